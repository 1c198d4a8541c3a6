"""Base class of every config in gristmill, and the strict YAML that recipes are written in."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from gristmill.foundation.errors import RecipeError

PLAIN = {type(None), str, int, float}


class Config(BaseModel):
    """Frozen; unknown keys are errors. Numbers must be finite, and booleans are not accepted as numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    @field_validator("*", mode="before", check_fields=False)
    @classmethod
    def reject_boolean_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject booleans for numeric fields: pydantic accepts true as 1."""
        # Most are plain values, and the planner asks often.
        if type(value) in PLAIN or not _holds_boolean(value) or info.field_name in _fields_of_booleans(cls):
            return value
        raise ValueError(f"{str(value).lower()} is not a valid value here; write the value itself")


def _holds_boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return True
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(member, bool) for member in members)


@cache
def _fields_of_booleans(config: type[Config]) -> frozenset[str]:
    return frozenset(name for name, field in config.model_fields.items() if _takes_boolean(field.annotation))


def _takes_boolean(annotation: Any) -> bool:
    """True for bool, Any, and containers of other configs, which check their own fields."""
    if annotation is Any or (isinstance(annotation, type) and issubclass(annotation, bool | BaseModel)):
        return True
    return any(_takes_boolean(argument) for argument in get_args(annotation))


# Strict YAML parser for recipes: YAML 1.2 plain values and sizes such as 4M; ambiguous values are errors with a line.
#
# `no` is text (a language), not False. 1e-3 is a number. 4M, 16k and 0.5B are numbers (powers of ten), 512Ki is one of
# powers of 1024, and a quoted "4M" is text. Refused: values that YAML 1.1 and 1.2 read differently (010, 1:30), keys
# named twice, tags, aliases that contain themselves or expand to a great many values, lone surrogates, and numbers
# beyond 64 bits. The time is linear in the text, whose length is limited.

MAX_CHARACTERS = 2_000_000  # 20,000 sources of 100 characters
MAX_DEPTH = 40  # the recipes of this repository have depth 5
MAX_VALUES = 200_000  # after aliases are expanded
MAX_INTEGER = 2**64 - 1
MAX_NUMBER_CHARACTERS = 64  # characters
NUMBER_CHARACTERS = set("0123456789abcdefxABCDEFX_+-.")

SIZE_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
SIZE = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:Ki|Mi|Gi|k|M|G|B|T)")
INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
NO_NUMBER = {".inf": "inf", "+.inf": "inf", "-.inf": "-inf", ".nan": "nan"}
CONSTANTS = {"": None, "~": None, "null": None, "true": True, "false": False}
# YAML 1.1 reads these as octal, binary and base-60 numbers, YAML 1.2 in part as other numbers, in part as text.
AMBIGUOUS = re.compile(r"[-+]?(?:0[0-9_]+|0o[0-7_]+|0b[01_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
SURROGATE = re.compile("[\ud800-\udfff]")
LONE_SURROGATE = "a lone surrogate such as \\ud800; write the complete character"
MERGE_KEY = "<<"
# libyaml where PyYAML was built with it: ten times as fast.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Location = tuple[str | int, ...]


@dataclass
class YamlDocument:
    """value: what the text says, of dict, list, str, int, float, bool and None. lines: location of a value, such as
    ("sources", 0, "name") -> the line where it begins, counted from 1. replaced: location -> who set it since."""

    value: Any
    lines: dict[Location, int] = field(default_factory=dict)
    replaced: dict[Location, str] = field(default_factory=dict)

    def line(self, location: Location) -> int | None:
        """The line of the deepest value on the path to a location; unknown path components are skipped."""
        here: Location = ()
        for part in location:
            if (*here, part) in self.lines:
                here = (*here, part)
        return self.lines.get(here)

    def where(self, location: Location, origin: str) -> str:
        """origin:line of a location, or the origin of the override that replaced the value."""
        for depth in range(len(location), 0, -1):
            if location[:depth] in self.replaced:
                return self.replaced[location[:depth]]
        line = self.line(location)
        return f"{origin}:{line}" if line else origin


class _Writer(yaml.SafeDumper):
    """Writes block style, and texts that would be read as something else in quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(writer: _Writer, text: str) -> yaml.ScalarNode:
    try:
        is_plain = read_yaml(text, "text", name_lines=False).value == text
    except RecipeError:
        is_plain = False
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Writer.add_representer(str, _represent_text)


def write_yaml(value: Any) -> str:
    """Text that `read_yaml` reads as the value, of dict, list, str, int, float, bool and None."""
    return yaml.dump(value, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120)


def read_yaml(text: str | bytes, origin: str, name_lines: bool = True) -> YamlDocument:
    """The text's one document. Raises RecipeError with origin, line, field and the fix; never anything else.

    name_lines: False for a text that is no file, such as an option's value."""
    return _Reader(_decoded(text, origin), origin, name_lines).read()


def parse_size(text: str) -> int:
    """'4M' -> 4000000, '16k' -> 16000, '0.5B' -> 500000000, '512Ki' -> 524288: k, M, G are powers of ten."""
    suffix = next(name for name in sorted(SIZE_SUFFIXES, key=len, reverse=True) if text.endswith(name))
    return round(float(text.removesuffix(suffix)) * SIZE_SUFFIXES[suffix])


def _decoded(text: str | bytes, origin: str) -> str:
    if len(text) > 4 * MAX_CHARACTERS:
        raise RecipeError(_too_long(origin))
    decoded = _from_utf8(text, origin) if isinstance(text, bytes) else text
    if len(decoded) > MAX_CHARACTERS:
        raise RecipeError(_too_long(origin))
    surrogate = SURROGATE.search(decoded)
    if surrogate:
        raise RecipeError(f"{visible(origin)}: {LONE_SURROGATE}")
    return decoded


def _from_utf8(content: bytes, origin: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{origin}:{line}: not UTF-8 text (byte {error.start} is {content[error.start]:#04x}); save it as UTF-8"
        ) from error


def _too_long(origin: str) -> str:
    return f"{origin}: longer than {MAX_CHARACTERS:,} characters; name many files with a glob instead of a list"


class _Reader:
    """Converts the parser's events to values, with limits on depth and on the number of values; an alias is expanded
    only if its size is within the limit."""

    def __init__(self, text: str, origin: str, name_lines: bool):
        self.text, self.origin, self.name_lines = text, origin, name_lines
        self.events: Iterator[Any] = iter(yaml.parse(text, Loader=LOADER))
        self.anchors: dict[str, tuple[Any, dict[Location, int], int]] = {}
        self.open_anchors: set[str] = set()
        self.values = 0

    def read(self) -> YamlDocument:
        try:
            return self._document()
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            context = f" ({error.context})" if error.context else ""
            raise RecipeError(f"{self._where(line)}: not YAML: {error.problem}{context}") from error
        except yaml.reader.ReaderError as error:
            line = self._line_of(error.position)
            raise RecipeError(f"{self._where(line)}: not YAML: {error.reason}; take the character out") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{self.origin}: not YAML: {error}") from error

    def _line_of(self, position: int) -> int:
        """libyaml counts bytes, PyYAML itself characters."""
        if LOADER is yaml.SafeLoader:
            return self.text.count("\n", 0, position) + 1
        return self.text.encode("utf-8").count(b"\n", 0, position) + 1

    def _where(self, line: int) -> str:
        return f"{self.origin}:{line}" if self.name_lines else self.origin

    def _document(self) -> YamlDocument:
        next(self.events)  # the stream's start
        if isinstance(next(self.events), yaml.StreamEndEvent):
            return YamlDocument(None)
        document = YamlDocument(None)
        document.value = self._value(next(self.events), (), document.lines)
        next(self.events)  # the document's end
        following = next(self.events)
        if not isinstance(following, yaml.StreamEndEvent):
            self._refuse(following, (), "a second document begins here; keep one, without a `---` between")
        return document

    def _value(self, event: Any, location: Location, lines: dict[Location, int]) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, location, lines)
        self._count(event, location, 1)
        if event.tag is not None:
            self._refuse(event, location, f"the tag {event.tag} is not read; write the plain value, or quote text")
        lines[location] = event.start_mark.line + 1
        before, own = self.values, lines if event.anchor is None else {location: lines[location]}
        if event.anchor is not None:
            self.open_anchors.add(event.anchor)
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event, location)
        elif len(location) >= MAX_DEPTH:
            self._refuse(event, location, f"nested more than {MAX_DEPTH} deep; close the open brackets")
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._sequence(location, own)
        else:
            value = self._mapping(location, own)
        if event.anchor is not None:
            self.open_anchors.discard(event.anchor)
            inner = {where[len(location) :]: line for where, line in own.items()}
            self.anchors[event.anchor] = (value, inner, self.values - before + 1)
            lines.update(own)
        return value

    def _sequence(self, location: Location, lines: dict[Location, int]) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            values.append(self._value(event, (*location, len(values)), lines))
        return values

    def _mapping(self, location: Location, lines: dict[Location, int]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._key(event, location)
            if key in content:
                first = lines.get((*location, key), 0)
                self._refuse(event, (*location, key), f"named twice, first in line {first}; keep one of the two")
            if key == MERGE_KEY and not event.style:
                merged |= self._merged(event, (*location, key), lines)
                continue
            content[key] = self._value(next(self.events), (*location, key), lines)
            lines[(*location, key)] = event.start_mark.line + 1
        return {**merged, **content}

    def _merged(self, key: Any, location: Location, lines: dict[Location, int]) -> dict[str, Any]:
        """The fields that `<<: *anchor` or `<<: [*one, *other]` brings in; of several, the first that has a field."""
        value = self._value(next(self.events), location, lines)
        fields: dict[str, Any] = {}
        for mapping in value if isinstance(value, list) else [value]:
            if not isinstance(mapping, dict):
                self._refuse(key, location, "`<<` takes an alias of a mapping, such as `<<: *defaults`")
            fields = {**mapping, **fields}
        for name in fields:
            lines.setdefault((*location[:-1], name), key.start_mark.line + 1)
        return fields

    def _key(self, event: Any, location: Location) -> str:
        if not isinstance(event, yaml.ScalarEvent) or (event.value == "" and not event.style):
            self._refuse(event, location, "a field's name must be plain text, such as `weight: 2`")
        if event.tag is not None or event.anchor is not None:
            self._refuse(event, location, f"the name {event.value!r} carries a tag or an anchor; write the name alone")
        self._no_surrogate(event, location)
        return event.value

    def _alias(self, event: Any, location: Location, lines: dict[Location, int]) -> Any:
        if event.anchor in self.open_anchors:
            self._refuse(event, location, f"*{event.anchor} contains itself; write the value out")
        if event.anchor not in self.anchors:
            self._refuse(event, location, f"*{event.anchor} has no anchor &{event.anchor} before it")
        value, inner, size = self.anchors[event.anchor]
        self._count(event, location, size)
        lines.update({(*location, *where): line for where, line in inner.items()})
        return _copy(value)

    def _scalar(self, event: Any, location: Location) -> Any:
        self._no_surrogate(event, location)
        text = event.value
        if event.style:
            return text
        if text.lower() in CONSTANTS and text in (text.lower(), text.upper(), text.capitalize()):
            return CONSTANTS[text.lower()]
        if text.lower() in NO_NUMBER:
            return float(NO_NUMBER[text.lower()])
        if not (text[0].isdigit() or text[0] in "+-."):
            return text
        return self._number(event, text, location)

    def _number(self, event: Any, text: str, location: Location) -> Any:
        """The number, or the text if it is not one."""
        if len(text) > MAX_NUMBER_CHARACTERS:
            return self._too_large(event, location) if set(text) <= NUMBER_CHARACTERS else text
        if SIZE.fullmatch(text):
            return self._bounded(event, parse_size(text), location)
        if AMBIGUOUS.fullmatch(text):
            self._refuse(
                event,
                location,
                f"{text} is one number to some readers of YAML, and another number or text to others; "
                f"write a decimal number, or quote it: '{text}'",
            )
        if INTEGER.fullmatch(text):
            base = 16 if text.startswith("0x") else 10
            return self._bounded(event, int(text.replace("_", ""), base), location)
        if FLOAT.fullmatch(text):
            return self._bounded(event, float(text.replace("_", "")), location)
        return text

    def _bounded(self, event: Any, value: int | float, location: Location) -> int | float:
        if (isinstance(value, int) and abs(value) > MAX_INTEGER) or value in (float("inf"), float("-inf")):
            self._too_large(event, location)
        return value

    def _too_large(self, event: Any, location: Location) -> NoReturn:
        self._refuse(
            event, location, f"{_shortened(event.value)} is larger than any field accepts; write a smaller number"
        )

    def _no_surrogate(self, event: Any, location: Location) -> None:
        if SURROGATE.search(event.value):
            self._refuse(event, location, LONE_SURROGATE)

    def _count(self, event: Any, location: Location, values: int) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            self._refuse(event, location, f"more than {MAX_VALUES:,} values, aliases expanded; write fewer")

    def _refuse(self, event: Any, location: Location, reason: str) -> NoReturn:
        names = [_shortened(str(part)) for part in location]
        where = ".".join(names if len(names) <= 8 else [*names[:6], "...", names[-1]])
        message = f"{where}: {reason}" if where else reason
        raise RecipeError(f"{self._where(event.start_mark.line + 1)}: {visible(message)}")


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:30]}... ({len(text)} characters)"


def visible(text: str) -> str:
    return SURROGATE.sub(lambda match: f"\\u{ord(match.group()):04x}", text)

"""Config of one source of raw text, and the mapping of its records' fields to documents."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig, PageKind
from gristmill.data_pipeline.filters.presets import FilterChoice, check_choices, parse_choices
from gristmill.data_pipeline.readers.document import NO_METADATA, Record, Unreadable, dumped_json, excerpt
from gristmill.data_pipeline.signals.language import require_language_code
from gristmill.foundation.config import Config
from gristmill.foundation.errors import did_you_mean
from gristmill.foundation.files import without_credentials
from gristmill.foundation.user_code import UserCode

# A document's text is rarely over 5 MB (a long book; Common Crawl truncates pages at 5 MiB); much longer ones are dumps
# or crawler traps. With escapes and other fields, a line of JSON is a few times its text. Cost: docs/curation.md.
MAX_RECORD_BYTES = 16_000_000

Format = Literal[
    "python_docs",
    "jsonl",
    "text",
    "markdown",
    "parquet",
    "html",
    "warc",
    "wet",
    "arc",
    "csv",
    "mbox",
    "pdf",
    "epub",
    "docx",
    "ipynb",
    "latex",
    "mediawiki",
    "stack_exchange",
    "datasets",
    "own",
]

# Common encodings, for suggestions; any encoding that Python supports is accepted.
ENCODINGS = (
    "utf-8", "utf-16", "latin-1", "cp1252", "utf-8-sig", "utf-32", "ascii", "iso-8859-15", "cp1250", "cp1251", "koi8-r",
    "shift-jis", "euc-jp", "euc-kr", "gb18030", "gbk", "big5", "mac-roman",
)  # fmt: skip


# Python's codecs from text to text, which no file is written in: of host names, of literals, and one that always fails.
NOT_OF_FILES = frozenset(["punycode", "idna", "unicode-escape", "raw-unicode-escape", "undefined"])


class SourceConfig(Config):
    """Location and format of documents, and the fields of a record that hold text, URL, language and metadata.

    paths: globs or fsspec addresses without credentials (`s3://`, `https://`, `memory://`); for `datasets` a hub name
    or a local folder.
    weight is the source's share of training batches; where no source has one, each is drawn in proportion to its
    tokens. priority decides which copy of a duplicate is kept (1 before 2). Neither changes what is read.
    held_out: all documents go to the split `test`, such as text in languages that are scored and not trained on."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)  # part of file names
    format: Format
    paths: tuple[str, ...] = ()
    text_field: str = "text"  # a field inside another by its path: article.body, or messages.content of a list
    html_field: str | None = None  # set: the text is extracted from this field's HTML, and text_field is not read
    url_field: str | None = "url"
    language_field: str | None = "language"
    metadata_fields: tuple[str, ...] | Literal["all", "none"] = "all"
    language: str | None = None  # used where the record has none
    license: str | None = Field(
        default=None,
        description="licence of the records that name none, such as CC-BY-4.0",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda value: value is None,
    )
    license_field: str | None = Field(
        default=None,
        description="field of a record that names its licence",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda value: value is None,
    )
    crawl_date_field: str | None = Field(
        default=None,
        description="field of a record with the day of its crawl; WARC, WET and ARC files have one of their own",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda value: value is None,
    )
    encoding: str = "utf-8"  # of text, markdown and CSV files; JSON is UTF-8 always
    record: Literal["file", "paragraph", "line"] = "file"  # unit of a document in text and markdown files
    extractor: Literal["blocks", "trafilatura", "trafilatura_precision", "resiliparse"] = "blocks"
    blocks: BlocksConfig = Field(default=BlocksConfig(), description="options of extractor: blocks")
    keep_page_kinds: tuple[PageKind, ...] = Field(
        default=(),
        json_schema_extra={"omit_default": True},
        exclude_if=lambda kinds: not kinds,
        description="extractor blocks: kinds of pages that are kept; (): all",
    )
    max_record_bytes: int = Field(default=MAX_RECORD_BYTES, ge=1)  # a larger record is quarantined, unread
    reader: UserCode | None = Field(
        default=None,
        description="own: the function that reads a file, such as my_reader.py:read (docs/extend.md)",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda code: code is None,
    )
    part: Literal["prose", "code"] | None = None  # python_docs: docstrings and comments, or the modules as they are
    packages: tuple[str, ...] = ()  # python_docs, prose: installed packages beside the standard library
    revision: str | None = None  # datasets: the hub's commit
    split: str = "train"  # datasets: which of its splits to read
    filters: tuple[FilterChoice, ...] | None = None  # replaces the recipe's filters for this source
    languages: tuple[str, ...] | None = Field(default=None, json_schema_extra={"omit_default": True})  # as filters
    weight: float | None = Field(default=None, ge=0)
    priority: int = Field(default=1, ge=1)
    held_out: Literal["test"] | None = Field(default=None, json_schema_extra={"omit_default": True})
    on_empty: Literal["warn", "error"] = Field(
        default="warn",
        description="what to do if curation keeps no document of the source: go on without it and say so, or stop",
        json_schema_extra={"omit_default": True},
    )

    @property
    def has_html(self) -> bool:
        """Whether the text is extracted from HTML pages."""
        return self.html_field is not None or self.format in ("html", "warc", "arc")

    @property
    def extracted_by_blocks(self) -> bool:
        return self.has_html and self.extractor == "blocks"

    @field_validator("paths")
    @classmethod
    def paths_are_not_empty_and_hold_no_credentials(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not path.strip():
                raise ValueError(
                    "an empty path; name files or a folder, such as data/*.jsonl, or the whole folder with `.`"
                )
            without_credentials(path)
        return value

    @field_validator("languages")
    @classmethod
    def languages_exist(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for code in value or ():
            require_language_code(code)
        return value

    @field_validator("encoding")
    @classmethod
    def encoding_is_known(cls, value: str) -> str:
        """Python's name of an encoding of text: utf-8, latin-1, cp1252, ... (`rot13` and `base64` are not encodings of
        text)."""
        try:
            "".encode(value)
            if codecs.lookup(value).name in NOT_OF_FILES:
                raise LookupError(value)
        except (LookupError, ValueError):
            examples = f"encodings are, for example, {', '.join(ENCODINGS[:4])}"
            hint = did_you_mean(value.lower().replace("_", "-"), ENCODINGS, otherwise=examples)
            raise ValueError(f"unknown encoding {value!r}; {hint}") from None
        return value

    @field_validator("filters", mode="before")
    @classmethod
    def parse_short_forms(cls, value: object) -> object:
        return None if value is None else parse_choices(value)

    @model_validator(mode="after")
    def is_readable(self) -> Self:
        check_choices(self.filters or ())
        if self.held_out is not None and self.weight:
            raise ValueError(
                f"source {self.name}: held_out={self.held_out} leaves nothing to train on, but weight={self.weight:g} "
                "is a share of training; remove one of the two"
            )
        if self.extractor != "blocks" and self.blocks != BlocksConfig():
            raise ValueError(
                f"source {self.name}: blocks has options of the extractor blocks; set extractor: blocks or remove them"
            )
        if self.keep_page_kinds and not self.extracted_by_blocks:
            raise ValueError(
                f"source {self.name}: keep_page_kinds needs pages whose kind the extractor blocks predicts; set format "
                "html, warc or arc (or html_field) and extractor: blocks, or remove it"
            )
        for field in ("license_field", "crawl_date_field"):
            wanted = getattr(self, field)
            if wanted is not None and self.metadata_fields != "all" and wanted not in self.metadata_fields:
                raise ValueError(
                    f"source {self.name}: {field}={wanted} is not among metadata_fields; add it there, or leave "
                    "metadata_fields out"
                )
        if (self.format == "own") != (self.reader is not None):
            raise ValueError(
                f"source {self.name}: format own and reader belong together; name a function, such as reader: "
                "my_reader.py:read"
            )
        if self.format == "python_docs":
            if self.part is None:
                raise ValueError(f"source {self.name}: format python_docs needs part: prose or part: code")
            if self.paths:
                raise ValueError(f"source {self.name}: python_docs reads the running interpreter; remove paths")
        elif not self.paths:
            raise ValueError(f"source {self.name}: no paths; give globs such as paths: [data/*.jsonl.zst]")
        if self.format == "datasets" and len(self.paths) != 1:
            raise ValueError(f"source {self.name}: format datasets takes one path, a hub name or a folder")
        return self


# Mapping of a record's fields to text, URL, language and metadata, as the recipe configures it.

NO_FIELD = "\0no field"  # stands for a field that the recipe sets to null; no record has one of this name


class FieldMap:
    """Builds records from fields. The configuration is resolved once, not for every record."""

    def __init__(self, source: SourceConfig):
        self.source = source
        self.wanted = source.html_field or source.text_field
        self.path = tuple(self.wanted.split(".")) if "." in self.wanted else ()
        self.is_html = source.html_field is not None
        self.url, self.language = source.url_field or NO_FIELD, source.language_field or NO_FIELD
        self.used = {self.wanted, source.url_field, source.language_field}
        self.default_language = source.language or ""
        names = source.metadata_fields
        self.metadata_names = None if names == "all" else () if names == "none" else tuple(names)

    def maker(self) -> Callable[[Any, int], Record | None]:
        """Return a function from (fields, number) to a record, or to None if there is no text. A closure, because
        attribute lookups on self take as long as the rest."""
        wanted, url_name, language_name, default = self.wanted, self.url, self.language, self.default_language
        metadata_of, is_html = self.metadata_of, self.is_html

        new = tuple.__new__  # a Record of all its fields, in half the time its class takes

        def record(fields: Any, number: int) -> Record | None:
            if type(fields) is not dict:
                return None
            get = fields.get
            text, url, language = get(wanted), get(url_name), get(language_name)
            if type(text) is not str:
                return None
            # there is metadata if at least one field is not in use
            spare = len(fields) - 1 - (url is not None) - (language is not None)
            metadata = metadata_of(fields) if spare else NO_METADATA
            if type(url) is not str:
                url = ""
            if not language or type(language) is not str:
                language = default
            if is_html:
                return Record(number, "", url, language, metadata, text.encode("utf-8"), "utf-8")
            return new(Record, (number, text, url, language, metadata, None, None, ()))

        if self.path:
            return lambda fields, number: record(self.lifted(fields), number)
        return record

    def lifted(self, fields: Any) -> Any:
        """The record with the text of a dotted field as a field of its own, and not where it was: for a.b,
        {"a": {"b": "x", "c": 1}} -> {"a": {"c": 1}, "a.b": "x"}. A record that has a field `a.b` stays as it is."""
        if type(fields) is not dict or self.wanted in fields:
            return fields
        texts = list(strings_at(fields, self.path))
        return {**without(fields, self.path), self.wanted: "\n\n".join(texts)} if texts else fields

    def record(self, fields: Mapping[str, Any], number: int, offset: int) -> Record | Unreadable:
        """The record, or an Unreadable: no text field (the message names the fields and the fix), or a value that is
        not a string."""
        return self.maker()(fields, number) or self.refused(fields, number, offset)

    def records(self, columns: Mapping[str, list], first: int) -> Iterator[Record | Unreadable]:
        """The records of rows stored by column, numbered from `first`. A row becomes a dictionary only if it has
        metadata: that takes twice as long as all the rest."""
        texts, rows = columns.get(self.wanted), len(next(iter(columns.values()), []))
        if texts is None or self.is_html:
            for at, row in enumerate(zip(*columns.values(), strict=True)):
                yield self.record(dict(zip(columns, row, strict=True)), first + at, -1)
            return
        others = self.metadata_columns(columns)
        new = tuple.__new__
        urls = columns.get(self.url, [""] * rows)
        languages = columns.get(self.language, [""] * rows)
        values: list[tuple[Any, ...]] = list(zip(*(columns[name] for name in others), strict=True)) or [()] * rows
        for at, (text, url, language, rest) in enumerate(zip(texts, urls, languages, values, strict=True), first):
            if not isinstance(text, str):
                yield self.refused({self.wanted: text}, at, -1)
                continue
            metadata = {k: v for k, v in zip(others, rest, strict=True) if v is not None} if rest else NO_METADATA
            if type(url) is not str:
                url = ""
            if not language or type(language) is not str:
                language = self.default_language
            yield new(Record, (at, text, url, language, metadata, None, None, ()))

    def metadata_columns(self, names: Iterable[str]) -> list[str]:
        """Those of the names that the recipe keeps as metadata."""
        others = [name for name in names if name not in self.used]
        return others if self.metadata_names is None else [name for name in self.metadata_names if name in others]

    def metadata_of(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields that the recipe keeps as metadata, without those that are null."""
        if self.metadata_names is None:
            used = self.used
            return {key: value for key, value in fields.items() if key not in used and value is not None}
        if not self.metadata_names:
            return NO_METADATA
        return {key: fields[key] for key in self.metadata_names if key not in self.used and fields.get(key) is not None}

    def refused(self, fields: Mapping[str, Any], number: int, offset: int) -> Unreadable:
        if self.wanted not in fields:
            known = ", ".join(sorted(field_names(fields))) or "none"
            setting = "html_field" if self.is_html else "text_field"
            reason = f"no field {self.wanted!r}; fields are {known[:200]}; set {setting} of source {self.source.name}"
            return Unreadable(number, "no_text_field", reason, offset, excerpt(dumped_json(dict(fields))))
        value = fields[self.wanted]
        kind = "null" if value is None else type(value).__name__
        quoted = dumped_json(value) if isinstance(value, list | dict) else str(value)
        reason = f"field {self.wanted!r} is {kind}, not a string"
        return Unreadable(number, "text_not_string", reason, offset, excerpt(quoted))


# Fields inside fields: `a.b` is the field b of the object a, or of each object in the list a.

MAX_FIELD_DEPTH = 4  # of the names in messages


def strings_at(value: Any, path: Sequence[str]) -> Iterator[str]:
    """The strings at the path, in their order: (a, b) of {"a": [{"b": "x"}, {"b": "y"}]} -> x, y. Lists of lists hold
    none."""
    for member in value if isinstance(value, list) else (value,):
        if not path and isinstance(member, str):
            yield member
        elif path and isinstance(member, dict) and path[0] in member:
            yield from strings_at(member[path[0]], path[1:])


def without(value: Any, path: Sequence[str]) -> Any:
    """A copy of the value that lacks what is at the path."""
    if isinstance(value, list):
        return [without(member, path) if isinstance(member, dict) else member for member in value]
    if not isinstance(value, dict) or path[0] not in value:
        return value
    rest = {name: member for name, member in value.items() if name != path[0]}
    return rest if len(path) == 1 else {**rest, path[0]: without(value[path[0]], path[1:])}


def field_names(fields: Mapping[str, Any], depth: int = MAX_FIELD_DEPTH) -> Iterator[str]:
    """{"id": 1, "a": {"b": "x"}} -> id, a.b."""
    for name, value in fields.items():
        inner = (
            next((member for member in value if isinstance(member, dict)), None) if isinstance(value, list) else value
        )
        if isinstance(inner, dict) and inner and depth > 1:
            yield from (f"{name}.{below}" for below in field_names(inner, depth - 1))
        else:
            yield str(name)

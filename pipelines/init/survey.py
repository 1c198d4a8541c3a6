"""A look at a folder of a user's files: what they are, which field holds the text, and a sample of their documents.

Files are grouped into sources by what they hold: their format, and for records the field of the text. Nothing is
written, and only the first records of a few files of each group are read."""

import codecs
import csv
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
from pydantic import ValidationError

from gristmill.data_pipeline.extraction.html_extraction import WINDOWS_1252, guessed_charset
from gristmill.data_pipeline.readers.compression import Damaged, blocks, in_utf8
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.files import foreign_kind
from gristmill.data_pipeline.readers.read import CONVERTERS, records_of
from gristmill.data_pipeline.readers.source import SourceConfig, field_names, strings_at
from gristmill.data_pipeline.readers.text_files import delimiter_of
from gristmill.foundation.errors import InputError, RecipeError

SAMPLED_FILES, SAMPLED_RECORDS, SAMPLED_BYTES = 200, 600, 4_000_000  # of a group: files, records, characters in all
HEAD_BYTES, DECODED_BYTES = 1 << 16, 1 << 20
LOOKED_AT_RECORDS = 20  # of a file, for the field that holds the text
NOT_OWN_TEXT = ("node_modules", "__pycache__", "site-packages", "venv", "bower_components")  # folders of programs
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
COMPRESSION_RATIO = 3.5  # of text by these programs, where the content's size is not known
FORMATS = {
    "jsonl": ("jsonl", "ndjson", "jsonlines", "json"),
    "parquet": ("parquet",),
    "csv": ("csv", "tsv"),
    "markdown": ("md", "markdown", "mdx"),
    "html": ("html", "htm", "xhtml"),
    "warc": ("warc",),
    "wet": ("wet",),
    "arc": ("arc",),
    "mbox": ("mbox", "mbx", "eml"),
    "pdf": ("pdf",),
    "epub": ("epub",),
    "docx": ("docx",),
    "ipynb": ("ipynb",),
    "latex": ("tex", "latex", "ltx"),
    "mediawiki": (),  # these two are known by their first element
    "stack_exchange": (),
    "text": ("txt", "text", "rst", "log", "org", "adoc", "srt", ""),
}
CODE = [
    "py",
    "js",
    "ts",
    "tsx",
    "jsx",
    "java",
    "c",
    "h",
    "cc",
    "cpp",
    "hpp",
    "cs",
    "go",
    "rs",
    "rb",
    "php",
    "pl",
    "swift",
    "kt",
    "scala",
    "sh",
    "bash",
    "sql",
    "r",
    "m",
    "jl",
    "lua",
    "hs",
    "ml",
    "ex",
    "erl",
    "clj",
    "dart",
    "vue",
    "css",
    "scss",
    "toml",
    "yaml",
    "yml",
    "ini",
    "cfg",
    "cmake",
    "dockerfile",
    "makefile",
    "proto",
]
FORMAT_OF = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
TEXT_NAMES = ("text", "content", "body", "document", "raw_content", "markdown", "article", "message", "html")
RECORD_FORMATS = ("jsonl", "parquet", "csv")
BINARY_FORMATS = ("parquet", "warc", "wet", "arc", "pdf", "epub", "docx")
ENCODED_KINDS = ("text", "markdown", "code", "csv", "latex")  # in an encoding that the recipe names
XML_KINDS = {"mediawiki": "mediawiki", "posts": "stack_exchange", "html": "html"}  # by the first element
_BEFORE_IT = rb"(?:\xef\xbb\xbf)?(?:\s|<\?.*?\?>|<!--.*?-->|<!DOCTYPE[^>]*>)*+"
_FIRST_ELEMENT = re.compile(_BEFORE_IT + rb"<([a-z][\w.:-]*)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class FileGroup:
    """Files of one source. kind: its format, or `code`. texts: of the sampled documents. text_share: bytes of these for
    a byte of their files, where a file is one document. problems: of records that could not be read."""

    kind: str
    field: str
    is_html: bool
    paths: tuple[Path, ...]
    num_bytes: int
    texts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    encoding: str = "utf-8"
    text_share: float | None = None

    @property
    def format(self) -> str:
        return "text" if self.kind == "code" else self.kind

    @property
    def config(self) -> dict[str, Any]:
        """The fields of a source of the recipe that are not the defaults."""
        settings: dict[str, Any] = {"format": self.format}
        if self.field and self.is_html:
            settings["html_field"] = self.field
        elif self.field and self.field != "text":
            settings["text_field"] = self.field
        if self.encoding != "utf-8":
            settings["encoding"] = self.encoding
        return settings


@dataclass
class Survey:
    """unused: why files are in no source -> their number and an example."""

    groups: list[FileGroup] = field(default_factory=list)
    unused: dict[str, tuple[int, str]] = field(default_factory=dict)


def survey(folder: Path) -> Survey:
    """Looks at all files below the folder, hidden ones left out. Raises InputError if no file can be a source."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; name the folder that holds your files")
    result, unused = Survey(), _Unused()
    by_kind: dict[tuple[str, str, bool, str], list[Path]] = {}
    encodings: dict[str, None] = {}
    for path in _files(folder, unused):
        kind, why = file_kind(path)
        text_field, is_html = "", False
        if kind is not None and (encoding := _encoding(path, kind, encodings)) is None:
            kind, why = None, "files in no encoding that is known here"
        elif kind in RECORD_FORMATS:
            fields = _raw_fields(path, kind, encoding or "utf-8")
            text_field, is_html = text_field_of(fields)
            if not text_field:
                kind, why = None, f"files of records without text (fields are {', '.join(fields) or 'none'})"
        if kind is None:
            unused.add(why, path)
        else:
            by_kind.setdefault((kind, text_field, is_html, encoding or "utf-8"), []).append(path)
    for (kind, text_field, is_html, encoding), paths in sorted(by_kind.items()):
        num_bytes = sum(map(content_bytes, paths))
        try:
            group = _sampled(FileGroup(kind, text_field, is_html, tuple(paths), num_bytes, encoding=encoding))
        except RecipeError as error:  # a format whose package is not installed
            unused.add(f"files ({error})", *paths)
            continue
        if group.texts:
            result.groups.append(group)
        else:
            unused.add(f"files without text ({group.problems[0] if group.problems else 'blank'})", *paths)
    result.unused = unused.by_reason()
    if not result.groups:
        reasons = "; ".join(
            f"{counted(number, why)}, such as {example}" for why, (number, example) in result.unused.items()
        )
        raise InputError(
            f"{folder}: holds no file that gristmill reads as text ({reasons or 'no files'}); formats are "
            f"{', '.join(sorted(FORMATS))}, plain or compressed"
        )
    return result


class _Unused:
    """Files that are in no source, by the reason."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def add(self, reason: str, *paths: Path) -> None:
        self._numbers[reason] += len(paths)
        self._examples.setdefault(reason, str(paths[0]))

    def by_reason(self) -> dict[str, tuple[int, str]]:
        return {reason: (number, self._examples[reason]) for reason, number in self._numbers.most_common()}


def counted(number: int, nouns: str) -> str:
    """(1, "empty files") -> "1 empty file"; (2000, "files of x") -> "2,000 files of x"."""
    singular = re.sub("(file|folder)s", r"\1", nouns, count=1)
    return f"{number:,} {singular if number == 1 else nouns}"


def _files(folder: Path, unused: _Unused) -> Iterator[Path]:
    """Files below the folder that may be the user's texts; folders of programs and of saved pages' parts are unused."""
    for root, folders, files in os.walk(folder):
        pages = {f"{Path(name).stem}_files" for name in files if name.lower().endswith((".html", ".htm"))}
        for name in [name for name in folders if name in NOT_OWN_TEXT or name in pages]:
            reason = "files of saved pages' parts" if name in pages else f"files of {name}, not texts of yours"
            inside = [path for path in Path(root, name).rglob("*") if path.is_file()]
            if inside:
                unused.add(reason, *inside)
            folders.remove(name)
        for nouns, names in (("hidden folders", folders), ("hidden files", files)):
            if hidden := sorted(name for name in names if name.startswith(".")):
                unused.add(nouns, *(Path(root, name) for name in hidden))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                yield path


def file_kind(path: Path) -> tuple[str | None, str]:
    """(the group's kind, "") or (None, why the file is in none): by its name, then by its first bytes."""
    try:
        if not path.stat().st_size:
            return None, "empty files"
        head = _head(path)
    except (OSError, Damaged, InputError):
        return None, "files that cannot be read"
    suffix = _suffix(path)
    kind = "code" if suffix in CODE or path.name.lower() in ("dockerfile", "makefile") else FORMAT_OF.get(suffix)
    if foreign_kind(head, kind or "text") is not None:
        return None, f"files of other kinds ({foreign_kind(head, kind or 'text')})"
    if kind in BINARY_FORMATS:
        return kind, ""
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None, "binary files"
    if kind == "jsonl" and not _is_json_lines(head):
        return None, "JSON files of one value, not a record a line (`jq -c .[] FILE` makes lines)"
    if kind in (None, "text") and head.startswith(b"From ") and re.search(rb"^Subject:", head, re.M):
        return "mbox", ""
    if kind in (None, "text") and _is_json_lines(head):
        return "jsonl", ""
    if kind in (None, "text") and (element := _FIRST_ELEMENT.match(head)):
        name = element[1].decode("ascii", "replace").lower()
        if name in XML_KINDS:
            return XML_KINDS[name], ""
        if b"<?xml" in head[:8]:
            return None, f"XML files of a kind that is not known here (they begin with <{name}>)"
    return kind or "text", ""


def _suffix(path: Path) -> str:
    name = path.name.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return name.rpartition(".")[2] if "." in name else ""


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return next(iter(blocks(file, str(path))), b"")[:HEAD_BYTES]


def _is_json_lines(head: bytes) -> bool:
    line, end, _ = head.lstrip().partition(b"\n")
    try:
        return isinstance(orjson.loads(line), dict)
    except ValueError:
        return not end and len(head) == HEAD_BYTES and head.lstrip().startswith(b"{")


def _encoding(path: Path, kind: str, known: dict[str, None]) -> str | None:
    """The encoding of the file's beginning; None if it is in none that is known here. known: encodings of the files
    before; one that gives the same text is taken, or windows-1252, so that there are fewer sources."""
    if kind not in ENCODED_KINDS:
        return "utf-8"
    with path.open("rb") as file:
        head = _beginning(in_utf8(blocks(file, str(path)))[0], DECODED_BYTES)
    if _decodes(head, "utf-8"):
        return "utf-8"
    guess = guessed_charset(head)
    if not _decodes(head, guess):
        return None
    same = (
        encoding
        for encoding in (*known, WINDOWS_1252)
        if head.decode(encoding, "replace") == head.decode(guess, "replace")
    )
    best = next(same, guess)
    known[best] = None
    return best


def _decodes(head: bytes, encoding: str) -> bool:
    try:
        codecs.getincrementaldecoder(encoding)("strict").decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _beginning(stream: Iterator[bytes], limit: int) -> bytes:
    content = b""
    try:
        while len(content) < limit:
            content += next(stream)
    except (StopIteration, Damaged):
        pass
    return content[:limit]


def text_field_of(fields: Mapping[str, Sequence[str]]) -> tuple[str, bool]:
    """(the field that holds the text, whether that is HTML), by content: the field with the most characters, names that
    say text first among those that hold at least half as many. ("", False) if no field holds text. fields: values of
    the first records by name."""
    chars = {name: sum(map(len, values)) for name, values in fields.items() if "".join(values).strip()}
    if not chars:
        return "", False
    most = max(chars.values())
    named = [name for word in TEXT_NAMES for name in chars if _last_name(name) == word and chars[name] * 2 >= most]
    best = named[0] if named else max(sorted(chars), key=lambda name: chars[name])
    pages = sum(len(value) for value in fields[best] if re.search(r"</(p|div|body|html|span|a)>", value))
    return best, pages * 2 > chars[best]


def _last_name(name: str) -> str:
    """article.body -> body."""
    return name.rpartition(".")[2].lower()


def _raw_fields(path: Path, kind: str, encoding: str) -> dict[str, list[str]]:
    """The strings of each field in the first records; fields inside others by their path (a.b)."""
    try:
        records = list(islice(_raw_records(path, kind, encoding), LOOKED_AT_RECORDS))
    except (InputError, OSError, ValueError, csv.Error):
        return {}
    fields: dict[str, list[str]] = {}
    for record in records:
        for name in field_names(record):
            whole = [record[name]] if isinstance(record.get(name), str) else strings_at(record, name.split("."))
            fields.setdefault(name, []).extend(whole)
    return fields


def _raw_records(path: Path, kind: str, encoding: str) -> Iterator[dict[str, Any]]:
    if kind == "parquet":
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=LOOKED_AT_RECORDS):
                yield from batch.to_pylist()
        return
    with path.open("rb") as file:
        head = _beginning(in_utf8(blocks(file, str(path)))[0], SAMPLED_BYTES)
    if kind == "csv":
        lines = iter(head.decode(encoding, "replace").removeprefix("\ufeff").splitlines(keepends=True))
        csv.field_size_limit(max(csv.field_size_limit(), SAMPLED_BYTES))
        header = next(lines, "")
        delimiter = delimiter_of(header, str(path))
        names = next(csv.reader([header], delimiter=delimiter), [])
        yield from (dict(zip(names, cells, strict=False)) for cells in csv.reader(lines, delimiter=delimiter))
        return
    for line in head.splitlines():
        with suppress(ValueError):  # the last line may be cut
            if isinstance(record := orjson.loads(line), dict):
                yield record


def _read(path: Path, source: SourceConfig) -> Iterator[Record | Unreadable]:
    try:
        yield from records_of(str(path), source)
    except (InputError, ValidationError, OSError, ValueError) as error:
        yield Unreadable(0, "unreadable_file", str(error))


def _sampled(group: FileGroup) -> FileGroup:
    """The group with the texts of its first records, of files spread over the group."""
    settings = {"text_field": group.field or "text", "html_field": group.field if group.is_html else None}
    source = SourceConfig(name="look", format=group.format, paths=("look",), encoding=group.encoding, **settings)
    step = max(1, len(group.paths) // SAMPLED_FILES)
    texts: list[str] = []
    problems: list[str] = []
    num_bytes = file_bytes = 0
    for path in group.paths[::step][:SAMPLED_FILES]:
        file_bytes += content_bytes(path)
        for record in islice(_read(path, source), max(25, SAMPLED_RECORDS // len(group.paths))):
            if isinstance(record, Unreadable):
                problems.append(f"{path}: {record.reason}")
            elif record.text.strip():
                texts.append(record.text)
                num_bytes += len(record.text)
        if num_bytes > SAMPLED_BYTES:
            break
    text_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    share = text_bytes / max(1, file_bytes) if group.format in CONVERTERS else None
    return replace(group, texts=tuple(texts), problems=tuple(problems), text_share=share)


def content_bytes(path: Path) -> int:
    """Bytes of the content, estimated for compressed files."""
    return int(path.stat().st_size * (COMPRESSION_RATIO if path.suffix in COMPRESSED else 1))

"""A look at a folder of a user's files: what they are, which field holds the text, and a sample of their documents.

Files are grouped into sources by what they hold: their format, and for records the field of the text. Nothing is
written, and only the first records of a few files of each group are read."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.files import foreign_kind
from gristmill.data_pipeline.readers.read import records_of
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError

SAMPLED_FILES, SAMPLED_RECORDS, SAMPLED_BYTES = 24, 600, 4_000_000  # of a group: files, records, characters in all
HEAD_BYTES = 1 << 16
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
    "text": ("txt", "text", "rst", "tex", "log", "org", "adoc", "srt", ""),
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
    "ipynb",
]
FORMAT_OF = {suffix: name for name, suffixes in FORMATS.items() for suffix in suffixes}
TEXT_NAMES = ("text", "content", "body", "document", "raw_content", "markdown", "article", "message", "html")
RECORD_FORMATS = ("jsonl", "parquet", "csv")


@dataclass(frozen=True)
class FileGroup:
    """Files of one source. kind: its format, or `code`. texts: of the sampled documents. sampled_bytes: of the files
    that these came from, as stored; problems: of records that could not be read."""

    kind: str
    field: str
    is_html: bool
    paths: tuple[Path, ...]
    num_bytes: int
    texts: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

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
    result, unused = Survey(), Counter[str]()
    examples: dict[str, str] = {}
    by_kind: dict[tuple[str, str, bool], list[Path]] = {}
    for path in _files(folder):
        kind, why = _kind(path)
        if kind is None:
            unused[why] += 1
            examples.setdefault(why, str(path))
            continue
        text_field, is_html = _text_field(path, kind) if kind in RECORD_FORMATS else ("", False)
        if kind in RECORD_FORMATS and not text_field:
            unused["records without a field of text"] += 1
            examples.setdefault("records without a field of text", str(path))
            continue
        by_kind.setdefault((kind, text_field, is_html), []).append(path)
    for (kind, text_field, is_html), paths in sorted(by_kind.items()):
        result.groups.append(_sampled(FileGroup(kind, text_field, is_html, tuple(paths), _total_bytes(paths))))
    result.groups = [group for group in result.groups if group.texts]
    result.unused = {why: (number, examples[why]) for why, number in unused.most_common()}
    if not result.groups:
        seen = "; ".join(f"{number} {why}, such as {example}" for why, (number, example) in result.unused.items())
        raise InputError(
            f"{folder}: holds no file that gristmill reads as text ({seen or 'no files'}); formats are "
            f"{', '.join(sorted(FORMATS))}, plain or compressed"
        )
    return result


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _kind(path: Path) -> tuple[str | None, str]:
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
    if kind in ("parquet", "warc", "wet", "arc"):
        return kind, ""
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None, "binary files"
    if kind == "jsonl" and not _is_json_lines(head):
        return None, "JSON files that are one value, not a record a line"
    if kind in (None, "text") and head.startswith(b"From ") and re.search(rb"^Subject:", head, re.M):
        return "mbox", ""
    if kind in (None, "text") and _is_json_lines(head):
        return "jsonl", ""
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
        return isinstance(json.loads(line), dict)
    except ValueError:
        return not end and len(head) == HEAD_BYTES and head.lstrip().startswith(b"{")


def _text_field(path: Path, kind: str) -> tuple[str, bool]:
    """(the field that holds the text, whether that is HTML), by content: the field with the most characters, names that
    say text first among those that hold at least half as many. ("", False) if no field holds text."""
    chars: Counter[str] = Counter()
    pages: Counter[str] = Counter()
    for record in _raw_records(path, kind):
        for name, value in record.items():
            if isinstance(value, str) and value.strip():
                chars[name] += len(value)
                pages[name] += len(value) * bool(re.search(r"</(p|div|body|html|span|a)>", value))
    if not chars:
        return "", False
    most = max(chars.values())
    named = [name for name in TEXT_NAMES if chars[name] * 2 >= most]
    best = named[0] if named else max(sorted(chars), key=lambda name: chars[name])
    return best, pages[best] * 2 > chars[best]


def _raw_records(path: Path, kind: str) -> list[dict[str, Any]]:
    """The first records with all their fields. A field that no record has makes the reader say which there are."""
    settings = SourceConfig(
        name="look", format=kind, paths=(str(path),), text_field="\1none", url_field=None, language_field=None
    )
    names: dict[str, None] = {}
    for record in islice(_read(path, settings), 5):
        if isinstance(record, Unreadable) and record.kind == "no_text_field":
            listed = re.search(r"fields are (.*); set text_field", record.reason)
            names |= dict.fromkeys(listed[1].split(", ") if listed else [])
    records: list[dict[str, Any]] = []
    for name in names:
        field_settings = settings.model_copy(update={"text_field": name})
        values = [r.text for r in islice(_read(path, field_settings), 5) if isinstance(r, Record)]
        records.append({name: "".join(values)})
    return records


def _read(path: Path, source: SourceConfig) -> Iterator[Record | Unreadable]:
    try:
        yield from records_of(str(path), source)
    except (InputError, ValidationError, OSError, ValueError) as error:
        yield Unreadable(0, "unreadable_file", str(error))


def _sampled(group: FileGroup) -> FileGroup:
    """The group with the texts of its first records, of files spread over the group."""
    settings = {"text_field": group.field or "text", "html_field": group.field if group.is_html else None}
    source = SourceConfig(name="look", format=group.format, paths=("look",), **settings)
    step = max(1, len(group.paths) // SAMPLED_FILES)
    texts: list[str] = []
    problems: list[str] = []
    num_bytes = 0
    for path in group.paths[::step][:SAMPLED_FILES]:
        for record in islice(_read(path, source), max(25, SAMPLED_RECORDS // len(group.paths))):
            if isinstance(record, Unreadable):
                problems.append(f"{path}: {record.reason}")
            elif record.text.strip():
                texts.append(record.text)
                num_bytes += len(record.text)
        if num_bytes > SAMPLED_BYTES:
            break
    return FileGroup(
        group.kind, group.field, group.is_html, group.paths, group.num_bytes, tuple(texts), tuple(problems)
    )


def _total_bytes(paths: Sequence[Path]) -> int:
    """Bytes of the content, estimated for compressed files."""
    return int(sum(path.stat().st_size * (COMPRESSION_RATIO if path.suffix in COMPRESSED else 1) for path in paths))

"""Config of one source of raw text."""

import codecs
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig, PageKind
from gristmill.data_pipeline.filters.presets import FilterChoice, check_choices, parse_choices
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

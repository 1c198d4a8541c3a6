"""Signals that are measured only if the recipe uses them: each costs time or needs a file of the user. Functions
of the user's own and the origin of documents are such signals too."""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from gristmill.data_pipeline.annotate.list_file import (
    BadWords,
    BlockedUrls,
    ListsConfig,
    LockedList,
    LockedRobots,
    RobotsRules,
    list_digests,
    read_locked_list,
    rules_of_robots,
)
from gristmill.data_pipeline.extraction.blocks_config import PageKind
from gristmill.data_pipeline.filters.pii import PiiKind, count_pii, pii_signal
from gristmill.data_pipeline.filters.profiles import ENGLISH, LockedProfiles, Profiles, ProfilesConfig, load_profiles
from gristmill.data_pipeline.quality.scores import DocumentLabel, QualityScore, label_columns, score_columns
from gristmill.data_pipeline.readers.document import split_url
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import (
    PARAGRAPH_LANGUAGE_FIELDS,
    SCRIPT_FIELD,
    ParagraphLanguageConfig,
    paragraph_language_columns,
    text_scripts,
)
from gristmill.data_pipeline.signals.stop_words import (
    STOP_WORD_FIELDS,
    WORD_ORDER_FIELDS,
    StopWordTable,
    make_table,
    stop_word_columns,
    word_order_columns,
)
from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.user_code import UserCode, defined_at, errors_named, parameter_names

# Signals and rules of the user's own: functions of a document, or of a table of documents, that the recipe names.
#
# A function with one parameter `document` gets a dictionary: doc_id, text, url, language, metadata (a dictionary), the
# detected language and every signal. One with the parameter `documents` gets a pyarrow.Table with these columns
# (metadata as JSON) and returns a value a row. A rule returns True to keep a document, False or a reason to remove it;
# a signal returns a number, or None. Texts are those after all line edits; documents without text are not passed.


ONE, MANY = ("document",), ("documents",)
HIDDEN = ("raw_digest", "record", "text_hash", "text_key", "changes", "unreadable", "reason", "offset", "excerpt")


class OwnSignal(Config):
    """is_rule: whether the function decides; its column then holds 1 for documents that it removes, 0 for others."""

    code: UserCode
    is_rule: bool = False

    @property
    def name(self) -> str:
        """The column: my_rules_no_lorem."""
        return self.code.label.replace(".", "_")

    @property
    def field(self) -> str:
        """The recipe's field that names the function."""
        return "curate.filters" if self.is_rule else "curate.signals"

    def arrow_field(self) -> pa.Field:
        return pa.field(self.name, pa.int64() if self.is_rule else pa.float64())

    def column(self, table: pa.Table) -> pa.Array:
        """One value a row; null for rows without text. table: the columns of an annotated file so far."""
        has_text = pc.and_(pc.is_null(table.column("unreadable")), pc.greater(table.column("num_chars"), 0))
        places = np.flatnonzero(has_text.to_numpy(zero_copy_only=False))
        visible = table.drop_columns([name for name in HIDDEN if name in table.schema.names])
        values = values_of(self.code, visible.take(pa.array(places)), self.field)
        column = np.full(len(table), np.nan)
        column[places] = [self._number(value) for value in values]
        return pa.array(column, from_pandas=True).cast(self.arrow_field().type)

    def _number(self, value: Any) -> float:
        """Raises RecipeError naming the function for a value of another kind."""
        if self.is_rule:
            if isinstance(value, bool | np.bool_ | str):
                return float(isinstance(value, str) or not value)
            wanted = "True to keep a document, False or a reason (text) to remove it"
        else:
            if value is None:
                return np.nan
            if isinstance(value, bool | int | float | np.number | np.bool_) and np.isfinite(value):
                return float(value)
            wanted = "a finite number, or None"
        function, _ = measure(self.code, self.field)
        raise RecipeError(
            f"{self.field}: {defined_at(function)}: {self.code.function} returned {value!r:.80}; {wanted}"
        )


@lru_cache(maxsize=64)
def measure(code: UserCode, field: str) -> tuple[Callable[[Any], Any], bool]:
    """(the function, whether it takes a table). Raises RecipeError for a file that does not load, or another
    signature."""
    function = code.load(field)
    with errors_named(field, "has no signature", code.file):
        names = parameter_names(function)
    if names not in (ONE, MANY):
        raise RecipeError(
            f"{field}: {defined_at(function)}: {code.function}({', '.join(names)}) must have one parameter, `document` "
            "(a dictionary) or `documents` (a pyarrow.Table); rename its parameters"
        )
    return function, names == MANY


def values_of(code: UserCode, documents: pa.Table, field: str) -> Sequence[Any]:
    """Values of the function by row. Raises RecipeError with file and line of its errors, and the document."""
    function, takes_table = measure(code, field)
    if not len(documents):
        return []
    if takes_table:
        with errors_named(
            field, f"{code.function} fails on a table of {len(documents)} documents", defined_at(function)
        ):
            values = function(documents)
            values = values.to_pylist() if isinstance(values, pa.Array | pa.ChunkedArray) else list(values)
        if len(values) != len(documents):
            raise RecipeError(
                f"{field}: {defined_at(function)}: {code.function} returned {len(values)} values for {len(documents)} "
                "documents; return one a row"
            )
        return values
    return [_value(function, row, code, field) for row in documents.to_pylist()]


def _value(function: Callable[[Any], Any], row: dict[str, Any], code: UserCode, field: str) -> Any:
    document = {**row, "metadata": orjson.loads(row["metadata"] or "{}")}
    with errors_named(field, f"{code.function} fails on document {row['doc_id']}", defined_at(function)):
        return function(document)


def own_columns(signals: Sequence[OwnSignal], table: pa.Table) -> list[pa.Array]:
    return [signal.column(table) for signal in signals]


def check_own_signals(signals: Sequence[OwnSignal], columns: Mapping[str, Any] | Sequence[str]) -> None:
    """Loads the functions. Raises RecipeError if one cannot be used, or its name is that of another column."""
    names = [signal.name for signal in signals]
    for signal in signals:
        measure(signal.code, signal.field)
        if signal.name in columns or names.count(signal.name) > 1:
            raise RecipeError(
                f"{signal.field}: {signal.code.label} would be the column {signal.name!r}, which there is already; "
                "rename the function or its file"
            )


# Origin of documents as columns of the signals: host, licence and day of the crawl, where the raw data have them.


ORIGIN_FIELDS = [pa.field("host", pa.string()), pa.field("license", pa.string()), pa.field("crawl_date", pa.string())]
CRAWL_FORMATS = ("warc", "wet", "arc")  # whose records have a date
WARC_DATE = "warc_date"
DAY = re.compile(r"(\d{4})-?(\d{2})-?(\d{2})(?!\d{7})")
MAX_LICENSE_CHARACTERS = 200


class OriginFields(Config):
    """Fields of a record's metadata that name its licence and the day of its crawl. license: of records that name
    none."""

    license: str | None = None
    license_field: str | None = None
    crawl_date_field: str | None = None

    def columns(self, urls: pa.Array, metadata: pa.Array) -> list[pa.Array]:
        """The columns ORIGIN_FIELDS, null where the raw data name nothing."""
        rows = [orjson.loads(row or "{}") for row in metadata.to_pylist()]
        hosts = [split_url(url or "")[0] or None for url in urls.to_pylist()]
        licenses = [_license(row.get(self.license_field)) or self.license for row in rows]
        days = [day_of(row.get(self.crawl_date_field)) for row in rows]
        return [pa.array(values, pa.string()) for values in (hosts, licenses, days)]


def origin_fields(source: SourceConfig) -> OriginFields | None:
    """The origin fields of a source; None where its format has none and the recipe names none."""
    date_field = source.crawl_date_field or (WARC_DATE if source.format in CRAWL_FORMATS else None)
    if source.license is None and source.license_field is None and date_field is None:
        return None
    return OriginFields(license=source.license, license_field=source.license_field, crawl_date_field=date_field)


def _license(value: Any) -> str | None:
    """A licence as text; several are joined with a comma."""
    names = value if isinstance(value, list) else [value]
    texts = [" ".join(name.split()) for name in names if isinstance(name, str)]
    return ", ".join(text for text in texts if text)[:MAX_LICENSE_CHARACTERS] or None


def day_of(value: Any) -> str | None:
    """2014-02-16T05:02:21Z, "2014-02-16 05:02:21" and 20140216050221 -> 2014-02-16; None for what is no date."""
    match = DAY.match(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    if match is None or not (1 <= int(match[2]) <= 12 and 1 <= int(match[3]) <= 31):
        return None
    return "-".join(match.groups())


BAD_WORDS = pa.field("num_bad_words", pa.int64())  # matches of entries of lists.badwords
ZLIB_RATIO = pa.field("zlib_ratio", pa.float64())  # bytes of the text compressed by zlib over its bytes
PAGE_KIND_KEPT = pa.field("page_kind_kept", pa.int64())  # 1 for a kind that keep_page_kinds names; null without kind
ZLIB_LEVEL = 6  # zlib's default
BLOCKED_URL = pa.field("blocked_url", pa.int64())  # 1 if lists.blocked_urls blocks the document's URL, else 0

OPTED_OUT = pa.field("opted_out", pa.int64())  # 1 if lists.opt_outs has the document's URL, else 0
# 1 if robots.txt of the host disallows the URL for one of lists.robots_agents, else 0; null where none is known
ROBOTS_DISALLOWED = pa.field("robots_disallowed", pa.int64())


class OptionalSignals(Config):
    """The optional signals of a source. stop_words: set if the language is detected and no profiles are used (profiles
    have their own stop words). pii: the kinds for which the recipe drops documents. zlib: set if a filter of the source
    has a rule on it. page_kinds: the source's keep_page_kinds. quality, labels: models, a column each. own: functions
    of the user, whose columns `own_columns` computes from all others."""

    stop_words: bool = False
    profiles: LockedProfiles | None = None
    paragraph_languages: ParagraphLanguageConfig | None = None
    pii: tuple[PiiKind, ...] = ()
    badwords: LockedList | None = None
    blocked_urls: LockedList | None = None
    zlib: bool = False
    quality: tuple[QualityScore, ...] = Field(default=(), exclude_if=lambda scores: not scores)
    labels: tuple[DocumentLabel, ...] = Field(default=(), exclude_if=lambda labels: not labels)
    page_kinds: tuple[PageKind, ...] = Field(default=(), exclude_if=lambda kinds: not kinds)
    origin: OriginFields | None = Field(default=None, exclude_if=lambda fields: fields is None)
    opt_outs: LockedList | None = Field(default=None, exclude_if=lambda locked: locked is None)
    robots: LockedRobots | None = Field(default=None, exclude_if=lambda locked: locked is None)
    own: tuple[OwnSignal, ...] = Field(default=(), exclude_if=lambda signals: not signals)

    def fields(self) -> list[pa.Field]:
        """The columns, in order."""
        return [
            *(STOP_WORD_FIELDS if self.stop_words else ()),
            *(PROFILE_FIELDS if self.profiles is not None else ()),
            *(PARAGRAPH_LANGUAGE_FIELDS if self.paragraph_languages is not None else ()),
            *(pa.field(pii_signal(kind), pa.int64()) for kind in self.pii),
            *([BAD_WORDS] if self.badwords is not None else ()),
            *([BLOCKED_URL] if self.blocked_urls is not None else ()),
            *([ZLIB_RATIO] if self.zlib else ()),
            *(score.arrow_field() for score in self.quality),
            *(label.arrow_field() for label in self.labels),
            *([PAGE_KIND_KEPT] if self.page_kinds else ()),
            *(ORIGIN_FIELDS if self.origin is not None else ()),
            *([OPTED_OUT] if self.opt_outs is not None else ()),
            *([ROBOTS_DISALLOWED] if self.robots is not None else ()),
            *(signal.arrow_field() for signal in self.own),
        ]

    def columns(
        self, texts: TextBuffer, detected: pa.RecordBatch, urls: pa.Array, metadata: pa.Array
    ) -> list[pa.Array]:
        """One array per field but the own ones. detected: the result of signals/language.detect; urls: "" or null for
        none. metadata: JSON."""
        signal_columns: list[pa.Array] = []
        if self.stop_words:
            signal_columns += stop_word_columns(texts, detected.column("detected_language").to_pylist())
        if self.profiles is not None:
            signal_columns += profile_columns(texts, detected, self.profiles)
        if self.paragraph_languages is not None or self.pii or self.badwords is not None:
            signal_columns += self._string_columns(texts.texts())
        if self.blocked_urls is not None:
            blocked = _blocked_urls(self.blocked_urls)
            signal_columns.append(pa.array([int(blocked.blocks(url or "")) for url in urls.to_pylist()], pa.int64()))
        if self.zlib:
            signal_columns.append(pa.array([zlib_ratio(bytes(texts.raw(k))) for k in range(len(texts))], pa.float64()))
        if self.quality:
            signal_columns += score_columns(texts, self.quality)
        signal_columns += label_columns(texts, self.labels)
        if self.page_kinds:
            kinds = [orjson.loads(row or "{}").get("page_kind") for row in metadata.to_pylist()]
            kept = [None if kind is None else int(kind in self.page_kinds) for kind in kinds]
            signal_columns.append(pa.array(kept, pa.int64()))
        return signal_columns + self._origin_columns(urls, metadata)

    def _origin_columns(self, urls: pa.Array, metadata: pa.Array) -> list[pa.Array]:
        """The columns about where a document is from and what its owner reserves."""
        columns: list[pa.Array] = []
        if self.origin is not None:
            columns += self.origin.columns(urls, metadata)
        addresses = (
            [url or "" for url in urls.to_pylist()] if self.opt_outs is not None or self.robots is not None else []
        )
        if self.opt_outs is not None:
            opted_out = _blocked_urls(self.opt_outs)
            columns.append(pa.array([int(opted_out.blocks(url)) for url in addresses], pa.int64()))
        if self.robots is not None:
            rules = _robots_rules(self.robots)
            columns.append(pa.array([_as_number(rules.disallows(url)) for url in addresses], pa.int64()))
        return columns

    def _string_columns(self, texts: Sequence[str]) -> list[pa.Array]:
        """The columns that are measured on Python strings."""
        signal_columns: list[pa.Array] = []
        if self.paragraph_languages is not None:
            signal_columns += paragraph_language_columns(texts, self.paragraph_languages)
        signal_columns += [pa.array([count_pii(text, kind) for text in texts], pa.int64()) for kind in self.pii]
        if self.badwords is not None:
            words = _bad_words(self.badwords)
            signal_columns.append(pa.array([words.count(text) for text in texts], pa.int64()))
        return signal_columns


def zlib_ratio(text: bytes) -> float:
    """How far a text can be compressed: near 0 for repetition, above 1 for a few bytes; 1 for no text."""
    return len(zlib.compress(text, ZLIB_LEVEL)) / len(text) if text else 1.0


def locked_list(patterns: Sequence[str]) -> LockedList | None:
    """Pin the list by its files' current digests, without parsing them; None if the recipe names no file."""
    return list_digests(patterns) if patterns else None


def locked_robots(lists: ListsConfig) -> LockedRobots | None:
    """Pin the robots.txt files by their current digests, without parsing them; None if the recipe names none."""
    locked = locked_list(lists.robots)
    if locked is None:
        return None
    return LockedRobots(digests=locked.digests, agents=lists.robots_agents, paths=locked.paths)


@lru_cache(maxsize=1)
def _bad_words(locked: LockedList) -> BadWords:
    """Cached per process, like the next function: a list may have millions of entries."""
    return BadWords(read_locked_list(locked))


def _as_number(value: bool | None) -> int | None:
    return None if value is None else int(value)


@lru_cache(maxsize=1)
def _robots_rules(locked: LockedRobots) -> RobotsRules:
    return rules_of_robots(locked)


@lru_cache(maxsize=2)  # of blocked addresses and of opt-outs
def _blocked_urls(locked: LockedList) -> BlockedUrls:
    return BlockedUrls(read_locked_list(locked))


# Signals that presets have rules on and that a source may lack.
OPTIONAL_SIGNALS = (
    "num_language_stop_words", "main_language_share", BAD_WORDS.name, BLOCKED_URL.name, ZLIB_RATIO.name,
    OPTED_OUT.name, ROBOTS_DISALLOWED.name,
)  # fmt: skip


# Signals of the language profile: the profile of each text, its stop words, and the order of its words.

PROFILE_FIELD = pa.field("profile", pa.string())  # LANGUAGE_Script of the profile, see filters/profiles.py
PROFILE_FIELDS = [SCRIPT_FIELD, PROFILE_FIELD, *STOP_WORD_FIELDS, *WORD_ORDER_FIELDS]


def profile_columns(texts: TextBuffer, detected: pa.RecordBatch, locked: LockedProfiles) -> list[pa.Array]:
    """The columns PROFILE_FIELDS. Word order is measured for all profiles but English, which uses the published
    filters."""
    profiles, table = _profiles(locked)
    languages = detected.column("detected_language").to_pylist()
    scores = detected.column("language_score").to_pylist()
    scripts = text_scripts(texts)
    keys = [profiles.choose(*row) for row in zip(languages, scores, scripts, strict=True)]
    return [
        pa.array(scripts, pa.string()),
        pa.array(keys, pa.string()),
        *stop_word_columns(texts, keys, table),
        *word_order_columns(texts, [key != ENGLISH for key in keys]),
    ]


@lru_cache(maxsize=2)
def _profiles(locked: LockedProfiles) -> tuple[Profiles, StopWordTable]:
    """Cached per process."""
    profiles = load_profiles(ProfilesConfig(path=locked.path, min_score=locked.min_score))
    return profiles, profile_table(profiles)


def profile_table(profiles: Profiles) -> StopWordTable:
    """Stop words that our word splitting can match, of the profiles with at least one."""
    lists = {key: profile.matched_words for key, profile in profiles.by_key.items()}
    lowered = frozenset(key for key, profile in profiles.by_key.items() if profile.stop_words_lowered)
    return make_table({key: words for key, words in lists.items() if words}, lowered)

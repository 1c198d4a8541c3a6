"""Signals that are measured only if the recipe uses them: each costs time or needs a file of the user."""

import zlib
from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa

from gristmill.data_pipeline.annotate.bad_words import BadWords
from gristmill.data_pipeline.annotate.blocked_urls import BlockedUrls
from gristmill.data_pipeline.annotate.list_file import PinnedList, entries
from gristmill.data_pipeline.annotate.profile_signals import PROFILE_FIELDS, profile_columns
from gristmill.data_pipeline.filters.pii import PiiKind, count_pii, pii_signal
from gristmill.data_pipeline.filters.profiles import PinnedProfiles
from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.paragraph_languages import (
    PARAGRAPH_LANGUAGE_FIELDS,
    ParagraphLanguageConfig,
    paragraph_language_columns,
)
from gristmill.data_pipeline.signals.stop_words import STOP_WORD_FIELDS, stop_word_columns
from gristmill.foundation.config import Config

BAD_WORDS = pa.field("num_bad_words", pa.int64())  # matches of entries of lists.badwords
ZLIB_RATIO = pa.field("zlib_ratio", pa.float64())  # bytes of the text compressed by zlib over its bytes
ZLIB_LEVEL = 6  # zlib's default
BLOCKED_URL = pa.field("blocked_url", pa.int64())  # 1 if lists.blocked_urls blocks the document's URL, else 0


class OptionalSignals(Config):
    """The optional signals of a source. stop_words: set if the language is detected and no profiles are used (profiles
    have their own stop words). pii: the kinds for which the recipe drops documents. zlib: set if a filter of the source
    has a rule on it."""

    stop_words: bool = False
    profiles: PinnedProfiles | None = None
    paragraph_languages: ParagraphLanguageConfig | None = None
    pii: tuple[PiiKind, ...] = ()
    badwords: PinnedList | None = None
    blocked_urls: PinnedList | None = None
    zlib: bool = False

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
        ]

    def columns(self, texts: TextBuffer, detected: pa.RecordBatch, urls: pa.Array) -> list[pa.Array]:
        """One array per field. detected: the result of signals/language.detect; urls: "" or null for none."""
        found: list[pa.Array] = []
        if self.stop_words:
            found += stop_word_columns(texts, detected.column("detected_language").to_pylist())
        if self.profiles is not None:
            found += profile_columns(texts, detected, self.profiles)
        if self.paragraph_languages is not None or self.pii or self.badwords is not None:
            found += self._string_columns(texts.texts())
        if self.blocked_urls is not None:
            blocked = _blocked_urls(self.blocked_urls)
            found.append(pa.array([int(blocked.blocks(url or "")) for url in urls.to_pylist()], pa.int64()))
        if self.zlib:
            found.append(pa.array([zlib_ratio(bytes(texts.raw(k))) for k in range(len(texts))], pa.float64()))
        return found

    def _string_columns(self, texts: Sequence[str]) -> list[pa.Array]:
        """The columns that are measured on Python strings."""
        found: list[pa.Array] = []
        if self.paragraph_languages is not None:
            found += paragraph_language_columns(texts, self.paragraph_languages)
        found += [pa.array([count_pii(text, kind) for text in texts], pa.int64()) for kind in self.pii]
        if self.badwords is not None:
            words = _bad_words(self.badwords)
            found.append(pa.array([words.count(text) for text in texts], pa.int64()))
        return found


def zlib_ratio(text: bytes) -> float:
    """How far a text can be compressed: near 0 for repetition, above 1 for a few bytes; 1 for no text."""
    return len(zlib.compress(text, ZLIB_LEVEL)) / len(text) if text else 1.0


@lru_cache(maxsize=1)
def _bad_words(pinned: PinnedList) -> BadWords:
    """Cached per process, like the next function: a list may have millions of entries."""
    return BadWords(entries(pinned))


@lru_cache(maxsize=1)
def _blocked_urls(pinned: PinnedList) -> BlockedUrls:
    return BlockedUrls(entries(pinned))


# Signals that presets have rules on and that a source may lack.
OPTIONAL_SIGNALS = (
    "num_language_stop_words", "main_language_share", BAD_WORDS.name, BLOCKED_URL.name, ZLIB_RATIO.name,
)  # fmt: skip

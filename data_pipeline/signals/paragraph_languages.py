"""The languages of a mixed page: each paragraph's by itself, and the share of the text that is in the main one."""

import re
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.signals.language import LanguageConfig, detect
from gristmill.foundation.config import Config

PARAGRAPH_LANGUAGE_FIELDS = [
    pa.field("main_language", pa.string()),  # the one with the most characters; null where no paragraph was told
    pa.field("main_language_share", pa.float64()),  # its share of the characters of the paragraphs that were told
    pa.field("num_languages", pa.int64()),  # how many there are in them
    pa.field("told_char_ratio", pa.float64()),  # share of all paragraphs' characters that were told
]
_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n\s*")


class ParagraphLanguageConfig(Config):
    """A paragraph ends at a blank line; in a text without blank lines (as extractors write them) every line is one.

    chars: how much of a paragraph is looked at, from its start. least_chars: a shorter one is not told, since the model
    guesses there. least_score: nor is one that no language scores this in (0.5: it is then the likelier than all others
    together). paragraphs: the first so many of at least least_chars are looked at, 30 microseconds each."""

    chars: int = Field(default=200, ge=20)
    least_chars: int = Field(default=40, ge=1)
    least_score: float = Field(default=0.5, ge=0, le=1)
    paragraphs: int = Field(default=100, ge=1)


def paragraph_language_columns(texts: Sequence[str], config: ParagraphLanguageConfig) -> list[pa.Array]:
    """The columns PARAGRAPH_LANGUAGE_FIELDS. 300 characters in English, 100 in German -> en, 0.75, 2, 1.0.

    Of languages with as many characters, the main one is the first in the alphabet."""
    rows = [_row(text, config) for text in texts]
    return [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(PARAGRAPH_LANGUAGE_FIELDS)]


def split_paragraphs(text: str) -> list[str]:
    """Between blank lines, or the lines where none is blank. "a\\nb\\n\\nc" -> [a\\nb, c]; "a\\nb" -> [a, b]."""
    pieces = _PARAGRAPHS.split(text.strip())
    if len(pieces) == 1:
        pieces = text.split("\n")
    return [piece.strip() for piece in pieces if piece.strip()]


def _row(text: str, config: ParagraphLanguageConfig) -> tuple[str | None, float | None, int, float | None]:
    pieces = split_paragraphs(text)
    long = [piece for piece in pieces if len(piece) >= config.least_chars][: config.paragraphs]
    found = detect(long, LanguageConfig(chars=config.chars)).to_pydict()
    chars: Counter[str] = Counter()
    for piece, language, score in zip(long, found["detected_language"], found["language_score"], strict=True):
        if score >= config.least_score:
            chars[language] += len(piece)
    if not chars:
        return None, None, 0, 0.0 if pieces else None
    main = min(chars, key=lambda language: (-chars[language], language))
    return main, chars[main] / chars.total(), len(chars), chars.total() / sum(map(len, pieces))

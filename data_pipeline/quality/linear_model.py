"""Linear model of text quality over hashed word n-grams, and its file.

The score is a calibrated probability that a text is from the positive class, where both classes are as frequent:
1 / (1 + exp(-(scale * sum / sqrt(n) + offset))) for the sum of the weights of a text's n n-grams."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.hashed_ngrams import MAX_NGRAM, linear_sums
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json

FORMAT = "gristmill-linear-quality"
FORMAT_VERSION = 1  # of the file, the tokens and the hashes
SCORE_DIGITS = 6
HEADER_BYTES = 8  # of a safetensors file: the length of the JSON behind it
MAX_FEATURES = 2**26


@dataclass(frozen=True)
class LinearModel:
    """weights: float32[2**b]. labels: (positive, negative). report: how it was fitted and what it reached."""

    weights: np.ndarray
    ngram: int
    scale: float
    offset: float
    labels: tuple[str, str] = ("good", "bad")
    report: dict[str, Any] = field(default_factory=dict)

    def margins(self, texts: TextBuffer) -> np.ndarray:
        """float64[N], sum / sqrt(n) before the calibration; NaN for a text without tokens."""
        sums, counts = linear_sums(texts, self.weights, self.ngram)
        return np.where(counts > 0, sums / np.sqrt(np.maximum(counts, 1)), np.nan)

    def scores(self, texts: TextBuffer) -> np.ndarray:
        """float64[N], 0 to 1, rounded to 6 digits; NaN for a text without tokens."""
        return np.round(probabilities(self.margins(texts), self.scale, self.offset), SCORE_DIGITS)

    def label_scores(self, texts: TextBuffer, label: str) -> np.ndarray:
        """`scores` of one of the labels."""
        scores = self.scores(texts)
        return scores if label == self.labels[0] else np.round(1.0 - scores, SCORE_DIGITS)

    def save(self, path: Path) -> None:
        """A safetensors file whose header describes the model."""
        described = {
            "version": FORMAT_VERSION,
            "ngram": self.ngram,
            "scale": self.scale,
            "offset": self.offset,
            "labels": list(self.labels),
            "report": self.report,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save({"weights": self.weights}, {FORMAT: canonical_json(described).decode()}))


def probabilities(margins: np.ndarray, scale: float, offset: float) -> np.ndarray:
    """float64[N]; of NaN NaN."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-(scale * margins + offset)))


def load_linear_model(path: Path) -> LinearModel:
    """Raises InputError for a file that is damaged or no linear model."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            weights = file.get_tensor("weights") if FORMAT in metadata and "weights" in file.keys() else None  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: the model cannot be read ({error}); fit or copy it again") from error
    if weights is None:
        raise InputError(f"{path}: a safetensors file, but no model of `gristmill quality fit`")
    try:
        return _model_of(orjson.loads(metadata[FORMAT]), weights)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: its header does not describe a model ({error}); fit it again") from error


def _model_of(described: dict[str, Any], weights: np.ndarray) -> LinearModel:
    """Raises ValueError, KeyError or TypeError for a description that the kernels cannot follow."""
    if described["version"] != FORMAT_VERSION:
        raise ValueError(f"version {described['version']}, this program reads {FORMAT_VERSION}")
    size, ngram = weights.size, int(described["ngram"])
    if weights.dtype != np.float32 or weights.shape != (size,) or size & (size - 1) or not 2 <= size <= MAX_FEATURES:
        raise ValueError(f"weights of shape {weights.shape} and type {weights.dtype}")
    if not 1 <= ngram <= MAX_NGRAM:
        raise ValueError(f"n-grams of {ngram} tokens")
    scale, offset = float(described["scale"]), float(described["offset"])
    if not (np.isfinite(weights).all() and np.isfinite([scale, offset]).all()):
        raise ValueError("weights that are not finite")
    positive, negative = map(str, described["labels"])
    if described["report"]:
        _check_report(described["report"])
    return LinearModel(weights, ngram, scale, offset, (positive, negative), described["report"])


def _check_report(report: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError where what the report of a run shows is no number."""
    numbers = [report["auc"], report["calibration_error"], report["measured_documents"]]
    numbers += [row[name] for row in report["reliability"] for name in ("score", "positive", "documents")]
    if not np.isfinite(np.array(numbers, np.float64)).all():
        raise ValueError("a report with numbers that are not finite")


def header_keys(path: Path) -> list[str]:
    """Keys of a safetensors file's metadata; none of a damaged one."""
    try:
        with safe_open(path, framework="numpy") as file:
            return sorted(file.metadata() or {})
    except (SafetensorError, OSError):
        return []


def is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file of so many bytes that begins like this is a safetensors file."""
    length = int.from_bytes(head[:HEADER_BYTES], "little")
    return len(head) > HEADER_BYTES and head[HEADER_BYTES : HEADER_BYTES + 1] == b"{" and HEADER_BYTES + length <= size

"""Linear model of text quality over hashed word n-grams, its fit and its file.

The score is a calibrated probability that a text is from the positive class, where both classes are as frequent:
1 / (1 + exp(-(scale * sum / sqrt(n) + offset))) for the sum of the weights of a text's n n-grams."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gristmill.data_pipeline.quality.config import MIN_DOCUMENTS
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.hashed_ngrams import MAX_NGRAM, linear_sums, ngram_slots
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.startup import DeferredModule, check_room_for_scipy

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


# Fit of the linear model of text quality: logistic regression on hashed n-grams, calibrated, with its accuracy.
#
# Every text's place decides what it is used for: of ten texts of a class, one measures, one calibrates (Platt 1999) and
# eight train. Copies have one place, so none is both trained on and measured. The model does not depend on the order of
# the texts.

# Curation that trains no model does without.
linear = DeferredModule("sklearn.linear_model")
metrics = DeferredModule("sklearn.metrics")
sparse = DeferredModule("scipy.sparse")
thread_limits = DeferredModule("threadpoolctl")

# Inverse of the penalty on squared weights. On WCXB's articles against other pages the AUC is .916 at 1, .926 at 10
# and .927 at 100.
INVERSE_PENALTY = 10.0
MAX_ITERATIONS = 200
SETTLED = 1e-10  # step of the calibration that ends it
RELIABILITY_BINS = 10
MEASURE, CALIBRATE, TRAIN = 0, 1, 2


@dataclass(frozen=True)
class FitSettings:
    """ngram: tokens of the longest n-gram. features: slots, a power of 2. held_out: the share of the texts that
    measures, and as many that calibrate. labels: (positive, negative)."""

    ngram: int = 2
    features: int = 2**18
    held_out: float = 0.1
    labels: tuple[str, str] = ("good", "bad")


def fit_linear_model(positive: Sequence[str], negative: Sequence[str], settings: FitSettings) -> LinearModel:
    """Raises InputError for a class with too few texts, and for classes that cannot be told apart."""
    classes, shared = _without_shared(positive, negative)
    for label, texts in zip(settings.labels, classes, strict=True):
        if (distinct := len(set(texts))) < MIN_DOCUMENTS:
            raise InputError(
                f"{distinct} distinct documents of the class {label!r}{_shared_note(shared)}; a model needs "
                f"{MIN_DOCUMENTS} of each"
            )
    uses = np.concatenate([_uses(texts, settings.held_out) for texts in classes])
    labels = np.repeat([1, 0], [len(texts) for texts in classes])
    texts = [text for of_class in classes for text in of_class]
    weights = _weights([texts[k] for k in np.flatnonzero(uses == TRAIN)], labels[uses == TRAIN], settings)
    unscaled = LinearModel(weights, settings.ngram, 1.0, 0.0)
    margins = np.nan_to_num(unscaled.margins(TextBuffer.of(texts)))
    _check_separation(margins, labels, uses, settings.labels)
    scale, offset = _calibration(margins[uses == CALIBRATE], labels[uses == CALIBRATE])
    if scale <= 0:
        raise InputError(
            f"{settings.labels[0]} and {settings.labels[1]} cannot be told apart: held-out documents score the other "
            "way round; check the labels, or give more documents"
        )
    measured = uses == MEASURE
    report = _report(probabilities(margins[measured], scale, offset), labels[measured])
    counts = {label: int((labels == place).sum()) for label, place in zip(settings.labels, (1, 0), strict=True)}
    report |= {"documents": counts, "in_both_classes": shared, "features": settings.features, "ngram": settings.ngram}
    return LinearModel(weights, settings.ngram, scale, offset, settings.labels, report)


def _without_shared(positive: Sequence[str], negative: Sequence[str]) -> tuple[list[list[str]], int]:
    """(the texts of both classes by their hashes, without those that are in both; how many those are)."""
    hashes = [[xxhash.xxh3_64_intdigest(text.encode()) for text in texts] for texts in (positive, negative)]
    both = set(hashes[0]) & set(hashes[1])
    kept = []
    for texts, keys in zip((positive, negative), hashes, strict=True):
        order = sorted((key, text) for key, text in zip(keys, texts, strict=True) if key not in both and text.strip())
        kept.append([text for _, text in order])
    return kept, sum(key in both for keys in hashes for key in keys)


def _shared_note(shared: int) -> str:
    return f" ({shared} that are in both classes are left out)" if shared else ""


def _uses(texts: Sequence[str], held_out: float) -> np.ndarray:
    """int64[N]: MEASURE, CALIBRATE or TRAIN for each of a class's texts, which are in order; copies have one."""
    places = np.cumsum([0, *(text != before for text, before in zip(texts[1:], texts, strict=False))])
    step = max(round(1 / held_out), 3)
    return np.where(places % step == 0, MEASURE, np.where(places % step == step // 2, CALIBRATE, TRAIN))


def _weights(texts: Sequence[str], labels: np.ndarray, settings: FitSettings) -> np.ndarray:
    """float32[features] of a logistic regression on counts / sqrt(n), both classes with equal weight."""
    check_room_for_scipy()
    bits = settings.features.bit_length() - 1
    rows, columns, values = [0], [], []
    for slots in ngram_slots(TextBuffer.of(texts), bits, settings.ngram):
        unique, counts = np.unique(slots, return_counts=True)
        columns.append(unique.astype(np.int32))
        values.append(counts / np.sqrt(max(len(slots), 1)))
        rows.append(rows[-1] + len(unique))
    table = sparse.csr_matrix(
        (np.concatenate(values), np.concatenate(columns), np.array(rows)), shape=(len(texts), settings.features)
    )
    model = linear.LogisticRegression(C=INVERSE_PENALTY, max_iter=MAX_ITERATIONS, class_weight="balanced")
    with thread_limits.threadpool_limits(1):  # sums in one order, whatever the number of cores
        return model.fit(table, labels).coef_[0].astype(np.float32)


def _check_separation(margins: np.ndarray, labels: np.ndarray, uses: np.ndarray, names: tuple[str, str]) -> None:
    for use in (MEASURE, CALIBRATE):
        if np.ptp(margins[uses == use]) == 0:
            raise InputError(
                f"{names[0]} and {names[1]}: all held-out documents have one score, so the classes do not differ in "
                "their words; check the labels"
            )


def _calibration(margins: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """(scale, offset) by Platt's method: maximum likelihood with targets (n + 1) / (n + 2) and 1 / (n + 2), both
    classes with equal weight."""
    sizes = np.bincount(labels, minlength=2)
    targets = np.where(labels == 1, (sizes[1] + 1) / (sizes[1] + 2), 1 / (sizes[0] + 2))
    importance = 0.5 / sizes[labels]
    columns = np.column_stack([margins / np.std(margins), np.ones(len(margins))])
    solution = np.zeros(2)
    for _ in range(100):  # Newton's method with steps halved until the loss falls
        chances = probabilities(columns @ solution, 1.0, 0.0)
        gradient = columns.T @ (importance * (chances - targets))
        curvature = (columns * (importance * chances * (1 - chances))[:, None]).T @ columns + 1e-9 * np.eye(2)
        step, loss = np.linalg.solve(curvature, gradient), _loss(columns, solution, targets, importance)
        while _loss(columns, solution - step, targets, importance) > loss and np.abs(step).max() > SETTLED:
            step = step / 2
        solution = solution - step
        if np.abs(step).max() <= SETTLED:
            break
    return float(solution[0] / np.std(margins)), float(solution[1])


def _loss(columns: np.ndarray, solution: np.ndarray, targets: np.ndarray, importance: np.ndarray) -> float:
    values = columns @ solution
    return float((importance * (np.logaddexp(0, values) - targets * values)).sum())


def _report(scores: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """AUC, the reliability curve over equal ranges of the score, and its mean distance from the diagonal (expected
    calibration error), with both classes as frequent."""
    sizes = np.bincount(labels, minlength=2)
    importance = 0.5 / sizes[labels]
    bins = np.minimum((scores * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    curve, error = [], 0.0
    for place in np.unique(bins).tolist():
        chosen = bins == place
        mass = importance[chosen].sum()
        mean_score = float((importance * scores)[chosen].sum() / mass)
        positive = float((importance * labels)[chosen].sum() / mass)
        error += float(mass) * abs(mean_score - positive)
        curve.append({"score": round(mean_score, 4), "positive": round(positive, 4), "documents": int(chosen.sum())})
    return {
        "auc": round(float(metrics.roc_auc_score(labels, scores)), 6),
        "calibration_error": round(error, 6),
        "measured_documents": len(labels),
        "reliability": curve,
    }

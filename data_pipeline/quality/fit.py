"""Fit of the linear model of text quality: logistic regression on hashed n-grams, calibrated, with its accuracy.

Every text's place decides what it is used for: of ten texts of a class, one measures, one calibrates (Platt 1999) and
eight train. Copies have one place, so none is both trained on and measured. The model does not depend on the order of
the texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from gristmill.data_pipeline.quality.config import MIN_DOCUMENTS
from gristmill.data_pipeline.quality.linear_model import LinearModel, probabilities
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.hashed_ngrams import ngram_slots
from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.startup import check_room_for_scipy

# Curation that trains no model does without.
linear = DeferredModule("sklearn.linear_model")
metrics = DeferredModule("sklearn.metrics")
sparse = DeferredModule("scipy.sparse")

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

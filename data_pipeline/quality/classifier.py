"""Quality classifier: logistic regression on hashed word n-grams, positive against negative sources.

As in GPT-3 (Brown et al. 2020, appendix A) and MT-NLG, with a Pareto draw that keeps some low-scoring documents. Here
the draw is a function of the document's id."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors.numpy import load_file, save

from gristmill.data_pipeline.quality.config import MIN_DOCUMENTS, QualityConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.runtime.startup import check_room_for_scipy
from gristmill.foundation.runtime.tasks.task_files import fetch_folder

SCORE_STEPS = 1_000_000  # scores are rounded to 6 digits
WEIGHTS_NAME, METADATA_NAME = "quality.safetensors", "quality.json"


class QualityClassifier:
    """weights: float32[features]. metadata: held-out AUC, numbers of documents, the config it was trained with."""

    def __init__(self, weights: np.ndarray, bias: float, metadata: dict):
        self.weights, self.bias, self.metadata = weights, bias, metadata
        self._vectorizer = _vectorizer(metadata["config"]["ngram"], metadata["config"]["features"])

    def scores(self, texts: Sequence[str]) -> np.ndarray:
        """float64[N], 0 to 1: probability that a text is from the positive class, rounded to 6 digits."""
        from scipy.special import expit  # loaded here: importing it slows the start of every worker

        if not len(texts):
            return np.empty(0)
        logits = self._vectorizer.transform(texts) @ self.weights.astype(np.float64) + self.bias
        return np.round(expit(logits), 6)

    def save(self, folder: Path) -> None:
        """Weights as safetensors, metadata as JSON, which is written last and marks both as complete."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / WEIGHTS_NAME, save({"weights": self.weights, "bias": np.array([self.bias])}))
        write_atomic(folder / METADATA_NAME, canonical_json(self.metadata) + b"\n")


def load_classifier(folder: Path) -> QualityClassifier:
    """Load the classifier. Raises InputError if the folder holds no complete one."""
    fetch_folder(folder)
    if not (folder / METADATA_NAME).is_file() or not (folder / WEIGHTS_NAME).is_file():
        raise InputError(f"{folder}: no classifier in this folder; the curate stage writes it")
    tensors = load_file(folder / WEIGHTS_NAME)
    return QualityClassifier(
        tensors["weights"], float(tensors["bias"][0]), orjson.loads((folder / METADATA_NAME).read_bytes())
    )


def train_classifier(
    positive: Sequence[str], negative: Sequence[str], config: QualityConfig, inputs: Sequence[str]
) -> QualityClassifier:
    """Train on all texts but every (1/held_out)-th of each class; those are the validation set for the AUC.

    The result depends on the order of the texts. inputs: names of their files, for the metadata. Raises InputError for
    a class with fewer than MIN_DOCUMENTS."""
    for name, texts in (("positive", positive), ("negative", negative)):
        if len(texts) < MIN_DOCUMENTS:
            raise InputError(
                f"curate.quality: {len(texts)} {name} documents; a classifier needs {MIN_DOCUMENTS} of each"
            )
    texts = [*positive, *negative]
    labels = np.repeat([1, 0], [len(positive), len(negative)])
    step = round(1 / config.held_out)
    held_out = np.concatenate([np.arange(len(side)) % step == 0 for side in (positive, negative)])
    counted = _vectorizer(config.ngram, config.features).transform(texts)
    from sklearn.linear_model import LogisticRegression  # loaded here, as in `scores`
    from sklearn.metrics import roc_auc_score

    model = LogisticRegression(max_iter=200, class_weight="balanced").fit(counted[~held_out], labels[~held_out])
    weights = model.coef_[0].astype(np.float32)
    auc = roc_auc_score(labels[held_out], counted[held_out] @ weights)
    metadata = {
        "auc": round(float(auc), 6),
        "documents": {"positive": len(positive), "negative": len(negative), "held_out": int(held_out.sum())},
        "config": config.model_dump(mode="json"),
        "inputs": fingerprint(list(inputs)),
    }
    return QualityClassifier(weights, float(model.intercept_[0]), metadata)


def lowest_of_best(counts: np.ndarray, share: float) -> float:
    """The lowest score of the best `share` of a source's documents; 0 for a source without any. counts: int64[], how
    many documents have the score 0, 1, 2, ... / SCORE_STEPS."""
    total = int(counts.sum())
    if not total:
        return 0.0
    place = min(max(total - round(share * total), 0), total - 1)
    return float(np.searchsorted(np.cumsum(counts), place, side="right")) / SCORE_STEPS


def select_documents(
    scores: np.ndarray, ids: np.ndarray, config: QualityConfig, min_score: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return (bool[N] kept documents, float64[N] minimum score for each to be kept).

    ids: uint64[N, 2], packed; only `pareto` reads them. min_score: of `quantile`, from `lowest_of_best`.

    pareto: GPT-3 keeps a document if np.random.pareto(alpha) > 1 - score; the draw is (1 - u)**(-1/alpha) - 1 with u
    from the document's id, so it does not depend on the order of the documents."""
    if config.keep == "all" or not len(scores):
        min_scores = np.zeros(len(scores))
    elif config.keep == "threshold":
        min_scores = np.full(len(scores), config.value)
    elif config.keep == "quantile":
        min_scores = np.full(len(scores), min_score)
    else:
        min_scores = 1.0 - pareto_draws(ids, config.value)
        return scores > min_scores, min_scores
    return scores >= min_scores, min_scores


def pareto_draws(ids: np.ndarray, alpha: float) -> np.ndarray:
    """float64[N] from packed ids uint64[N, 2]: their last 13 hex digits as a uniform number, independent of the split
    assignment."""
    uniform = (ids[:, 1] & np.uint64(16**13 - 1)).astype(np.float64) / 16.0**13
    return (1.0 - uniform) ** (-1.0 / alpha) - 1.0


def _vectorizer(ngram: int, features: int) -> Any:
    check_room_for_scipy()
    from sklearn.feature_extraction.text import HashingVectorizer  # loaded here, as in `scores`

    return HashingVectorizer(n_features=features, ngram_range=(1, ngram), alternate_sign=False, norm="l2")

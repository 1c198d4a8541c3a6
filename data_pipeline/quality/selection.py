"""Selection of documents by a quality score: a threshold, the best share of a source, or a Pareto draw.

The Pareto draw is that of GPT-3 (Brown et al. 2020, appendix A) and MT-NLG, which keeps some low-scoring documents.
Here the draw is a function of the document's id."""

import numpy as np

from gristmill.data_pipeline.quality.config import QualityConfig

SCORE_STEPS = 1_000_000  # scores are rounded to 6 digits


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

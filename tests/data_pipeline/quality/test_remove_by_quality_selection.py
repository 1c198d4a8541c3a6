"""Which documents a quality score keeps."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.ledger.document_file import packed_ids
from gristmill.data_pipeline.quality.config import QualityConfig
from gristmill.data_pipeline.quality.remove_by_quality import (
    SCORE_STEPS,
    lowest_of_best,
    pareto_draws,
    select_documents,
)

CONFIG = QualityConfig(positive=("books",), negative=("web",), features=2**12)
DIGITS = [hashlib.sha256(b"%d" % k).hexdigest()[:32] for k in range(2000)]
IDS = packed_ids(pa.array(DIGITS), Path())


def test_threshold_and_quantile():
    scores = np.array([0.1, 0.5, 0.7, 0.9])
    ids = IDS[:4]
    counts = np.bincount(np.rint(scores * SCORE_STEPS).astype(int))
    kept = [
        select_documents(
            scores, ids, CONFIG.model_copy(update={"keep": keep, "value": value}), lowest_of_best(counts, value)
        )[0].tolist()
        for keep, value in (("threshold", 0.5), ("quantile", 0.25), ("quantile", 1.0), ("all", 1.0))
    ]
    assert kept == [[False, True, True, True], [False, False, False, True], [True] * 4, [True] * 4]


@given(st.lists(st.integers(0, SCORE_STEPS), min_size=1, max_size=30), st.floats(0, 1))
def test_the_quantile_of_counted_scores_is_that_of_the_sorted_ones(steps, share):
    scores = np.sort(np.round(np.array(steps) / SCORE_STEPS, 6))
    place = min(max(len(scores) - round(share * len(scores)), 0), len(scores) - 1)
    assert lowest_of_best(np.bincount(steps, minlength=SCORE_STEPS + 1), share) == scores[place]
    assert lowest_of_best(np.zeros(4, np.int64), share) == 0.0


def test_the_pareto_rule_keeps_the_share_that_its_formula_says():
    """P(draw > 1 - s) = (2 - s)**-alpha: 9 % of documents of score 0.7 at alpha 9, 46 % at alpha 3."""
    for alpha in (3.0, 9.0):
        config = CONFIG.model_copy(update={"value": alpha})
        for score in (0.3, 0.7, 0.95):
            kept, _ = select_documents(np.full(len(IDS), score), IDS, config)
            assert kept.mean() == pytest.approx((2 - score) ** -alpha, abs=0.035)
    order = np.random.default_rng(0).permutation(len(IDS))
    assert (pareto_draws(IDS[order], 9) == pareto_draws(IDS, 9)[order]).all()
    uniform = np.array([int(digits[-13:], 16) / 16**13 for digits in DIGITS])
    assert (pareto_draws(IDS, 9) == (1 - uniform) ** (-1 / 9) - 1).all()

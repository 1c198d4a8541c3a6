import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.ledger.document_file import packed_ids
from gristmill.data_pipeline.quality.classifier import (
    SCORE_STEPS,
    load_classifier,
    lowest_of_best,
    pareto_draws,
    select_documents,
    train_classifier,
)
from gristmill.data_pipeline.quality.config import QualityConfig
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError, RecipeError
from tests.support.corpora import prose, run_curate, tree_digests, write_jsonl

CONFIG = QualityConfig(positive=("books",), negative=("web",), features=2**12)
GOOD = [prose(k) for k in range(60)]
BAD = [prose(1000 + k).replace("the", "buy now").replace("river", "cheap") for k in range(60)]
DIGITS = [hashlib.sha256(b"%d" % k).hexdigest()[:32] for k in range(2000)]
IDS = packed_ids(pa.array(DIGITS), Path())


def test_a_classifier_tells_the_sides_apart_and_survives_the_disk(tmp_path):
    trained = train_classifier(GOOD, BAD, CONFIG, ["x"])
    assert trained.metadata["auc"] > 0.95
    assert trained.metadata["documents"] == {"positive": 60, "negative": 60, "held_out": 12}
    scores = trained.scores(GOOD[:5] + BAD[:5])
    assert scores[:5].min() > scores[5:].max()
    trained.save(tmp_path)
    assert load_classifier(tmp_path).scores(GOOD + BAD).tolist() == trained.scores(GOOD + BAD).tolist()
    with pytest.raises(InputError, match="19 negative documents; a classifier needs 20"):
        train_classifier(GOOD, BAD[:19], CONFIG, ["x"])


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


def sources(tmp_path) -> list[SourceConfig]:
    write_jsonl(tmp_path / "books.jsonl", [{"text": text} for text in GOOD])
    write_jsonl(tmp_path / "web.jsonl", [{"text": text} for text in BAD + [prose(2000 + k) for k in range(6)]])
    return [
        SourceConfig(name=name, format="jsonl", paths=(str(tmp_path / f"{name}.jsonl"),)) for name in ("books", "web")
    ]


def test_the_score_is_a_signal_and_the_rule_stands_in_the_ledger(tmp_path):
    quality = {"positive": ("books",), "negative": ("web",), "keep": "quantile", "value": 0.5, "features": 2**12}
    counts = run_curate(sources(tmp_path), tmp_path / "one", quality=quality)["sources"]
    run_curate(sources(tmp_path), tmp_path / "two", quality=quality)
    assert tree_digests(tmp_path / "one/curate") == tree_digests(tmp_path / "two/curate")
    assert counts["web"]["removed"]["quality"]["documents"] == 33 and "quality" not in counts["books"]["removed"]
    row = next(
        r for r in pq.read_table(tmp_path / "one/curate/ledger/web-00000.parquet").to_pylist() if r["step"] == "quality"
    )
    assert row["outcome"] == "removed" and row["value"] < row["threshold"] and row["duplicate_of"] is None
    scores = pq.read_table(tmp_path / "one/curate/signals/train/web-00000.parquet").column("quality_score").to_pylist()
    assert min(scores) >= row["threshold"]
    assert load_classifier(tmp_path / "one/curate/quality").metadata["auc"] > 0.8  # six of web's are books


def test_a_source_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        RecipeError, match=r"curate.quality names 'wob', but there is no source of this name; did you mean 'web'"
    ):
        run_curate(sources(tmp_path), tmp_path, quality={"positive": ("books",), "negative": ("wob",)})

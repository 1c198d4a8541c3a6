"""Cells of a mix: ranks, names, factors and repeats under a budget and a cap."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.data_pipeline.indexed.config import IndexConfig, MixConfig
from gristmill.data_pipeline.indexed.language_shares import language_of
from gristmill.data_pipeline.indexed.mix import (
    Cell,
    bucket_ranks,
    cell_of,
    document_cells,
    factors,
    mix_repeats,
    repeats_in_budget,
    topic_name,
)
from gristmill.foundation.errors import InputError, RecipeError


def test_ranks_are_shares_of_the_tokens_of_a_group():
    scores, tokens = np.array([3.0, 1.0, 2.0, 5.0, 4.0]), np.array([20, 10, 10, 30, 10])
    ranks = bucket_ranks(scores, tokens, np.array([0, 0, 0, 1, 1]), np.arange(5))
    assert ranks == pytest.approx([0.75, 0.125, 0.375, 0.625, 0.125])
    equal = bucket_ranks(np.array([1.0, 1.0, np.nan]), np.ones(3), np.zeros(3, int), np.array([1, 0, 2]))
    assert equal == pytest.approx([5 / 6, 0.5, 1 / 6])  # by id where scores are equal, no score first


def test_documents_are_ranked_within_their_language():
    documents = pa.table({"doc_id": [f"{n:032x}" for n in range(8)], "language": ["en", "de"] * 4})
    signals = pa.table({"quality_a": [0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.6, 0.4], "label_t": ["Law", None] * 4})
    mix = MixConfig(score="quality_a", buckets=2, topic="label_t")
    cells = document_cells(documents, np.full(8, 10), signals, np.array([0] * 7 + [1]), "web", mix)
    assert cells["cell"].to_pylist() == [
        "web.q01.t-law", "web.q00.t-none", "web.q01.t-law", "web.q00.t-none",
        "web.q00.t-law", "web.q01.t-none", "web.q00.t-law", "web.q01.t-none.c1",
    ]  # fmt: skip
    with pytest.raises(InputError, match="all 8 documents have the same quality_a; buckets would be drawn by chance"):
        document_cells(
            documents, np.full(8, 10), signals.set_column(0, "quality_a", pa.array([0.5] * 8)), np.zeros(8), "web", mix
        )


@given(st.builds(Cell, st.just("web"), st.integers(0, 99), st.none() | st.from_regex(r"[a-z0-9_]+"), st.integers(0, 9)))
def test_a_cell_is_read_from_its_name(cell):
    if cell.topic is None or cell.topic == topic_name(cell.topic):
        assert cell_of(cell.name) == cell and language_of(cell.name) is None


def test_names_that_are_no_cells():
    assert cell_of("web") == Cell("web") and topic_name("Science & Tech./..") == "science-tech" and topic_name(None)
    assert language_of("web.pt_BR") == "pt_BR"


def test_the_curve_rises_with_its_power_and_drops_the_worst():
    cells = {Cell("web", bucket): 100 for bucket in range(4)}
    assert list(factors(cells, MixConfig(score="s", buckets=4, power=0)).values()) == [1, 1, 1, 1]
    linear = factors(cells, MixConfig(score="s", buckets=4))
    assert list(linear.values()) == pytest.approx([0.25, 0.75, 1.25, 1.75])
    dropped = factors(cells, MixConfig(score="s", buckets=4, drop=0.5))
    assert list(dropped.values()) == pytest.approx([0, 0, 1, 3])


def test_topics_copies_and_patterns_change_factors():
    cells = {Cell("web", 1, "law"): 10, Cell("web", 1, "art"): 10, Cell("web", 1, "art", 1): 10}
    settings = {"score": "s", "buckets": 2, "topic": "t"}
    mixed = factors(cells, MixConfig(**settings, power=0, topics={"Law": 3.0}, copies={2: 2.0}))
    assert list(mixed.values()) == pytest.approx([1.5, 0.5, 1.0])
    named = factors(cells, MixConfig(**settings, repeats={"web.q01.*": 1, "web.q01.t-law": 0}))
    assert list(named.values()) == pytest.approx([0, 1.5, 1.5])
    with pytest.raises(RecipeError, match=r"'web\.q09' is no cell; cells are web.q01.t-law"):
        factors(cells, MixConfig(**settings, repeats={"web.q09": 1}))
    with pytest.raises(RecipeError, match="no document has 'sports'; labels are art, law"):
        factors(cells, MixConfig(**settings, topics={"sports": 1}))


def test_repeats_worked_example():
    assert repeats_in_budget([10, 10], [3, 1], 60, 4) == [4, 2]
    assert repeats_in_budget([10, 10], [3, 1], 40, 4) == [3, 1]
    with pytest.raises(ValueError, match="too few"):
        repeats_in_budget([10, 10], [1, 0], 41, 4)


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(0.01, 100)), min_size=1, max_size=30),
    st.floats(0.01, 1),
    st.floats(0.1, 50),
)
def test_repeats_meet_the_budget_and_the_cap_and_keep_proportions(cells, share, cap):
    tokens, weights = (np.array(column) for column in zip(*cells, strict=True))
    budget = share * cap * tokens.sum()
    times = np.array(repeats_in_budget(tokens, weights, budget, cap))
    assert (tokens * times).sum() == pytest.approx(budget) and times.max() <= cap * (1 + 1e-6)
    free = times < cap * (1 - 1e-6)
    assert np.ptp(times[free] / weights[free]) <= 1e-6 * (times[free] / weights[free]).max() if free.any() else True


def test_each_weighted_source_has_its_share_and_unweighted_ones_share_a_budget():
    cells = {Cell("web", 0): 100, Cell("web", 1): 100, Cell("books"): 50}
    mix = MixConfig(score="s", buckets=2, max_epochs=10)
    rows = mix_repeats(cells, {"web": 3.0, "books": 1.0}, mix, 400)
    assert [row.times for row in rows] == pytest.approx([0.75, 2.25, 2.0])
    rows = mix_repeats(cells, {"web": None, "books": None}, mix, 250)
    assert [row.times for row in rows] == pytest.approx([0.5, 1.5, 1.0])
    assert rows[1].line == "source web, bucket 1: 100 tokens, 1.50 times"


def test_the_cell_that_binds_is_named():
    cells = {Cell("web", bucket): 100 for bucket in range(4)}
    message = (
        r"index.mix: web: 1,000 tokens of the run, and 4 cells with 400 tokens read at most 2 times give 800; web.q03 "
        r"\(100 tokens\) reaches the cap first. Set index.mix.max_epochs to 2.50 or more"
    )
    with pytest.raises(RecipeError, match=message):
        mix_repeats(cells, {"web": 1.0}, MixConfig(score="s", buckets=4, max_epochs=2), 1000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mix": {"score": "s", "topics": {"law": 2}}}, "no mix.topic names the column"),
        ({"mix": {"score": "s", "copies": {1: 2}}}, "a cluster has at least 2 documents"),
        ({"mix": {"score": "s", "repeats": {"web.q00": -1}}}, "a factor is 0 or more"),
        ({"mix": {"score": "s", "repeats": {"web.q00": 1}, "power": 2}}, "factors by cell replace power"),
        ({"mix": {"score": "s"}, "rehydrate": {2: 2}}, "index.mix and index.rehydrate .* index.mix.copies"),
        ({"mix": {"score": "s"}, "languages": {}}, "index.mix and index.languages"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        IndexConfig.model_validate(settings)

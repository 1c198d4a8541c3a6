"""Weights that follow tokens, and how often a run sees each source."""

import pytest

from gristmill.data_pipeline.indexed.config import IndexConfig, PhaseConfig
from gristmill.data_pipeline.indexed.draws import blend_weights, epochs_by_source, repeat_warnings, tokens_drawn
from gristmill.data_pipeline.indexed.samples import open_samples

TOKENS = {"a": 300, "b": 100}


def test_without_weights_each_source_has_its_share_of_the_tokens():
    assert blend_weights({"a": None, "b": None}, TOKENS) == {"a": 0.75, "b": 0.25}
    assert epochs_by_source(TOKENS, {"a": None, "b": None}, 800) == {"a": 2.0, "b": 2.0}


def test_weights_that_are_given_stay():
    assert blend_weights({"a": 1.0, "b": 0.0}, TOKENS) == {"a": 1.0, "b": 0.0}


def test_weights_of_some_sources_alone_are_refused():
    with pytest.raises(
        ValueError, match=r"'a' has a weight and source 'b' has none; give every source a weight, or none"
    ):
        blend_weights({"a": 1.0, "b": None}, TOKENS)


def test_epochs_worked_by_hand():
    assert tokens_drawn({"a": 3.0, "b": 1.0}, 400) == {"a": 300.0, "b": 100.0}
    assert epochs_by_source({"a": 100, "b": 10, "none": 0}, {"a": 3.0, "b": 1.0, "none": 0.0}, 400) == {
        "a": 3.0,
        "b": 10.0,
    }


def test_phases_replace_the_weights():
    phases = (
        PhaseConfig(from_tokens=0, weights={"a": 1.0}),
        PhaseConfig(from_tokens=600, weights={"a": 1.0, "b": 3.0, "elsewhere": 5.0}),
        PhaseConfig(from_tokens=5000, weights={"b": 1.0}),
    )
    assert tokens_drawn({"a": 1.0, "b": 1.0}, 1000, phases) == {"a": 700.0, "b": 300.0}


def test_a_source_seen_more_than_4_times_is_warned_of_with_the_numbers():
    epochs = epochs_by_source({"web": 1_000_000, "notes": 10_000}, {"web": 1.0, "notes": 1.0}, 1_040_000)
    (line,) = repeat_warnings(epochs, {"web": 1_000_000, "notes": 10_000}, 1_040_000)
    assert "source 'notes' has 10,000 tokens and is seen 52.0 times in a run of 1,040,000" in line
    assert "give it a share of 3.85% or less" in line
    assert epochs_by_source({"web": 1_000_000, "notes": 10_000}, {"web": 0.9615, "notes": 0.0385}, 1_040_000)[
        "notes"
    ] == pytest.approx(4.0, abs=0.01)
    assert repeat_warnings({"a": 4.0}, {"a": 10}, 40) == []


def test_the_forecast_is_what_a_run_draws(make_dataset, random_documents):
    """But for the tokens of windows that are not whole and the rounding of shares to samples of a block."""
    folder = make_dataset({"books": (0.75, random_documents(1, 400, 30)), "notes": (0.25, random_documents(2, 50, 20))})
    samples = open_samples(folder, "train", 16, 0, IndexConfig(block_samples=16))
    tokens = {name: samples.samples_of(name) * 16 for name in samples.sources}
    forecast = epochs_by_source(tokens, {"books": 0.75, "notes": 0.25}, 16 * 5000)
    assert {draw.source: draw.epochs for draw in samples.drawn(5000)} == pytest.approx(forecast, rel=0.01)
    assert len(samples.repeat_warnings(5000)) == sum(times > 4 for times in forecast.values()) == 2

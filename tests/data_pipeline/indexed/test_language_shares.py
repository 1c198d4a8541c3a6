"""Shares by language, worked by hand, and as laws: temperature, floors, caps on epochs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.data_pipeline.indexed.config import LanguageSampling
from gristmill.data_pipeline.indexed.language_shares import (
    NO_RUN,
    RunLength,
    cell_weights,
    held_out_notes,
    language_of,
    language_tag,
    pooled,
    tempered,
    weights_by_language,
)
from gristmill.foundation.errors import RecipeError


def test_a_power_of_the_shares():
    assert tempered({"en": 0.9, "de": 0.1}, 0.5) == pytest.approx({"en": 0.75, "de": 0.25})
    assert tempered({"en": 900, "de": 100}, 1.0) == pytest.approx({"en": 0.9, "de": 0.1})


def test_a_language_of_two_sources_is_divided_as_their_text_is():
    tokens = {("web", "en"): 600, ("web", "de"): 200, ("books", "en"): 100}
    weights = cell_weights(tokens, {"web": 0.8, "books": 0.2}, LanguageSampling(alpha=0.5), NO_RUN)
    # en: 0.8 * 600/800 + 0.2 = 0.8, de: 0.2; square roots 2 : 1; of en, 0.6 : 0.2 are web's and books'
    assert weights == pytest.approx({("web", "en"): 0.5, ("web", "de"): 1 / 3, ("books", "en"): 1 / 6})


def test_floors_raise_small_languages_and_the_others_keep_their_proportions():
    tokens = {("web", "en"): 600, ("web", "de"): 300, ("web", "is"): 60, ("web", "fo"): 40}
    weights = cell_weights(tokens, {"web": 1.0}, LanguageSampling(min_share=0.1), NO_RUN)
    assert weights == pytest.approx(
        {("web", "en"): 0.8 * 2 / 3, ("web", "de"): 0.8 / 3, ("web", "is"): 0.1, ("web", "fo"): 0.1}
    )


def test_caps_lower_what_would_be_repeated_and_win_over_floors():
    tokens = {("web", "en"): 901, ("web", "is"): 101}
    config = LanguageSampling(alpha=0.01, min_share=0.4, max_epochs=2)
    weights = cell_weights(tokens, {"web": 1.0}, config, RunLength(1000))
    assert weights == pytest.approx({("web", "en"): 0.8, ("web", "is"): 0.2})


def test_an_epoch_has_whole_samples_only():
    tokens = {("web", "en"): 9001, ("web", "is"): 768}  # two windows of 256 and one token are 513
    weights = cell_weights(tokens, {"web": 1.0}, LanguageSampling(alpha=0.01, max_epochs=4), RunLength(20_000, 256))
    assert weights["web", "is"] == pytest.approx(4 * 512 / 20_000)


@settings(max_examples=40)
@given(
    tokens=st.lists(st.integers(2, 10**9), min_size=1, max_size=12),
    alpha=st.floats(0.05, 1),
    floor=st.floats(0, 0.08),
    cap=st.floats(1, 50),
)
def test_shares_add_up_to_one_within_their_bounds(tokens, alpha, floor, cap):
    cells = {f"web.{number}": count for number, count in enumerate(tokens)}
    config = LanguageSampling(alpha=alpha, min_share=floor, max_epochs=cap)
    train_tokens = max(1, sum(tokens) - len(tokens))
    weights = weights_by_language(cells, {"web": 1.0}, config, RunLength(train_tokens))
    assert sum(weights.values()) == pytest.approx(1)
    for name, count in cells.items():
        most = cap * (count - 1) / train_tokens
        assert weights[name] <= most * (1 + 1e-9)
        assert weights[name] >= min(floor, most) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("config", "train_tokens", "message"),
    [
        ({"min_share": 0.6}, None, "of each of 2 languages is more than 1; set it to 0.5000 or less"),
        ({"max_epochs": 2}, 10_000, "give at most 20.0% of train.tokens; raise it"),
        ({"max_epochs": 2}, None, "needs train.tokens"),
    ],
)
def test_bounds_that_cannot_hold_are_refused(config, train_tokens, message):
    with pytest.raises(RecipeError, match=message):
        cell_weights(
            {("web", "en"): 901, ("web", "is"): 101}, {"web": 1.0}, LanguageSampling(**config), RunLength(train_tokens)
        )


def test_names_of_languages_never_become_paths():
    assert [language_tag(name) for name in ("en", "pt_BR", "zh-Hant-TW", "eng_Latn")] == [
        "en",
        "pt_BR",
        "zh-Hant-TW",
        "eng_Latn",
    ]
    assert {language_tag(name) for name in ("../x", "", None, "a/b", "english language", "en.", "a" * 40)} == {
        "unknown"
    }
    assert (language_of("wiki.pt_BR"), language_of("wiki")) == ("pt_BR", None)


def test_small_languages_are_sampled_together():
    assert pooled({"de": 90, "fr": 5, "it": 10}, 10) == {"de": "de", "fr": "other", "it": "it"}


def test_languages_without_held_out_text_are_named():
    tokens = {"train": {"en": 9, "is": 2, "fo": 0}, "validation": {}, "test": {"en": 1, "fo": 3}}
    assert held_out_notes(tokens) == [
        "languages without test text, so no score of theirs: 1 (is)",
        "languages in test text alone, not trained on: 1 (fo)",
    ]

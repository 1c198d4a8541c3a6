"""Filters, penalties and draws of the sampler, against transformers and against their definitions."""

import numpy as np
import pytest
import torch

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate import sampler
from gristmill.evaluation.inference.generate.sampler import (
    BROKEN,
    LogitRules,
    RowChoice,
    TokenCounts,
    changed_logits,
    choose_tokens,
    draw_sorted,
    kept_tokens,
)

LOGITS = torch.tensor([[0.2, 0.5, 0.3]]).double().log()
SAMPLED = SamplingConfig(temperature=1.0)


def weights_of(logits_V: torch.Tensor, **sampling) -> dict[int, float]:
    """Probability by token that a row's filters leave."""
    config = SamplingConfig(**{"temperature": 1.0, **sampling})
    scaled = ((logits_V - logits_V.max()) / config.temperature).exp()
    ids, weights = kept_tokens(scaled, config)
    ids = np.arange(len(weights)) if ids is None else ids
    kept = weights > 0
    return dict(zip(ids[kept].tolist(), (weights[kept] / weights.sum()).tolist(), strict=True))


def test_top_p_takes_the_likeliest_until_it_is_reached() -> None:
    assert weights_of(LOGITS[0], top_p=0.6) == pytest.approx({1: 0.625, 2: 0.375})
    assert weights_of(LOGITS[0], top_k=1) == {1: 1.0}
    assert weights_of(LOGITS[0], min_p=0.5) == pytest.approx({1: 0.625, 2: 0.375})


def test_draws_follow_the_probabilities() -> None:
    uniform = np.random.default_rng(0).random(4000)
    tokens = choose_tokens(LOGITS.expand(4000, 3), [RowChoice(SAMPLED, number) for number in uniform])
    shares = np.bincount(tokens, minlength=3) / 4000
    assert shares.tolist() == pytest.approx([0.2, 0.5, 0.3], abs=4 * np.sqrt(0.25 / 4000))


def test_the_penalty_moves_logits_towards_less_likely() -> None:
    logits, counts = torch.tensor([[2.0, 1.5, -1.0]]), TokenCounts([0])
    assert choose_tokens(logits, [RowChoice(SamplingConfig(), counts=counts)]) == [0]
    assert choose_tokens(logits, [RowChoice(SamplingConfig(repetition_penalty=2.0), counts=counts)]) == [1]


def test_presence_frequency_bias_and_bans_are_those_of_the_api() -> None:
    counts = TokenCounts([4])
    for token in (1, 1, 2):
        counts.add(token)
    rules = LogitRules(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, 7.0),))
    allowed = np.array([True, True, True, True, True, False])
    row = RowChoice(SamplingConfig(), rules=rules, counts=counts, banned=(0,), allowed=allowed)
    changed = changed_logits(torch.zeros(1, 6), [row])[0].tolist()
    assert changed == [-np.inf, -1.0, -0.75, 7.0, 0.0, -np.inf]


def test_counts_grow_with_the_text() -> None:
    counts = TokenCounts(range(5))
    for token in [*range(500), 7]:
        counts.add(token)
    ids, generated = counts.arrays()
    assert dict(zip(ids.tolist(), generated.tolist(), strict=True)) == {token: 1 + (token == 7) for token in range(500)}


def test_rows_whose_logits_are_no_numbers_are_named() -> None:
    logits = torch.tensor([[1.0, torch.nan], [3.0, 1.0], [torch.inf, 0.0]])
    assert choose_tokens(logits, [RowChoice(SamplingConfig())] * 3) == [BROKEN, 0, BROKEN]


FILTERS = [{"top_p": 0.9}, {"top_k": 12, "top_p": 0.8}, {"min_p": 0.02}, {"top_p": 0.95, "min_p": 0.001}, {"top_k": 5}]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_filters_are_those_of_transformers(filters: dict, scale: float, monkeypatch) -> None:
    """Also where a histogram, and not a sort, finds top-p's limit."""
    transformers = pytest.importorskip("transformers")
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=3000) * scale)
    scores = transformers.TemperatureLogitsWarper(0.7)(None, logits[None])
    kinds = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    for name, value in filters.items():
        scores = kinds[name](value)(None, scores)
    expected = torch.softmax(scores[0], dim=-1).numpy()
    for sorted_tokens in (sampler.SORTED_TOKENS, 10):
        monkeypatch.setattr(sampler, "SORTED_TOKENS", sorted_tokens)
        ours = np.zeros_like(expected)
        for token, weight in weights_of(logits, temperature=0.7, **filters).items():
            ours[token] = weight
        assert ours.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("filters", [{}, *FILTERS])
def test_one_sort_of_all_rows_draws_the_same_distribution(filters: dict) -> None:
    """The path of GPUs: its kept tokens and their shares over many draws are those of the path of CPUs."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=60) * 2)
    weights = (logits - logits.max()).exp()
    uniform = (np.arange(3000) + 0.5) / 3000
    rows = [RowChoice(SamplingConfig(temperature=1.0, **filters), number) for number in uniform]
    tokens = draw_sorted(weights.repeat(3000, 1), rows)
    shares = torch.bincount(tokens, minlength=60) / 3000
    expected = weights_of(logits, **filters)
    assert set(tokens.tolist()) <= expected.keys()
    assert shares.tolist() == pytest.approx([expected.get(token, 0.0) for token in range(60)], abs=2 / 3000)

"""Speculative decoding gives the tokens of decoding one by one, and the counts of its distribution."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.drafts import Drafting, ngram_draft
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.sampler import LogitRules
from tests.evaluation.inference.generate.test_batch import Words, model_of, requests, run


@pytest.mark.parametrize(
    "tokens, count, draft",
    [
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3]),
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),
        ([7, 2, 3, 4, 1, 2, 3], 1, [4]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),
        ([1, 2, 3], 4, []),
        ([5], 4, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_an_ngram_is_continued_as_it_was_last_time(tokens, count, draft):
    assert ngram_draft(np.array(tokens), count) == draft


def limits_of(kind, causal_lm, sequences):
    """With guesses by n-grams, a model that guesses always right, and one that seldom does."""
    draft_model = {"ngram": None, "itself": causal_lm, "another": model_of("learned")}[kind]
    return BatchLimits(sequences, 60, drafting=Drafting(5, draft_model))


SAMPLED = SamplingConfig(temperature=1.0, top_k=60, top_p=0.95, repetition_penalty=1.1, seed=7)


# Which guesses are kept depends on logits alone: with draws, one shape; each shape's cache is cut without them too.
SHAPES_AND_SAMPLING = [
    pytest.param(shape, sampling, id=f"{name}-{shape}", marks=marks)
    for shape in ("attention", "window", "alibi", "latent", "experts")
    for name, sampling, marks in (
        ("greedy", SamplingConfig(), ()),
        ("sampled", SAMPLED, () if shape == "attention" else pytest.mark.slow),
    )
]


@pytest.mark.parametrize("kind", ["ngram", "itself", "another"])
@pytest.mark.parametrize(("shape", "sampling"), SHAPES_AND_SAMPLING)
def test_guesses_do_not_change_the_tokens(kind, shape, sampling):
    causal_lm = model_of(shape)
    rules = LogitRules(presence_penalty=0.2 if sampling.temperature else 0.0)
    made = requests(7, sampling=sampling, stops=("17 ",), rules=rules, logprobs=1)
    expected, _ = run(causal_lm, made, BatchLimits(3))
    for sequences, joins_every in ((1, 0), (3, 0), (4, 2)):
        generations, batch = run(causal_lm, made, limits_of(kind, causal_lm, sequences), joins_every)
        for own, other in zip(generations, expected, strict=True):
            assert [one.tokens for one in own] == [one.tokens for one in other]
            assert own[0].logprobs[-1].logprob == pytest.approx(other[0].logprobs[-1].logprob, abs=1e-9)
        if kind != "ngram":
            assert batch.speculation.guessed_tokens > 20
        if kind == "itself" and not sampling.temperature:
            assert batch.speculation.accepted_tokens > 0.5 * batch.speculation.guessed_tokens


def test_repeated_text_is_guessed():
    causal_lm, prompt = model_of("attention"), (5, 6, 7, 8) * 4
    bias = LogitRules(logit_bias=tuple((token, 100.0) for token in (5, 6)), presence_penalty=0.0)
    request = GenerationRequest(prompt, GenerationSettings(40, rules=bias))
    plain, one_by_one = run(causal_lm, [request], BatchLimits(1))
    guessed, batch = run(causal_lm, [request], BatchLimits(1, drafting=Drafting(8)))
    assert guessed[0][0].tokens == plain[0][0].tokens
    assert batch.speculation.accepted_tokens > 10 and one_by_one.speculation.accepted_tokens == 0


@pytest.mark.parametrize("kind", ["ngram", "itself"])
def test_the_second_token_has_the_distribution_of_the_model(kind):
    """1,000 draws from the four likeliest tokens, counted by their rank, against the model's own probabilities. The
    n-grams repeat because a bias leaves four tokens."""
    causal_lm, bias = model_of("attention"), np.zeros(300)
    bias[3:7] = 100.0 if kind == "ngram" else 0.0
    rules = LogitRules(logit_bias=tuple((token, bias[token]) for token in range(3, 7)))
    settings = GenerationSettings(3, SamplingConfig(temperature=3.0, top_k=4, seed=11), rules=rules, ignore_end=True)
    prompt, known = (3, 4, 5, 3, 4), {}
    batch = ContinuousBatch(causal_lm, Words(), limits_of(kind, causal_lm, 8))
    for draw in range(1000):
        batch.add(GenerationRequest(prompt, settings, draw))
    counts, expected = np.zeros(4), np.zeros(4)
    while not batch.is_idle:
        for result in batch.step():
            first, second, _ = result.generations[0].tokens
            if first not in known:
                logits = causal_lm.head(causal_lm.hidden(torch.tensor([[*prompt, first]]))[0, -1:])[0]
                known[first] = (logits + torch.from_numpy(bias)).topk(4)
            likeliest = known[first]
            counts[likeliest.indices.tolist().index(second)] += 1
            expected += (likeliest.values / 3.0).softmax(dim=0).numpy()
    assert batch.speculation.accepted_tokens > 50
    assert chisquare(counts, expected).pvalue > 0.01

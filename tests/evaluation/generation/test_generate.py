"""Batched generation: stop strings, sampling, streaming, independence of the batch."""

import numpy as np
import pytest
import torch

from gristmill.evaluation.config import SamplingConfig
from gristmill.evaluation.generation.generate import generate
from gristmill.evaluation.generation.request import GenerationSettings
from gristmill.evaluation.generation.sampler import candidates, sample_token
from gristmill.foundation.errors import InputError

PROMPTS = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3]]


def greedy_without_cache(causal_lm, prompt, new_tokens, end):
    """The definition: the likeliest token after the whole text so far, read anew each time."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        logits = causal_lm.head(causal_lm.hidden(torch.tensor([tokens]))[0, -1:])[0]
        token = int(logits.argmax())
        if token == end or len(tokens) >= causal_lm.sequence_length:
            break
        tokens.append(token)
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("batch_tokens", [1, 40, 5000])
def test_greedy_equals_reading_the_whole_text_anew(small_causal_lm, byte_codec, batch_tokens):
    causal_lm = small_causal_lm(sequence_length=30)
    found = generate(causal_lm, byte_codec, PROMPTS, GenerationSettings(40), batch_tokens=batch_tokens)
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert result.tokens == greedy_without_cache(causal_lm, prompt, 40, byte_codec.end_of_document)
        assert result.ended in ("length", "document")


def test_sampling_depends_on_the_seed_and_the_prompts_place_alone(small_causal_lm, byte_codec):
    causal_lm = small_causal_lm()
    warm = SamplingConfig(temperature=1.0, top_k=50, top_p=0.9, seed=5)
    together = generate(causal_lm, byte_codec, PROMPTS, GenerationSettings(12, warm))
    apart = generate(causal_lm, byte_codec, PROMPTS, GenerationSettings(12, warm), batch_tokens=1)
    assert together == apart
    assert together[0] != together[3]  # the same prompt twice is two draws
    assert (
        generate(causal_lm, byte_codec, PROMPTS, GenerationSettings(12, SamplingConfig(temperature=1.0, seed=6)))
        != together
    )


def test_a_stop_string_ends_the_text_before_it(small_causal_lm, byte_codec):
    causal_lm = small_causal_lm()
    whole = generate(causal_lm, byte_codec, [[1, 2, 3]], GenerationSettings(12))[0]
    stop = whole.text[4:6]
    stopped = generate(causal_lm, byte_codec, [[1, 2, 3]], GenerationSettings(12, stops=(stop,)))[0]
    assert stopped.ended == "stop"
    assert stopped.text == whole.text[: whole.text.find(stop)]


def test_streamed_pieces_make_the_text(small_causal_lm, byte_codec):
    pieces: dict[int, str] = {}

    def stream(index: int, text: str) -> None:
        pieces[index] = pieces.get(index, "") + text

    found = generate(
        small_causal_lm(),
        byte_codec,
        PROMPTS,
        GenerationSettings(12, SamplingConfig(temperature=2.0), ("e",)),
        stream=stream,
    )
    assert pieces == {index: result.text for index, result in enumerate(found) if result.text}


def test_a_prompt_must_fit(small_causal_lm, byte_codec):
    with pytest.raises(InputError, match="prompt 1 has 64 tokens; the model takes 1 to 63"):
        generate(small_causal_lm(sequence_length=64), byte_codec, [[1], [1] * 64], GenerationSettings(4))
    with pytest.raises(InputError, match="prompt 0 has 0 tokens"):
        generate(small_causal_lm(), byte_codec, [[]], GenerationSettings(4))


def test_top_p_takes_the_likeliest_until_it_is_reached():
    logits = np.log([0.2, 0.5, 0.3])
    kept, weights = candidates(logits, SamplingConfig(temperature=1.0, top_p=0.6))
    assert kept.tolist() == [1, 2]
    assert weights.tolist() == pytest.approx([0.625, 0.375])
    kept, _ = candidates(logits, SamplingConfig(temperature=1.0, top_k=1))
    assert kept.tolist() == [1]


def test_draws_follow_the_probabilities():
    logits = np.log([0.2, 0.5, 0.3])
    rng = np.random.default_rng(0)
    drawn = [sample_token(logits, SamplingConfig(temperature=1.0), set(), rng) for _ in range(4000)]
    shares = np.bincount(drawn, minlength=3) / 4000
    assert shares.tolist() == pytest.approx([0.2, 0.5, 0.3], abs=4 * np.sqrt(0.25 / 4000))


def test_the_penalty_moves_logits_towards_less_likely():
    logits = np.array([2.0, 1.5, -1.0])
    rng = np.random.default_rng(0)
    assert sample_token(logits, SamplingConfig(), {0}, rng) == 0
    assert sample_token(logits, SamplingConfig(repetition_penalty=2.0), {0}, rng) == 1


def test_the_samplers_filters_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    logits = np.random.default_rng(1).normal(size=(40,)) * 3
    seen = {3, 7, 20}
    chain = [
        transformers.RepetitionPenaltyLogitsProcessor(1.3),
        transformers.TemperatureLogitsWarper(0.7),
        transformers.TopKLogitsWarper(12),
        transformers.TopPLogitsWarper(0.8),
    ]
    scores = torch.tensor(logits)[None]
    for step in chain:
        scores = step(torch.tensor([sorted(seen)]), scores)
    theirs = torch.softmax(scores[0], dim=-1).numpy()
    settings = SamplingConfig(temperature=0.7, top_k=12, top_p=0.8, repetition_penalty=1.3)
    penalised = logits.copy()
    for token in seen:
        penalised[token] *= 1.3 if penalised[token] < 0 else 1 / 1.3
    kept, weights = candidates(penalised / 0.7, settings)
    ours = np.zeros_like(theirs)
    ours[kept] = weights
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-12)

"""Continuous batching: requests of mixed lengths that join at different times equal each request alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.sequence import log_softmax
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize, place_decoding_weights
from gristmill.training.model.transformer import ComputeOptions, Transformer

VOCABULARY, CONTEXT = 300, 96
ATTENTION = {"heads": 4, "kv_heads": 2}
MAMBA = {"mamba2": {"head_width": 8, "state": 4, "groups": 1}}
TCNCA = {"tcnca": {"chunk": 8, "kernel": 3, "depth": 2, "blocks": 1}}
LATENT = {"latent_attention": {"key_value_rank": 10, "query_rank": 6, "value_width": 6}}
SHAPES = {
    "attention": ATTENTION,
    "flat": ATTENTION,
    "window": {**ATTENTION, "window": 7},
    "alibi": {"heads": 4, "positions": "alibi", "norm": "layernorm"},
    "learned": {"heads": 4, "positions": "learned"},
    "experts": {**ATTENTION, "moe": {"experts": (0, 4), "top_k": 2, "ffn_hidden_size": 16}},
    "mamba2": {**ATTENTION, "mixer": "mamba2", "mixers": MAMBA},
    "hybrid": {**ATTENTION, "pattern": "M*", "mixers": MAMBA},
    "tcnca": {**ATTENTION, "mixer": "tcnca", "mixers": TCNCA},
    "latent": {"heads": 4, "mixer": "latent_attention", "head_width": 12, "rope_width": 4, "mixers": LATENT},
}


class Words:
    """Token i is the word `i `; the last ends a document."""

    end_of_document = VOCABULARY - 1
    ends = (VOCABULARY - 1,)

    def decode(self, ids):
        return "".join(f"{token} " for token in ids)


def model_of(shape: str) -> LocalCausalLM:
    config = ModelConfig(layers=2, width=32, sequence_length=CONTEXT, **SHAPES[shape])
    dtype = torch.float32 if shape == "flat" else torch.float64
    model = Transformer(config, VOCABULARY, options=ComputeOptions(dtype))
    initialize(model, seed=0, device=torch.device("cpu"), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)  # likelier differences
    if shape == "flat":
        place_decoding_weights(model)
    return LocalCausalLM(model, CONTEXT)


def requests(number: int, **options) -> list[GenerationRequest]:
    rng = np.random.default_rng(3)
    shared = rng.integers(0, VOCABULARY - 1, 24).tolist()
    made = []
    for index in range(number):
        own = rng.integers(0, VOCABULARY - 1, int(rng.integers(1, 50))).tolist()
        prompt = (*shared, *own[:20]) if index % 3 == 0 else tuple(own)
        made.append(GenerationRequest(prompt, GenerationSettings(int(rng.integers(1, 16)), **options), index))
    return [*made, made[0], made[1]]  # two prompts come twice


def run(causal_lm, made, limits, joins_every=0):
    """All requests; joins_every: steps between a request's joining and the next one's, 0: all wait from the start."""
    batch, found, number_of = ContinuousBatch(causal_lm, Words(), limits), {}, {}
    waiting, steps = list(enumerate(made)), 0
    while waiting or not batch.is_idle:
        while waiting and (not joins_every or steps % joins_every == 0):
            index, request = waiting.pop(0)
            number_of[batch.add(request)] = index
            if joins_every:
                break
        steps += 1
        for result in batch.step():
            assert result.error is None
            found[number_of[result.number]] = result.generations
    return [found[index] for index in range(len(made))], batch


def by_whole_passes(causal_lm, request):
    """The definition: the likeliest token after the whole text so far, read anew each time."""
    tokens = list(request.prompt)
    while len(tokens) < min(CONTEXT, len(request.prompt) + request.settings.max_new_tokens):
        token = int(causal_lm.head(causal_lm.hidden(torch.tensor([tokens]))[0, -1:])[0].argmax())
        if token == Words.end_of_document:
            break
        tokens.append(token)
    return tuple(tokens[len(request.prompt) :])


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_that_join_and_leave_equal_whole_passes(shape):
    causal_lm, made = model_of(shape), requests(6)
    expected = [by_whole_passes(causal_lm, request) for request in made]
    assert len({tokens[:3] for tokens in expected}) > 3
    for slots, joins_every in ((3, 0), (4, 2)):
        found, _ = run(causal_lm, made, BatchLimits(slots, prompt_tokens=60), joins_every)
        assert [generations[0].tokens for generations in found] == expected


@pytest.mark.parametrize("shape", ["attention", "hybrid"])
def test_sampled_requests_do_not_depend_on_the_batch(shape):
    sampling = SamplingConfig(temperature=1.0, top_k=60, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=7)
    causal_lm, made = model_of(shape), requests(4, sampling=sampling, count=2, logprobs=2)
    expected = [run(causal_lm, [request], BatchLimits(1))[0][0] for request in made]
    assert any(first.tokens != second.tokens for first, second in expected)
    for slots, joins_every in ((5, 0), (4, 2)):
        found, _ = run(causal_lm, made, BatchLimits(slots), joins_every)
        assert [[each.tokens for each in generations] for generations in found] == [
            [each.tokens for each in generations] for generations in expected
        ]


def test_a_shared_beginning_is_read_once():
    causal_lm = model_of("attention")
    start = tuple(range(40))
    made = [GenerationRequest((*start, 50 + index), GenerationSettings(1)) for index in range(6)]
    _, batch = run(causal_lm, made, BatchLimits(8))
    assert batch.read_tokens == 41 + 5
    batch.add(GenerationRequest((*start, 90, 91, 92), GenerationSettings(1)))  # all before have ended
    batch.step()
    assert batch.read_tokens == 41 + 5 + 3
    copies = [GenerationRequest(start, GenerationSettings(1, count=8))]
    assert run(causal_lm, copies, BatchLimits(8))[1].read_tokens == 40
    assert run(model_of("hybrid"), copies, BatchLimits(8))[1].read_tokens == 40


def test_the_best_of_some_candidates_is_the_likeliest_a_token():
    causal_lm = model_of("attention")
    sampling = SamplingConfig(temperature=1.5, seed=1)
    settings = GenerationSettings(5, sampling, count=6, logprobs=0)
    every = run(causal_lm, [GenerationRequest((1, 2), settings)], BatchLimits(6))[0][0]
    best = GenerationSettings(5, sampling, count=2, best_of=6)
    ranked = run(causal_lm, [GenerationRequest((1, 2), best)], BatchLimits(3))[0][0]

    def mean(generation):
        return math.fsum(each.logprob for each in generation.logprobs) / len(generation.logprobs)

    expected = sorted(every, key=mean, reverse=True)[:2]
    assert [each.tokens for each in ranked] == [each.tokens for each in expected]


def test_logprobs_are_those_of_whole_passes():
    causal_lm, prompt = model_of("attention"), (5, 6, 7, 8)
    settings = GenerationSettings(3, logprobs=2, prompt_logprobs=True)
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(4))
    for draw in range(2):
        batch.add(GenerationRequest(prompt, settings, draw))
    batch.add(GenerationRequest((*prompt, 9, 10, 11), settings))
    results = {}
    while not batch.is_idle:
        results |= {result.number: result for result in batch.step()}
    for result in results.values():
        generation = result.generations[0]
        whole = [each.token for each in result.prompt_logprobs] + list(generation.tokens)
        logits = causal_lm.head(causal_lm.hidden(torch.tensor([whole]))[0]).numpy()
        found = [*result.prompt_logprobs, *generation.logprobs]
        assert found[0].logprob is None
        for place, each in enumerate(found[1:], start=1):
            logprobs = log_softmax(logits[place - 1])
            assert each.logprob == pytest.approx(float(logprobs[each.token]), abs=1e-9)
            assert [token for token, _ in each.top] == np.argsort(-logprobs)[:2].tolist()


def test_no_new_tokens_score_the_prompt_alone():
    batch = ContinuousBatch(model_of("attention"), Words(), BatchLimits(2))
    batch.add(GenerationRequest((1, 2, 3), GenerationSettings(0, logprobs=0, prompt_logprobs=True)))
    (result,) = batch.step()
    assert len(result.prompt_logprobs) == 3 and result.generations[0].tokens == ()
    assert batch.is_idle


def test_a_cancelled_request_leaves_the_others_as_they_are():
    causal_lm, made = model_of("attention"), requests(5)
    expected = [by_whole_passes(causal_lm, request) for request in made]
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(3))
    numbers = [batch.add(request) for request in made]
    found = {result.number: result for result in batch.step()}
    batch.cancel(numbers[0])
    batch.cancel(numbers[4])
    while not batch.is_idle:
        found |= {result.number: result for result in batch.step()}
    assert sorted(found) == [number for number in numbers if number not in (numbers[0], numbers[4])]
    assert all(found[number].generations[0].tokens == expected[number] for number in found)


class BreaksOn(LocalCausalLM):
    """A model whose logits after one token are not numbers."""

    def head(self, hidden_ND):
        logits = super().head(hidden_ND)
        return torch.where((self.last == 13)[: len(logits), None], torch.nan, logits)

    def read(self, tokens_BT, rows, cache):
        self.last = tokens_BT[:, -1]
        return super().read(tokens_BT, rows, cache)


def test_a_row_that_breaks_fails_alone():
    whole = model_of("attention")
    broken = BreaksOn(whole.model, CONTEXT)
    batch = ContinuousBatch(broken, Words(), BatchLimits(3))
    good, bad = (batch.add(GenerationRequest(prompt, GenerationSettings(4))) for prompt in ((1, 2), (1, 13)))
    found = {}
    while not batch.is_idle:
        found |= {result.number: result for result in batch.step()}
    assert isinstance(found[bad].error, InputError) and "not numbers" in str(found[bad].error)
    assert found[good].generations[0].tokens == by_whole_passes(whole, GenerationRequest((1, 2), GenerationSettings(4)))


def test_a_request_that_does_not_fit_is_refused_when_it_is_added():
    batch = ContinuousBatch(model_of("attention"), Words(), BatchLimits(3))
    with pytest.raises(InputError, match="has 96 tokens; the model takes 1 to 95: shorten it"):
        batch.add(GenerationRequest((1,) * 96, GenerationSettings(4)))
    with pytest.raises(InputError, match="has token 300; the model's vocabulary has 0 to 299"):
        batch.add(GenerationRequest((1, 300), GenerationSettings(4)))
    assert batch.is_idle


def run_in_parts(causal_lm, made, limits, prompt_tokens):
    """All requests by steps that read so many tokens of prompts, the first of them begun alone."""
    batch = ContinuousBatch(causal_lm, Words(), limits)
    numbers, generations, largest = [batch.add(made[0])], {}, 0
    batch.step(prompt_tokens)
    numbers += [batch.add(request) for request in made[1:]]
    while not batch.is_idle:
        before = batch.read_prompt_tokens
        for result in batch.step(prompt_tokens):
            generations[result.number] = result.generations
        largest = max(largest, batch.read_prompt_tokens - before)
    return [generations[number] for number in numbers], largest


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_that_are_read_in_parts_equal_whole_passes(shape):
    causal_lm, made = model_of(shape), requests(6)
    expected = [by_whole_passes(causal_lm, request) for request in made]
    for prompt_tokens in (5, 16):
        generations, largest = run_in_parts(causal_lm, made, BatchLimits(4), prompt_tokens)
        assert [candidates[0].tokens for candidates in generations] == expected
        assert largest <= prompt_tokens or not causal_lm.reads_trees


@pytest.mark.parametrize("prompt_tokens", [1, 5, 70])
@pytest.mark.parametrize("blocks", [None, 8])
def test_prompts_that_are_read_with_the_next_tokens_of_others_equal_whole_passes(blocks, prompt_tokens):
    """Also where some wait for memory, and beside one whose own log-probabilities are asked for. A step is one pass."""
    causal_lm, made = model_of("flat"), requests(6)
    expected = [by_whole_passes(causal_lm, request) for request in made]
    made[2] = replace(made[2], settings=replace(made[2].settings, logprobs=0, prompt_logprobs=True))
    passes, read = [], causal_lm.read
    causal_lm.read = lambda tokens_BT, rows, cache: (passes.append(rows), read(tokens_BT, rows, cache))[1]
    batch, found, steps = ContinuousBatch(causal_lm, Words(), BatchLimits(4, cache_blocks=blocks)), {}, 0
    assert batch.reads_together
    numbers = [batch.add(request) for request in made]
    while not batch.is_idle:
        found |= {result.number: result for result in batch.step(prompt_tokens)}
        steps += 1
    assert [found[number].generations[0].tokens for number in numbers] == expected
    assert len(found[numbers[2]].prompt_logprobs) == len(made[2].prompt)
    assert len(passes) <= steps + 1 + batch.preemptions


@pytest.mark.parametrize("shape", ["flat", "attention"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_that_wants_no_token_is_read_before_it_ends(shape, pooling):
    """Beside a running sequence, in parts of 7 tokens and whole: the same hidden states."""
    causal_lm, prompt = model_of(shape), tuple(range(40))
    wanted = GenerationRequest(prompt, GenerationSettings(0, pooling=pooling))
    hidden_TD = causal_lm.hidden(torch.tensor([prompt]))[0]
    expected = (hidden_TD[-1] if pooling == "last" else hidden_TD.mean(dim=0)).detach().numpy()
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(3))
    numbers = [batch.add(GenerationRequest((1, 2, 3), GenerationSettings(12))), *(batch.add(wanted) for _ in range(2))]
    results = {}
    while not batch.is_idle:
        results |= {result.number: result for result in batch.step(7)}
    for number in numbers[1:]:
        np.testing.assert_allclose(results[number].embedding, expected, rtol=1e-4, atol=1e-5)


def test_a_step_reads_prompts_up_to_its_tokens():
    """Two whole ones and a part of the next one, whose rest comes first in one of the next two steps."""
    causal_lm = model_of("flat")
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(6))
    for length in (3, 7, 30, 2):
        batch.add(GenerationRequest(tuple(range(length, 2 * length)), GenerationSettings(20)))
    read = []
    for _ in range(5):
        before = batch.read_prompt_tokens
        batch.step(12.0)
        read.append((int(batch.read_prompt_tokens - before), batch.decoding))
    assert read == [(12, 2), (12, 3), (12, 3), (6, 4), (0, 4)]


def test_a_request_cancelled_while_its_prompt_is_read_leaves_the_others():
    causal_lm = model_of("attention")
    other = GenerationRequest((1, 2, 3), GenerationSettings(12))
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(3))
    number = batch.add(other)
    batch.step(8)
    long = batch.add(GenerationRequest(tuple(range(80)), GenerationSettings(4)))
    batch.step(8)
    batch.cancel(long)
    results = {}
    while not batch.is_idle:
        results |= {result.number: result for result in batch.step(8)}
    assert results.keys() == {number} and results[number].generations[0].tokens == by_whole_passes(causal_lm, other)


def test_a_short_prompt_joins_while_a_long_one_is_read():
    batch = ContinuousBatch(model_of("attention"), Words(), BatchLimits(3))
    batch.add(GenerationRequest((1, 2, 3), GenerationSettings(60)))
    batch.step(8)
    long = batch.add(GenerationRequest(tuple(range(90)), GenerationSettings(1)))
    short = batch.add(GenerationRequest((200, 201), GenerationSettings(1)))
    order = []
    while long not in order:
        order += [result.number for result in batch.step(8)]
    assert order == [short, long]

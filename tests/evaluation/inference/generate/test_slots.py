"""A cache of little memory: every stream gets the tokens that it gets alone, and the memory is never exceeded."""

import numpy as np
import pytest

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate import slots as slots_file
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.drafts import Drafting
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.slots import BLOCK_TOKENS, Slots
from gristmill.foundation.errors import InputError
from gristmill.training.model.decoding_cache import SharedPrefix
from tests.evaluation.inference.generate.test_batch import SHAPES, Words, model_of, run

SAMPLED = SamplingConfig(temperature=1.0, top_k=60, top_p=0.95, repetition_penalty=1.1, seed=7)


def shared_requests(number, **options):
    """Half of the prompts begin with the same 32 tokens; each is continued to 40 to 95 tokens."""
    rng = np.random.default_rng(5)
    shared = rng.integers(0, 299, 32).tolist()
    prompts = [rng.integers(0, 299, int(rng.integers(1, 30))).tolist() for _ in range(number)]
    prompts = [(*shared, *prompt) if index % 2 else tuple(prompt) for index, prompt in enumerate(prompts)]
    return [
        GenerationRequest(prompt, GenerationSettings(int(rng.integers(24, 33)), ignore_end=True, **options), index)
        for index, prompt in enumerate(prompts)
    ]


def run_within(causal_lm, requests, limits, prompt_tokens=None):
    """The tokens of every request, the largest use of the cache behind a step, and the batch. The requests join one
    after another."""
    batch, results, pieces, most_blocks = ContinuousBatch(causal_lm, Words(), limits), {}, {}, 0
    waiting = list(requests)
    while waiting or not batch.is_idle:
        if waiting:
            text = []
            number = batch.add(waiting.pop(0), lambda candidate, piece, logprobs, text=text: text.append(piece))
            pieces[number] = text
        results |= {result.number: result for result in batch.step(prompt_tokens)}
        most_blocks = max(most_blocks, batch.cache_use.used_blocks)
    for number, text in pieces.items():
        assert "".join(text) == results[number].generations[0].text  # no piece comes twice
    return [results[number].generations[0] for number in pieces], most_blocks, batch


def tokens_of(generations):
    return [generation.tokens for generation in generations]


def alone(causal_lm, requests):
    """The continuations without a limit of memory."""
    return [generation for (generation,) in run(causal_lm, requests, BatchLimits(8))[0]]


# What is drawn depends on a stream's own logits and tokens alone: with draws, one shape of each kind of cache.
SHAPES_AND_SAMPLING = [
    *(pytest.param(shape, SamplingConfig(), id=f"{shape}-greedy") for shape in SHAPES),
    *(pytest.param(shape, SAMPLED, id=f"{shape}-sampled") for shape in ("attention", "hybrid")),
    *(
        pytest.param(shape, SAMPLED, id=f"{shape}-sampled", marks=pytest.mark.slow)
        for shape in SHAPES
        if shape not in ("attention", "hybrid")
    ),
]


@pytest.mark.parametrize(("shape", "sampling"), SHAPES_AND_SAMPLING)
def test_little_memory_changes_no_token(shape, sampling):
    """Six blocks hold one sequence of 96 tokens; up to eight run."""
    causal_lm, requests = model_of(shape), shared_requests(8, sampling=sampling)
    expected = tokens_of(alone(causal_lm, requests))
    for blocks, prompt_tokens in ((6, None), (11, None), (11, 7.0)):
        limits = BatchLimits(8, prompt_tokens=60, cache_blocks=blocks)
        generations, most_blocks, batch = run_within(causal_lm, requests, limits, prompt_tokens)
        assert tokens_of(generations) == expected
        assert 4 < most_blocks <= blocks and batch.preemptions > 0


@pytest.mark.parametrize("kind", ["ngram", "itself", "another"])
def test_guesses_take_no_memory_from_other_sequences(kind):
    causal_lm = model_of("attention")
    draft_model = {"ngram": None, "itself": causal_lm, "another": model_of("learned")}[kind]
    requests = shared_requests(8, sampling=SAMPLED)
    limits = BatchLimits(8, cache_blocks=11, drafting=Drafting(5, draft_model))
    generations, most_blocks, batch = run_within(causal_lm, requests, limits)
    assert tokens_of(generations) == tokens_of(alone(causal_lm, requests))
    assert most_blocks <= 11 and batch.preemptions > 0
    assert kind == "ngram" or batch.speculation.guessed_tokens > 20


def test_log_probabilities_of_a_prompt_are_computed_once():
    causal_lm = model_of("attention")
    requests = shared_requests(5, prompt_logprobs=True, logprobs=1)
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(4, cache_blocks=8))
    for request in requests:
        batch.add(request)
    results = {}
    while not batch.is_idle:
        results |= {result.number: result for result in batch.step()}
    assert batch.preemptions > 0
    for number, generation in enumerate(alone(causal_lm, requests)):
        assert [scored.token for scored in results[number].prompt_logprobs] == list(requests[number].prompt)
        own = results[number].generations[0]
        assert own.tokens == generation.tokens
        assert [token.logprob for token in own.logprobs] == pytest.approx(
            [token.logprob for token in generation.logprobs], abs=1e-9
        )


def ended(batch, *requests):
    for request in requests:
        batch.add(request)
    while not batch.is_idle:
        batch.step()
    return batch.read_prompt_tokens


def test_the_prefix_used_longest_ago_makes_room_from_its_end():
    """Three prompts of 48, 32 and 16 tokens take six blocks. One of 32 that begins as the second goes on in its place.
    A new one of 32 takes two blocks of the first, whose last block serves the next."""
    prompts = [tuple(range(first, first + count)) for first, count in ((0, 48), (100, 32), (200, 16))]
    batch = ContinuousBatch(model_of("attention"), Words(), BatchLimits(8, cache_blocks=6))
    for prompt in prompts:
        read = ended(batch, GenerationRequest(prompt, GenerationSettings(0)))
    assert (read, batch.cache_use.used_blocks) == (96, 6)
    read = ended(batch, GenerationRequest((*prompts[1][:31], 7), GenerationSettings(0)))
    assert (read, batch.cache_use.used_blocks, batch.cache_use.evicted_blocks) == (97, 6, 0)
    read = ended(batch, GenerationRequest(tuple(range(50, 82)), GenerationSettings(0)))
    assert (read, batch.cache_use.used_blocks, batch.cache_use.evicted_blocks) == (129, 6, 2)
    read = ended(batch, GenerationRequest((*prompts[0][:20], 7), GenerationSettings(0)))
    assert (read, batch.cache_use.evicted_blocks) == (129 + 5, 3)  # a block of the first was left


def test_running_sequences_that_share_a_prefix_evict_nothing():
    shared = tuple(range(40))
    batch = ContinuousBatch(model_of("attention"), Words(), BatchLimits(4, cache_blocks=12))
    requests = [GenerationRequest((*shared, 50 + index), GenerationSettings(3)) for index in range(4)]
    assert ended(batch, *requests) == 41 + 3
    assert batch.cache_use.evicted_blocks == batch.preemptions == 0


def test_a_request_that_can_never_fit_is_refused_before_it_starts():
    batch = ContinuousBatch(model_of("attention"), Words(), BatchLimits(4, cache_blocks=5))
    assert batch.sequence_length == 5 * BLOCK_TOKENS
    message = "the prompt's 50 tokens and 31 new ones do not fit the cache of 80 tokens; ask for fewer"
    with pytest.raises(InputError, match=message):
        batch.add(GenerationRequest((1,) * 50, GenerationSettings(31)))
    batch.add(GenerationRequest((1,) * 50, GenerationSettings(30, ignore_end=True)))
    while not batch.is_idle:
        (*_,) = results = batch.step()
    assert len(results[0].generations[0].tokens) == 30 and batch.cache_use.used_blocks == 5


def test_a_stream_that_has_begun_counts_as_running_while_it_waits():
    """So that a failed step does not begin it anew."""
    batch = ContinuousBatch(model_of("attention"), Words(), BatchLimits(2, cache_blocks=6))
    first, second = (
        batch.add(GenerationRequest(tuple(range(begin, begin + 30)), GenerationSettings(60, ignore_end=True)))
        for begin in (0, 100)
    )
    while not batch.preemptions:
        batch.step()
    third = batch.add(GenerationRequest((1, 2), GenerationSettings(1)))
    assert batch.decoding == 1 and batch.running_numbers() == {first, second} and third not in (first, second)


class NoCache:
    """A cache of which the numbers are not asked for."""

    def _nothing(self, *_):
        pass

    copy = swap = release = select = _nothing


def test_the_prefix_that_saves_the_most_columns_comes_first():
    """Three begin with the same 600 tokens and two of them with the same 900: the three save 1200 columns, the two 900.
    Two others share 1500."""
    tokens, other = np.arange(2000), np.arange(2000)[::-1]
    prompts = [tokens, np.r_[tokens[:600], other], other, np.r_[tokens[:900], other], np.r_[other[:1500], tokens]]
    slots = Slots(NoCache(), 6, keeps_prefixes=True)
    for number, prompt in enumerate([*prompts, np.arange(40)]):
        slots.claim(prompt, len(prompt), 0, 0)
        slots[number].cached = len(prompt)
    assert slots.shared_prefixes(range(6)) == (SharedPrefix((0, 1, 3), 600), SharedPrefix((2, 4), 1500))
    assert slots.shared_prefixes([1, 2, 3, 5]) == ()  # 600 columns are too few
    assert slots.shared_prefixes([2, 4]) == (SharedPrefix((2, 4), 1500),)


def test_sequences_that_share_a_prefix_get_the_tokens_they_get_alone(monkeypatch):
    causal_lm, requests = model_of("flat"), shared_requests(8)
    expected = tokens_of(alone(causal_lm, requests))
    monkeypatch.setattr(slots_file, "MIN_PREFIX_TOKENS", 16)
    monkeypatch.setattr(slots_file, "MIN_SAVED_COLUMNS", 1)
    prefixes, read = [], causal_lm.read
    monkeypatch.setattr(
        causal_lm, "read", lambda tokens, rows, cache: prefixes.append(rows.prefixes) or read(tokens, rows, cache)
    )
    for drafting in (Drafting(0), Drafting(3)):
        assert (
            tokens_of(generations[0] for generations in run(causal_lm, requests, BatchLimits(8, drafting=drafting))[0])
            == expected
        )
    assert max(len(prefix.rows) for step in prefixes for prefix in step) == 4

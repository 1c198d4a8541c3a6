"""Prompts in parts: how large one is, and that a part goes on where its sequence's slot is."""

import numpy as np
import pytest

from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.prefill import part_size
from tests.evaluation.inference.generate.test_batch import Words, by_whole_passes, model_of


@pytest.mark.parametrize(
    "prompt_tokens, layers, size",
    [(16, 6, (48, 2)), (5, 6, (30, 1)), (0.5, 6, (8, 1)), (64, 6, (64, 6)), (200.5, 6, (200, 6)), (3, 1, (3, 1))],
)
def test_a_part_passes_through_some_layers(prompt_tokens, layers, size):
    assert part_size(prompt_tokens, layers) == size


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_part_goes_on_where_its_slot_was_moved(steps):
    """The first request leaves while a part has passed one of two layers, so the last slot takes its place."""
    causal_lm = model_of("attention")
    prompts = [(1, 2, 3), (4, 5, 6), tuple(np.random.default_rng(0).integers(0, 299, 60).tolist())]
    made = [GenerationRequest(prompt, GenerationSettings(20)) for prompt in prompts]
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(3))
    leaves, *numbers = [batch.add(request) for request in made[:2]]
    batch.step()
    numbers.append(batch.add(made[2]))
    for _ in range(steps):
        batch.step(6.0)
    batch.cancel(leaves)
    generations = {}
    while not batch.is_idle:
        generations |= {result.number: result.generations[0].tokens for result in batch.step(6.0)}
    assert [generations[number] for number in numbers] == [by_whole_passes(causal_lm, one) for one in made[1:]]


def test_a_step_runs_as_many_layers_as_its_tokens_allow():
    causal_lm = model_of("window")
    batch = ContinuousBatch(causal_lm, Words(), BatchLimits(2))
    batch.add(GenerationRequest((1, 2), GenerationSettings(90)))
    batch.step()
    long = batch.add(GenerationRequest(tuple(range(70)), GenerationSettings(1)))
    steps = 0
    while not any(result.number == long for result in batch.step(8.0)):
        steps += 1
    assert steps == 8  # four parts of 16 tokens pass one of two layers a step; the last has 6 and passes both in one

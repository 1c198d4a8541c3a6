"""Models of transformers that gristmill's own model does not have: batched generation is that of transformers alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.evaluation.generation.batch import BatchLimits, ContinuousBatch
from gristmill.evaluation.generation.request import GenerationRequest, GenerationSettings
from gristmill.evaluation.models.huggingface import has_family
from gristmill.evaluation.models.transformers_causal_lm import TransformersCausalLM
from gristmill.foundation.errors import RecipeError
from gristmill.training.auto_tp.transformers_folder import open_causal_folder
from tests.support.transformers_models import VOCABULARY, tiny_model


class Numbers:
    """Token i is the word `i `; the last ends a document."""

    end_of_document = VOCABULARY - 1

    def decode(self, ids: list[int]) -> str:
        return "".join(f"{token} " for token in ids)


@pytest.fixture
def causal_lm(tmp_path: Path) -> TransformersCausalLM:
    tiny_model("mpt").save_pretrained(tmp_path)
    assert not has_family(tmp_path)
    return TransformersCausalLM(open_causal_folder(tmp_path), "cpu", torch.float32)


def greedy(causal_lm: TransformersCausalLM, prompt: list[int], number: int) -> list[int]:
    """One token after another by the whole model."""
    tokens = list(prompt)
    for _ in range(number):
        tokens.append(int(causal_lm.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == Numbers.end_of_document:
            break
    return [token for token in tokens[len(prompt) :] if token != Numbers.end_of_document]


def test_a_batch_generates_as_each_prompt_alone(causal_lm: TransformersCausalLM) -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY - 1, length).tolist() for length in (3, 9, 5, 12, 4)]
    batch = ContinuousBatch(causal_lm, Numbers(), BatchLimits(2))
    numbers = [
        batch.add(GenerationRequest(tuple(prompt), GenerationSettings(6 + index)))
        for index, prompt in enumerate(prompts)
    ]
    found = {}
    while not batch.is_idle:
        found |= {result.number: result for result in batch.step()}
    for index, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        expected = Numbers().decode(greedy(causal_lm, prompt, 6 + index))
        assert found[number].generations[0].text == expected


def test_a_tree_of_continuations_is_refused(causal_lm: TransformersCausalLM) -> None:
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(RecipeError, match="no tree"):
        causal_lm.hidden(tokens, tokens, torch.ones(1, 2, 2, dtype=torch.bool))

"""Span corruption: a worked example, and that text and spans can be put together again."""

from typing import Any

import numpy as np
import pytest

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.model import ModelConfig
from gristmill.training.objectives.check import checked_loss
from gristmill.training.objectives.load_objective import make_objective
from gristmill.training.objectives.masked import corrupted
from gristmill.training.objectives.objective import ObjectiveInputs, TermSpec

VOCAB, SENTINELS = 60, 10
PIECES = (*(f"<extra_id_{number}>" for number in range(SENTINELS)), *map(str, range(SENTINELS, VOCAB)))


class Rising:
    vocab_size, fingerprint = VOCAB, "rising"

    def __init__(self, length: int):
        self.length = length

    def sample(self, k: int) -> dict[str, np.ndarray]:
        tokens = np.arange(self.length + 1) % (VOCAB - SENTINELS) + SENTINELS
        return {"tokens": tokens[:-1], "targets": tokens[1:]}

    def source_of(self, k: int) -> str:
        return "all"


def objective(length: int, **options: Any) -> Any:
    model = ModelConfig(layers=1, width=8, heads=2, sequence_length=length)
    return make_objective(
        "span_corruption", options, ObjectiveInputs(Rising(length), model, VOCAB, 59, 3, pieces=PIECES)
    )


def test_a_sequence_by_hand() -> None:
    text = np.array([11, 12, 13, 14, 15])
    sequence, start = corrupted(text, np.array([2, 1]), np.array([1, 1]), np.array([0, 1]))
    assert sequence.tolist() == [11, 12, 0, 14, 1, 0, 13, 1, 15] and start == 5


def test_text_and_spans_give_the_text_back() -> None:
    made = objective(40)
    for k in range(20):
        sample = made.sample(k)
        sequence = np.append(sample["tokens"], sample["targets"][-1])
        learned = np.flatnonzero(sample["weights"])
        start, end = learned[0] + 1, learned[-1] + 2
        assert (np.diff(learned) == 1).all() and end == made.raw + 2 * made.spans <= 41
        spans = np.split(sequence[start:end], np.flatnonzero(sequence[start:end] < SENTINELS))[1:]
        assert sum(len(span) - 1 for span in spans) == made.noise == round(0.15 * made.raw)
        parts = {int(span[0]): span[1:] for span in spans}
        text = [parts[token] if token < SENTINELS else [token] for token in sequence[:start].tolist()]
        assert np.concatenate(text).tolist() == (np.arange(made.raw) + SENTINELS).tolist()


def test_its_terms_and_what_it_lacks() -> None:
    assert checked_loss(objective(40)).terms == (TermSpec("spans", "weights", 1.0),)
    with pytest.raises(RecipeError, match="has no piece '<s_0>'"):
        objective(40, sentinel="<s_{}>")
    with pytest.raises(RecipeError, match="has no room for spans"):
        objective(2)

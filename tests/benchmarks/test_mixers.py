"""The parts of benchmarks/mixers.py that its figures rest on."""

import pytest
import torch
from support.mixer_recall import PHONEBOOK, RECALL, models
from support.mixer_timings import MovingAverage, crossing, decoders

from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count


def test_a_crossing_by_hand() -> None:
    """Times n and 8: at 4 tokens the first takes half, at 16 twice as long, so they cross at 8."""
    assert crossing([1, 4, 16], [1, 4, 16], [8, 8, 8]) == pytest.approx(8)
    assert crossing([1, 4], [1, 4], [8, 8]) is None


def test_the_moving_average_is_its_recurrence() -> None:
    layer = MovingAverage(size=3).double()
    x = torch.randn(1, layer.p.shape[0], 9, dtype=torch.float64)
    p, d = torch.sigmoid(layer.p), torch.sigmoid(layer.d)
    state, outputs = torch.zeros_like(p), []
    for t in range(x.shape[2]):
        state = p * layer.b * x[0, :, t : t + 1] + (1 - p * d) * state
        outputs.append((layer.n * state).sum(dim=1))
    torch.testing.assert_close(layer(x)[0], torch.stack(outputs, dim=1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("task", [RECALL, PHONEBOOK], ids=lambda task: task.title)
def test_every_question_has_its_answer_before_it(task) -> None:
    tokens, wanted = task.samples(4, task.entries, torch.Generator().manual_seed(0))
    assert tokens.shape == (4, task.length)
    entry = task.name + task.value
    for row in tokens.tolist():
        entries = [tuple(row[start : start + entry]) for start in range(0, len(row), entry)]
        book = {each[: task.name]: each for each in entries[: task.entries]}
        assert len(book) == task.entries
        assert all(book[each[: task.name]] == each for each in entries[task.entries :])
    assert wanted[0].sum() == task.queries * task.value
    assert not wanted[0, : task.entries * entry + task.name].any()


def test_compared_models_are_equally_large() -> None:
    for task in (RECALL, PHONEBOOK):
        sizes = [parameter_count(shape_of(model, task.vocabulary)) for model in models(task).values()]
        assert max(sizes) / min(sizes) < 1.005
    sizes = [parameter_count(shape_of(model, 512)) for model in decoders(256, 4096).values()]
    assert max(sizes) / min(sizes) < 1.005

"""Passes that are recorded once and replayed: their memory, their results, and what they must not do.

A recording of torch's operators stands for the CUDA graph: a replay runs the operators again on the memory of the
recorded pass, and nothing of Python, so it is the same as the graph in what it reads, writes and leaves out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.engine.passes import GradientAccumulation, GraphedAccumulation, check_cuda_graphs
from gristmill.training.model import loss
from gristmill.training.model.moe import mixture
from gristmill.training.objectives.objective import Batches
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel.mesh import single_process
from gristmill.training.trainer import Trainer
from tests.support.causal_samples import causal_samples
from tests.support.parity import Uneven

HOST_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class Operators(TorchDispatchMode):
    """The operators of a pass that compute something, with the memory they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in HOST_READS, f"{func} waits for the device"
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            results = [each for each in tree_leaves(found) if isinstance(each, Tensor)]
            self.made.append((func, *held((args, kwargs or {})), [each.detach() for each in results]))
        return found


def held(arguments: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach(), arguments)


class Replayed:
    """Warms up once, records, then replays."""

    def __init__(self) -> None:
        self.runs, self.replays = 0, 0
        self._operators, self._result = Operators(), torch.empty(0)

    @torch.no_grad()
    def _replay(self) -> None:
        for func, args, kwargs, results in self._operators.made:
            again = [each for each in tree_leaves(func(*args, **kwargs)) if isinstance(each, Tensor)]
            for target, value in zip(results, again, strict=True):
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)

    def run(self, function: Callable[[], Tensor]) -> Tensor:
        self.runs += 1
        if self.runs == 2:
            with self._operators:
                self._result = function()
        elif self.runs > 2:
            self.replays += 1
            self._replay()
            return self._result
        else:
            return function()
        return self._result


def trained(
    make: Callable[..., GradientAccumulation], steps: int = 4, moe: dict[str, Any] | None = None, **changes: Any
) -> tuple[list[Any], Any, Trainer]:
    """(loss, norm and reason to skip of each step, the parameters, the trainer)."""
    model = ModelConfig(layers=2, width=32, heads=2, ffn_hidden_size=48, sequence_length=16, dropout=0.1, moe=moe)
    config = {"tokens": steps * 8 * 16, "batch_tokens": 8 * 16, "precision": "fp32", "layout": {"micro_batch": 2}}
    train, mesh = TrainConfig(**(config | changes)), single_process()
    parts = build_local_model(model, 51, train, mesh, seed=3)
    passes = make(parts, 2, causal_loss())
    batches = Batches(causal_samples(Uneven(51), True), mesh.data, mesh.device)
    trainer = Trainer(train, parts, passes, build_optimizer(parts.parameters, train, model, mesh), batches, mesh)
    reports = [trainer.step() for _ in range(steps)]
    values = {name: value.detach().clone() for name, value in parts.parameters.items()}
    return [(report.loss, report.grad_norm, report.skipped) for report in reports], values, trainer


def plain(parts: Any, micro_batch: int, loss: Any) -> GradientAccumulation:
    return GradientAccumulation(parts.stages[0], micro_batch, loss)


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16", "float8": True}, {"precision": "fp16"}], ids=str)
def test_replayed_passes_train_the_same_model(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise; with fp16 the first steps overflow, and the scale that the graph reads falls."""
    monkeypatch.setattr(
        loss, "_is_one_kernel", lambda *_: False
    )  # a kernel of CPUs, which the stand-in does not record
    recordings: list[Replayed] = []

    def recorded() -> Replayed:
        recordings.append(Replayed())
        return recordings[-1]

    expected, weights, _ = trained(plain, **changes)
    found, others, trainer = trained(lambda *parts: GraphedAccumulation(*parts, recorded), **changes)
    assert found == expected
    assert all(torch.equal(others[name], weights[name]) for name in weights)
    (recording,) = recordings
    assert recording.replays == 4 * 4 - 2  # all but the warm-up and the recorded pass, which ran
    assert trainer.model.keeps_gradients


def test_replayed_passes_train_the_same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the grouped matmul, which reads how many tokens each expert has on the device; with the side losses."""
    monkeypatch.setattr(mixture, "uses_grouped", lambda x: True)
    moe = {"experts": 4, "top_k": 2, "ffn_hidden_size": 16, "balance_loss": 0.1, "router_z_loss": 0.05}
    expected, weights, _ = trained(plain, moe=moe)
    replayed, others, _ = trained(lambda *parts: GraphedAccumulation(*parts, Replayed), moe=moe)
    assert replayed == expected
    assert all(torch.equal(others[name], weights[name]) for name in weights)


def test_gradients_stay_where_they_are() -> None:
    places: list[list[int]] = []

    class Noted(Replayed):
        def run(self, function: Callable[[], Tensor]) -> Tensor:
            result = super().run(function)
            places.append([value.grad.data_ptr() for value in parameters.values()])
            return result

    parameters: dict[str, Any] = {}

    def make(parts: Any, *rest: Any) -> GradientAccumulation:
        parameters.update(parts.parameters)
        return GraphedAccumulation(parts, *rest, Noted)

    trained(make)
    assert len(places) == 16 and all(each == places[0] for each in places)


def test_many_shapes_are_refused() -> None:
    passes = trained(lambda *parts: GraphedAccumulation(*parts, Replayed), steps=1)[2].forward_backward
    with pytest.raises(InputError, match=r"more than 4 shapes.*set cuda_graphs: false"):
        for tokens in range(2, 8):
            fields = {"tokens": torch.zeros(2, tokens, dtype=torch.int64), "weights": torch.ones(2, tokens)}
            passes.train(fields | {"targets": fields["tokens"]}, [1.0])


def test_a_processor_has_no_graphs() -> None:
    with pytest.raises(RecipeError, match="needs a CUDA device, not cpu; set it false"):
        check_cuda_graphs(torch.device("cpu"))

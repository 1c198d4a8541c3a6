"""Places where the host would wait for a GPU, counted on a CPU by interposing on what makes it wait: one in a step,
when the results are read, none in a layer. What waits cannot be captured in a CUDA graph either."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill.training.engine.local_model import build_local_model
from gristmill.training.engine.passes import GradientAccumulation
from gristmill.training.model.attention import ring, ring_plan
from gristmill.training.model.moe import mixture as mixtures
from gristmill.training.model.transformer import Transformer
from gristmill.training.objectives.objective import Batches
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel.context import HOST_DOCUMENTS
from gristmill.training.parallel.mesh import Mesh, single_process
from gristmill.training.trainer import Trainer
from tests.support.parity import Case, mesh_of_group, outcome

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
COPIES = ("tensor", "as_tensor", "new_tensor")  # of numbers of the host to the device
OPERATORS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
)


class _Calls(TorchFunctionMode):
    def __init__(self, waits: Counter[str]):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        copies_numbers = name in COPIES and not isinstance(args[1 if name == "new_tensor" else 0], Tensor)
        if name in READS or copies_numbers:
            self.waits[name] += 1
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, waits: Counter[str]):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in OPERATORS or by_mask:
            self.waits[str(func)] += 1
        return func(*args, **(kwargs or {}))


def waits_of(function: Callable[[], Any]) -> Counter[str]:
    """What made the host wait while the function ran, by name. `.tolist()` and `.item()` of one tensor are one."""
    waits: Counter[str] = Counter()
    with _Operators(waits), _Calls(waits):
        function()
    return waits


def trainer_of(case: Case, mesh: Mesh) -> Trainer:
    model, train = case.configs
    parts = build_local_model(model, case.vocab, train, mesh, seed=3)
    passes = GradientAccumulation(parts.stages[0], train.layout.micro_batch, case.loss)
    optimizer = build_optimizer(parts.parameters, train, model, mesh)
    batches = Batches(case.samples, mesh.data, mesh.device, on_host=mesh.context.size > 1)
    return Trainer(train, parts, passes, optimizer, batches, mesh)


@pytest.mark.parametrize("model", ["llama", "bloom", "gemma2", "experts", "hybrid_experts", "tcnca", "latent"])
def test_a_step_waits_once(model: str) -> None:
    """Experts on the grouped path, as on a GPU; with dropout. The batch is made beside it, in a thread."""
    with mock.patch.object(mixtures, "uses_grouped", lambda x: True):
        trainer = trainer_of(Case({}, model, "fp32"), single_process())
        trainer.step()
        assert waits_of(trainer.step) == {"tolist": 1}


def test_what_waits_is_counted() -> None:
    ones = torch.ones(3)
    assert waits_of(lambda: ones.sum().item()).keys() >= {"item"}
    assert waits_of(lambda: torch.tensor([1.0, 2.0]))["tensor"] == 1
    assert waits_of(lambda: bool(ones.sum() > 2)).total() >= 1
    assert waits_of(lambda: ones[ones > 0])["aten.index.Tensor"] == 1
    assert waits_of(lambda: (ones * 2 + torch.full((), 3.0)).sum()) == {}


class _Copies(TorchFunctionMode):
    """Copies between host and device that are waited for: `.cpu()`, and `.to(device)` unless it says otherwise."""

    def __init__(self, waits: Counter[str]):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        to_device = name == "to" and isinstance(args[1] if len(args) > 1 else named.get("device"), torch.device)
        if name == "cpu" or (to_device and not named.get("non_blocking")):
            self.waits[name] += 1
        return func(*args, **named)


def on_a_context_rank(method: str) -> Counter[str]:
    """The ring's plan computes with host tensors, of which only the copies are counted."""
    case = Case({"context": 2, "context_method": method}, "llama", "fp32", documents=True)
    trainer = trainer_of(case, mesh_of_group(*case.configs))
    trainer.step()
    waits: Counter[str] = Counter()
    plan = Transformer.attention_metadata

    def plan_counted(*arguments: Any, **named: Any) -> Any:
        with _Copies(waits):
            return plan(*arguments, **named)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with _Operators(waits), _Calls(waits):
                return function(*arguments, **named)

        return run

    # The ring is an operator, inside which no mode sees what is called.
    parts = [(Transformer, "hidden_states"), *((ring, name) for name in ("attend_tile", "merge", "tile_gradients"))]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Transformer, "attention_metadata", plan_counted))
        for place, name in [*parts, (ring_plan.RingPlan, "bias")]:
            stack.enter_context(mock.patch.object(place, name, counted(getattr(place, name))))
        trainer.step()
    return waits


def inputs_of_passes(layout: dict[str, Any]) -> set[tuple[bool, bool]]:
    """Whether each pass of a step has the documents on the host among its inputs, which FSDP moves to a GPU, and beside
    them."""
    seen: set[tuple[bool, bool]] = set()
    case = Case({"context": 2} | layout, "llama", "fp32", documents=True)
    forward = Transformer.forward

    def recorded(model: Transformer, x: Tensor, **batch: Tensor) -> Any:
        seen.add((HOST_DOCUMENTS in batch, model.host_documents is not None))
        result = forward(model, x, **batch)
        assert model.host_documents is None
        return result

    with mock.patch.object(Transformer, "forward", recorded):
        outcome(case, mesh_of_group(*case.configs))
    return seen


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "micro_batch": 4}], ids=["alone", "pipeline"])
def test_documents_on_the_host_are_no_input(layout: dict[str, Any], pool: Any) -> None:
    ranks = 2 * layout.get("pipeline", 1)
    assert pool.run(ranks, inputs_of_passes, layout) == [{(False, True)}] * ranks


@pytest.mark.parametrize("method", ["ring", "all_to_all"])
def test_layers_on_a_context_axis_wait_for_nothing(method: str, pool: Any) -> None:
    """Nor does the ring's plan before them, which reads the documents that stayed on the host."""
    assert pool.run(2, on_a_context_rank, method) == [Counter(), Counter()]

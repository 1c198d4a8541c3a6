"""What `train.compile` makes of layers: one graph, so that nothing between two products is left to Python."""

from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine import local_model
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model import layer_hook
from gristmill.training.parallel.linear import HAS_ONEDNN, linear
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import RunConfig, build_forward_backward
from tests.support.parity import MODELS, Case, outcome, relative, worst

TOKENS = 16
MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
slow = partial(pytest.param, marks=pytest.mark.slow)
KINDS = {"llama": 1, "gpt2": 1, "bloom": 1, "latent": 1, "gemma2": 2, "three_mixers": 4}  # of layers


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_the_layers_of_a_process_alone_are_one_graph(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eight of three_mixers are two groups of other kinds."""
    assert graphs_of_a_pass(name, {}, monkeypatch, precision) == (2 if name == "three_mixers" else 1)


def test_groups_of_layers_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers in groups of two."""
    monkeypatch.setattr(local_model, "COMPILED_TOGETHER", 2)
    assert graphs_of_a_pass("llama", {}, monkeypatch) == 1
    assert graphs_of_a_pass("gemma2", {}, monkeypatch) == 1  # both kinds of windows are in each group


@pytest.mark.parametrize("name", ["llama", "gemma2", "three_mixers"])
def test_each_kind_of_recomputed_layer_is_one_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphs_of_a_pass(name, {"recompute": "full"}, monkeypatch) == KINDS[name]


def test_recomputed_operators_are_kept_inside_a_compiled_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix product is computed again."""
    monkeypatch.setattr(local_model, "COMPILED_TOGETHER", 1)  # as with recomputation
    kept = products_of_a_pass({"recompute": "operators"}, monkeypatch)
    assert kept == products_of_a_pass({}, monkeypatch)
    monkeypatch.setattr(layer_hook, "_KEPT_OPERATORS", ())
    assert kept < products_of_a_pass({"recompute": "operators"}, monkeypatch)


def products_of_a_pass(layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Matrix products in the graphs of both passes, each kind of layer once."""
    counted = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        counted.extend(node for node in graph.graph.nodes if node.target in (MM, ADDMM))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    graphs_of_a_pass("llama", layout, monkeypatch, backend=backend)
    return len(counted)


@pytest.mark.parametrize("model", [slow("gemma2"), slow("experts"), "hybrid_experts", slow("tcnca")])
def test_a_group_of_layers_trains_the_model_of_single_ones(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps in float64 with dropout, side losses and counts of experts, through the compiler's autograd."""
    compiler = torch.compile
    alone = outcome(Case({}, model), single_process())
    monkeypatch.setattr(torch, "compile", partial(compiler, backend="aot_eager"))
    together = outcome(Case({}, model, compiled=True), single_process())
    assert relative(together.losses, alone.losses) <= 1e-12
    assert worst(together.gradients, alone.gradients) <= 1e-12
    assert worst(together.parameters, alone.parameters) <= 1e-12


def graphs_of_a_pass(
    name: str, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch, precision: str = "bf16", backend: Any = "eager"
) -> int:
    compiler = torch.compile
    model = ModelConfig(**{"layers": 4, "width": 32, "heads": 4, "sequence_length": TOKENS} | MODELS[name])
    train = TrainConfig(tokens=1, batch_tokens=1, precision=precision, compile=True, layout={"micro_batch": 2} | layout)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", partial(compiler, backend=backend))
        mesh = single_process(torch.device("cpu"))
        parts = build_local_model(model, 64, train, mesh, seed=1)
        passes = build_forward_backward(parts, RunConfig(model, train, 1), mesh, causal_loss())
        tokens = torch.randint(0, 64, (2, TOKENS))
        torch._dynamo.reset()
        counters.clear()
        passes.train({"tokens": tokens, "targets": tokens, "weights": torch.ones(tokens.shape)}, [1e-3])
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no oneDNN")
def test_a_compiled_float32_product_is_that_of_onednn() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND = torch.randn(64, 32, generator=generator)
    weight_FD = torch.randn(16, 32, generator=generator, requires_grad=True)
    found = torch.compile(lambda x, weight: linear(x, weight, None), backend="aot_eager")(x_ND, weight_FD)
    assert torch.equal(found, linear(x_ND, weight_FD, None))
    (compiled,) = torch.autograd.grad(found.square().sum(), weight_FD)
    (eager,) = torch.autograd.grad(linear(x_ND, weight_FD, None).square().sum(), weight_FD)
    assert torch.equal(compiled, eager)

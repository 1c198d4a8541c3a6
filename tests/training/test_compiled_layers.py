"""What `train.compile` makes of a layer: one graph, so that nothing between two products is left to Python."""

import pytest
import torch
from torch._dynamo.utils import counters

from gristmill.training.calibrate.layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.parallel.linear import HAS_ONEDNN, linear
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import RunConfig, build_forward_backward
from tests.support.parity import MODELS

TOKENS = 16


@pytest.mark.parametrize(
    ("name", "kinds"), [("llama", 1), ("gpt2", 1), ("bloom", 1), ("latent", 1), ("gemma2", 2), ("three_mixers", 4)]
)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_each_kind_of_layer_is_one_graph(
    name: str, kinds: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compiler(function, backend="eager"))
    model = ModelConfig(**{"layers": 4, "width": 32, "heads": 4, "sequence_length": TOKENS} | MODELS[name])
    train = TrainConfig(tokens=1, batch_tokens=1, precision=precision, compile=True, layout={"micro_batch": 2})
    mesh = single_process(torch.device("cpu"))
    parts = build_local_model(model, 64, train, mesh, seed=1)
    passes = build_forward_backward(parts, RunConfig(model, train, 1), mesh, causal_loss())
    tokens = torch.randint(0, 64, (2, TOKENS))
    torch._dynamo.reset()
    counters.clear()
    passes.train({"tokens": tokens, "targets": tokens, "weights": torch.ones(tokens.shape)}, [1e-3])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == kinds


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

"""Initial values of a shard are those of the whole parameter, and only its chunks are drawn."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model import init
from gristmill.training.model.init import draw, initialize, place_decoding_weights
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import build_mesh, local, local_shard
from tests.support.forked_pool import ForkedPool

MODEL = ModelConfig(layers=2, width=32, heads=4, kv_heads=2, sequence_length=16)
VOCAB = 130


@pytest.mark.parametrize("rows", [range(0, 130), range(3, 4), range(7, 60), range(100, 130), range(130, 130)])
def test_rows_are_those_of_the_whole(rows: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "CHUNK_ELEMENTS", 8 * 32)  # 17 chunks
    shape = torch.Size([VOCAB, 32])
    whole = draw("head.weight", shape, 3, MODEL)
    assert torch.equal(draw("head.weight", shape, 3, MODEL, rows), whole[rows.start : rows.stop])
    assert whole.unique().numel() == whole.numel()  # no chunk repeats another


def test_a_parameter_of_one_chunk_is_one_draw_of_its_name() -> None:
    value = draw("head.weight", torch.Size([VOCAB, 32]), 3, MODEL)
    generator = init._generator("head.weight", 3)
    assert torch.equal(value, torch.randn(VOCAB, 32, generator=generator) * 0.02)


def test_outputs_and_an_untied_head_begin_at_zero_and_the_embedding_has_its_own_spread() -> None:
    config = ModelConfig(**MODEL.model_dump(exclude_unset=True), zero_outputs=True, embedding_std=1.0)
    model = Transformer(config, VOCAB)
    initialize(model, 3, torch.device("cpu"), torch.float32)
    zero = {name for name, value in model.named_parameters() if not value.any()}
    layers = {f"layers.{layer}.{name}.weight" for layer in range(2) for name in ("mixer.output", "mlp.down")}
    assert zero == layers | {"head.weight"}
    assert model.embedding.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.layers["0"].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.05)


def drawn_on_ranks(axes: dict[str, Any]) -> tuple[int, int]:
    """(numbers that this rank draws, numbers of its shards), after a comparison with whole draws."""
    with mock.patch.object(init, "CHUNK_ELEMENTS", 8 * 32):  # these processes run other tests too
        return drawn_in_chunks(axes)


def drawn_in_chunks(axes: dict[str, Any]) -> tuple[int, int]:
    train = TrainConfig(tokens=64, batch_tokens=64, precision="fp32", layout=axes)
    mesh = build_mesh(train.layout, MODEL.num_kv_heads, torch.device("cpu"))
    drawn, original = [], torch.randn

    def counting(*arguments: Any, **named: Any) -> torch.Tensor:
        value = original(*arguments, **named)
        drawn.append(value.numel())
        return value

    torch.randn = counting
    try:
        parts = build_local_model(MODEL, VOCAB, train, mesh, seed=3)
    finally:
        torch.randn = original
    for name, parameter in parts.parameters.items():
        expected = local_shard(draw(name, parameter.shape, 3, MODEL), parameter)
        assert isinstance(parameter, DTensor) and torch.equal(local(parameter.detach()), expected), name
    matrices = [value for name, value in parts.parameters.items() if "norm" not in name]
    return sum(drawn), sum(local(value.detach()).numel() for value in matrices)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "tensor": 2}, {"tensor": 4}], ids=str)
def test_a_rank_draws_the_chunks_of_its_shard(axes: dict[str, Any], pool: ForkedPool) -> None:
    for drawn, own in pool.run(4, drawn_on_ranks, axes):
        # A row-parallel matrix is drawn with the columns of the other tensor ranks, and a chunk of 8 rows whole.
        most = 1.6 if axes == {"data": 4} else 2.7
        assert own <= drawn <= most * own


@pytest.mark.parametrize("tied", [False, True])
def test_weights_placed_for_decoding_give_the_same_logits(tied: bool) -> None:
    config = ModelConfig(layers=2, width=16, heads=4, kv_heads=2, sequence_length=32, tied_embeddings=tied)
    model = Transformer(config, 40)
    initialize(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    tokens = torch.arange(30).view(2, 15)
    with torch.inference_mode():
        before = model(tokens)
    place_decoding_weights(model)
    assert not any(weight.is_contiguous() for name, weight in model.named_parameters() if "query" in name)
    assert model.head is not None and (model.embedding is not None)
    assert (model.head.weight is model.embedding.weight) == tied
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), before, rtol=0, atol=1e-6)

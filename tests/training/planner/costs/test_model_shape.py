"""FLOPs by hand, by the formula of arXiv 2104.04473, on the real model, and by torch's counter."""

import math

import pytest
import torch
from model_counts import matmul_flops_per_token
from torch.utils.flop_counter import FlopCounterMode

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.mixers.attention import attended_pairs
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from gristmill.training.planner.costs.model_shape import (
    flops_per_token,
    gpt,
    paper_flops,
    recomputed_flops,
    shape_of,
    step_flops,
)
from gristmill.training.planner.costs.parameters import parameter_count

MODEL = ModelConfig(layers=2, width=16, heads=4, kv_heads=2, ffn_hidden_size=24, sequence_length=8)
VOCAB = 40


def test_by_hand() -> None:
    # Query, key and value, output, three matrices of the MLP; the head.
    matrices = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24) + 40 * 16
    assert flops_per_token(shape_of(MODEL, VOCAB)) == 6 * matrices + 12 * 2 * 16 * 8
    assert parameter_count(shape_of(MODEL, VOCAB)) == matrices + 40 * 16 + 5 * 16  # the table, and five norms
    assert (attended_pairs(512, 128, causal=True), attended_pairs(512, None, causal=True)) == (57408, 131328)  # mGPT
    windowed = MODEL.model_copy(update={"window": 2})
    assert flops_per_token(shape_of(MODEL, VOCAB)) - flops_per_token(shape_of(windowed, VOCAB)) == 12 * 2 * 16 * (8 - 2)


def test_torch_counts_the_same_matrix_products() -> None:
    model = Transformer(MODEL, VOCAB)
    initialize(model, 1, torch.device("cpu"), torch.float32)
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    model.output = causal_loss()
    onednn = torch.ops.mkldnn._linear_pointwise  # float32 products on CPUs
    left_out_by_torch = {
        onednn: lambda x_ND, weight_FD, *_, **__: 2 * math.prod(x_ND) * weight_FD[0],
        torch.ops.aten.baddbmm_: lambda _, left_BNK, right_BKM, **__: 2 * math.prod(left_BNK) * right_BKM[2],
    }
    with FlopCounterMode(display=False, custom_mapping=left_out_by_torch) as counter:
        model(tokens, tokens=tokens, targets=tokens, weights=torch.ones(3, 8))[:, 0].sum().backward()
    found = counter.get_flop_counts()["Global"].items()
    products = sum(flops for operator, flops in found if "mm" in str(operator) or operator is onednn)
    # Attention is counted too: 8 tokens are one block.
    assert products == pytest.approx(flops_per_token(shape_of(MODEL, VOCAB)) * 3 * 8)


def test_gpt3s_step_by_the_papers_formula():
    """96 x 1536 x 2048 x 96 x 12288^2 x (1 + 2048/73728 + 51200/18874368) = 4.51e18, by hand."""
    flops = paper_flops(96, 12288, 51200, 1536, 2048)
    assert flops == pytest.approx(96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / 73728 + 51200 / 18874368))
    assert flops == pytest.approx(4.51e18, rel=0.01)


@pytest.mark.parametrize("size", [(24, 2304, 24), (105, 20480, 128)])
def test_the_exact_count_of_a_gpt_is_the_papers(size):
    shape = gpt(*size)
    layers, width, _ = size
    assert step_flops(shape, 8) == pytest.approx(paper_flops(layers, width, 51200, 8, 2048, recompute=False))
    full = step_flops(shape, 8) + recomputed_flops(shape.blocks, 8, 2048, "full")
    assert full == pytest.approx(paper_flops(layers, width, 51200, 8, 2048))


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(layers=4, width=128, heads=8, kv_heads=2, sequence_length=64),
        ModelConfig(layers=6, width=128, heads=8, sequence_length=64, window=(16, None), mlp="gelu"),
        ModelConfig(layers=2, width=128, heads=4, head_width=64, ffn_hidden_size=300, sequence_length=64),
        ModelConfig(layers=2, width=128, heads=4, sequence_length=64, mlp="geglu", norm_order="sandwich"),
        ModelConfig(layers=2, width=128, heads=4, sequence_length=64, mlp="relu", parallel_residual="one_norm"),
    ],
)
def test_matmul_flops_are_those_of_the_real_models_matrices(model):
    attention = 12 * sum(model.heads * model.head_dim * min(layer.window or 64, 64) for layer in model.layer_list)
    assert flops_per_token(shape_of(model, 1000)) == matmul_flops_per_token(model, 1000) + attention


def test_attended_pairs_by_hand():
    assert attended_pairs(4, None, causal=False) == 16
    assert attended_pairs(4, None, causal=True) == 10
    assert attended_pairs(4, 2, causal=True) == 1 + 2 + 2 + 2
    assert attended_pairs(4, 9, causal=True) == 10

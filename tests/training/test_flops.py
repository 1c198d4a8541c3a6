"""Operations a token, by hand and against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gristmill.training.config import ModelConfig
from gristmill.training.flops import count_parameters, flops_per_token
from gristmill.training.model.initialization import initialise
from gristmill.training.model.transformer import Transformer

MODEL = ModelConfig(layers=2, width=16, heads=4, kv_heads=2, hidden=24, context=8)
VOCAB = 40


def test_by_hand() -> None:
    matrices = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24) + 40 * 16  # q, k and v, o, three of the channel; head
    assert flops_per_token(MODEL, VOCAB) == 6 * matrices + 12 * 2 * 16 * 8
    assert count_parameters(MODEL, VOCAB) == matrices + 40 * 16 + 5 * 16  # the table, and five norms
    windowed = MODEL.model_copy(update={"window": 2})
    assert flops_per_token(MODEL, VOCAB) - flops_per_token(windowed, VOCAB) == 12 * 2 * 16 * (8 - 2)


def test_torch_counts_the_same_matrix_products() -> None:
    model = Transformer(MODEL, VOCAB)
    initialise(model, 1, torch.device("cpu"), torch.float32)
    tokens = torch.zeros(3, 8, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens, torch.ones(3, 8))[:, 0].sum().backward()
    products = sum(flops for operator, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(operator))
    assert products == pytest.approx(flops_per_token(MODEL, VOCAB) * 3 * 8)  # attention too: 8 tokens are one block

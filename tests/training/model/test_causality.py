"""A token changes no result before it and none of another document, for every mixer and every kind of mixture, as they
are computed in training."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.mixer import NO_MIXER, mixer_names
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import ComputeOptions, Transformer
from tests.support.parity import MAMBA2, TCNCA

TOKENS, VOCAB = 24, 31
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8])
EXPERTS = {"experts": 4, "top_k": 2, "ffn_hidden_size": 8}
MIXTURES: dict[str, dict[str, Any] | None] = {
    "no mixture": None,
    "all tokens": EXPERTS,
    "shared experts": EXPERTS | {"shared_experts": 1, "balance_loss": 0.1, "router_z_loss": 0.1},
    "PR-MoE": EXPERTS | {"residual": True, "balance_loss": 0.1},
    "groups and a bias": EXPERTS | {"router": "sigmoid", "groups": 2, "top_groups": 1, "bias_update_rate": 0.1},
    "load of the batch": EXPERTS | {"balance_loss": 0.1, "balance_over": "batch"},
    "the last dropped": EXPERTS | {"capacity_factor": 0.2, "shared_experts": 1},
    "random ones dropped": EXPERTS | {"capacity_factor": 0.2, "drop": "random"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "mamba2": MAMBA2,
    "tcnca": TCNCA,
    "latent_attention": {"key_value_rank": 10, "query_rank": 6, "value_width": 6},
}
MIXERS = [name for name in mixer_names() if name != NO_MIXER]


def model(mixer: str, moe: dict[str, Any] | None) -> Transformer:
    sizes: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "ffn_hidden_size": 48, "sequence_length": TOKENS}
    sizes |= {"head_width": 12, "rope_width": 4} if mixer == "latent_attention" else {}
    config = ModelConfig(
        mixer=mixer, mixers={mixer: OPTIONS[mixer]} if mixer in OPTIONS else {}, moe=moe, init_std=0.3, **sizes
    )
    built = Transformer(config, VOCAB, layout=LayoutConfig(), options=ComputeOptions(torch.float64, 1))
    initialize(built, 3, torch.device("cpu"), torch.float64)
    built.side_loss_factor = 1.0  # as in training, where routers have a capacity
    return built


@torch.no_grad()
def results(built: Transformer, tokens_1T: Tensor, documents: Tensor | None) -> Tensor:
    """Logits of one sample, [T, V]."""
    batch = {"weights": torch.ones(1, TOKENS, dtype=torch.float64), "samples": torch.tensor([5])}
    if documents is not None:
        starts = torch.tensor([0, 7, 16])
        batch |= {"documents": documents, "positions": torch.arange(TOKENS).unsqueeze(0) - starts[documents]}
    return built(tokens_1T, **batch)[0]


def greatest_changes(built: Transformer, changed: range, documents: Tensor | None) -> Tensor:
    """Of each token's logits, [T], over a few samples in which the tokens of the range are others."""
    generator, greatest_T = torch.Generator().manual_seed(0), torch.zeros(TOKENS, dtype=torch.float64)
    for _ in range(8):
        tokens = torch.randint(0, VOCAB, (1, TOKENS), generator=generator)
        others = tokens.clone()
        others[0, changed] = (
            tokens[0, changed] + torch.randint(1, VOCAB, (len(changed),), generator=generator)
        ) % VOCAB
        change_TV = results(built, others, documents) - results(built, tokens, documents)
        greatest_T = torch.maximum(greatest_T, change_TV.abs().amax(dim=1))
    return greatest_T


PAIRS = [(mixer, "no mixture") for mixer in MIXERS] + [(mixer, "the last dropped") for mixer in MIXERS]
PAIRS += [("attention", mixture) for mixture in MIXTURES if ("attention", mixture) not in PAIRS]
NOT_CAUSAL = "random ones dropped"


@pytest.mark.parametrize(("mixer", "mixture"), PAIRS)
def test_only_later_tokens_of_the_document_change(mixer: str, mixture: str) -> None:
    built = model(mixer, MIXTURES[mixture])
    first, second, third = (slice(0, 7), slice(7, 16), slice(16, 24))
    change = greatest_changes(built, range(7, 16), DOCUMENTS)
    assert change[second].max() > 1e-3
    assert torch.cat([change[first], change[third]]).max() < 1e-12
    for documents, tokens in ((None, slice(0, 23)), (DOCUMENTS, slice(16, 23))):
        if mixture != NOT_CAUSAL:
            assert greatest_changes(built, range(23, 24), documents)[tokens].max() < 1e-12


def test_random_drops_are_not_causal() -> None:
    """As docs/mixture_of_experts.md says of them."""
    assert greatest_changes(model("attention", MIXTURES[NOT_CAUSAL]), range(16, 24), None)[:16].max() > 1e-3

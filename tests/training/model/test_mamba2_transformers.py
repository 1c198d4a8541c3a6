"""Agreement with transformers' Mamba2 and Nemotron-H (their torch path, in float32) on copied weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Mamba2Config, Mamba2ForCausalLM, NemotronHConfig, NemotronHForCausalLM

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import fill
from gristmill.training.model.transformer import Transformer
from tests.support.huggingface_shapes import NEMOTRON_H_SHAPE

VOCAB, TOKENS = 61, 12
SIZE: dict[str, Any] = {
    "width": 32,
    "heads": 4,
    "kv_heads": 2,
    "sequence_length": 64,
    "ffn_hidden_size": 48,
    "positions": "none",
}


def mixer_weights(theirs: dict[str, Tensor], prefix: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """Ours by name from theirs: in_proj holds z, x, B, C, dt, and conv1d x, B, C, one under another."""
    found: dict[str, Tensor] = {}
    for name, part in zip(("z", "x", "B", "C", "dt"), theirs[f"{prefix}.in_proj.weight"].split(sizes), strict=True):
        found[f"{name}.weight"] = part
    for leaf in ("weight", "bias"):
        parts = theirs[f"{prefix}.conv1d.{leaf}"].split(sizes[1:4])
        for name, part in zip(("x", "B", "C"), parts, strict=True):
            found[f"{name}_convolution.{leaf}"] = part.flatten(1) if leaf == "weight" else part
    for name in ("A_log", "D", "dt_bias"):
        found[f"scan.{name}"] = theirs[f"{prefix}.{name}"]
    return found | {
        "norm.weight": theirs[f"{prefix}.norm.weight"],
        "output.weight": theirs[f"{prefix}.out_proj.weight"],
    }


def layer_weights(theirs: dict[str, Tensor], prefix: str, symbol: str, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    norm = theirs[f"{prefix}.norm.weight"]
    if symbol == "-":
        return {"mlp_norm.weight": norm} | {
            f"mlp.{name}.weight": theirs[f"{prefix}.mixer.{name}_proj.weight"] for name in ("up", "down")
        }
    if symbol == "M":
        mixed = mixer_weights(theirs, f"{prefix}.mixer", sizes)
    else:
        names = {"query": "q", "key": "k", "value": "v", "output": "o"}
        mixed = {f"{ours}.weight": theirs[f"{prefix}.mixer.{name}_proj.weight"] for ours, name in names.items()}
    return {"mixer_norm.weight": norm} | {f"mixer.{name}": value for name, value in mixed.items()}


def copied(theirs: dict[str, Tensor], config: ModelConfig, backbone: str) -> dict[str, Tensor]:
    options = config.mixer_named("mamba2")
    inner, shared = options.inner(config.width), options.group_width
    sizes = (inner, inner, shared, shared, options.heads(config.width))
    found = {
        "embedding.weight": theirs[f"{backbone}.embeddings.weight"],
        "final_norm.weight": theirs[f"{backbone}.norm_f.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for index, symbol in enumerate(config.pattern):
        each = layer_weights(theirs, f"{backbone}.layers.{index}", symbol, sizes)
        found |= {f"layers.{index}.{name}": value for name, value in each.items()}
    return found


def mamba2() -> tuple[torch.nn.Module, ModelConfig]:
    theirs = Mamba2ForCausalLM(
        Mamba2Config(
            num_hidden_layers=3,
            hidden_size=32,
            num_heads=8,
            head_dim=8,
            state_size=8,
            n_groups=1,
            chunk_size=5,
            vocab_size=VOCAB,
            layer_norm_epsilon=1e-5,
        )
    )
    options = {"head_width": 8, "state": 8, "chunk": 4}
    return theirs, ModelConfig(**SIZE, layers=3, pattern="MMM", mixers={"mamba2": options})


def nemotron_h() -> tuple[torch.nn.Module, ModelConfig]:
    theirs = NemotronHForCausalLM(NemotronHConfig(**NEMOTRON_H_SHAPE, chunk_size=5, vocab_size=VOCAB))
    options = {"head_width": 8, "state": 8, "groups": 2, "chunk": 4, "min_step": 0.001}
    return theirs, ModelConfig(**SIZE, layers=5, pattern="M-M*-", mlp="relu2", mixers={"mamba2": options})


@pytest.mark.parametrize(
    ("build", "backbone"), [(mamba2, "backbone"), (nemotron_h, "model")], ids=["mamba2", "nemotron_h"]
)
def test_logits_and_gradients_agree(build: Any, backbone: str) -> None:
    torch.manual_seed(0)
    theirs, config = build()
    with torch.no_grad():  # their first weights are so small that a wrong mixer would hardly show
        for name, parameter in theirs.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    theirs = theirs.float().eval()
    ours = Transformer(config, VOCAB)
    weights = copied(dict(theirs.named_parameters()), config, backbone)
    assert weights.keys() == dict(ours.named_parameters()).keys()
    fill(ours, lambda name, _: weights[name].detach().clone())
    tokens, upstream = torch.randint(VOCAB, (2, TOKENS)), torch.randn(2, TOKENS, VOCAB)
    expected, found = theirs(tokens, use_cache=False).logits, ours(tokens)
    assert float((found - expected).detach().abs().max() / expected.abs().max()) < 1e-5
    (expected * upstream).sum().backward()
    (found * upstream).sum().backward()
    gradients = copied({name: each.grad for name, each in theirs.named_parameters()}, config, backbone)
    for name, parameter in ours.named_parameters():
        error = (parameter.grad - gradients[name]).abs().max() / gradients[name].abs().max()
        assert error < 1e-4, name

"""Folders of transformers' Mamba2 and Nemotron-H: read, written, and read by transformers again, with equal logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM, NemotronHConfig, NemotronHForCausalLM

from gristmill.evaluation.convert.huggingface import family_for, read_huggingface, write_huggingface
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from tests.support.huggingface_shapes import NEMOTRON_H_SHAPE

VOCAB = 61
MAMBA2 = Mamba2Config(
    num_hidden_layers=3, hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=1, vocab_size=VOCAB
)
NEMOTRON_H = NemotronHConfig(**NEMOTRON_H_SHAPE, vocab_size=VOCAB)
THEIRS = {"mamba2": (Mamba2ForCausalLM, MAMBA2), "nemotron_h": (NemotronHForCausalLM, NEMOTRON_H)}
SIZE: dict[str, Any] = {"width": 32, "heads": 4, "sequence_length": 16, "ffn_hidden_size": 48, "positions": "none"}
OPTIONS = {"head_width": 8, "state": 8}
OURS = {
    "Mamba2ForCausalLM": ModelConfig(**SIZE, layers=2, pattern="MM", mixers={"mamba2": OPTIONS}),
    "NemotronHForCausalLM": ModelConfig(
        **SIZE, layers=4, pattern="M-*M", mlp="relu2", mixers={"mamba2": OPTIONS | {"groups": 4, "min_step": 0.001}}
    ),
}
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCAB


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def enlarge(model: torch.nn.Module) -> None:
    """With first weights, scan and attention would hardly change the logits."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(0.2 / parameter.std())


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_their_folder_has_their_logits(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, config = THEIRS[name]
    theirs = build(config).eval()
    enlarge(theirs)
    theirs.save_pretrained(tmp_path)
    ours, saved = read_huggingface(tmp_path)
    assert relative(ours(TOKENS), theirs(TOKENS, use_cache=False).logits) < 1e-5
    assert saved["vocab_size"] == VOCAB


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_a_written_folder_has_our_logits(name: str, tmp_path: Path) -> None:
    ours = Transformer(OURS[name], VOCAB)
    initialize(ours, 1, torch.device("cpu"), torch.float32)
    enlarge(ours)
    assert write_huggingface(tmp_path, ours, 2) == name
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs).__name__ == name
    expected = ours(TOKENS)
    assert relative(theirs(TOKENS, use_cache=False).logits, expected) < 1e-5
    again, _ = read_huggingface(tmp_path)
    assert torch.equal(again(TOKENS), expected)


WRONG = [
    ("mamba2", {"n_groups": 2}, "n_groups above 1"),
    ("mamba2", {"use_bias": True}, "use_bias=True"),
    ("mamba2", {"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
    ("mamba2", {"head_dim": 5}, "no multiple of hidden_size=32"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}, "layers of experts"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ("nemotron_h", {"mamba_num_heads": None}, "not a valid model config"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_what_cannot_be_imported_is_named(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    fields = THEIRS[name][1].to_dict() | {"architectures": [THEIRS[name][0].__name__]} | changes
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    with pytest.raises(InputError, match=message):
        read_huggingface(tmp_path)


def test_what_cannot_be_exported_is_named() -> None:
    whole = ModelConfig(**SIZE, layers=2, mixer="mamba2", mixers={"mamba2": OPTIONS})
    with pytest.raises(InputError, match="NemotronHForCausalLM has no layers of mixer and MLP in one"):
        family_for(whole)
    with pytest.raises(InputError, match="Mamba2ForCausalLM has no other layers than mamba2"):
        family_for(ModelConfig(**SIZE, layers=2, pattern="M-", mlp="gelu", mixers={"mamba2": OPTIONS}))

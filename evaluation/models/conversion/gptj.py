"""GPTJForCausalLM (GPT-J-6B, 2021) and our transformer: attention and MLP share one norm, and neighbouring features of
a head turn together, where ours are half the turned width apart."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    UnsupportedConfig,
    grouped_heads,
    linear_rules,
    norm_rules,
    other_widths,
    read_gelu,
    unsupported_fields,
    write_gelu,
)
from gristmill.evaluation.models.conversion.tensor_conversion import Rule, TensorConversion
from gristmill.training.model_config import ModelConfig

CONSTANTS = {
    "positions": "rope",
    "norm": "layernorm",
    "mlp": "gelu",
    "biases": "mlp",
    "parallel_residual": "one_norm",
    "head_bias": True,
}


def _order(config: ModelConfig) -> Tensor:
    """Their row of each of our rows of a head. 6 features of which 4 turn -> [0, 2, 1, 3, 4, 5]."""
    turned = config.rope_width or config.head_dim
    pairs = torch.arange(turned).unflatten(0, (-1, 2)).T.flatten()
    return torch.cat([pairs, torch.arange(turned, config.head_dim)])


def _rows(tensor: Tensor, order: Tensor, config: ModelConfig) -> Tensor:
    return tensor.unflatten(0, (config.heads, config.head_dim))[:, order].flatten(0, 1)


def _interleaved(tensors: Sequence[Tensor], config: ModelConfig) -> Tensor:
    return _rows(tensors[0], _order(config).argsort(), config)


INTERLEAVED = TensorConversion(_interleaved, lambda tensor, config: [_rows(tensor, _order(config), config)])


def _rules(config: ModelConfig) -> list[Rule]:
    theirs, ours = "transformer.h.{i}", "layers.{i}"
    rules = [
        Rule("transformer.wte.weight", ("embedding.weight",)),
        Rule(f"{theirs}.attn.q_proj.weight", (f"{ours}.mixer.query.weight",), INTERLEAVED),
        Rule(f"{theirs}.attn.k_proj.weight", (f"{ours}.mixer.key.weight",), INTERLEAVED),
    ]
    attention = {f"{theirs}.attn.v_proj": f"{ours}.mixer.value", f"{theirs}.attn.out_proj": f"{ours}.mixer.output"}
    rules += linear_rules(attention, False)
    mlp = {f"{theirs}.mlp.fc_in": f"{ours}.mlp.up", f"{theirs}.mlp.fc_out": f"{ours}.mlp.down"}
    rules += linear_rules(mlp, True)
    rules += norm_rules(config, {f"{theirs}.ln_1": f"{ours}.mixer_norm", "transformer.ln_f": "final_norm"})
    rules.append(Rule("lm_head.bias", ("head.bias",)))
    return rules if config.tied_embeddings else [*rules, Rule("lm_head.weight", ("head.weight",))]


def _write(config: ModelConfig) -> Fields:
    return {
        "n_embd": config.width,
        "n_inner": config.hidden_width("gelu"),
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.sequence_length,
        "rotary_dim": config.rope_width or config.head_dim,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": write_gelu(config),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    width, heads = fields["n_embd"], fields["n_head"]
    turned = fields.get("rotary_dim", 64)
    if turned is None:
        raise UnsupportedConfig(
            "config.json says rotary_dim=null, positions over the whole width; gristmill turns heads"
        )
    return {
        **CONSTANTS,
        "layers": fields["n_layer"],
        "width": width,
        "heads": heads,
        "hidden": fields.get("n_inner") or 4 * width,
        "sequence_length": fields.get("n_positions", 2048),
        "gelu": read_gelu(fields, "activation_function", "gelu_new"),
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "rope_width": 0 if turned == width // heads else turned,
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def _unsupported(config: ModelConfig) -> list[str]:
    found = unsupported_fields(config, gelu=config.gelu, rope_width=config.rope_width, **CONSTANTS)
    base = [] if config.rope_base == 10000 else [f"rope_base={config.rope_base}"]
    return found + base + grouped_heads(config) + other_widths(config)


GPTJ = Family("GPTJForCausalLM", "gptj", _unsupported, _rules, _write, _read)

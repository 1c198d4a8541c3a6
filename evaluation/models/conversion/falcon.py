"""FalconForCausalLM (arXiv 2311.16867) and our transformer: attention and MLP in parallel, behind one norm (7B) or two
(40B, 180B), with few key/value heads. Each group's rows of queries, its key and its value lie together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    UnsupportedConfig,
    linear_rules,
    norm_rules,
    other_widths,
    read_gelu,
    require_value,
    unsupported_fields,
    weight_and_bias,
    write_gelu,
)
from gristmill.evaluation.models.conversion.rope import read_rope, write_rope
from gristmill.evaluation.models.conversion.tensor_conversion import Rule, TensorConversion
from gristmill.training.model_config import ModelConfig

CONSTANTS = {"positions": "rope", "norm": "layernorm", "mlp": "gelu"}


def _grouped(tensors: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """q [H * K, ...], k and v [G * K, ...] -> [G * (H / G + 2) * K, ...]."""
    query, key, value = (tensor.unflatten(0, (config.num_kv_heads, -1, config.head_dim)) for tensor in tensors)
    return torch.cat([query, key, value], dim=1).flatten(0, 2)


def _ungrouped(tensor: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    groups = tensor.unflatten(0, (config.num_kv_heads, -1, config.head_dim))
    return [part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])]


GROUPED = TensorConversion(_grouped, _ungrouped)


def _norms(config: ModelConfig) -> dict[str, str]:
    if config.parallel_residual == "one_norm":
        return {"input_layernorm": "mixer_norm"}
    if config.parallel_residual:
        return {"ln_attn": "mixer_norm", "ln_mlp": "mlp_norm"}
    return {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}


def _rules(config: ModelConfig) -> list[Rule]:
    theirs, ours = "transformer.h.{i}", "layers.{i}"
    triple = tuple(f"{ours}.mixer.{name}" for name in ("query", "key", "value"))
    packed = weight_and_bias(f"{theirs}.self_attention.query_key_value", triple, GROUPED, GROUPED)
    rules = packed if config.projection_biases else packed[:1]
    linears = {
        f"{theirs}.self_attention.dense": f"{ours}.mixer.output",
        f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.up",
        f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.down",
    }
    rules += linear_rules(linears, config.mlp_biases)
    norms = {f"{theirs}.{name}": f"{ours}.{norm}" for name, norm in _norms(config).items()}
    rules += norm_rules(config, norms | {"transformer.ln_f": "final_norm"})
    rules.append(Rule("transformer.word_embeddings.weight", ("embedding.weight",)))
    return rules if config.tied_embeddings else [*rules, Rule("lm_head.weight", ("head.weight",))]


def _new_architecture(config: ModelConfig) -> bool:
    """Whether it is that of Falcon-40B, which has groups of heads."""
    one = config.parallel_residual == "one_norm" and config.num_kv_heads == 1
    return bool(config.parallel_residual) and not one


def _write(config: ModelConfig) -> Fields:
    new, kv_heads = _new_architecture(config), config.num_kv_heads
    return {
        "hidden_size": config.width,
        "ffn_hidden_size": config.hidden_width("gelu"),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_kv_heads": kv_heads if new else config.heads,
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1,
        "parallel_attn": bool(config.parallel_residual),
        "num_ln_in_parallel_attn": (1 if config.parallel_residual == "one_norm" else 2) if new else None,
        "alibi": False,
        "bias": config.mlp_biases,
        "activation": write_gelu(config),
        "max_position_embeddings": config.sequence_length,
        "layer_norm_epsilon": config.norm_epsilon,
        **write_rope(config),
        "hidden_dropout": config.dropout,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    require_value({"alibi": bool(fields.get("alibi", False))}, "alibi", False)
    heads = fields["num_attention_heads"] if "num_attention_heads" in fields else fields["n_head"]
    new, parallel = bool(fields.get("new_decoder_architecture", False)), bool(fields.get("parallel_attn", True))
    norms = fields.get("num_ln_in_parallel_attn") or (2 if new else 1)
    if (new and not parallel) or (not new and parallel and norms == 2):
        raise UnsupportedConfig(
            f"config.json says new_decoder_architecture={new}, parallel_attn={parallel} and "
            f"num_ln_in_parallel_attn={norms}, which no published Falcon has"
        )
    grouped = fields.get("num_kv_heads") or heads
    return {
        **CONSTANTS,
        "layers": fields["num_hidden_layers"] if "num_hidden_layers" in fields else fields["n_layer"],
        "width": fields["hidden_size"],
        "heads": heads,
        "kv_heads": grouped if new else 1 if fields.get("multi_query", True) else heads,
        "hidden": fields.get("ffn_hidden_size") or 4 * fields["hidden_size"],
        "sequence_length": fields.get("max_position_embeddings", 2048),
        "gelu": read_gelu(fields, "activation", "gelu"),
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        **read_rope(fields),
        "parallel_residual": ("one_norm" if norms == 1 else True) if parallel else False,
        "biases": bool(fields.get("bias", False)),
        "tied_embeddings": fields.get("tie_word_embeddings", True),
    }


def _unsupported(config: ModelConfig) -> list[str]:
    found = unsupported_fields(
        config,
        **CONSTANTS,
        gelu=config.gelu,
        biases=config.biases is True,
        parallel_residual=config.parallel_residual,
        rope_scaling=config.rope_scaling,
    )
    if not config.parallel_residual and config.num_kv_heads not in (1, config.heads):
        found.append(f"kv_heads={config.kv_heads} without parallel_residual")
    return found + other_widths(config)


FALCON = Family("FalconForCausalLM", "falcon", _unsupported, _rules, _write, _read)

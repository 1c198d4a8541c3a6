"""OPTForCausalLM (arXiv 2205.01068) and our transformer: learned positions whose table begins with two rows that no
token uses, and ReLU."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import (
    BY_HEAD,
    SAME,
    Fields,
    ModelFamily,
    TensorConversion,
    UnsupportedConfig,
    WeightRule,
    grouped_heads,
    linear_rules,
    norm_rules,
    other_widths,
    read_gelu,
    require_value,
    unsupported_fields,
    weight_and_bias,
    write_gelu,
)
from gristmill.evaluation.convert.hf.rope_and_windows import read_rope, write_rope
from gristmill.training.config.model import ModelConfig

OFFSET = 2
NORM_EPSILON = 1e-5  # of the architecture; no field of config.json
CONSTANTS = {"positions": "learned", "position_offset": OFFSET, "mlp": "relu"}
LAYER = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.out_proj": "mixer.output",
    "fc1": "mlp.up",
    "fc2": "mlp.down",
}
NORMS = {
    "model.decoder.layers.{i}.self_attn_layer_norm": "layers.{i}.mixer_norm",
    "model.decoder.layers.{i}.final_layer_norm": "layers.{i}.mlp_norm",
}


def _rules(config: ModelConfig) -> list[WeightRule]:
    layer = {f"model.decoder.layers.{{i}}.{hf_name}": f"layers.{{i}}.{ours}" for hf_name, ours in LAYER.items()}
    norms = NORMS | ({"model.decoder.final_layer_norm": "final_norm"} if config.final_norm else {})
    rules = [
        *linear_rules(layer, config.mlp_biases),
        *norm_rules(config, norms),
        WeightRule("model.decoder.embed_tokens.weight", ("embedding.weight",)),
        WeightRule("model.decoder.embed_positions.weight", ("positions.weight",)),
    ]
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _write(config: ModelConfig) -> Fields:
    return {
        "hidden_size": config.width,
        "word_embed_proj_dim": config.width,
        "ffn_dim": config.hidden_width("relu"),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.sequence_length,
        "activation_function": "relu",
        "do_layer_norm_before": config.norm_order == "pre",
        "_remove_final_layer_norm": not config.final_norm,
        "enable_bias": config.mlp_biases,
        "layer_norm_elementwise_affine": bool(config.norm_leaves),
        "dropout": config.dropout,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    require_value({"activation_function": fields.get("activation_function", "relu")}, "activation_function", "relu")
    width = fields["hidden_size"]
    narrow = fields.get("word_embed_proj_dim") or width
    if narrow != width:
        raise UnsupportedConfig(
            f"config.json says word_embed_proj_dim={narrow} for hidden_size={width}, as OPT-350m; gristmill imports "
            "embeddings as wide as the model only"
        )
    before = fields.get("do_layer_norm_before", True)
    return {
        **CONSTANTS,
        "layers": fields["num_hidden_layers"],
        "width": width,
        "heads": fields["num_attention_heads"],
        "ffn_hidden_size": fields["ffn_dim"],
        "sequence_length": fields.get("max_position_embeddings", 2048),
        "norm": "layernorm" if fields.get("layer_norm_elementwise_affine", True) else "plain_layernorm",
        "norm_epsilon": NORM_EPSILON,
        "norm_order": "pre" if before else "post",
        "final_norm": bool(before and not fields.get("_remove_final_layer_norm", False)),
        "biases": bool(fields.get("enable_bias", True)),
        "tied_embeddings": fields.get("tie_word_embeddings", True),
    }


def _unsupported(config: ModelConfig) -> list[str]:
    orders = {layer.norm_order for layer in config.layer_list}
    order = "post" if orders == {"post"} else "pre"
    wanted = {
        **CONSTANTS,
        "norm": config.norm if config.norm != "rmsnorm" else "layernorm",
        "biases": config.biases is True,
        "final_norm": config.final_norm and order == "pre",
    }
    lacking = unsupported_fields(config, norm_order=order, **wanted)
    if config.norm_epsilon != NORM_EPSILON:
        lacking.append(f"norm_epsilon={config.norm_epsilon}")
    return lacking + grouped_heads(config) + other_widths(config)


OPT = ModelFamily("OPTForCausalLM", "opt", _unsupported, _rules, _write, _read)


# BloomForCausalLM (arXiv 2211.05100) and our transformer: ALiBi, and a norm right after the embedding.

CONTEXT = 2048  # what BLOOM was trained with; ALiBi itself has no end, so config.json may not say
BLOOM_CONSTANTS = {"positions": "alibi", "norm": "layernorm", "mlp": "gelu", "biases": True, "embedding_norm": True}


def _bloom_rules(config: ModelConfig) -> list[WeightRule]:
    layer, triple = "transformer.h.{i}", ("layers.{i}.mixer.query", "layers.{i}.mixer.key", "layers.{i}.mixer.value")
    rules = weight_and_bias(f"{layer}.self_attention.query_key_value", triple, BY_HEAD, BY_HEAD)
    for hf_name, ours in (
        ("transformer.word_embeddings_layernorm", "embedding_norm"),
        (f"{layer}.input_layernorm", "layers.{i}.mixer_norm"),
        (f"{layer}.self_attention.dense", "layers.{i}.mixer.output"),
        (f"{layer}.post_attention_layernorm", "layers.{i}.mlp_norm"),
        (f"{layer}.mlp.dense_h_to_4h", "layers.{i}.mlp.up"),
        (f"{layer}.mlp.dense_4h_to_h", "layers.{i}.mlp.down"),
        ("transformer.ln_f", "final_norm"),
    ):
        rules += weight_and_bias(hf_name, (ours,), SAME, SAME)
    rules.append(WeightRule("transformer.word_embeddings.weight", ("embedding.weight",)))
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _write_bloom(config: ModelConfig) -> Fields:
    return {
        "hidden_size": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "seq_length": config.sequence_length,
        "layer_norm_epsilon": config.norm_epsilon,
        "hidden_dropout": config.dropout,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _read_bloom(fields: Mapping[str, Any]) -> Fields:
    post = fields.get("apply_residual_connection_post_layernorm", False)
    require_value({"apply_residual_connection_post_layernorm": post}, "apply_residual_connection_post_layernorm", False)
    width = fields.get("hidden_size") or fields["n_embed"]
    return {
        **BLOOM_CONSTANTS,
        "layers": fields.get("n_layer") or fields["num_hidden_layers"],
        "width": width,
        "heads": fields.get("n_head") or fields["num_attention_heads"],
        "ffn_hidden_size": 4 * width,
        "sequence_length": fields.get("seq_length") or CONTEXT,
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "tied_embeddings": fields.get("tie_word_embeddings", True),
    }


def _unsupported_bloom(config: ModelConfig) -> list[str]:
    lacking = unsupported_fields(config, **BLOOM_CONSTANTS) + grouped_heads(config) + other_widths(config)
    if config.hidden_width("gelu") != 4 * config.width:
        lacking.append(f"hidden={config.ffn_hidden_size}")
    return lacking


BLOOM = ModelFamily("BloomForCausalLM", "bloom", _unsupported_bloom, _bloom_rules, _write_bloom, _read_bloom)


# FalconForCausalLM (arXiv 2311.16867) and our transformer: attention and MLP in parallel, behind one norm (7B) or two
# (40B, 180B), with few key/value heads. Each group's rows of queries, its key and its value lie together.

FALCON_CONSTANTS = {"positions": "rope", "norm": "layernorm", "mlp": "gelu"}


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


def _falcon_rules(config: ModelConfig) -> list[WeightRule]:
    hf_name, ours = "transformer.h.{i}", "layers.{i}"
    triple = tuple(f"{ours}.mixer.{name}" for name in ("query", "key", "value"))
    packed = weight_and_bias(f"{hf_name}.self_attention.query_key_value", triple, GROUPED, GROUPED)
    rules = packed if config.projection_biases else packed[:1]
    linears = {
        f"{hf_name}.self_attention.dense": f"{ours}.mixer.output",
        f"{hf_name}.mlp.dense_h_to_4h": f"{ours}.mlp.up",
        f"{hf_name}.mlp.dense_4h_to_h": f"{ours}.mlp.down",
    }
    rules += linear_rules(linears, config.mlp_biases)
    norms = {f"{hf_name}.{name}": f"{ours}.{norm}" for name, norm in _norms(config).items()}
    rules += norm_rules(config, norms | {"transformer.ln_f": "final_norm"})
    rules.append(WeightRule("transformer.word_embeddings.weight", ("embedding.weight",)))
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _new_architecture(config: ModelConfig) -> bool:
    """Whether it is that of Falcon-40B, which has groups of heads."""
    one_norm = config.parallel_residual == "one_norm" and config.num_kv_heads == 1
    return bool(config.parallel_residual) and not one_norm


def _write_falcon(config: ModelConfig) -> Fields:
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


def _read_falcon(fields: Mapping[str, Any]) -> Fields:
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
        **FALCON_CONSTANTS,
        "layers": fields["num_hidden_layers"] if "num_hidden_layers" in fields else fields["n_layer"],
        "width": fields["hidden_size"],
        "heads": heads,
        "kv_heads": grouped if new else 1 if fields.get("multi_query", True) else heads,
        "ffn_hidden_size": fields.get("ffn_hidden_size") or 4 * fields["hidden_size"],
        "sequence_length": fields.get("max_position_embeddings", 2048),
        "gelu": read_gelu(fields, "activation", "gelu"),
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        **read_rope(fields),
        "parallel_residual": ("one_norm" if norms == 1 else True) if parallel else False,
        "biases": bool(fields.get("bias", False)),
        "tied_embeddings": fields.get("tie_word_embeddings", True),
    }


def _unsupported_falcon(config: ModelConfig) -> list[str]:
    lacking = unsupported_fields(
        config,
        **FALCON_CONSTANTS,
        gelu=config.gelu,
        biases=config.biases is True,
        parallel_residual=config.parallel_residual,
        rope_scaling=config.rope_scaling,
    )
    if not config.parallel_residual and config.num_kv_heads not in (1, config.heads):
        lacking.append(f"kv_heads={config.kv_heads} without parallel_residual")
    return lacking + other_widths(config)


FALCON = ModelFamily("FalconForCausalLM", "falcon", _unsupported_falcon, _falcon_rules, _write_falcon, _read_falcon)

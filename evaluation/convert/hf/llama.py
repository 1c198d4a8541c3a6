"""LlamaForCausalLM (arXiv 2302.13971, 2407.21783) and our transformer."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    WeightRule,
    linear_rules,
    norm_rules,
    require_value,
    unsupported_fields,
)
from gristmill.evaluation.convert.hf.rope_and_windows import read_rope, write_rope
from gristmill.training.config.model import ModelConfig

OUTPUT = "mixer.output"
ATTENTION = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.o_proj": OUTPUT,
}
MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
NORMS = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}


def attention_rules(config: ModelConfig) -> list[WeightRule]:
    projections = {hf_name: ours for hf_name, ours in ATTENTION.items() if ours != OUTPUT}
    output = {hf_name: ours for hf_name, ours in ATTENTION.items() if ours == OUTPUT}
    return layer_rules(projections, config.projection_biases) + layer_rules(output, config.output_biases)


def mlp_rules(config: ModelConfig) -> list[WeightRule]:
    return layer_rules(MLP, config.mlp_biases)


def layer_rules(pairs: Mapping[str, str], biases: bool) -> list[WeightRule]:
    """Rules of linear layers, named from their layer on."""
    return linear_rules(
        {f"model.layers.{{i}}.{hf_name}": f"layers.{{i}}.{ours}" for hf_name, ours in pairs.items()}, biases
    )


def ends_rules(config: ModelConfig, norms: Mapping[str, str] = NORMS) -> list[WeightRule]:
    """Embedding, norms and head."""
    pairs = {f"model.layers.{{i}}.{hf_name}": f"layers.{{i}}.{ours}" for hf_name, ours in norms.items()}
    rules = [WeightRule("model.embed_tokens.weight", ("embedding.weight",))]
    rules += norm_rules(config, pairs | {"model.norm": "final_norm"})
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _rules(config: ModelConfig) -> list[WeightRule]:
    return attention_rules(config) + mlp_rules(config) + ends_rules(config)


def write_llama(config: ModelConfig) -> Fields:
    return {
        "hidden_size": config.width,
        "intermediate_size": config.hidden_width("swiglu"),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.sequence_length,
        "rms_norm_eps": config.norm_epsilon,
        **write_rope(config),
        "attention_bias": config.output_biases,
        "mlp_bias": config.mlp_biases,
        "tie_word_embeddings": config.tied_embeddings,
    }


def read_llama(fields: Mapping[str, Any]) -> Fields:
    require_value(fields, "hidden_act", "silu")
    return {
        "layers": fields["num_hidden_layers"],
        "width": fields["hidden_size"],
        "heads": fields["num_attention_heads"],
        "kv_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "head_width": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "ffn_hidden_size": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "norm_epsilon": fields["rms_norm_eps"],
        **read_rope(fields),
        "biases": read_biases(fields),
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def read_biases(fields: Mapping[str, Any]) -> bool | str:
    attention, mlp = bool(fields.get("attention_bias", False)), bool(fields.get("mlp_bias", False))
    return attention if attention == mlp else "attention" if attention else "mlp"


def _unsupported(config: ModelConfig) -> list[str]:
    lacking = unsupported_fields(
        config, positions="rope", norm="rmsnorm", mlp="swiglu", rope_scaling=config.rope_scaling
    )
    return [*lacking, "biases=qkv"] if config.biases == "qkv" else lacking


LLAMA = ModelFamily("LlamaForCausalLM", "llama", _unsupported, _rules, write_llama, read_llama)

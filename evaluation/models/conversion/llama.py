"""LlamaForCausalLM (arXiv 2302.13971) and our transformer."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import Family, Fields, require_value, unsupported_fields
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig

ATTENTION = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.o_proj": "mixer.output",
}
MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}


def attention_rules(config: ModelConfig) -> list[Rule]:
    return _linear_rules(ATTENTION, config)


def mlp_rules(config: ModelConfig) -> list[Rule]:
    return _linear_rules(MLP, config)


def _linear_rules(pairs: Mapping[str, str], config: ModelConfig) -> list[Rule]:
    leaves = ("weight", "bias") if config.biases else ("weight",)
    return [
        Rule(f"model.layers.{{i}}.{theirs}.{leaf}", (f"layers.{{i}}.{ours}.{leaf}",))
        for theirs, ours in pairs.items()
        for leaf in leaves
    ]


def ends_rules(config: ModelConfig) -> list[Rule]:
    """Embedding, norms and head."""
    rules = [
        Rule("model.embed_tokens.weight", ("embedding.weight",)),
        Rule("model.layers.{i}.input_layernorm.weight", ("layers.{i}.mixer_norm.weight",)),
        Rule("model.layers.{i}.post_attention_layernorm.weight", ("layers.{i}.mlp_norm.weight",)),
        Rule("model.norm.weight", ("final_norm.weight",)),
    ]
    return rules if config.tied_embeddings else [*rules, Rule("lm_head.weight", ("head.weight",))]


def _rules(config: ModelConfig) -> list[Rule]:
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
        "rope_theta": config.rope_base,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},  # transformers 5
        "attention_bias": config.biases,
        "mlp_bias": config.biases,
        "tie_word_embeddings": config.tied_embeddings,
    }


def read_llama(fields: Mapping[str, Any]) -> Fields:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    require_value(fields, "hidden_act", "silu")
    for name in ("rope_parameters", "rope_scaling"):
        stated = fields.get(name) or {}
        require_value({"rope_type": stated.get("rope_type", stated.get("type", "default"))}, "rope_type", "default")
    if fields.get("attention_bias", False) != fields.get("mlp_bias", False):
        raise InputError("attention_bias and mlp_bias differ; gristmill has biases in all linear layers or in none")
    return {
        "layers": fields["num_hidden_layers"],
        "width": fields["hidden_size"],
        "heads": fields["num_attention_heads"],
        "kv_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "head_width": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "hidden": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "norm_epsilon": fields["rms_norm_eps"],
        "rope_base": rope.get("rope_theta", fields.get("rope_theta", 10000.0)),
        "biases": fields.get("attention_bias", False),
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def _unsupported(config: ModelConfig) -> list[str]:
    return unsupported_fields(config, positions="rope", norm="rmsnorm", mlp="swiglu")


LLAMA = Family("LlamaForCausalLM", "llama", _unsupported, _rules, write_llama, read_llama)

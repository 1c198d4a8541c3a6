"""LlamaForCausalLM (arXiv 2302.13971, 2407.21783) and our transformer."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import Family, Fields, require_value, unsupported_fields
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig

SCALING_FIELDS: dict[str, tuple[str, ...]] = {  # of each rope_type, beside its factor
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
OUTPUT = "mixer.output"
ATTENTION = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.o_proj": OUTPUT,
}
MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}


def attention_rules(config: ModelConfig) -> list[Rule]:
    projections = {theirs: ours for theirs, ours in ATTENTION.items() if ours != OUTPUT}
    output = {theirs: ours for theirs, ours in ATTENTION.items() if ours == OUTPUT}
    return linear_rules(projections, config.projection_biases) + linear_rules(output, config.output_biases)


def mlp_rules(config: ModelConfig) -> list[Rule]:
    return linear_rules(MLP, config.mlp_biases)


def linear_rules(pairs: Mapping[str, str], biases: bool) -> list[Rule]:
    return [
        Rule(f"model.layers.{{i}}.{theirs}.{leaf}", (f"layers.{{i}}.{ours}.{leaf}",))
        for theirs, ours in pairs.items()
        for leaf in (("weight", "bias") if biases else ("weight",))
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
        **write_rope(config),
        "attention_bias": config.output_biases,
        "mlp_bias": config.mlp_biases,
        "tie_word_embeddings": config.tied_embeddings,
    }


def write_rope(config: ModelConfig) -> Fields:
    """As transformers 4 and as transformers 5 read it."""
    scaling = config.rope_scaling
    if scaling is None:
        default = {"rope_type": "default", "rope_theta": config.rope_base}
        return {"rope_theta": config.rope_base, "rope_parameters": default}
    names = ("rope_type", "factor", *SCALING_FIELDS[scaling.rope_type])
    stated = {name: getattr(scaling, name) for name in names}
    stated = {name: value for name, value in stated.items() if value is not None}
    parameters = stated | {"rope_theta": config.rope_base}
    return {"rope_theta": config.rope_base, "rope_scaling": stated, "rope_parameters": parameters}


def read_rope(fields: Mapping[str, Any]) -> Fields:
    """rope_base and rope_scaling. Raises InputError for a kind of scaling that is not supported."""
    both = [found for name in ("rope_scaling", "rope_parameters") if (found := fields.get(name))] or [{}]
    kinds = [found.get("rope_type", found.get("type", "default")) for found in both]
    if len(set(kinds)) > 1:
        raise InputError(f"config.json says rope_type={kinds[0]!r} and rope_type={kinds[1]!r}; remove the wrong one")
    stated, kind = both[-1], kinds[0]
    if any(isinstance(value, dict) for value in stated.values()):
        raise InputError("config.json has other rotary positions in some layers; gristmill imports one kind for all")
    base = stated.get("rope_theta", fields.get("rope_theta", 10000.0))
    if stated.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise InputError("config.json has partial_rotary_factor, which turns a part of each head; gristmill turns all")
    if kind == "default":
        return {"rope_base": base}
    if kind not in SCALING_FIELDS:
        raise InputError(f"config.json says rope_type={kind!r}; gristmill imports default, {', '.join(SCALING_FIELDS)}")
    if kind == "yarn" and (stated.get("mscale") or stated.get("truncate") is False):
        raise InputError("config.json has yarn with mscale or without truncate; gristmill imports the paper's form")
    scaling = {"rope_type": kind, "factor": stated["factor"]}
    for name in SCALING_FIELDS[kind]:
        if stated.get(name) is not None:
            scaling[name] = stated[name]
    if kind != "linear":  # as transformers fills it in
        scaling.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        if fields.get("original_max_position_embeddings"):
            scaling["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return {"rope_base": base, "rope_scaling": scaling}


def read_llama(fields: Mapping[str, Any]) -> Fields:
    require_value(fields, "hidden_act", "silu")
    attention_bias, mlp_bias = bool(fields.get("attention_bias", False)), bool(fields.get("mlp_bias", False))
    if mlp_bias and not attention_bias:
        raise InputError("config.json has mlp_bias without attention_bias; gristmill imports both, none or the latter")
    return {
        "layers": fields["num_hidden_layers"],
        "width": fields["hidden_size"],
        "heads": fields["num_attention_heads"],
        "kv_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "head_width": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "hidden": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "norm_epsilon": fields["rms_norm_eps"],
        **read_rope(fields),
        "biases": True if mlp_bias else "attention" if attention_bias else False,
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def _unsupported(config: ModelConfig) -> list[str]:
    found = unsupported_fields(config, positions="rope", norm="rmsnorm", mlp="swiglu", rope_scaling=config.rope_scaling)
    return [*found, "biases=qkv"] if config.biases == "qkv" else found


LLAMA = Family("LlamaForCausalLM", "llama", _unsupported, _rules, write_llama, read_llama)

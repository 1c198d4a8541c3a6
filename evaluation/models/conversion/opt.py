"""OPTForCausalLM (arXiv 2205.01068) and our transformer: learned positions whose table begins with two rows that no
token uses, and ReLU."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    UnsupportedConfig,
    grouped_heads,
    linear_rules,
    norm_rules,
    other_widths,
    require_value,
    unsupported_fields,
)
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.training.model_config import ModelConfig

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


def _rules(config: ModelConfig) -> list[Rule]:
    layer = {f"model.decoder.layers.{{i}}.{theirs}": f"layers.{{i}}.{ours}" for theirs, ours in LAYER.items()}
    norms = NORMS | ({"model.decoder.final_layer_norm": "final_norm"} if config.final_norm else {})
    rules = [
        *linear_rules(layer, config.mlp_biases),
        *norm_rules(config, norms),
        Rule("model.decoder.embed_tokens.weight", ("embedding.weight",)),
        Rule("model.decoder.embed_positions.weight", ("positions.weight",)),
    ]
    return rules if config.tied_embeddings else [*rules, Rule("lm_head.weight", ("head.weight",))]


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
        "hidden": fields["ffn_dim"],
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
    found = unsupported_fields(config, norm_order=order, **wanted)
    if config.norm_epsilon != NORM_EPSILON:
        found.append(f"norm_epsilon={config.norm_epsilon}")
    return found + grouped_heads(config) + other_widths(config)


OPT = Family("OPTForCausalLM", "opt", _unsupported, _rules, _write, _read)

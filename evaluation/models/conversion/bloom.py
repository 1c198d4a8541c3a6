"""BloomForCausalLM (arXiv 2211.05100) and our transformer: ALiBi, and a norm right after the embedding."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    grouped_heads,
    other_widths,
    require_value,
    unsupported_fields,
    weight_and_bias,
)
from gristmill.evaluation.models.conversion.tensor_conversion import BY_HEAD, SAME, Rule
from gristmill.training.model_config import ModelConfig

CONTEXT = 2048  # what BLOOM was trained with; ALiBi itself has no end, so config.json may not say
CONSTANTS = {"positions": "alibi", "norm": "layernorm", "mlp": "gelu", "biases": True, "embedding_norm": True}


def _rules(config: ModelConfig) -> list[Rule]:
    layer, triple = "transformer.h.{i}", ("layers.{i}.mixer.query", "layers.{i}.mixer.key", "layers.{i}.mixer.value")
    rules = weight_and_bias(f"{layer}.self_attention.query_key_value", triple, BY_HEAD, BY_HEAD)
    for theirs, ours in (
        ("transformer.word_embeddings_layernorm", "embedding_norm"),
        (f"{layer}.input_layernorm", "layers.{i}.mixer_norm"),
        (f"{layer}.self_attention.dense", "layers.{i}.mixer.output"),
        (f"{layer}.post_attention_layernorm", "layers.{i}.mlp_norm"),
        (f"{layer}.mlp.dense_h_to_4h", "layers.{i}.mlp.up"),
        (f"{layer}.mlp.dense_4h_to_h", "layers.{i}.mlp.down"),
        ("transformer.ln_f", "final_norm"),
    ):
        rules += weight_and_bias(theirs, (ours,), SAME, SAME)
    rules.append(Rule("transformer.word_embeddings.weight", ("embedding.weight",)))
    return rules if config.tied_embeddings else [*rules, Rule("lm_head.weight", ("head.weight",))]


def _write(config: ModelConfig) -> Fields:
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


def _read(fields: Mapping[str, Any]) -> Fields:
    post = fields.get("apply_residual_connection_post_layernorm", False)
    require_value({"apply_residual_connection_post_layernorm": post}, "apply_residual_connection_post_layernorm", False)
    width = fields.get("hidden_size") or fields["n_embed"]
    return {
        **CONSTANTS,
        "layers": fields.get("n_layer") or fields["num_hidden_layers"],
        "width": width,
        "heads": fields.get("n_head") or fields["num_attention_heads"],
        "hidden": 4 * width,
        "sequence_length": fields.get("seq_length") or CONTEXT,
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "tied_embeddings": fields.get("tie_word_embeddings", True),
    }


def _unsupported(config: ModelConfig) -> list[str]:
    found = unsupported_fields(config, **CONSTANTS) + grouped_heads(config) + other_widths(config)
    if config.hidden_width("gelu") != 4 * config.width:
        found.append(f"hidden={config.hidden}")
    return found


BLOOM = Family("BloomForCausalLM", "bloom", _unsupported, _rules, _write, _read)

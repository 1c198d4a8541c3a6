"""GPT2LMHeadModel (Radford et al. 2019) and our transformer."""

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
from gristmill.evaluation.models.conversion.tensor_conversion import SAME, TRANSPOSED, TRANSPOSED_TRIPLE, TRIPLE, Rule
from gristmill.training.model_config import ModelConfig


def _rules(config: ModelConfig) -> list[Rule]:
    layer = "transformer.h.{i}"
    triple = ("layers.{i}.mixer.query", "layers.{i}.mixer.key", "layers.{i}.mixer.value")
    rules = weight_and_bias(f"{layer}.attn.c_attn", triple, TRANSPOSED_TRIPLE, TRIPLE)
    for theirs, ours in (
        ("attn.c_proj", "mixer.output"),
        ("mlp.c_fc", "mlp.up"),
        ("mlp.c_proj", "mlp.down"),
    ):
        rules += weight_and_bias(f"{layer}.{theirs}", (f"layers.{{i}}.{ours}",), TRANSPOSED, SAME)
    for theirs, ours in (
        (f"{layer}.ln_1", "layers.{i}.mixer_norm"),
        (f"{layer}.ln_2", "layers.{i}.mlp_norm"),
        ("transformer.ln_f", "final_norm"),
    ):
        rules += [Rule(f"{theirs}.{leaf}", (f"{ours}.{leaf}",)) for leaf in ("weight", "bias")]
    rules += [
        Rule("transformer.wte.weight", ("embedding.weight",)),
        Rule("transformer.wpe.weight", ("positions.weight",)),
    ]
    return rules if config.tied_embeddings else [*rules, Rule("lm_head.weight", ("head.weight",))]


def _write(config: ModelConfig) -> Fields:
    return {
        "n_embd": config.width,
        "n_inner": config.hidden_width("gelu"),
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.sequence_length,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": "gelu_new",
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    if fields.get("activation_function", "gelu_new") not in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"):
        require_value(fields, "activation_function", "gelu_new")
    require_value({"scale_attn_weights": fields.get("scale_attn_weights", True)}, "scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        require_value({name: fields.get(name, False)}, name, False)
    return {
        **CONSTANTS,
        "layers": fields["n_layer"],
        "width": fields["n_embd"],
        "heads": fields["n_head"],
        "hidden": fields.get("n_inner") or 4 * fields["n_embd"],
        "sequence_length": fields.get("n_positions") or fields["n_ctx"],
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "tied_embeddings": fields.get("tie_word_embeddings", True),
    }


CONSTANTS = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "biases": True}


def _unsupported(config: ModelConfig) -> list[str]:
    return unsupported_fields(config, **CONSTANTS) + grouped_heads(config) + other_widths(config)


GPT2 = Family("GPT2LMHeadModel", "gpt2", _unsupported, _rules, _write, _read)

"""GPTNeoXForCausalLM (Pythia, arXiv 2304.01373; GPT-NeoX-20B, 2204.06745) and our transformer: attention and MLP read
the same stream through a norm each, and a part of each head turns."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    grouped_heads,
    linear_rules,
    norm_rules,
    other_widths,
    read_gelu,
    unsupported_fields,
    weight_and_bias,
    write_gelu,
)
from gristmill.evaluation.models.conversion.rope import read_partial_rope, write_partial_rope
from gristmill.evaluation.models.conversion.tensor_conversion import BY_HEAD, Rule
from gristmill.training.model_config import ModelConfig

CONSTANTS = {"positions": "rope", "norm": "layernorm", "mlp": "gelu"}
SHARE = 0.25  # of a head that turns, where config.json does not say it


def _rules(config: ModelConfig) -> list[Rule]:
    theirs, ours = "gpt_neox.layers.{i}", "layers.{i}"
    triple = tuple(f"{ours}.mixer.{name}" for name in ("query", "key", "value"))
    packed = weight_and_bias(f"{theirs}.attention.query_key_value", triple, BY_HEAD, BY_HEAD)
    rules = packed if config.projection_biases else packed[:1]
    rules += linear_rules({f"{theirs}.attention.dense": f"{ours}.mixer.output"}, config.output_biases)
    mlp = {f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.up", f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.down"}
    rules += linear_rules(mlp, config.mlp_biases)
    norms = {
        f"{theirs}.input_layernorm": f"{ours}.mixer_norm",
        f"{theirs}.post_attention_layernorm": f"{ours}.mlp_norm",
        "gpt_neox.final_layer_norm": "final_norm",
    }
    rules += norm_rules(config, norms)
    rules.append(Rule("gpt_neox.embed_in.weight", ("embedding.weight",)))
    return rules if config.tied_embeddings else [*rules, Rule("embed_out.weight", ("head.weight",))]


def _write(config: ModelConfig) -> Fields:
    rope = write_partial_rope(config)
    return {
        "hidden_size": config.width,
        "intermediate_size": config.hidden_width("gelu"),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.sequence_length,
        "hidden_act": write_gelu(config),
        "layer_norm_eps": config.norm_epsilon,
        "rotary_pct": rope["partial_rotary_factor"],
        "rotary_emb_base": config.rope_base,
        "rope_parameters": rope["rope_parameters"],
        "rope_scaling": rope.get("rope_scaling"),
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": config.output_biases,
        "hidden_dropout": config.dropout,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    rope = {**fields} | {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    return {
        **CONSTANTS,
        "layers": fields["num_hidden_layers"],
        "width": width,
        "heads": heads,
        "hidden": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "gelu": read_gelu(fields, "hidden_act", "gelu"),
        "norm_epsilon": fields.get("layer_norm_eps", 1e-5),
        **read_partial_rope(rope, width // heads, SHARE),
        "parallel_residual": bool(fields.get("use_parallel_residual", True)),
        "biases": True if fields.get("attention_bias", True) else "mlp",
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def _unsupported(config: ModelConfig) -> list[str]:
    wanted = {
        **CONSTANTS,
        "biases": config.biases if config.biases in (True, "mlp") else True,
        "gelu": config.gelu,
        "rope_width": config.rope_width,
        "rope_scaling": config.rope_scaling,
        "parallel_residual": bool(config.parallel_residual),
    }
    return unsupported_fields(config, **wanted) + grouped_heads(config) + other_widths(config)


GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    _unsupported,
    _rules,
    _write,
    _read,
    aliases={"lm_head.weight": "embed_out.weight"},
)

"""GPT2LMHeadModel (Radford et al. 2019) and our transformer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import (
    BY_HEAD,
    SAME,
    TRANSPOSED,
    TRANSPOSED_TRIPLE,
    TRIPLE,
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
from gristmill.evaluation.convert.hf.rope_and_windows import read_partial_rope, write_partial_rope
from gristmill.training.config.model import ModelConfig


def _rules(config: ModelConfig) -> list[WeightRule]:
    layer = "transformer.h.{i}"
    triple = ("layers.{i}.mixer.query", "layers.{i}.mixer.key", "layers.{i}.mixer.value")
    rules = weight_and_bias(f"{layer}.attn.c_attn", triple, TRANSPOSED_TRIPLE, TRIPLE)
    for hf_name, ours in (
        ("attn.c_proj", "mixer.output"),
        ("mlp.c_fc", "mlp.up"),
        ("mlp.c_proj", "mlp.down"),
    ):
        rules += weight_and_bias(f"{layer}.{hf_name}", (f"layers.{{i}}.{ours}",), TRANSPOSED, SAME)
    for hf_name, ours in (
        (f"{layer}.ln_1", "layers.{i}.mixer_norm"),
        (f"{layer}.ln_2", "layers.{i}.mlp_norm"),
        ("transformer.ln_f", "final_norm"),
    ):
        rules += [WeightRule(f"{hf_name}.{leaf}", (f"{ours}.{leaf}",)) for leaf in ("weight", "bias")]
    rules += [
        WeightRule("transformer.wte.weight", ("embedding.weight",)),
        WeightRule("transformer.wpe.weight", ("positions.weight",)),
    ]
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


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
        "ffn_hidden_size": fields.get("n_inner") or 4 * fields["n_embd"],
        "sequence_length": fields.get("n_positions") or fields["n_ctx"],
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "tied_embeddings": fields.get("tie_word_embeddings", True),
    }


CONSTANTS = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "biases": True}


def _unsupported(config: ModelConfig) -> list[str]:
    return unsupported_fields(config, **CONSTANTS) + grouped_heads(config) + other_widths(config)


GPT2 = ModelFamily("GPT2LMHeadModel", "gpt2", _unsupported, _rules, _write, _read)


# GPTJForCausalLM (GPT-J-6B, 2021) and our transformer: attention and MLP share one norm, and neighbouring features of
# a head turn together, where ours are half the turned width apart.

GPTJ_CONSTANTS = {
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


def _gptj_rules(config: ModelConfig) -> list[WeightRule]:
    hf_name, ours = "transformer.h.{i}", "layers.{i}"
    rules = [
        WeightRule("transformer.wte.weight", ("embedding.weight",)),
        WeightRule(f"{hf_name}.attn.q_proj.weight", (f"{ours}.mixer.query.weight",), INTERLEAVED),
        WeightRule(f"{hf_name}.attn.k_proj.weight", (f"{ours}.mixer.key.weight",), INTERLEAVED),
    ]
    attention = {f"{hf_name}.attn.v_proj": f"{ours}.mixer.value", f"{hf_name}.attn.out_proj": f"{ours}.mixer.output"}
    rules += linear_rules(attention, False)
    mlp = {f"{hf_name}.mlp.fc_in": f"{ours}.mlp.up", f"{hf_name}.mlp.fc_out": f"{ours}.mlp.down"}
    rules += linear_rules(mlp, True)
    rules += norm_rules(config, {f"{hf_name}.ln_1": f"{ours}.mixer_norm", "transformer.ln_f": "final_norm"})
    rules.append(WeightRule("lm_head.bias", ("head.bias",)))
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _write_gptj(config: ModelConfig) -> Fields:
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


def _read_gptj(fields: Mapping[str, Any]) -> Fields:
    width, heads = fields["n_embd"], fields["n_head"]
    turned = fields.get("rotary_dim", 64)
    if turned is None:
        raise UnsupportedConfig(
            "config.json says rotary_dim=null, positions over the whole width; gristmill turns heads"
        )
    return {
        **GPTJ_CONSTANTS,
        "layers": fields["n_layer"],
        "width": width,
        "heads": heads,
        "ffn_hidden_size": fields.get("n_inner") or 4 * width,
        "sequence_length": fields.get("n_positions", 2048),
        "gelu": read_gelu(fields, "activation_function", "gelu_new"),
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "rope_width": 0 if turned == width // heads else turned,
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def _unsupported_gptj(config: ModelConfig) -> list[str]:
    lacking = unsupported_fields(config, gelu=config.gelu, rope_width=config.rope_width, **GPTJ_CONSTANTS)
    base = [] if config.rope_base == 10000 else [f"rope_base={config.rope_base}"]
    return lacking + base + grouped_heads(config) + other_widths(config)


GPTJ = ModelFamily("GPTJForCausalLM", "gptj", _unsupported_gptj, _gptj_rules, _write_gptj, _read_gptj)


# GPTNeoXForCausalLM (Pythia, arXiv 2304.01373; GPT-NeoX-20B, 2204.06745) and our transformer: attention and MLP read
# the same stream through a norm each, and a part of each head turns.

NEOX_CONSTANTS = {"positions": "rope", "norm": "layernorm", "mlp": "gelu"}
SHARE = 0.25  # of a head that turns, where config.json does not say it


def _neox_rules(config: ModelConfig) -> list[WeightRule]:
    hf_name, ours = "gpt_neox.layers.{i}", "layers.{i}"
    triple = tuple(f"{ours}.mixer.{name}" for name in ("query", "key", "value"))
    packed = weight_and_bias(f"{hf_name}.attention.query_key_value", triple, BY_HEAD, BY_HEAD)
    rules = packed if config.projection_biases else packed[:1]
    rules += linear_rules({f"{hf_name}.attention.dense": f"{ours}.mixer.output"}, config.output_biases)
    mlp = {f"{hf_name}.mlp.dense_h_to_4h": f"{ours}.mlp.up", f"{hf_name}.mlp.dense_4h_to_h": f"{ours}.mlp.down"}
    rules += linear_rules(mlp, config.mlp_biases)
    norms = {
        f"{hf_name}.input_layernorm": f"{ours}.mixer_norm",
        f"{hf_name}.post_attention_layernorm": f"{ours}.mlp_norm",
        "gpt_neox.final_layer_norm": "final_norm",
    }
    rules += norm_rules(config, norms)
    rules.append(WeightRule("gpt_neox.embed_in.weight", ("embedding.weight",)))
    return rules if config.tied_embeddings else [*rules, WeightRule("embed_out.weight", ("head.weight",))]


def _write_neox(config: ModelConfig) -> Fields:
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


def _read_neox(fields: Mapping[str, Any]) -> Fields:
    names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    rope = {**fields} | {ours: fields[hf_name] for hf_name, ours in names.items() if hf_name in fields}
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    return {
        **NEOX_CONSTANTS,
        "layers": fields["num_hidden_layers"],
        "width": width,
        "heads": heads,
        "ffn_hidden_size": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "gelu": read_gelu(fields, "hidden_act", "gelu"),
        "norm_epsilon": fields.get("layer_norm_eps", 1e-5),
        **read_partial_rope(rope, width // heads, SHARE),
        "parallel_residual": bool(fields.get("use_parallel_residual", True)),
        "biases": True if fields.get("attention_bias", True) else "mlp",
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def _unsupported_neox(config: ModelConfig) -> list[str]:
    wanted = {
        **NEOX_CONSTANTS,
        "biases": config.biases if config.biases in (True, "mlp") else True,
        "gelu": config.gelu,
        "rope_width": config.rope_width,
        "rope_scaling": config.rope_scaling,
        "parallel_residual": bool(config.parallel_residual),
    }
    return unsupported_fields(config, **wanted) + grouped_heads(config) + other_widths(config)


GPT_NEOX = ModelFamily(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    _unsupported_neox,
    _neox_rules,
    _write_neox,
    _read_neox,
    aliases={"lm_head.weight": "embed_out.weight"},
)

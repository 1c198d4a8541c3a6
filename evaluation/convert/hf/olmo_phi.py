"""OlmoForCausalLM (arXiv 2402.00838), Olmo2ForCausalLM (2501.00656) and Olmo3ForCausalLM (2512.13961) and our
transformer. OLMo is a Llama whose norms have no parameters; from OLMo 2 on, norms follow attention and MLP and
normalization queries and keys over all heads; OLMo 3 adds windows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    TensorConversion,
    WeightRule,
    norm_rules,
    other_widths,
    read_gelu,
    require_value,
    unsupported_fields,
    without,
    write_gelu,
)
from gristmill.evaluation.convert.hf.llama import (
    QK_NORM_RULES,
    attention_rules,
    ends_rules,
    layer_rules,
    mlp_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.convert.hf.rope_and_windows import (
    FULL,
    SLIDING,
    layer_types,
    one_window,
    read_layer_types,
    read_one_window,
    read_partial_rope,
    read_rope_by_window,
    several_windows,
    some_windows,
    stated_window,
    write_partial_rope,
    write_rope_by_window,
)
from gristmill.training.config.model import ModelConfig

NORM_EPSILON = 1e-5  # of OLMo 1; no field of config.json
OUTPUT_NORMS = {"post_attention_layernorm": "mixer_norm", "post_feedforward_layernorm": "mlp_norm"}
OLMO_3_BASE = 500000.0


def _biases(config: ModelConfig) -> bool | str:
    """Required value of the field: the whole attention's, or none."""
    return config.biases if config.biases in (False, "attention") else False


def _olmo_rules(config: ModelConfig) -> list[WeightRule]:
    return [*attention_rules(config), *mlp_rules(config), *ends_rules(config)]


def _write_olmo(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "mlp_bias", "rms_norm_eps", "head_dim")
    return {**fields, "clip_qkv": config.qkv_clip}


def _read_olmo(fields: Mapping[str, Any]) -> Fields:
    read = read_llama({**fields, "mlp_bias": False, "rms_norm_eps": NORM_EPSILON})
    return {**read, "norm": "plain_layernorm", "qkv_clip": fields.get("clip_qkv")}


def _olmo_lacks(config: ModelConfig) -> list[str]:
    lacking = unsupported_fields(
        config,
        positions="rope",
        norm="plain_layernorm",
        mlp="swiglu",
        biases=_biases(config),
        qkv_clip=config.qkv_clip,
        rope_scaling=config.rope_scaling,
    )
    if config.norm_epsilon != NORM_EPSILON:
        lacking.append(f"norm_epsilon={config.norm_epsilon}")
    return lacking + other_widths(config)


def _olmo2_rules(config: ModelConfig) -> list[WeightRule]:
    return [*attention_rules(config), *QK_NORM_RULES, *mlp_rules(config), *ends_rules(config, OUTPUT_NORMS)]


def _write_olmo2(config: ModelConfig) -> Fields:
    return without(write_llama(config), "mlp_bias", "head_dim")


def _read_olmo2(fields: Mapping[str, Any]) -> Fields:
    return {**read_llama({**fields, "mlp_bias": False}), "norm_order": "output", "qk_norm": "width"}


def _olmo2_lacks(config: ModelConfig, **wanted: Any) -> list[str]:
    lacking = unsupported_fields(
        config,
        positions="rope",
        norm="rmsnorm",
        norm_order="output",
        mlp="swiglu",
        biases=_biases(config),
        qk_norm="width",
        rope_scaling=config.rope_scaling,
        **wanted,
    )
    return lacking + other_widths(config)


def _write_olmo3(config: ModelConfig) -> Fields:
    fields = without(_write_olmo2(config), "rope_scaling", "rope_theta")
    windows = {"sliding_window": stated_window(config), "layer_types": layer_types(config)}
    return {**fields, **write_rope_by_window(config), **windows}


def _read_olmo3(fields: Mapping[str, Any]) -> Fields:
    layers = int(fields["num_hidden_layers"])
    windows = read_layer_types(fields, [FULL if (index + 1) % 4 == 0 else SLIDING for index in range(layers)])
    rope = read_rope_by_window(fields, OLMO_3_BASE, window_base=None)
    plain = without({**fields}, "rope_parameters", "rope_scaling")
    return {**_read_olmo2(plain), **windows, **rope}


def _olmo3_lacks(config: ModelConfig) -> list[str]:
    lacking = _olmo2_lacks(config, windows=True, window_rope_base=config.window_rope_base)
    return lacking + several_windows(config)


OLMO = ModelFamily("OlmoForCausalLM", "olmo", _olmo_lacks, _olmo_rules, _write_olmo, _read_olmo)
OLMO_2 = ModelFamily("Olmo2ForCausalLM", "olmo2", _olmo2_lacks, _olmo2_rules, _write_olmo2, _read_olmo2)
OLMO_3 = ModelFamily("Olmo3ForCausalLM", "olmo3", _olmo3_lacks, _olmo2_rules, _write_olmo3, _read_olmo3)


# PhiForCausalLM (Phi 1, 1.5 and 2, arXiv 2306.11644) and Phi3ForCausalLM (Phi 3 and 4, 2404.14219) and our
# transformer. The first is GPT-J with biases; the second a Llama that packs its projections.

PHI = {
    "positions": "rope",
    "norm": "layernorm",
    "mlp": "gelu",
    "biases": True,
    "parallel_residual": "one_norm",
    "head_bias": True,
}
PHI_LAYER = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.dense": "mixer.output",
    "mlp.fc1": "mlp.up",
    "mlp.fc2": "mlp.down",
}
SHARE = 0.5  # of a head that turns, where config.json of Phi does not say it


def _joined(tensors: Sequence[Tensor], _: ModelConfig) -> Tensor:
    return torch.cat(list(tensors))


def _query_key_value(tensor: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    keys = config.num_kv_heads * config.head_dim
    return tensor.split((config.heads * config.head_dim, keys, keys))


PACKED_HEADS = TensorConversion(_joined, _query_key_value)
HALVES = TensorConversion(_joined, lambda tensor, _: tensor.chunk(2))


def _phi_rules(config: ModelConfig) -> list[WeightRule]:
    norms = {
        "model.layers.{i}.input_layernorm": "layers.{i}.mixer_norm",
        "model.final_layernorm": "final_norm",
    }
    if config.qk_norm:
        for hf_name, ours in (("q", "query"), ("k", "key")):
            norms[f"model.layers.{{i}}.self_attn.{hf_name}_layernorm"] = f"layers.{{i}}.mixer.{ours}_norm"
    rules = [*layer_rules(PHI_LAYER, True), *norm_rules(config, norms)]
    rules += [
        WeightRule("model.embed_tokens.weight", ("embedding.weight",)),
        WeightRule("lm_head.bias", ("head.bias",)),
    ]
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _write_phi(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "attention_bias", "mlp_bias", "rms_norm_eps", "head_dim")
    return {
        **fields,
        **write_partial_rope(config),
        "intermediate_size": config.hidden_width("gelu"),
        "hidden_act": write_gelu(config),
        "layer_norm_eps": config.norm_epsilon,
        "qk_layernorm": config.qk_norm,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
    }


def _read_phi(fields: Mapping[str, Any]) -> Fields:
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    return {
        **PHI,
        "layers": fields["num_hidden_layers"],
        "width": width,
        "heads": heads,
        "kv_heads": fields.get("num_key_value_heads") or heads,
        "ffn_hidden_size": fields["intermediate_size"],
        "sequence_length": fields.get("max_position_embeddings", 2048),
        "gelu": read_gelu(fields, "hidden_act", "gelu_new"),
        "norm_epsilon": fields.get("layer_norm_eps", 1e-5),
        **read_partial_rope(fields, width // heads, SHARE),
        "qk_norm": bool(fields.get("qk_layernorm", False)),
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def _phi_lacks(config: ModelConfig) -> list[str]:
    wanted = {
        **PHI,
        "gelu": config.gelu,
        "rope_width": config.rope_width,
        "rope_scaling": config.rope_scaling,
        "qk_norm": bool(config.qk_norm),
    }
    return unsupported_fields(config, **wanted) + other_widths(config)


def _phi3_rules(config: ModelConfig) -> list[WeightRule]:
    hf_name, ours = "model.layers.{i}", "layers.{i}"
    heads = tuple(f"{ours}.mixer.{name}.weight" for name in ("query", "key", "value"))
    return [
        *ends_rules(config),
        *layer_rules({"self_attn.o_proj": "mixer.output", "mlp.down_proj": "mlp.down"}, False),
        WeightRule(f"{hf_name}.self_attn.qkv_proj.weight", heads, PACKED_HEADS),
        WeightRule(f"{hf_name}.mlp.gate_up_proj.weight", (f"{ours}.mlp.gate.weight", f"{ours}.mlp.up.weight"), HALVES),
    ]


def _write_phi3(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "attention_bias", "mlp_bias", "head_dim")
    lengths = {"original_max_position_embeddings": config.sequence_length, "sliding_window": one_window(config)}
    return {**fields, **write_partial_rope(config), **lengths}


def _read_phi3(fields: Mapping[str, Any]) -> Fields:
    require_value({"attention_bias": bool(fields.get("attention_bias", False))}, "attention_bias", False)
    share = {**fields} | {"partial_rotary_factor": None, "rope_parameters": None, "rope_scaling": None}
    rope = read_partial_rope(fields, fields["hidden_size"] // fields["num_attention_heads"])
    return {**read_llama(share), **rope, **read_one_window(fields)}


def _phi3_lacks(config: ModelConfig) -> list[str]:
    lacking = unsupported_fields(
        config, windows=True, positions="rope", norm="rmsnorm", mlp="swiglu", biases=False, rope_width=config.rope_width
    )
    return lacking + several_windows(config) + some_windows(config) + other_widths(config)


PHI_1 = ModelFamily("PhiForCausalLM", "phi", _phi_lacks, _phi_rules, _write_phi, _read_phi)
PHI_3 = ModelFamily("Phi3ForCausalLM", "phi3", _phi3_lacks, _phi3_rules, _write_phi3, _read_phi3)

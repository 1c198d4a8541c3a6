"""OlmoForCausalLM (arXiv 2402.00838), Olmo2ForCausalLM (2501.00656) and Olmo3ForCausalLM (2512.13961) and our
transformer. OLMo is a Llama whose norms have no parameters; from OLMo 2 on, norms follow attention and MLP and
normalise queries and keys over all heads; OLMo 3 adds windows."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    other_widths,
    unsupported_fields,
    without,
)
from gristmill.evaluation.models.conversion.llama import (
    attention_rules,
    ends_rules,
    mlp_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.models.conversion.moe import QK_NORM_RULES
from gristmill.evaluation.models.conversion.rope import (
    FULL,
    SLIDING,
    read_rope_by_window,
    write_rope_by_window,
)
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.evaluation.models.conversion.windows import layer_types, read_layer_types, several_windows, stated_window
from gristmill.training.model_config import ModelConfig

NORM_EPSILON = 1e-5  # of OLMo 1; no field of config.json
OUTPUT_NORMS = {"post_attention_layernorm": "mixer_norm", "post_feedforward_layernorm": "mlp_norm"}
OLMO_3_BASE = 500000.0


def _biases(config: ModelConfig) -> bool | str:
    """What the field must be: the whole attention's, or none."""
    return config.biases if config.biases in (False, "attention") else False


def _olmo_rules(config: ModelConfig) -> list[Rule]:
    return [*attention_rules(config), *mlp_rules(config), *ends_rules(config)]


def _write_olmo(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "mlp_bias", "rms_norm_eps", "head_dim")
    return {**fields, "clip_qkv": config.qkv_clip}


def _read_olmo(fields: Mapping[str, Any]) -> Fields:
    read = read_llama({**fields, "mlp_bias": False, "rms_norm_eps": NORM_EPSILON})
    return {**read, "norm": "plain_layernorm", "qkv_clip": fields.get("clip_qkv")}


def _olmo_lacks(config: ModelConfig) -> list[str]:
    found = unsupported_fields(
        config,
        positions="rope",
        norm="plain_layernorm",
        mlp="swiglu",
        biases=_biases(config),
        qkv_clip=config.qkv_clip,
        rope_scaling=config.rope_scaling,
    )
    if config.norm_epsilon != NORM_EPSILON:
        found.append(f"norm_epsilon={config.norm_epsilon}")
    return found + other_widths(config)


def _olmo2_rules(config: ModelConfig) -> list[Rule]:
    return [*attention_rules(config), *QK_NORM_RULES, *mlp_rules(config), *ends_rules(config, OUTPUT_NORMS)]


def _write_olmo2(config: ModelConfig) -> Fields:
    return without(write_llama(config), "mlp_bias", "head_dim")


def _read_olmo2(fields: Mapping[str, Any]) -> Fields:
    return {**read_llama({**fields, "mlp_bias": False}), "norm_order": "output", "qk_norm": "width"}


def _olmo2_lacks(config: ModelConfig, **wanted: Any) -> list[str]:
    found = unsupported_fields(
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
    return found + other_widths(config)


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
    found = _olmo2_lacks(config, windows=True, window_rope_base=config.window_rope_base)
    return found + several_windows(config)


OLMO = Family("OlmoForCausalLM", "olmo", _olmo_lacks, _olmo_rules, _write_olmo, _read_olmo)
OLMO_2 = Family("Olmo2ForCausalLM", "olmo2", _olmo2_lacks, _olmo2_rules, _write_olmo2, _read_olmo2)
OLMO_3 = Family("Olmo3ForCausalLM", "olmo3", _olmo3_lacks, _olmo2_rules, _write_olmo3, _read_olmo3)

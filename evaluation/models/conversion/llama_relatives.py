"""MistralForCausalLM (arXiv 2310.06825), Qwen2ForCausalLM (2407.10671), Qwen3ForCausalLM (2505.09388) and
Starcoder2ForCausalLM (2402.19173): Llamas with windows, with other biases, with normalised queries and keys, or with
GPT-2's norm and MLP."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    other_widths,
    require_value,
    unsupported_fields,
    without,
)
from gristmill.evaluation.models.conversion.llama import (
    attention_rules,
    ends_rules,
    layer_rules,
    mlp_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.models.conversion.moe import QK_NORM_RULES
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.evaluation.models.conversion.windows import (
    one_window,
    read_one_window,
    read_windows,
    several_windows,
    some_windows,
    write_windows,
)
from gristmill.training.model_config import ModelConfig


def _lacks(config: ModelConfig, **wanted: Any) -> list[str]:
    plain = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "biases": False, "qk_norm": False}
    found = unsupported_fields(config, windows=True, rope_scaling=config.rope_scaling, **(plain | wanted))
    return found + several_windows(config)


def _rules(config: ModelConfig) -> list[Rule]:
    norms = QK_NORM_RULES if config.qk_norm else []
    return [*attention_rules(config), *norms, *mlp_rules(config), *ends_rules(config)]


def _mistral_lacks(config: ModelConfig) -> list[str]:
    return _lacks(config) + some_windows(config)


def _write_mistral(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "attention_bias", "mlp_bias")
    return fields | {"sliding_window": one_window(config)}


def _read_mistral(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | read_one_window(fields)


def _write_qwen2(config: ModelConfig) -> Fields:
    return without(write_llama(config), "attention_bias", "mlp_bias", "head_dim") | write_windows(config)


def _read_qwen2(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | read_windows(fields) | {"biases": "qkv"}


def _qwen2_lacks(config: ModelConfig) -> list[str]:
    return _lacks(config, biases="qkv") + other_widths(config)


def _write_qwen3(config: ModelConfig) -> Fields:
    return without(write_llama(config), "mlp_bias") | write_windows(config)


def _read_qwen3(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | read_windows(fields) | {"qk_norm": True}


def _qwen3_lacks(config: ModelConfig) -> list[str]:
    biases = config.biases if config.biases in (False, "attention") else False
    return _lacks(config, biases=biases, qk_norm=True)


def _starcoder2_rules(config: ModelConfig) -> list[Rule]:
    mlp = layer_rules({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}, config.mlp_biases)
    return [*attention_rules(config), *mlp, *ends_rules(config)]


def _write_starcoder2(config: ModelConfig) -> Fields:
    fields = without(write_llama(config), "attention_bias", "mlp_bias", "rms_norm_eps", "head_dim")
    return fields | {
        "intermediate_size": config.hidden_width("gelu"),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config.norm_epsilon,
        "use_bias": True,
        "sliding_window": one_window(config),
    }


def _read_starcoder2(fields: Mapping[str, Any]) -> Fields:
    require_value(fields, "hidden_act", "gelu_pytorch_tanh")
    require_value({"use_bias": fields.get("use_bias", True)}, "use_bias", True)
    read = read_llama({**fields, "hidden_act": "silu", "rms_norm_eps": fields["norm_epsilon"]})
    return {**read, **read_one_window(fields), "biases": True, "mlp": "gelu", "norm": "layernorm"}


def _starcoder2_lacks(config: ModelConfig) -> list[str]:
    found = _lacks(config, biases=True, norm="layernorm", mlp="gelu")
    return found + some_windows(config) + other_widths(config)


MISTRAL = Family("MistralForCausalLM", "mistral", _mistral_lacks, _rules, _write_mistral, _read_mistral)
QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _qwen2_lacks, _rules, _write_qwen2, _read_qwen2)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _qwen3_lacks, _rules, _write_qwen3, _read_qwen3)
STARCODER2 = Family(
    "Starcoder2ForCausalLM",
    "starcoder2",
    _starcoder2_lacks,
    _starcoder2_rules,
    _write_starcoder2,
    _read_starcoder2,
)

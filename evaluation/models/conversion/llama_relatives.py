"""MistralForCausalLM (arXiv 2310.06825), Qwen2ForCausalLM (2407.10671), Qwen3ForCausalLM (2505.09388) and
Starcoder2ForCausalLM (2402.19173): Llamas with windows, with other biases, with normalised queries and keys, or with
GPT-2's norm and MLP."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import Family, Fields, require_value, unsupported_fields
from gristmill.evaluation.models.conversion.llama import (
    attention_rules,
    ends_rules,
    linear_rules,
    mlp_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.models.conversion.moe import QK_NORM_RULES
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def _lacks(config: ModelConfig, **wanted: Any) -> list[str]:
    plain = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "biases": False, "qk_norm": False}
    found = unsupported_fields(config, windows=True, rope_scaling=config.rope_scaling, **(plain | wanted))
    if len(_windows(config)) > 1:
        found.append(f"windows of several sizes ({config.window})")
    return found


def _windows(config: ModelConfig) -> set[int]:
    return {layer.window for layer in config.layer_list if layer.window is not None}


def _window(config: ModelConfig) -> int | None:
    """The size that all windows have; None without any."""
    return next(iter(_windows(config)), None)


def _with_one_window(config: ModelConfig, found: list[str]) -> list[str]:
    """Adds what an architecture lacks whose layers all have the same window."""
    differ = len({layer.window for layer in config.layer_list}) > 1
    return [*found, f"windows in some layers only ({config.window})"] if differ else found


def _with_whole_heads(config: ModelConfig, found: list[str]) -> list[str]:
    """Adds what an architecture lacks whose heads together are as wide as the model."""
    differ = config.head_dim * config.heads != config.width
    return [*found, f"head_width={config.head_dim}"] if differ else found


def _rules(config: ModelConfig) -> list[Rule]:
    norms = QK_NORM_RULES if config.qk_norm else []
    return [*attention_rules(config), *norms, *mlp_rules(config), *ends_rules(config)]


def _without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def _mistral_lacks(config: ModelConfig) -> list[str]:
    return _with_one_window(config, _lacks(config))


def _write_mistral(config: ModelConfig) -> Fields:
    fields = _without(write_llama(config), "attention_bias", "mlp_bias")
    return fields | {"sliding_window": _window(config)}


def _read_mistral(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | _one_window(fields)


def _one_window(fields: Mapping[str, Any]) -> Fields:
    """A window of all layers; none if it is as long as the longest sample."""
    window = fields.get("sliding_window")
    return {"window": window if window is not None and window < fields["max_position_embeddings"] else None}


def _write_windows(config: ModelConfig) -> Fields:
    """As Qwen's configs say it: by layer, and for older versions of transformers the first layer that has a window."""
    windows = [layer.window for layer in config.layer_list]
    first = next((index for index, window in enumerate(windows) if window is not None), len(windows))
    return {
        "use_sliding_window": first < len(windows),
        "sliding_window": _window(config),
        "max_window_layers": first,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def _read_windows(fields: Mapping[str, Any]) -> Fields:
    layers = int(fields["num_hidden_layers"])
    if not fields.get("use_sliding_window", False):
        return {"window": None}
    first = int(fields.get("max_window_layers", layers))
    kinds = fields.get("layer_types") or [FULL] * first + [SLIDING] * (layers - first)
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        raise InputError(f"config.json has layer_types={kinds}; expected {layers} times {FULL} or {SLIDING}")
    window = _one_window(fields)["window"]
    return {"window": tuple(window if kind == SLIDING else None for kind in kinds)}


def _write_qwen2(config: ModelConfig) -> Fields:
    return _without(write_llama(config), "attention_bias", "mlp_bias", "head_dim") | _write_windows(config)


def _read_qwen2(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | _read_windows(fields) | {"biases": "qkv"}


def _qwen2_lacks(config: ModelConfig) -> list[str]:
    return _with_whole_heads(config, _lacks(config, biases="qkv"))


def _write_qwen3(config: ModelConfig) -> Fields:
    return _without(write_llama(config), "mlp_bias") | _write_windows(config)


def _read_qwen3(fields: Mapping[str, Any]) -> Fields:
    return read_llama(fields) | _read_windows(fields) | {"qk_norm": True}


def _qwen3_lacks(config: ModelConfig) -> list[str]:
    biases = config.biases if config.biases in (False, "attention") else False
    return _lacks(config, biases=biases, qk_norm=True)


def _starcoder2_rules(config: ModelConfig) -> list[Rule]:
    norms = [
        Rule(f"{theirs}.bias", (f"{ours}.bias",))
        for theirs, ours in (
            ("model.layers.{i}.input_layernorm", "layers.{i}.mixer_norm"),
            ("model.layers.{i}.post_attention_layernorm", "layers.{i}.mlp_norm"),
            ("model.norm", "final_norm"),
        )
    ]
    mlp = linear_rules({"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}, config.mlp_biases)
    return [*attention_rules(config), *mlp, *ends_rules(config), *norms]


def _write_starcoder2(config: ModelConfig) -> Fields:
    fields = _without(write_llama(config), "attention_bias", "mlp_bias", "rms_norm_eps", "head_dim")
    return fields | {
        "intermediate_size": config.hidden_width("gelu"),
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config.norm_epsilon,
        "use_bias": True,
        "sliding_window": _window(config),
    }


def _read_starcoder2(fields: Mapping[str, Any]) -> Fields:
    require_value(fields, "hidden_act", "gelu_pytorch_tanh")
    require_value({"use_bias": fields.get("use_bias", True)}, "use_bias", True)
    read = read_llama({**fields, "hidden_act": "silu", "rms_norm_eps": fields["norm_epsilon"]})
    return {**read, **_one_window(fields), "biases": True, "mlp": "gelu", "norm": "layernorm"}


def _starcoder2_lacks(config: ModelConfig) -> list[str]:
    found = _with_one_window(config, _lacks(config, biases=True, norm="layernorm", mlp="gelu"))
    return _with_whole_heads(config, found)


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

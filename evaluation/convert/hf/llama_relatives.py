"""MistralForCausalLM (arXiv 2310.06825), Qwen2ForCausalLM (2407.10671), Qwen3ForCausalLM (2505.09388) and
Starcoder2ForCausalLM (2402.19173): Llamas with windows, with other biases, with normalized queries and keys, or with
GPT-2's norm and MLP."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    WeightRule,
    other_widths,
    require_value,
    unsupported_fields,
    without,
)
from gristmill.evaluation.convert.hf.llama import (
    attention_rules,
    ends_rules,
    layer_rules,
    mlp_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.convert.hf.moe import QK_NORM_RULES
from gristmill.evaluation.convert.hf.rope_and_windows import (
    FULL,
    SLIDING,
    layer_types,
    one_window,
    read_layer_types,
    read_one_window,
    read_partial_rope,
    read_windows,
    several_windows,
    some_windows,
    write_partial_rope,
    write_windows,
)
from gristmill.foundation.errors import InputError
from gristmill.training.config.layers import Scales
from gristmill.training.config.model import ModelConfig


def _lacks(config: ModelConfig, **wanted: Any) -> list[str]:
    plain = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "biases": False, "qk_norm": False}
    lacking = unsupported_fields(config, windows=True, rope_scaling=config.rope_scaling, **(plain | wanted))
    return lacking + several_windows(config)


def _rules(config: ModelConfig) -> list[WeightRule]:
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


def _starcoder2_rules(config: ModelConfig) -> list[WeightRule]:
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
    lacking = _lacks(config, biases=True, norm="layernorm", mlp="gelu")
    return lacking + some_windows(config) + other_widths(config)


MISTRAL = ModelFamily("MistralForCausalLM", "mistral", _mistral_lacks, _rules, _write_mistral, _read_mistral)
QWEN2 = ModelFamily("Qwen2ForCausalLM", "qwen2", _qwen2_lacks, _rules, _write_qwen2, _read_qwen2)
QWEN3 = ModelFamily("Qwen3ForCausalLM", "qwen3", _qwen3_lacks, _rules, _write_qwen3, _read_qwen3)
STARCODER2 = ModelFamily(
    "Starcoder2ForCausalLM",
    "starcoder2",
    _starcoder2_lacks,
    _starcoder2_rules,
    _write_starcoder2,
    _read_starcoder2,
)


# GraniteForCausalLM (arXiv 2405.04324) and SmolLM3ForCausalLM (2025) and our transformer: Llamas with constant
# factors, and with layers without rotary positions.


def _granite_rules(config: ModelConfig) -> list[WeightRule]:
    return [*attention_rules(config), *mlp_rules(config), *ends_rules(config)]


def _lacks_in_granite(config: ModelConfig, **wanted: Any) -> list[str]:
    plain = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "rope_scaling": config.rope_scaling}
    biases = config.biases if config.biases != "qkv" else False
    return unsupported_fields(config, **plain, biases=biases, **wanted) + other_widths(config)


def _write_granite(config: ModelConfig) -> Fields:
    scales = config.scales
    return {
        **without(write_llama(config), "head_dim"),
        "embedding_multiplier": scales.embedding,
        "residual_multiplier": scales.residual,
        "attention_multiplier": config.head_dim**-0.5 if scales.attention is None else scales.attention,
        "logits_scaling": scales.logit_divisor,
    }


def _read_granite(fields: Mapping[str, Any]) -> Fields:
    scales = Scales(
        embedding=fields.get("embedding_multiplier", 1.0),
        residual=fields.get("residual_multiplier", 1.0),
        attention=fields.get("attention_multiplier", 1.0),
        logit_divisor=fields.get("logits_scaling", 1.0),
    )
    return {**read_llama(fields), "scales": scales}


def _granite_lacks(config: ModelConfig) -> list[str]:
    return _lacks_in_granite(config, scales=config.scales)


def _write_smollm3(config: ModelConfig) -> Fields:
    return {
        **without(write_llama(config), "head_dim"),
        "no_rope_layers": [int(layer.rope) for layer in config.layer_list],
        "use_sliding_window": one_window(config) is not None,
        "sliding_window": one_window(config),
        "layer_types": layer_types(config),
    }


def _read_smollm3(fields: Mapping[str, Any]) -> Fields:
    layers, every = int(fields["num_hidden_layers"]), int(fields.get("no_rope_layer_interval", 4))
    turned = [bool(turns) for turns in fields.get("no_rope_layers") or ()]
    turned = turned or [(index + 1) % every != 0 for index in range(layers)]
    if len(turned) < layers:
        raise InputError(f"config.json has {len(turned)} no_rope_layers for {layers} layers; fetch the file again")
    has_windows = bool(fields.get("use_sliding_window")) and fields.get("sliding_window") is not None
    kinds = [SLIDING if has_windows and not turns else FULL for turns in turned[:layers]]
    rope_layers = None if all(turned[:layers]) else tuple(turned[:layers])
    read = read_llama({"tie_word_embeddings": True, **fields})
    return {**read, **read_layer_types(fields, kinds), "rope_layers": rope_layers}


def _smollm3_lacks(config: ModelConfig) -> list[str]:
    return _lacks_in_granite(config, windows=True, rope_layers=config.rope_layers) + several_windows(config)


GRANITE = ModelFamily("GraniteForCausalLM", "granite", _granite_lacks, _granite_rules, _write_granite, _read_granite)
SMOLLM3 = ModelFamily("SmolLM3ForCausalLM", "smollm3", _smollm3_lacks, _granite_rules, _write_smollm3, _read_smollm3)


# NemotronForCausalLM (Nemotron-4, arXiv 2402.16819; Minitron) and our transformer: LayerNorms that multiply by 1 +
# weight, squared ReLU, and heads of which a part turns.

CONSTANTS = {"positions": "rope", "norm": "layernorm", "norm_plus_one": True, "mlp": "relu2"}
SHARE = 0.5  # of a head that turns, where config.json does not say it


def _nemotron_rules(config: ModelConfig) -> list[WeightRule]:
    mlp = layer_rules({"mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}, config.mlp_biases)
    return [*attention_rules(config), *mlp, *ends_rules(config)]


def _write(config: ModelConfig) -> Fields:
    return {
        **without(write_llama(config), "rms_norm_eps"),
        **write_partial_rope(config),
        "intermediate_size": config.hidden_width("relu2"),
        "hidden_act": "relu2",
        "norm_eps": config.norm_epsilon,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    require_value({"hidden_act": fields.get("hidden_act", "relu2")}, "hidden_act", "relu2")
    plain = {"partial_rotary_factor": None, "rope_parameters": None, "rope_scaling": None}
    read = read_llama({**fields, **plain, "hidden_act": "silu", "rms_norm_eps": fields.get("norm_eps", 1e-5)})
    return {**read, **CONSTANTS, **read_partial_rope(fields, read["head_width"], SHARE)}


def _unsupported(config: ModelConfig) -> list[str]:
    biases = config.biases if config.biases != "qkv" else False
    rope = {"rope_width": config.rope_width, "rope_scaling": config.rope_scaling}
    return unsupported_fields(config, **CONSTANTS, biases=biases, **rope)


NEMOTRON = ModelFamily("NemotronForCausalLM", "nemotron", _unsupported, _nemotron_rules, _write, _read)

"""GraniteForCausalLM (arXiv 2405.04324) and SmolLM3ForCausalLM (2025) and our transformer: Llamas with constant
factors, and with layers without rotary positions."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import Family, Fields, other_widths, unsupported_fields, without
from gristmill.evaluation.models.conversion.llama import (
    attention_rules,
    ends_rules,
    mlp_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.models.conversion.rope import FULL, SLIDING
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.evaluation.models.conversion.windows import layer_types, one_window, read_layer_types, several_windows
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig
from gristmill.training.scales_config import Scales


def _rules(config: ModelConfig) -> list[Rule]:
    return [*attention_rules(config), *mlp_rules(config), *ends_rules(config)]


def _lacks(config: ModelConfig, **wanted: Any) -> list[str]:
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
    return _lacks(config, scales=config.scales)


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
    return _lacks(config, windows=True, rope_layers=config.rope_layers) + several_windows(config)


GRANITE = Family("GraniteForCausalLM", "granite", _granite_lacks, _rules, _write_granite, _read_granite)
SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", _smollm3_lacks, _rules, _write_smollm3, _read_smollm3)

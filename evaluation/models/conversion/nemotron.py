"""NemotronForCausalLM (Nemotron-4, arXiv 2402.16819; Minitron) and our transformer: LayerNorms that multiply by
1 + weight, squared ReLU, and heads of which a part turns."""

from collections.abc import Mapping
from typing import Any

from gristmill.evaluation.models.conversion.family import Family, Fields, require_value, unsupported_fields, without
from gristmill.evaluation.models.conversion.llama import (
    attention_rules,
    ends_rules,
    layer_rules,
    read_llama,
    write_llama,
)
from gristmill.evaluation.models.conversion.rope import read_partial_rope, write_partial_rope
from gristmill.evaluation.models.conversion.tensor_conversion import Rule
from gristmill.training.model_config import ModelConfig

CONSTANTS = {"positions": "rope", "norm": "layernorm", "norm_plus_one": True, "mlp": "relu2"}
SHARE = 0.5  # of a head that turns, where config.json does not say it


def _rules(config: ModelConfig) -> list[Rule]:
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


NEMOTRON = Family("NemotronForCausalLM", "nemotron", _unsupported, _rules, _write, _read)

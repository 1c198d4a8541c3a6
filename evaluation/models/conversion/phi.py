"""PhiForCausalLM (Phi 1, 1.5 and 2, arXiv 2306.11644) and Phi3ForCausalLM (Phi 3 and 4, 2404.14219) and our
transformer. The first is GPT-J with biases; the second a Llama that packs its projections."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.models.conversion.family import (
    Family,
    Fields,
    norm_rules,
    other_widths,
    read_gelu,
    require_value,
    unsupported_fields,
    without,
    write_gelu,
)
from gristmill.evaluation.models.conversion.llama import ends_rules, layer_rules, read_llama, write_llama
from gristmill.evaluation.models.conversion.rope import read_partial_rope, write_partial_rope
from gristmill.evaluation.models.conversion.tensor_conversion import Rule, TensorConversion
from gristmill.evaluation.models.conversion.windows import one_window, read_one_window, several_windows, some_windows
from gristmill.training.model_config import ModelConfig

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


def _phi_rules(config: ModelConfig) -> list[Rule]:
    norms = {
        "model.layers.{i}.input_layernorm": "layers.{i}.mixer_norm",
        "model.final_layernorm": "final_norm",
    }
    if config.qk_norm:
        for theirs, ours in (("q", "query"), ("k", "key")):
            norms[f"model.layers.{{i}}.self_attn.{theirs}_layernorm"] = f"layers.{{i}}.mixer.{ours}_norm"
    rules = [*layer_rules(PHI_LAYER, True), *norm_rules(config, norms)]
    rules += [Rule("model.embed_tokens.weight", ("embedding.weight",)), Rule("lm_head.bias", ("head.bias",))]
    return rules if config.tied_embeddings else [*rules, Rule("lm_head.weight", ("head.weight",))]


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
        "hidden": fields["intermediate_size"],
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


def _phi3_rules(config: ModelConfig) -> list[Rule]:
    theirs, ours = "model.layers.{i}", "layers.{i}"
    heads = tuple(f"{ours}.mixer.{name}.weight" for name in ("query", "key", "value"))
    return [
        *ends_rules(config),
        *layer_rules({"self_attn.o_proj": "mixer.output", "mlp.down_proj": "mlp.down"}, False),
        Rule(f"{theirs}.self_attn.qkv_proj.weight", heads, PACKED_HEADS),
        Rule(f"{theirs}.mlp.gate_up_proj.weight", (f"{ours}.mlp.gate.weight", f"{ours}.mlp.up.weight"), HALVES),
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
    found = unsupported_fields(
        config, windows=True, positions="rope", norm="rmsnorm", mlp="swiglu", biases=False, rope_width=config.rope_width
    )
    return found + several_windows(config) + some_windows(config) + other_widths(config)


PHI_1 = Family("PhiForCausalLM", "phi", _phi_lacks, _phi_rules, _write_phi, _read_phi)
PHI_3 = Family("Phi3ForCausalLM", "phi3", _phi3_lacks, _phi3_rules, _write_phi3, _read_phi3)

"""DeepseekV2ForCausalLM (arXiv 2405.04434) and DeepseekV3ForCausalLM (2412.19437) and our transformer: Llamas with
latent attention and, after the first layers, mixtures of experts. Neighbouring features of the turned part of a head
turn together, and stand behind those that do not turn."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import (
    SAME,
    Fields,
    ModelFamily,
    TensorConversion,
    UnsupportedConfig,
    WeightRule,
    require_value,
    unsupported_fields,
    without,
)
from gristmill.evaluation.convert.hf.llama import (
    ends_rules,
    expert_rules,
    layer_rules,
    mlp_rules,
    one_value,
    read_llama,
    write_llama,
)
from gristmill.training.config.mixers.latent_attention import LatentAttentionMixer
from gristmill.training.config.model import ModelConfig

LATENT = "latent_attention"
NORM_EPSILON = 1e-6  # of the norms of the narrow vectors, whatever config.json says of the others
BIAS_UPDATE_RATE = 1e-3  # of DeepSeek-V3 (section 4.2); no field of config.json
SCALED = {"mscale": 0.0, "mscale_all_dim": 0.0}


def _mixer(config: ModelConfig) -> LatentAttentionMixer:
    mixer = config.mixer_named(LATENT)
    assert isinstance(mixer, LatentAttentionMixer)
    return mixer


def _pairs(width: int) -> Tensor:
    """Their feature of each of our turned features. 4 -> [0, 2, 1, 3]."""
    return torch.arange(width).unflatten(0, (-1, 2)).T.flatten()


def _query_order(config: ModelConfig) -> Tensor:
    """Their row of each of our rows of a head: ours has the turned features first."""
    mixer = _mixer(config)
    return torch.cat([mixer.plain_width + _pairs(mixer.rope_width), torch.arange(mixer.plain_width)])


def _key_order(config: ModelConfig) -> Tensor:
    mixer = _mixer(config)
    return torch.cat([torch.arange(mixer.key_value_rank), mixer.key_value_rank + _pairs(mixer.rope_width)])


def _in_order(tensor: Tensor, order: Tensor) -> Tensor:
    return tensor.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def _joined(order: Any, tensors: Sequence[Tensor], config: ModelConfig) -> Tensor:
    return _in_order(tensors[0], order(config).argsort())


def _split(order: Any, tensor: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    return [_in_order(tensor, order(config))]


QUERY = TensorConversion(partial(_joined, _query_order), partial(_split, _query_order))
KEY = TensorConversion(partial(_joined, _key_order), partial(_split, _key_order))


def _attention_rules(config: ModelConfig) -> list[WeightRule]:
    named = [("q_proj", "query", QUERY)]
    if _mixer(config).query_rank:
        named = [("q_a_proj", "query_down", SAME), ("q_a_layernorm", "query_norm", SAME), ("q_b_proj", "query", QUERY)]
    named += [
        ("kv_a_proj_with_mqa", "key_value_down", KEY),
        ("kv_a_layernorm", "key_value_norm", SAME),
        ("kv_b_proj", "key_value", SAME),
        ("o_proj", "output", SAME),
    ]
    return [
        WeightRule(f"model.layers.{{i}}.self_attn.{hf_name}.weight", (f"layers.{{i}}.mixer.{ours}.weight",), form)
        for hf_name, ours, form in named
    ]


def _rules(config: ModelConfig) -> list[WeightRule]:
    sparse = tuple(index for index, layer in enumerate(config.layer_list) if layer.experts)
    dense = tuple(index for index, layer in enumerate(config.layer_list) if not layer.experts)
    rules = [*_attention_rules(config), *ends_rules(config)]
    rules += [WeightRule(rule.hf_name, rule.ours, rule.form, dense) for rule in mlp_rules(config)]
    if config.moe is None or not sparse:
        return rules
    rules += expert_rules(config, "mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}, sparse)
    if config.moe.shared_experts:
        names = {f"mlp.shared_experts.{name}_proj": f"mlp.shared.{name}" for name in ("gate", "up", "down")}
        rules += [WeightRule(rule.hf_name, rule.ours, rule.form, sparse) for rule in layer_rules(names, False)]
    if config.moe.bias_update_rate:
        hf_name, ours = "mlp.gate.e_score_correction_bias", "mlp.router.balance_bias"
        rules.append(WeightRule(f"model.layers.{{i}}.{hf_name}", (f"layers.{{i}}.{ours}",), layers=sparse))
    return rules


def _write(config: ModelConfig) -> Fields:
    mixer, moe, fields = _mixer(config), config.moe, write_llama(config)
    sparse = [index for index, layer in enumerate(config.layer_list) if layer.experts]
    written = without(fields, "mlp_bias", "head_dim", "num_key_value_heads") | {
        "num_key_value_heads": config.heads,
        "kv_lora_rank": mixer.key_value_rank,
        "q_lora_rank": mixer.query_rank or None,
        "qk_rope_head_dim": mixer.rope_width,
        "qk_nope_head_dim": mixer.plain_width,
        "v_head_dim": mixer.value_width,
        "first_k_dense_replace": sparse[0] if sparse else config.layers,
        "n_shared_experts": moe.shared_experts if moe else 1,
        "norm_topk_prob": bool(moe and moe.normalize_gates),
        "routed_scaling_factor": moe.gate_scale if moe else 1.0,
        "n_group": moe.groups if moe else 1,
        "topk_group": moe.top_groups if moe else 1,
    }
    if moe is None:
        return written
    return written | {
        "n_routed_experts": one_value(config, "experts"),
        "num_experts_per_tok": one_value(config, "top_k"),
        "moe_intermediate_size": one_value(config, "expert_ffn_hidden_size"),
    }


def _write_v2(config: ModelConfig) -> Fields:
    grouped = config.moe is not None and config.moe.groups > 1
    return _write(config) | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _write_v3(config: ModelConfig) -> Fields:
    return _write(config) | {"rope_interleave": True, "num_nextn_predict_layers": 0}


def _read(fields: Mapping[str, Any]) -> Fields:
    require_value({"attention_bias": bool(fields.get("attention_bias", False))}, "attention_bias", False)
    require_value({"mlp_bias": bool(fields.get("mlp_bias", False))}, "mlp_bias", False)
    if fields["rms_norm_eps"] != NORM_EPSILON:
        require_value(fields, "rms_norm_eps", NORM_EPSILON)
    turned, plain = int(fields["qk_rope_head_dim"]), int(fields["qk_nope_head_dim"])
    llama = read_llama({**fields, "head_dim": turned + plain, "num_key_value_heads": None})
    options = {"key_value_rank": fields["kv_lora_rank"], "value_width": fields["v_head_dim"]}
    options |= {"query_rank": fields["q_lora_rank"]} if fields.get("q_lora_rank") else {}
    settings = {**llama, "kv_heads": 0, "rope_width": turned, "mixer": LATENT, "mixers": {LATENT: options}}
    dense, layers = int(fields.get("first_k_dense_replace", 0)), int(fields["num_hidden_layers"])
    if dense >= layers:
        return settings
    experts = int(fields["n_routed_experts"])
    moe = {
        "experts": tuple(0 if index < dense else experts for index in range(layers)) if dense else experts,
        "top_k": fields["num_experts_per_tok"],
        "ffn_hidden_size": fields["moe_intermediate_size"],
        "shared_experts": fields.get("n_shared_experts") or 0,
        "normalize_gates": bool(fields.get("norm_topk_prob")),
        "gate_scale": fields.get("routed_scaling_factor", 1.0),
        "groups": fields.get("n_group") or 1,
        "top_groups": fields.get("topk_group") or 1,
    }
    return {**settings, "moe": moe}


def _read_v2(fields: Mapping[str, Any]) -> Fields:
    """Its groups are scored by their best expert alone."""
    method, settings = fields.get("topk_method") or "greedy", _read(fields)
    if method not in ("greedy", "group_limited_greedy"):
        require_value(fields, "topk_method", "greedy")
    if moe := settings.get("moe"):
        grouped = {"group_score": "best"} if method == "group_limited_greedy" else {"groups": 1, "top_groups": 1}
        settings["moe"] = {**moe, **grouped, "normalize_gates": False}  # norm_topk_prob has no effect in its code
    return settings


def _read_v3(fields: Mapping[str, Any]) -> Fields:
    require_value({"rope_interleave": fields.get("rope_interleave", True)}, "rope_interleave", True)
    settings = _read(fields)
    if moe := settings.get("moe"):
        if moe["groups"] > 1 and moe["top_k"] != 2 * moe["top_groups"]:
            raise UnsupportedConfig(
                f"config.json says num_experts_per_tok={moe['top_k']} of topk_group={moe['top_groups']}; DeepSeek-V3 "
                "scores groups by their best two experts, and gristmill by top_k / top_groups"
            )
        settings["moe"] = {**moe, "router": "sigmoid", "bias_update_rate": BIAS_UPDATE_RATE}
    return settings


def _unsupported(config: ModelConfig, **routing: Any) -> list[str]:
    if set(config.used_mixers) != {LATENT} or config.pattern is not None:
        return ["model without latent attention in each layer"]
    lacking = unsupported_fields(
        config,
        positions="rope",
        norm="rmsnorm",
        mlp="swiglu",
        biases=False,
        mixer=LATENT,
        moe=config.moe,
        rope_width=config.rope_width,
        rope_scaling=config.rope_scaling,
        norm_epsilon=NORM_EPSILON,
    )
    counts = [layer.experts for layer in config.layer_list]
    if counts != sorted(counts) or len(set(counts) - {0}) > 1:
        lacking.append("experts in other layers than the last ones")
    if config.moe is None:
        return lacking
    for name in ("top_k", "expert_ffn_hidden_size"):
        if len({getattr(layer, name) for layer in config.layer_list if layer.experts}) > 1:
            lacking.append(f"moe with {name} by layer")
    plain = {"residual": False, **routing}
    lacking += [
        f"moe.{name}={getattr(config.moe, name)!r}" for name in plain if getattr(config.moe, name) != plain[name]
    ]
    return lacking if config.moe.shared_experts else [*lacking, "moe.shared_experts=0"]


def _v2_lacks(config: ModelConfig) -> list[str]:
    moe = config.moe
    grouped = {"group_score": "best"} if moe is not None and moe.groups > 1 else {}
    return _unsupported(config, router="softmax", bias_update_rate=0.0, normalize_gates=False, **grouped)


def _v3_lacks(config: ModelConfig) -> list[str]:
    lacking, moe = _unsupported(config, router="sigmoid", group_score="sum"), config.moe
    if moe is not None and not moe.bias_update_rate:
        lacking.append("moe.bias_update_rate=0.0")
    if moe is not None and moe.groups > 1 and one_value(config, "top_k") != 2 * moe.top_groups:
        lacking.append(f"groups scored by other than two experts (moe.top_k={moe.top_k})")
    return lacking


DEEPSEEK_V2 = ModelFamily("DeepseekV2ForCausalLM", "deepseek_v2", _v2_lacks, _rules, _write_v2, _read_v2)
DEEPSEEK_V3 = ModelFamily("DeepseekV3ForCausalLM", "deepseek_v3", _v3_lacks, _rules, _write_v3, _read_v3)

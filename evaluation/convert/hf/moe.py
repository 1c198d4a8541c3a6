"""MixtralForCausalLM (arXiv 2401.04088), Qwen3MoeForCausalLM (2505.09388), OlmoeForCausalLM (2409.02060) and our
transformer with mixture-of-experts layers. All are Llamas with other MLPs; Qwen3 and OLMoE normalize queries and keys,
by head or over all heads."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    WeightRule,
    require_value,
    unsupported_fields,
)
from gristmill.evaluation.convert.hf.llama import attention_rules, ends_rules, mlp_rules, read_llama, write_llama
from gristmill.evaluation.convert.hf.rope_and_windows import one_window, read_one_window, several_windows, some_windows
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig

QK_NORM_RULES = [
    WeightRule(f"model.layers.{{i}}.self_attn.{hf_name}_norm.weight", (f"layers.{{i}}.mixer.{ours}_norm.weight",))
    for hf_name, ours in (("q", "query"), ("k", "key"))
]
MIXTRAL_NAMES = ("block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "down"})
QWEN_NAMES = ("mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})


def _rules(names: tuple[str, dict[str, str]], config: ModelConfig) -> list[WeightRule]:
    block, experts = names
    sparse = tuple(index for index, layer in enumerate(config.layer_list) if layer.experts)
    dense = tuple(index for index, layer in enumerate(config.layer_list) if not layer.experts)
    rules = [*attention_rules(config), *ends_rules(config), *(QK_NORM_RULES if config.qk_norm else [])]
    rules += [WeightRule(rule.hf_name, rule.ours, rule.form, dense) for rule in mlp_rules(config)]
    return rules + expert_rules(config, block, experts, sparse)


def expert_rules(
    config: ModelConfig, block: str, experts: Mapping[str, str], sparse: tuple[int, ...]
) -> list[WeightRule]:
    """Those of the router and the experts in the layers `sparse`. experts: Hugging Face names to ours."""
    rules = [WeightRule(f"model.layers.{{i}}.{block}.gate.weight", ("layers.{i}.mlp.router.weight",), layers=sparse)]
    for hf_name, ours in experts.items():
        rules.append(
            WeightRule(
                f"model.layers.{{i}}.{block}.experts.{{e}}.{hf_name}.weight",
                (f"layers.{{i}}.mlp.experts.{ours}.weight",),
                layers=sparse,
                experts=one_value(config, "experts"),
            )
        )
    return rules


def one_value(config: ModelConfig, name: str) -> int:
    """The field of the mixture layers, which is the same in each."""
    return next(getattr(layer, name) for layer in config.layer_list if layer.experts)


def _unsupported(config: ModelConfig, windows: bool = False, **wanted: Any) -> list[str]:
    if config.moe is None or not config.has_experts:
        return ["model without experts"]
    moe, sparse = config.moe, [layer for layer in config.layer_list if layer.experts]
    lacking = unsupported_fields(
        config,
        windows=windows,
        positions="rope",
        norm="rmsnorm",
        mlp="swiglu",
        biases=False,
        moe=moe,
        qk_norm=wanted.pop("qk_norm"),
        rope_scaling=config.rope_scaling,
    )
    plain = {"shared_experts": 0, "residual": False, "router": "softmax", "gate_scale": 1.0, "groups": 1}
    for name, value in {**plain, "bias_update_rate": 0.0, **wanted}.items():
        if getattr(moe, name) != value:
            lacking.append(f"moe.{name}={getattr(moe, name)!r}")
    for name in ("experts", "top_k", "expert_ffn_hidden_size"):
        if len({getattr(layer, name) for layer in sparse}) > 1:
            lacking.append(f"moe with {name} by layer")
    return lacking


def _all_layers(config: ModelConfig, lacking: list[str]) -> list[str]:
    dense = any(not layer.experts for layer in config.layer_list)
    return [*lacking, "plain MLP in some layers"] if dense else lacking


def _write_moe(config: ModelConfig) -> Fields:
    fields = write_llama(config)
    return {name: fields[name] for name in fields if name not in ("mlp_bias", "head_dim")} | {
        "num_experts_per_tok": one_value(config, "top_k"),
        "output_router_logits": False,
    }


def _read_moe(fields: Mapping[str, Any], experts: int, hidden: int, normalize: bool) -> Fields:
    """The fields of a Llama, and those of a mixture in all layers."""
    if experts < 1:
        raise InputError(f"config.json says that there are {experts} experts; fetch the file again")
    moe = {
        "experts": experts,
        "top_k": fields["num_experts_per_tok"],
        "ffn_hidden_size": hidden,
        "normalize_gates": normalize,
    }
    require_value({"attention_bias": bool(fields.get("attention_bias", False))}, "attention_bias", False)
    read = read_llama(fields)
    return {**read, "moe": moe}


def _write_mixtral(config: ModelConfig) -> Fields:
    return _write_moe(config) | {
        "head_dim": config.head_dim,
        "intermediate_size": one_value(config, "expert_ffn_hidden_size"),
        "num_local_experts": one_value(config, "experts"),
        "sliding_window": one_window(config),
    }


def _read_mixtral(fields: Mapping[str, Any]) -> Fields:
    read = _read_moe(fields, int(fields["num_local_experts"]), int(fields["intermediate_size"]), True)
    return {**read, **read_one_window(fields)}


def _write_qwen(config: ModelConfig) -> Fields:
    assert config.moe is not None
    return _write_moe(config) | {
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_width("swiglu"),
        "moe_intermediate_size": one_value(config, "expert_ffn_hidden_size"),
        "num_experts": one_value(config, "experts"),
        "norm_topk_prob": config.moe.normalize_gates,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, layer in enumerate(config.layer_list) if not layer.experts],
    }


def _read_qwen(fields: Mapping[str, Any]) -> Fields:
    require_value({"use_sliding_window": fields.get("use_sliding_window", False)}, "use_sliding_window", False)
    experts = int(fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"])
    step, plain = int(fields.get("decoder_sparse_step", 1)), set(fields.get("mlp_only_layers") or ())
    layers = int(fields["num_hidden_layers"])
    pattern = tuple(0 if index in plain or (index + 1) % step else experts for index in range(layers))
    read = _read_moe(fields, experts, int(fields["moe_intermediate_size"]), bool(fields.get("norm_topk_prob", False)))
    read["moe"] |= {"experts": experts if all(pattern) else pattern}
    return {**read, "qk_norm": True}


def _write_olmoe(config: ModelConfig) -> Fields:
    assert config.moe is not None
    return _write_moe(config) | {
        "intermediate_size": one_value(config, "expert_ffn_hidden_size"),
        "num_experts": one_value(config, "experts"),
        "norm_topk_prob": config.moe.normalize_gates,
        "clip_qkv": None,
    }


def _read_olmoe(fields: Mapping[str, Any]) -> Fields:
    require_value({"clip_qkv": fields.get("clip_qkv")}, "clip_qkv", None)
    normalize = bool(fields.get("norm_topk_prob", False))
    read = _read_moe(fields, int(fields["num_experts"]), int(fields["intermediate_size"]), normalize)
    return {**read, "qk_norm": "width"}


def _mixtral_lacks(config: ModelConfig) -> list[str]:
    lacking = _all_layers(config, _unsupported(config, windows=True, qk_norm=False, normalize_gates=True))
    return lacking + several_windows(config) + some_windows(config)


def _qwen_lacks(config: ModelConfig) -> list[str]:
    return _unsupported(config, qk_norm=True)


def _olmoe_lacks(config: ModelConfig) -> list[str]:
    lacking = _all_layers(config, _unsupported(config, qk_norm="width"))
    return [*lacking, f"head_width={config.head_dim}"] if config.head_dim * config.heads != config.width else lacking


MIXTRAL = ModelFamily(
    "MixtralForCausalLM",
    "mixtral",
    _mixtral_lacks,
    partial(_rules, MIXTRAL_NAMES),
    _write_mixtral,
    _read_mixtral,
)
QWEN3_MOE = ModelFamily(
    "Qwen3MoeForCausalLM", "qwen3_moe", _qwen_lacks, partial(_rules, QWEN_NAMES), _write_qwen, _read_qwen
)
OLMOE = ModelFamily("OlmoeForCausalLM", "olmoe", _olmoe_lacks, partial(_rules, QWEN_NAMES), _write_olmoe, _read_olmoe)

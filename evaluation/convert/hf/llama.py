"""LlamaForCausalLM (arXiv 2302.13971, 2407.21783), NanoChatForCausalLM, the Llamas with mixtures of experts, and our
transformer."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    TensorConversion,
    WeightRule,
    linear_rules,
    norm_rules,
    other_widths,
    require_value,
    unsupported_fields,
    without,
)
from gristmill.evaluation.convert.hf.rope_and_windows import (
    one_window,
    read_one_window,
    read_rope,
    several_windows,
    some_windows,
    write_rope,
)
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig

OUTPUT = "mixer.output"
ATTENTION = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.o_proj": OUTPUT,
}
MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
NORMS = {"input_layernorm": "mixer_norm", "post_attention_layernorm": "mlp_norm"}


def attention_rules(config: ModelConfig) -> list[WeightRule]:
    projections = {hf_name: ours for hf_name, ours in ATTENTION.items() if ours != OUTPUT}
    output = {hf_name: ours for hf_name, ours in ATTENTION.items() if ours == OUTPUT}
    return layer_rules(projections, config.projection_biases) + layer_rules(output, config.output_biases)


def mlp_rules(config: ModelConfig) -> list[WeightRule]:
    return layer_rules(MLP, config.mlp_biases)


def layer_rules(pairs: Mapping[str, str], biases: bool) -> list[WeightRule]:
    """Rules of linear layers, named from their layer on."""
    return linear_rules(
        {f"model.layers.{{i}}.{hf_name}": f"layers.{{i}}.{ours}" for hf_name, ours in pairs.items()}, biases
    )


def ends_rules(config: ModelConfig, norms: Mapping[str, str] = NORMS) -> list[WeightRule]:
    """Embedding, norms and head."""
    pairs = {f"model.layers.{{i}}.{hf_name}": f"layers.{{i}}.{ours}" for hf_name, ours in norms.items()}
    rules = [WeightRule("model.embed_tokens.weight", ("embedding.weight",))]
    rules += norm_rules(config, pairs | {"model.norm": "final_norm"})
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _rules(config: ModelConfig) -> list[WeightRule]:
    return attention_rules(config) + mlp_rules(config) + ends_rules(config)


def write_llama(config: ModelConfig) -> Fields:
    return {
        "hidden_size": config.width,
        "intermediate_size": config.hidden_width("swiglu"),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.sequence_length,
        "rms_norm_eps": config.norm_epsilon,
        **write_rope(config),
        "attention_bias": config.output_biases,
        "mlp_bias": config.mlp_biases,
        "tie_word_embeddings": config.tied_embeddings,
    }


def read_llama(fields: Mapping[str, Any]) -> Fields:
    require_value(fields, "hidden_act", "silu")
    return {
        "layers": fields["num_hidden_layers"],
        "width": fields["hidden_size"],
        "heads": fields["num_attention_heads"],
        "kv_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "head_width": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "ffn_hidden_size": fields["intermediate_size"],
        "sequence_length": fields["max_position_embeddings"],
        "norm_epsilon": fields["rms_norm_eps"],
        **read_rope(fields),
        "biases": read_biases(fields),
        "tied_embeddings": fields.get("tie_word_embeddings", False),
    }


def read_biases(fields: Mapping[str, Any]) -> bool | str:
    attention, mlp = bool(fields.get("attention_bias", False)), bool(fields.get("mlp_bias", False))
    return attention if attention == mlp else "attention" if attention else "mlp"


def _unsupported(config: ModelConfig) -> list[str]:
    lacking = unsupported_fields(
        config, positions="rope", norm="rmsnorm", mlp="swiglu", rope_scaling=config.rope_scaling
    )
    return [*lacking, "biases=qkv"] if config.biases == "qkv" else lacking


LLAMA = ModelFamily("LlamaForCausalLM", "llama", _unsupported, _rules, write_llama, read_llama)


# NanoChatForCausalLM (karpathy/nanochat, as transformers has it) and our transformer: norms without parameters, of the
# embedding and of queries and keys too, squared ReLU, and bounded logits.
#
# Its rotary positions turn the other way: the second half of each head's queries and keys has the other sign.

CONSTANTS: dict[str, Any] = {
    "positions": "rope",
    "norm": "plain_rmsnorm",
    "mlp": "relu2",
    "qk_norm": True,
    "embedding_norm": True,
}
TURNED = ("mixer.query", "mixer.key")


def _negated(tensors: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """[H * K, D] with the second half of each head's rows negated."""
    first, second = tensors[0].unflatten(0, (-1, config.head_dim)).chunk(2, dim=1)
    return torch.cat([first, -second], dim=1).flatten(0, 1)


OTHER_WAY = TensorConversion(_negated, lambda tensor, config: [_negated([tensor], config)])


def _nanochat_rules(config: ModelConfig) -> list[WeightRule]:
    turned = [
        WeightRule(f"model.layers.{{i}}.{hf_name}.weight", (f"layers.{{i}}.{ours}.weight",), OTHER_WAY)
        for hf_name, ours in ATTENTION.items()
        if ours in TURNED
    ]
    others = {hf_name: ours for hf_name, ours in ATTENTION.items() if ours not in TURNED}
    linears = others | {"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}
    return [*turned, *layer_rules(linears, biases=False), *ends_rules(config)]


def _write_nanochat(config: ModelConfig) -> Fields:
    return without(write_llama(config), "mlp_bias", "head_dim") | {
        "intermediate_size": config.hidden_width("relu2"),
        "hidden_act": "relu2",
        "final_logit_softcapping": config.logit_softcap,
    }


def _read_nanochat(fields: Mapping[str, Any]) -> Fields:
    for name, value in (("hidden_act", "relu2"), ("attention_bias", False)):
        require_value({name: fields.get(name, value)}, name, value)
    read = read_llama({"rms_norm_eps": 1e-6, **fields, "hidden_act": "silu"})
    return {**read, **CONSTANTS, "logit_softcap": fields.get("final_logit_softcapping", 15.0)}


def _nanochat_unsupported(config: ModelConfig) -> list[str]:
    rope = {"rope_scaling": config.rope_scaling, "logit_softcap": config.logit_softcap}
    return unsupported_fields(config, **CONSTANTS, biases=False, **rope) + other_widths(config)


NANOCHAT = ModelFamily(
    "NanoChatForCausalLM", "nanochat", _nanochat_unsupported, _nanochat_rules, _write_nanochat, _read_nanochat
)


# MixtralForCausalLM (arXiv 2401.04088), Qwen3MoeForCausalLM (2505.09388), OlmoeForCausalLM (2409.02060) and our
# transformer with mixture-of-experts layers. All are Llamas with other MLPs; Qwen3 and OLMoE normalize queries and
# keys, by head or over all heads.

QK_NORM_RULES = [
    WeightRule(f"model.layers.{{i}}.self_attn.{hf_name}_norm.weight", (f"layers.{{i}}.mixer.{ours}_norm.weight",))
    for hf_name, ours in (("q", "query"), ("k", "key"))
]
MIXTRAL_NAMES = ("block_sparse_moe", {"w1": "gate", "w3": "up", "w2": "down"})
QWEN_NAMES = ("mlp", {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"})


def _moe_rules(names: tuple[str, dict[str, str]], config: ModelConfig) -> list[WeightRule]:
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


def _moe_unsupported(config: ModelConfig, windows: bool = False, **wanted: Any) -> list[str]:
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
    lacking = _all_layers(config, _moe_unsupported(config, windows=True, qk_norm=False, normalize_gates=True))
    return lacking + several_windows(config) + some_windows(config)


def _qwen_lacks(config: ModelConfig) -> list[str]:
    return _moe_unsupported(config, qk_norm=True)


def _olmoe_lacks(config: ModelConfig) -> list[str]:
    lacking = _all_layers(config, _moe_unsupported(config, qk_norm="width"))
    return [*lacking, f"head_width={config.head_dim}"] if config.head_dim * config.heads != config.width else lacking


MIXTRAL = ModelFamily(
    "MixtralForCausalLM",
    "mixtral",
    _mixtral_lacks,
    partial(_moe_rules, MIXTRAL_NAMES),
    _write_mixtral,
    _read_mixtral,
)
QWEN3_MOE = ModelFamily(
    "Qwen3MoeForCausalLM", "qwen3_moe", _qwen_lacks, partial(_moe_rules, QWEN_NAMES), _write_qwen, _read_qwen
)
OLMOE = ModelFamily(
    "OlmoeForCausalLM", "olmoe", _olmoe_lacks, partial(_moe_rules, QWEN_NAMES), _write_olmoe, _read_olmoe
)

"""LlamaForCausalLM (arXiv 2302.13971, 2407.21783), NanoChatForCausalLM and our transformer."""

from collections.abc import Mapping, Sequence
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
from gristmill.evaluation.convert.hf.rope_and_windows import read_rope, write_rope
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

"""NanoChatForCausalLM (karpathy/nanochat, as transformers has it) and our transformer: norms without parameters, of
the embedding and of queries and keys too, squared ReLU, and bounded logits.

Its rotary positions turn the other way: the second half of each head's queries and keys has the other sign."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    TensorConversion,
    WeightRule,
    other_widths,
    require_value,
    unsupported_fields,
    without,
)
from gristmill.evaluation.convert.hf.llama import ATTENTION, ends_rules, layer_rules, read_llama, write_llama
from gristmill.training.config.model import ModelConfig

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


def _rules(config: ModelConfig) -> list[WeightRule]:
    turned = [
        WeightRule(f"model.layers.{{i}}.{hf_name}.weight", (f"layers.{{i}}.{ours}.weight",), OTHER_WAY)
        for hf_name, ours in ATTENTION.items()
        if ours in TURNED
    ]
    others = {hf_name: ours for hf_name, ours in ATTENTION.items() if ours not in TURNED}
    linears = others | {"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"}
    return [*turned, *layer_rules(linears, biases=False), *ends_rules(config)]


def _write(config: ModelConfig) -> Fields:
    return without(write_llama(config), "mlp_bias", "head_dim") | {
        "intermediate_size": config.hidden_width("relu2"),
        "hidden_act": "relu2",
        "final_logit_softcapping": config.logit_softcap,
    }


def _read(fields: Mapping[str, Any]) -> Fields:
    for name, value in (("hidden_act", "relu2"), ("attention_bias", False)):
        require_value({name: fields.get(name, value)}, name, value)
    read = read_llama({"rms_norm_eps": 1e-6, **fields, "hidden_act": "silu"})
    return {**read, **CONSTANTS, "logit_softcap": fields.get("final_logit_softcapping", 15.0)}


def _unsupported(config: ModelConfig) -> list[str]:
    rope = {"rope_scaling": config.rope_scaling, "logit_softcap": config.logit_softcap}
    return unsupported_fields(config, **CONSTANTS, biases=False, **rope) + other_widths(config)


NANOCHAT = ModelFamily("NanoChatForCausalLM", "nanochat", _unsupported, _rules, _write, _read)

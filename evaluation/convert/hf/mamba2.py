"""Mamba2ForCausalLM and NemotronHForCausalLM (arXiv 2405.21060, 2504.03624) and our hybrid transformer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.evaluation.convert.hf.architecture import (
    Fields,
    ModelFamily,
    TensorConversion,
    UnsupportedConfig,
    WeightRule,
    require_value,
    unsupported_fields,
)
from gristmill.training.config.mixers.mamba2 import Mamba2
from gristmill.training.config.model import ModelConfig

# C channels of x, B and C together, K taps

SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
NAMES = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
CONSTANTS: dict[str, Any] = {"positions": "none", "norm": "rmsnorm", "biases": False}


def _options(config: ModelConfig) -> Mamba2:
    options = config.mixer_named("mamba2")
    assert isinstance(options, Mamba2)
    return options


def _sizes(config: ModelConfig) -> tuple[int, ...]:
    """Rows of z, x, B, C and dt in their one matrix."""
    options = _options(config)
    inner, shared = options.inner(config.width), options.group_width
    return inner, inner, shared, shared, options.heads(config.width)


def _joined(tensors: Sequence[Tensor], config: ModelConfig) -> Tensor:
    return torch.cat(list(tensors))


PROJECTIONS = TensorConversion(_joined, lambda tensor, config: tensor.split(_sizes(config)))
STREAMS = TensorConversion(_joined, lambda tensor, config: tensor.split(_sizes(config)[1:4]))
# Theirs are [C, 1, K].
FILTERS = TensorConversion(
    lambda tensors, config: _joined(tensors, config).unsqueeze(1),
    lambda tensor, config: tensor.squeeze(1).split(_sizes(config)[1:4]),
)


def _rules(config: ModelConfig) -> list[WeightRule]:
    kinds = [(layer.mixer, layer.mlp) for layer in config.layer_list]
    scans = tuple(index for index, (mixer, _) in enumerate(kinds) if mixer == "mamba2")
    attentions = tuple(index for index, (mixer, _) in enumerate(kinds) if mixer == "attention")
    mlps = tuple(index for index, (mixer, _) in enumerate(kinds) if mixer == "none")
    hf_name, ours = "backbone.layers.{i}", "layers.{i}"
    rules = [
        WeightRule("backbone.embeddings.weight", ("embedding.weight",)),
        WeightRule(f"{hf_name}.norm.weight", (f"{ours}.mixer_norm.weight",), layers=tuple(sorted(scans + attentions))),
        WeightRule(f"{hf_name}.norm.weight", (f"{ours}.mlp_norm.weight",), layers=mlps),
        WeightRule("backbone.norm_f.weight", ("final_norm.weight",)),
    ]
    in_names = tuple(f"{ours}.mixer.{name}.weight" for name in ("z", "x", "B", "C", "dt"))
    rules.append(WeightRule(f"{hf_name}.mixer.in_proj.weight", in_names, PROJECTIONS, scans))
    for leaf, form in (("weight", FILTERS), ("bias", STREAMS)):
        names = tuple(f"{ours}.mixer.{name}_convolution.{leaf}" for name in "xBC")
        rules.append(WeightRule(f"{hf_name}.mixer.conv1d.{leaf}", names, form, scans))
    rules += [
        WeightRule(f"{hf_name}.mixer.{name}", (f"{ours}.mixer.scan.{name}",), layers=scans)
        for name in ("A_log", "D", "dt_bias")
    ]
    for name, own, layers in (
        ("norm", "mixer.norm", scans),
        ("out_proj", "mixer.output", scans),
        ("q_proj", "mixer.query", attentions),
        ("k_proj", "mixer.key", attentions),
        ("v_proj", "mixer.value", attentions),
        ("o_proj", "mixer.output", attentions),
        ("up_proj", "mlp.up", mlps),
        ("down_proj", "mlp.down", mlps),
    ):
        rules.append(WeightRule(f"{hf_name}.mixer.{name}.weight", (f"{ours}.{own}.weight",), layers=layers))
    return rules if config.tied_embeddings else [*rules, WeightRule("lm_head.weight", ("head.weight",))]


def _shared_fields(config: ModelConfig) -> Fields:
    options = _options(config)
    return {
        "hidden_size": config.width,
        "expand": options.expand,
        "n_groups": options.groups,
        "conv_kernel": options.kernel,
        "chunk_size": options.chunk_of(config.sequence_length),
        "layer_norm_epsilon": config.norm_epsilon,
        "use_bias": False,
        "use_conv_bias": True,
        "residual_in_fp32": False,
        "tie_word_embeddings": config.tied_embeddings,
    }


def _write_mamba2(config: ModelConfig) -> Fields:
    options = _options(config)
    return _shared_fields(config) | {
        "num_hidden_layers": config.layers,
        "num_heads": options.heads(config.width),
        "head_dim": options.head_width,
        "state_size": options.state,
        "hidden_act": "silu",
        "max_position_embeddings": config.sequence_length,
    }


def _write_nemotron_h(config: ModelConfig) -> Fields:
    options = _options(config)
    kinds = [layer.mixer for layer in config.layer_list]
    symbols = {"mamba2": "M", "attention": "*", "none": "-"}
    return _shared_fields(config) | {
        "layers_block_type": [NAMES[symbols[kind]] for kind in kinds],
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_width("relu2"),
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": options.heads(config.width),
        "mamba_head_dim": options.head_width,
        "ssm_state_size": options.state,
        "mamba_hidden_act": "silu",
        "time_step_min": options.min_step,
        "max_position_embeddings": config.sequence_length,
        "attention_bias": False,
        "mlp_bias": False,
        "mamba_proj_bias": False,
    }


def _read_shared(fields: Mapping[str, Any], heads: int, head_width: int, state: int, min_step: float) -> Fields:
    for name, value in (("use_bias", False), ("use_conv_bias", True)):
        require_value({name: fields.get(name, value)}, name, value)
    width = int(fields["hidden_size"])
    if heads * head_width % width:
        raise UnsupportedConfig(
            f"config.json says {heads} heads of {head_width}, which is no multiple of hidden_size={width}; gristmill "
            "has an inner width of expand x width"
        )
    options: Fields = {"expand": heads * head_width // width, "head_width": head_width, "state": state}
    options |= {"groups": fields.get("n_groups", 8), "kernel": fields.get("conv_kernel", 4), "min_step": min_step}
    return CONSTANTS | {
        "width": width,
        "norm_epsilon": fields.get("layer_norm_epsilon", 1e-5),
        "sequence_length": fields.get("max_position_embeddings", 4096),
        "tied_embeddings": fields.get("tie_word_embeddings", False),
        "mixers": {"mamba2": options},
    }


def _read_mamba2(fields: Mapping[str, Any]) -> Fields:
    require_value({"hidden_act": fields.get("hidden_act", "silu")}, "hidden_act", "silu")
    low, high = fields.get("time_step_limit") or (0.0, float("inf"))
    if low or not (high == float("inf") or (isinstance(high, Mapping) and high.get("__float__") == "Infinity")):
        raise UnsupportedConfig(f"config.json says time_step_limit={[low, high]}; gristmill imports [0, Infinity] only")
    shared = _read_shared(fields, fields["num_heads"], fields["head_dim"], fields["state_size"], 0.0)
    layers = int(fields["num_hidden_layers"])
    if fields.get("n_groups", 8) != 1:
        raise UnsupportedConfig(
            "config.json says n_groups above 1: its norm is over all channels, ours is over each group's"
        )
    return shared | {"layers": layers, "pattern": "M" * layers, "heads": 1}


def _read_nemotron_h(fields: Mapping[str, Any]) -> Fields:
    for name, value in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        require_value({name: fields.get(name, value)}, name, value)
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        require_value({name: fields.get(name, False)}, name, False)
    require_value({"sliding_window": fields.get("sliding_window")}, "sliding_window", None)
    heads, head_width = fields["mamba_num_heads"], fields["mamba_head_dim"]
    min_step = fields.get("time_step_min", 0.001)
    pattern = fields.get("hybrid_override_pattern") or "".join(
        SYMBOLS.get(kind, "E") for kind in fields["layers_block_type"]
    )
    if "E" in pattern:
        raise UnsupportedConfig("config.json has layers of experts; gristmill imports Nemotron-H without them only")
    return _read_shared(fields, heads, head_width, fields["ssm_state_size"], min_step) | {
        "layers": len(pattern),
        "pattern": pattern,
        "mlp": "relu2",
        "heads": fields["num_attention_heads"],
        "kv_heads": fields["num_key_value_heads"],
        "head_width": fields["head_dim"],
        "ffn_hidden_size": fields["intermediate_size"],
    }


def _unsupported(config: ModelConfig) -> list[str]:
    if "mamba2" not in config.stateful_mixers:
        return ["layers without mamba2"]
    both = any(layer.mixer != "none" and layer.mlp != "none" for layer in config.layer_list)
    lacking = unsupported_fields(config, **CONSTANTS, mixer=config.mixer, pattern=config.pattern)
    return lacking + ["layers of mixer and MLP in one"] * both


def _unsupported_by_mamba2(config: ModelConfig) -> list[str]:
    lacking = _unsupported(config)
    if any(layer.mixer != "mamba2" for layer in config.layer_list):
        lacking.append("other layers than mamba2")
    elif not lacking and _options(config).groups > 1:
        lacking.append("norm over each of several groups")
    elif not lacking and _options(config).min_step:
        lacking.append(f"min_step={_options(config).min_step}")
    return lacking


def _unsupported_by_nemotron_h(config: ModelConfig) -> list[str]:
    lacking = _unsupported(config)
    mlps = sorted({layer.mlp for layer in config.layer_list if layer.mlp not in ("none", "relu2")})
    return lacking + [f"mlp={mlp}" for mlp in mlps]


MAMBA2 = ModelFamily("Mamba2ForCausalLM", "mamba2", _unsupported_by_mamba2, _rules, _write_mamba2, _read_mamba2)
NEMOTRON_H = ModelFamily(
    "NemotronHForCausalLM", "nemotron_h", _unsupported_by_nemotron_h, _rules, _write_nemotron_h, _read_nemotron_h
)

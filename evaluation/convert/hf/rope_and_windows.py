"""Rotary positions in config.json: scaled, of a part of each head, and of two bases."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.evaluation.convert.hf.architecture import Fields, UnsupportedConfig
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig

SCALING_FIELDS: dict[str, tuple[str, ...]] = {  # of each rope_type, beside its factor
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
}
FULL, SLIDING = "full_attention", "sliding_attention"


def write_rope(config: ModelConfig) -> Fields:
    """As transformers 4 and as transformers 5 read it."""
    scaling, base = config.rope_scaling, config.rope_base
    if scaling is not None and scaling.rope_type == "ntk":
        base, scaling = scaling.ntk_base(base, config.rope_width or config.head_dim), None
    if scaling is None:
        return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    names = ("rope_type", "factor", *SCALING_FIELDS[scaling.rope_type])
    stated = {name: getattr(scaling, name) for name in names}
    stated = {name: value for name, value in stated.items() if value is not None}
    parameters = stated | {"rope_theta": config.rope_base}
    return {"rope_theta": config.rope_base, "rope_scaling": stated, "rope_parameters": parameters}


def read_rope(fields: Mapping[str, Any], partial: bool = False) -> Fields:
    """rope_base and rope_scaling. partial: the caller reads partial_rotary_factor. Raises InputError for a kind of
    scaling that is not supported."""
    both = [rope_fields for name in ("rope_scaling", "rope_parameters") if (rope_fields := fields.get(name))] or [{}]
    kinds = [rope_fields.get("rope_type", rope_fields.get("type", "default")) for rope_fields in both]
    if len(set(kinds)) > 1:
        raise InputError(f"config.json says rope_type={kinds[0]!r} and rope_type={kinds[1]!r}; remove the wrong one")
    stated, kind = both[-1], kinds[0]
    if any(isinstance(value, dict) for value in stated.values()):
        raise UnsupportedConfig(
            "config.json has other rotary positions in some layers; gristmill imports one kind for all"
        )
    base = stated.get("rope_theta", fields.get("rope_theta", 10000.0))
    if not partial and rotary_share(fields) != 1:
        raise UnsupportedConfig(
            "config.json has partial_rotary_factor, which turns a part of each head; gristmill turns all"
        )
    if kind == "default":
        return {"rope_base": base}
    if kind not in SCALING_FIELDS:
        raise UnsupportedConfig(
            f"config.json says rope_type={kind!r}; gristmill imports default, {', '.join(SCALING_FIELDS)}"
        )
    if kind == "yarn" and stated.get("truncate") is False:
        raise UnsupportedConfig("config.json has yarn without truncate; gristmill imports the paper's form")
    scaling = {"rope_type": kind, "factor": stated["factor"]}
    for name in SCALING_FIELDS[kind]:
        if stated.get(name):  # null and 0 are the default
            scaling[name] = stated[name]
    if kind != "linear":  # as transformers fills it in
        scaling.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        if fields.get("original_max_position_embeddings"):
            scaling["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return {"rope_base": base, "rope_scaling": scaling}


def rotary_share(fields: Mapping[str, Any], default: float = 1.0) -> float:
    """Share of a head's features that turn."""
    stated = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    share = stated.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    return default if share is None else float(share)


def read_partial_rope(fields: Mapping[str, Any], head_dim: int, default: float = 1.0) -> Fields:
    """rope_base, rope_scaling and rope_width. default: the share of an architecture whose config does not say it."""
    width = int(head_dim * rotary_share(fields, default))
    if width % 2 or width < 2:
        raise UnsupportedConfig(
            f"config.json turns {width} features of each head; gristmill turns an even number, at least 2"
        )
    return {**read_rope(fields, partial=True), "rope_width": 0 if width == head_dim else width}


def write_share(config: ModelConfig) -> float:
    """The share of a head that turns, such that transformers' int(head_dim * share) is its width."""
    width = config.rope_width or config.head_dim
    share = width / config.head_dim
    return share if int(config.head_dim * share) == width else math.nextafter(share, 2)


def write_partial_rope(config: ModelConfig) -> Fields:
    share, fields = write_share(config), write_rope(config)
    return {
        **fields,
        "partial_rotary_factor": share,
        "rope_parameters": fields["rope_parameters"] | {"partial_rotary_factor": share},
    }


def read_rope_by_window(fields: Mapping[str, Any], base: float, window_base: float | None) -> Fields:
    """Rotary positions of layers with and without a window. base, window_base: what the architecture takes where
    config.json says nothing; None: the same as without a window."""
    stated = fields.get("rope_parameters") or {}
    plain = {name: value for name, value in fields.items() if name not in ("rope_parameters", "rope_scaling")}
    full = stated.get(FULL) or {**(fields.get("rope_scaling") or {})}
    full = {"rope_theta": fields.get("rope_theta", base), **full}
    sliding = stated.get(SLIDING) or {}
    default = full["rope_theta"] if window_base is None else fields.get("rope_local_base_freq", window_base)
    sliding = {"rope_theta": default, **sliding}
    settings = read_rope({**plain, "rope_parameters": full})
    in_windows = read_rope({**plain, "rope_parameters": sliding})
    if in_windows == settings:
        return settings
    if "rope_scaling" in in_windows:
        raise UnsupportedConfig(
            "config.json scales the rotary positions of layers with a window; gristmill scales the others"
        )
    return {**settings, "window_rope_base": in_windows["rope_base"]}


def write_rope_by_window(config: ModelConfig) -> Fields:
    full = write_rope(config)["rope_parameters"]
    sliding = full
    if config.window_rope_base is not None:
        sliding = {"rope_type": "default", "rope_theta": config.window_rope_base}
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}


# Attention windows in config.json: one size, in all layers or in those that layer_types names.


def _sizes(config: ModelConfig) -> set[int]:
    return {layer.window for layer in config.layer_list if layer.window is not None}


def one_window(config: ModelConfig) -> int | None:
    """The size that all windows have; None without any."""
    return next(iter(_sizes(config)), None)


def stated_window(config: ModelConfig) -> int:
    """The same for architectures of which transformers asks a size also where no layer has a window."""
    return one_window(config) or config.sequence_length


def several_windows(config: ModelConfig) -> list[str]:
    """Fields that an architecture lacks whose windows all have one size."""
    return [f"windows of several sizes ({config.window})"] if len(_sizes(config)) > 1 else []


def some_windows(config: ModelConfig) -> list[str]:
    """Fields that an architecture lacks whose layers all have the same window."""
    differ = len({layer.window for layer in config.layer_list}) > 1
    return [f"windows in some layers only ({config.window})"] if differ else []


def read_one_window(fields: Mapping[str, Any]) -> Fields:
    """A window of all layers; none if it is as long as the longest sample."""
    window = fields.get("sliding_window")
    return {"window": window if window is not None and window < fields["max_position_embeddings"] else None}


def layer_types(config: ModelConfig) -> list[str]:
    return [FULL if layer.window is None else SLIDING for layer in config.layer_list]


def write_windows(config: ModelConfig) -> Fields:
    """As Qwen's configs say it: by layer, and for older versions of transformers the first layer that has a window."""
    windows = [layer.window for layer in config.layer_list]
    first = next((index for index, window in enumerate(windows) if window is not None), len(windows))
    return {
        "use_sliding_window": first < len(windows),
        "sliding_window": one_window(config),
        "max_window_layers": first,
        "layer_types": layer_types(config),
    }


def read_windows(fields: Mapping[str, Any]) -> Fields:
    """Inverse of `write_windows`."""
    layers = int(fields["num_hidden_layers"])
    if not fields.get("use_sliding_window", False):
        return {"window": None}
    first = int(fields.get("max_window_layers", layers))
    return read_layer_types(fields, [FULL] * first + [SLIDING] * (layers - first))


def read_layer_types(fields: Mapping[str, Any], default: Sequence[str]) -> Fields:
    """The window of each layer, from layer_types and sliding_window. default: kinds of layers where the config does not
    name them."""
    kinds, layers = list(fields.get("layer_types") or default), int(fields["num_hidden_layers"])
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        raise UnsupportedConfig(f"config.json has layer_types={kinds}; expected {layers} times {FULL} or {SLIDING}")
    if SLIDING not in kinds:
        return {"window": None}
    window = min(fields["sliding_window"], fields["max_position_embeddings"])
    return {"window": tuple(window if kind == SLIDING else None for kind in kinds)}

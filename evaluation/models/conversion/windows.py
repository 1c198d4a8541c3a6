"""Attention windows in config.json: one size, in all layers or in those that layer_types names."""

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.evaluation.models.conversion.family import Fields, UnsupportedConfig
from gristmill.evaluation.models.conversion.rope import FULL, SLIDING
from gristmill.training.model_config import ModelConfig


def _sizes(config: ModelConfig) -> set[int]:
    return {layer.window for layer in config.layer_list if layer.window is not None}


def one_window(config: ModelConfig) -> int | None:
    """The size that all windows have; None without any."""
    return next(iter(_sizes(config)), None)


def stated_window(config: ModelConfig) -> int:
    """The same for architectures of which transformers asks a size also where no layer has a window."""
    return one_window(config) or config.sequence_length


def several_windows(config: ModelConfig) -> list[str]:
    """What an architecture lacks whose windows all have one size."""
    return [f"windows of several sizes ({config.window})"] if len(_sizes(config)) > 1 else []


def some_windows(config: ModelConfig) -> list[str]:
    """What an architecture lacks whose layers all have the same window."""
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

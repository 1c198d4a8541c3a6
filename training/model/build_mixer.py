"""Builds the torch module of a layer's mixer."""

import importlib

from torch import nn

from gristmill.training.layer_config import LayerConfig
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.tensor import TensorAxis


def build_mixer(config: ModelConfig, layer: LayerConfig, tensor: TensorAxis) -> nn.Module:
    """The module that the layer's mixer names, whose parameters must be those that it declares."""
    mixer = config.mixer_named(layer.mixer, layer)
    file, name = mixer.module.split(":")
    built = getattr(importlib.import_module(file), name)(config, mixer, tensor)
    found = {path: tuple(parameter.shape) for path, parameter in built.named_parameters()}
    declared = {parameter.name: parameter.shape for parameter in mixer.parameters(config.width)}
    if found != declared:
        differ = sorted(set(found.items()) ^ set(declared.items()))
        raise TypeError(f"mixer {layer.mixer} declares other parameters than its module {mixer.module} has: {differ}")
    return built

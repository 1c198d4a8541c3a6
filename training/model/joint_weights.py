"""Weights that one product takes lie next to each other in memory."""

from torch import nn

from gristmill.training.model.attention import Attention
from gristmill.training.model.mlp import GatedMlp
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.linear import place_jointly
from gristmill.training.parallel.tensor import ColumnParallelLinear


def place_joint_weights(model: Transformer) -> None:
    """Moves the weights of query, key and value, and of gate and up, next to each other (parallel/linear.py), where
    they are whole and in memory. Quantized layers stay as they are."""
    for layer in model.layers.values():
        if isinstance(layer.mixer, Attention):
            _place([layer.mixer.query, layer.mixer.key, layer.mixer.value])
        if isinstance(layer.mlp, GatedMlp):
            _place([layer.mlp.gate, layer.mlp.up])


def _place(layers: list[nn.Module]) -> None:
    if all(type(layer) is ColumnParallelLinear for layer in layers):
        place_jointly([layer.weight for layer in layers])

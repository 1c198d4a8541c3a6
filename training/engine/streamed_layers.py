"""Initial weights of a model whose layers' weights are streamed: one layer at a time is in memory."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from gristmill.training.memory.weight_stream import WeightStream
from gristmill.training.model.initialization import fill, first_values
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.local import local


def initialise_streamed(
    model: Transformer, stream: WeightStream, seed: int, device: torch.device, dtype: torch.dtype
) -> None:
    """As `initialise`; the values of the layers are in the stream's store afterwards. model: on the meta device, maybe
    sharded by FSDP."""
    value = first_values(model.config, seed, device, dtype)
    for place, (index, layer) in enumerate(model.layers.items()):
        prefix = f"layers.{index}."
        fill(layer, lambda name, parameter, prefix=prefix: value(prefix + name, parameter))
        _pad_shards(layer)
        for name, parameter in layer.named_parameters():
            stream.take(place, prefix + name, local(parameter.detach()))
    fill(model, lambda name, parameter: parameter if name.startswith("layers.") else value(name, parameter))
    stream.attach(list(model.layers.values()))


def _pad_shards(layer: nn.Module) -> None:
    """FSDP copies shards into padded memory of its own at the first pass; this does so while the shards have values."""
    for module in layer.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for each in group.fsdp_params:
                each.reset_sharded_param()
                each._init_extensions()
            group._reset_sharded_params = True

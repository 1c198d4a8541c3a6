"""Models whose layers' weights lie in host memory or on disk while they evaluate and generate (ZeRO-Inference,
DeepSpeed Inference, arXiv 2207.00032, section 6)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gristmill.evaluation.convert.weight_source import WeightSource
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.sharded import ShardedCausalLM
from gristmill.training.checkpoint.checkpoint import load, read_model_config, saved_tensors, verified
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import fill, parameter_dtype, shard_like, stored_name
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import Mesh, local, stored_like
from gristmill.training.parallel.offload.weight_stream import LAYERS_HELD, WeightStream, make_store
from gristmill.training.planner.costs.stage_splitting import split_model


@dataclass(frozen=True)
class StreamedModel:
    """This process's part of a model, and the stream of its layers' weights."""

    model: Transformer
    stream: WeightStream

    @property
    def weights(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint is loaded into, by name."""
        stored = self.stream.stored
        weights = {
            stored_name(name, self.model.config): stored_like(stored[name], parameter)
            if name in stored
            else parameter.detach()
            for name, parameter in self.model.named_parameters()
        }
        return weights | saved_buffers(self.model)

    def causal_lm(self, layout: LayoutConfig, mesh: Mesh, vocab_size: int) -> LocalCausalLM:
        """Once the weights are loaded. Buffers take the precision of the computation, as in a model that is cast."""
        self.stream.store.release_pages()
        for module in self.model.modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, leaf, buffer.to(self.model.dtype))
        if mesh.tensor.size * mesh.pipeline.size * layout.expert > 1:
            return ShardedCausalLM({mesh.pipeline.rank: self.model}, layout, vocab_size, mesh)
        return LocalCausalLM(self.model, self.model.config.sequence_length, vocab_size)

    def note(self, place: str) -> str:
        """Note to the user on how it runs."""
        weights = {name: local(value).nbytes for name, value in self.weights.items()}
        layers = sum(size for name, size in weights.items() if name in self.stream.stored)
        where = {"host": "in host memory", "disk": "in a file on disk"}[place]
        return (
            f"the weights of {len(self.model.layers)} layers ({layers / 2**30:.3f} GiB) are {where}; at most "
            f"{LAYERS_HELD} layers' ({self.stream.held_bytes / 2**30:.3f} GiB) are on the device at once, beside "
            f"embedding and head ({(sum(weights.values()) - layers) / 2**30:.3f} GiB)"
        )


def load_streamed_checkpoint(
    checkpoint: Path, place: str, dtype: torch.dtype, layout: LayoutConfig, mesh: Mesh
) -> StreamedModel:
    """This process's part of a checkpoint of any layout."""
    verified(checkpoint)
    saved_config = read_model_config(checkpoint)
    config, vocab_size = ModelConfig.model_validate(saved_config["model"]), saved_config["vocab_size"]
    streamed = _without_values(_part(config, vocab_size, dtype, layout, mesh), place, checkpoint.parent, mesh.device)
    load(checkpoint, saved_tensors(streamed.weights, {}), mesh)
    return streamed


def load_streamed_source(
    source: WeightSource, place: str, dtype: torch.dtype, layout: LayoutConfig, mesh: Mesh
) -> StreamedModel:
    """This process's part of a model in a foreign format, read one tensor at a time."""
    model = _part(source.config, source.vocab_size, dtype, layout, mesh)
    streamed = _without_values(model, place, source.files[0].parent, mesh.device)
    weights = streamed.weights
    for name, whole in source.stream():
        if name in weights:
            target = weights[name]
            local(target).copy_(local(shard_like(whole, target)))
            streamed.stream.store.release_pages()
    return streamed


def _part(config: ModelConfig, vocab_size: int, dtype: torch.dtype, layout: LayoutConfig, mesh: Mesh) -> Transformer:
    part = split_model(config, vocab_size, layout)[mesh.pipeline.rank]
    return Transformer(config, vocab_size, mesh, layout, part, ComputeOptions(dtype))


def _without_values(model: Transformer, place: str, folder: Path, device: torch.device) -> StreamedModel:
    """The model with room for its weights: those of the layers in the store."""
    stream, config = WeightStream(make_store(place, folder, device), device), model.config

    def room(prefix: str, name: str, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter, device=device, dtype=parameter_dtype(prefix + name, config, model.dtype))

    for number, (index, layer) in enumerate(model.layers.items()):
        prefix = f"layers.{index}."
        fill(layer, partial(room, prefix))
        for name, parameter in layer.named_parameters():
            stream.take(number, prefix + name, local(parameter.detach()), keep_values=False)
    fill(model, lambda name, parameter: parameter if name.startswith("layers.") else room("", name, parameter))
    stream.attach(list(model.layers.values()))
    return StreamedModel(model.eval().requires_grad_(False), stream)

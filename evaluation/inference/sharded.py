"""A model sharded over tensor-parallel ranks and pipeline stages, or whose layers are streamed from host memory or
disk, with the interface of an unsharded one.

All ranks of one replica make the same calls in the same order and get the same results."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.evaluation.convert.safetensors_folder import WeightSource
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM, head_of, layers_of
from gristmill.training.checkpoint.checkpoint import load, read_model_config, saved_tensors, verified
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import AttentionMetadata
from gristmill.training.model.init import cast, fill, parameter_dtype, shard_like, stored_name
from gristmill.training.model.layer import Layer
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import Mesh, local, stored_like
from gristmill.training.parallel.offload.weight_stream import LAYERS_HELD, WeightStream, make_store
from gristmill.training.planner.costs.stage_splitting import split_model, stages_of_rank

# B rows, T tokens, D width, V vocabulary, N picked positions; Vt = this tensor rank's share of V


class ShardedCausalLM(LocalCausalLM):
    """One or more stages per pipeline rank. Hidden states are sent from stage to stage and the final ones broadcast;
    logits are gathered over the tensor ranks of the last stage and broadcast."""

    def __init__(self, parts: Mapping[int, Transformer], layout: LayoutConfig, vocab_size: int, mesh: Mesh):
        self.parts = {stage: parts[stage].eval().requires_grad_(False) for stage in sorted(parts)}
        self.model = next(iter(self.parts.values()))
        self.sequence_length, self.mesh = self.model.config.sequence_length, mesh
        self.vocab_size, self.device = vocab_size, mesh.device
        self.reads_trees = not self.model.config.stateful_mixers
        self._flat, self.skips_padding = None, False
        self._last = layout.num_stages - 1
        self._rank_of = {stage: rank for rank in range(layout.pipeline) for stage in stages_of_rank(layout, rank)}

    @property
    def layer_count(self) -> int:
        """A pipeline's passes are not divided."""
        return super().layer_count if len(self.parts) == self._last + 1 == 1 else 1

    def _layers(self) -> Iterable[Layer]:
        return [layer for part in self.parts.values() for layer in layers_of(part)]

    def _hidden_states(
        self, tokens_BT: Tensor, metadata: AttentionMetadata, caches: tuple[Any, ...] | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        x = tokens_BT
        new_caches: tuple[Any, ...] = ()
        for stage, part in self.parts.items():
            if stage and stage - 1 not in self.parts:
                x = self._received(tokens_BT, self._rank_of[stage - 1])
            own = None if caches is None else caches[len(new_caches) : len(new_caches) + len(part.layers)]
            x, added = part.hidden_states(x, metadata, own)
            new_caches += added
            if stage < self._last and stage + 1 not in self.parts:
                dist.send(x.contiguous(), group=self.mesh.pipeline.group, group_dst=self._rank_of[stage + 1])
        return self._last_to_all(x, metadata), new_caches

    def _last_to_all(self, x_BTD: Tensor, metadata: AttentionMetadata) -> Tensor:
        hidden_BTD = x_BTD.contiguous()
        if self._last not in self.parts:
            wanted_N = metadata.wanted_N
            shape = x_BTD.shape if wanted_N is None else (1, len(wanted_N), x_BTD.shape[-1])
            hidden_BTD = x_BTD.new_empty(shape)
        if self.mesh.pipeline.size > 1:
            dist.broadcast(hidden_BTD, group=self.mesh.pipeline.group, group_src=self._rank_of[self._last])
        return hidden_BTD

    def _received(self, tokens_BT: Tensor, sender: int) -> Tensor:
        shape = (*tokens_BT.shape, self.model.config.width)
        x_BTD = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        dist.recv(x_BTD, group=self.mesh.pipeline.group, group_src=sender)
        return x_BTD

    def head(self, hidden_ND: Tensor) -> Tensor:
        if self._last in self.parts:
            logits_NV = self._gathered(head_of(self.parts[self._last])(hidden_ND.unsqueeze(0))[0])
        else:
            shape = len(hidden_ND), self.model.vocab_size
            logits_NV = torch.empty(shape, dtype=_logit_dtype(hidden_ND), device=self.device)
        if self.mesh.pipeline.size > 1:
            dist.broadcast(logits_NV, group=self.mesh.pipeline.group, group_src=self._rank_of[self._last])
        return logits_NV

    def _gathered(self, logits_NVt: Tensor) -> Tensor:
        """Gathers logits over the vocabulary. Each rank holds ceil(V / size) columns, the last one the remainder."""
        axis = self.mesh.tensor
        if axis.size == 1:
            return logits_NVt.contiguous()
        share = math.ceil(self.model.vocab_size / axis.size)
        padded = torch.nn.functional.pad(logits_NVt, (0, share - logits_NVt.shape[1])).contiguous()
        pieces = [torch.empty_like(padded) for _ in range(axis.size)]
        dist.all_gather(pieces, padded, group=axis.group)
        return torch.cat(pieces, dim=1)[:, : self.model.vocab_size].contiguous()


def load_sharded(
    checkpoint: Path, layout: LayoutConfig, mesh: Mesh, dtype: torch.dtype, vocab_size: int | None = None
) -> ShardedCausalLM:
    """This rank's shard of a checkpoint saved with any layout. layout: tensor and pipeline of this evaluation, with
    sequence_parallel off, so that any number of tokens can be read. vocab_size: as of LocalCausalLM."""
    verified(checkpoint)
    saved_config = read_model_config(checkpoint)
    config = ModelConfig.model_validate(saved_config["model"])
    model = _shard(config, saved_config["vocab_size"], layout, mesh, dtype)
    fill(model, lambda _, parameter: torch.empty_like(parameter, device=mesh.device))
    parameters = {stored_name(name, config): value for name, value in model.named_parameters()}
    load(checkpoint, saved_tensors(parameters, saved_buffers(model)), mesh)
    parts = {mesh.pipeline.rank: cast(model, mesh.device, dtype)}
    return ShardedCausalLM(parts, layout, vocab_size or model.vocab_size, mesh)


def shard_source(
    source: WeightSource, layout: LayoutConfig, mesh: Mesh, dtype: torch.dtype, vocab_size: int
) -> ShardedCausalLM:
    """This rank's shard of a model in a foreign format, of which each rank reads one tensor at a time."""
    config = source.config
    model = _shard(config, source.vocab_size, layout, mesh, dtype)
    wanted: dict[str, Tensor] = {stored_name(name, config): value for name, value in model.named_parameters()}
    wanted |= saved_buffers(model)
    values = {
        name: shard_like(whole.to(mesh.device), wanted[name]) for name, whole in source.stream() if name in wanted
    }
    fill(model, lambda name, _: values[stored_name(name, config)])
    for name, buffer in saved_buffers(model).items():
        buffer.copy_(values[name])
    return ShardedCausalLM({mesh.pipeline.rank: cast(model, mesh.device, dtype)}, layout, vocab_size, mesh)


def _shard(config: ModelConfig, vocab_size: int, layout: LayoutConfig, mesh: Mesh, dtype: torch.dtype) -> Transformer:
    part = split_model(config, vocab_size, layout)[mesh.pipeline.rank]
    return Transformer(config, vocab_size, mesh, layout, part, ComputeOptions(dtype))


def _logit_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


# Models whose layers' weights lie in host memory or on disk while they evaluate and generate (ZeRO-Inference,
# DeepSpeed Inference, arXiv 2207.00032, section 6).


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
    streamed = _without_values(_shard(config, vocab_size, layout, mesh, dtype), place, checkpoint.parent, mesh.device)
    load(checkpoint, saved_tensors(streamed.weights, {}), mesh)
    return streamed


def load_streamed_source(
    source: WeightSource, place: str, dtype: torch.dtype, layout: LayoutConfig, mesh: Mesh
) -> StreamedModel:
    """This process's part of a model in a foreign format, read one tensor at a time."""
    model = _shard(source.config, source.vocab_size, layout, mesh, dtype)
    streamed = _without_values(model, place, source.files[0].parent, mesh.device)
    weights = streamed.weights
    for name, whole in source.stream():
        if name in weights:
            target = weights[name]
            local(target).copy_(local(shard_like(whole, target)))
            streamed.stream.store.release_pages()
    return streamed


def _without_values(model: Transformer, place: str, folder: Path, device: torch.device) -> StreamedModel:
    """The model with room for its weights: those of the layers in the store."""
    stream, config = WeightStream(make_store(place, folder, device), device), model.config

    def empty(prefix: str, name: str, parameter: Tensor) -> Tensor:
        return torch.empty_like(parameter, device=device, dtype=parameter_dtype(prefix + name, config, model.dtype))

    for number, (index, layer) in enumerate(model.layers.items()):
        prefix = f"layers.{index}."
        fill(layer, partial(empty, prefix))
        for name, parameter in layer.named_parameters():
            stream.take(number, prefix + name, local(parameter.detach()), keep_values=False)
    fill(model, lambda name, parameter: parameter if name.startswith("layers.") else empty("", name, parameter))
    stream.attach(list(model.layers.values()))
    return StreamedModel(model.eval().requires_grad_(False), stream)

"""Initial weights: each is drawn from (seed, its name, the number of its chunk of rows), so every layout starts equal,
and a process draws the chunks that its shard is in."""

import hashlib
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gristmill.training.config.mixer import Mixer, MixerParameter
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.attention import GroupedQueryAttention
from gristmill.training.model.heads import Head
from gristmill.training.model.modules import GatedMlp
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.linear import place_jointly
from gristmill.training.parallel.mesh import local, other_dims_of_shard, own_rows, stored_like
from gristmill.training.parallel.tensor import ColumnParallelLinear, RowParallelLinear

TOKEN_TABLE, HEAD_TABLE = "embedding.weight", "head.weight"
CHUNK_ELEMENTS = 2**22  # of one draw: 16 MB of float32, a hundredth of a second


def initialize(model: Transformer, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Fills every parameter. Drawn in float32 on the CPU, so that the values do not depend on device and precision."""
    fill(model, first_values(model.config, seed, device, dtype))


def first_values(
    config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype
) -> Callable[[str, Tensor], Tensor]:
    """The initial value of a parameter by its name, sharded as the parameter is."""

    def first_value(name: str, parameter: Tensor) -> Tensor:
        own, rows = stored_name(name, config), own_rows(parameter)
        drawn = draw(own, parameter.shape, seed, config, rows).to(device, dtype)
        if not isinstance(parameter, DTensor):
            return drawn
        # A copy, so that the rows' other columns are given up.
        return stored_like(other_dims_of_shard(drawn, parameter).contiguous().clone(), parameter)

    return first_value


def empty_values(device: torch.device, dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    """Memory for a parameter, which a checkpoint fills."""

    def empty_value(_: str, parameter: Tensor) -> Tensor:
        shape = local(parameter.detach()).shape
        return stored_like(torch.empty(shape, device=device, dtype=dtype), parameter)

    return empty_value


@torch.no_grad()
def draw_in_place(parameters: Mapping[str, nn.Parameter], config: ModelConfig, seed: int) -> None:
    """Draws the values of parameters that were left empty."""
    for name, parameter in parameters.items():
        shard = local(parameter.detach())
        shard.copy_(local(first_values(config, seed, shard.device, shard.dtype)(name, parameter)))


def draw(name: str, shape: torch.Size, seed: int, config: ModelConfig, rows: range | None = None) -> Tensor:
    """Initial value of these rows (None: all) of a parameter, float32."""
    role, declared = role_of(name, config), declared_parameter(name, config)
    rows = range(shape[0]) if rows is None else rows
    if declared is not None and declared.initial is not None:
        return declared.initial(torch.rand(shape, generator=_generator(name, seed)))[rows.start : rows.stop]
    own = (len(rows), *shape[1:])
    if role is Role.NORM:
        return torch.zeros(own) if name.endswith("bias") or config.norm_plus_one else torch.ones(own)
    if role is Role.BIAS:
        return torch.zeros(own)
    if config.zero_outputs and (role is Role.OUTPUT or name == HEAD_TABLE):
        return torch.zeros(own)
    std = initial_std(role, config)
    if name == TOKEN_TABLE and config.embedding_std is not None:
        std = config.embedding_std
    return _normal_rows(name, shape, seed, rows) * std


def _normal_rows(name: str, shape: torch.Size, seed: int, rows: range) -> Tensor:
    """Drawn by chunks of rows, of which only those are drawn that the rows are in."""
    size = max(1, CHUNK_ELEMENTS // max(1, shape[1:].numel()))
    parts = [torch.empty(0, *shape[1:])]
    for first in range(rows.start // size * size, rows.stop, size):
        chunk = torch.randn((min(size, shape[0] - first), *shape[1:]), generator=_generator(name, seed, first // size))
        parts.append(chunk[max(rows.start - first, 0) : rows.stop - first])
    return torch.cat(parts)


def _generator(name: str, seed: int, chunk: int = 0) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}{f':{chunk}' if chunk else ''}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def fill(model: nn.Module, value: Callable[[str, Tensor], Tensor]) -> None:
    """Replaces each parameter by value(name, parameter), unless that is the parameter itself; parameters that are one
    stay one. Buffers go to their device."""
    replaced: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in replaced:
                name = f"{path}.{leaf}" if path else leaf
                new = value(name, parameter)
                is_kept = new is parameter
                replaced[id(parameter)] = parameter if is_kept else nn.Parameter(new)
            module.register_parameter(leaf, replaced[id(parameter)])
    for module in model.modules() if replaced else ():
        for leaf, buffer in module.named_buffers(recurse=False):
            setattr(module, leaf, buffer.to(next(iter(replaced.values())).device))


def parameter_dtype(name: str, config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a parameter in a model that computes in dtype: that, but at least float32 where its mixer declares it
    so."""
    declared = declared_parameter(name, config)
    return torch.promote_types(dtype, torch.float32) if declared is not None and declared.fp32 else dtype


def cast(model: Transformer, device: str | torch.device, dtype: torch.dtype) -> Transformer:
    """The model on the device, its parameters and buffers in the precision of the computation."""
    wider = {name: parameter_dtype(name, model.config, dtype) for name, _ in model.named_parameters()}
    exact = {name: value.detach() for name, value in model.named_parameters() if wider[name] != dtype}
    model = model.to(device, dtype)
    for name, value in exact.items():
        model.get_parameter(name).data = value.to(device, wider[name])
    return model


def shard_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor, sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def stored_name(name: str, config: ModelConfig) -> str:
    """The name under which a parameter is drawn and saved: a tied head has the embedding's, on every stage."""
    return TOKEN_TABLE if name == HEAD_TABLE and config.tied_embeddings else name


# The role of a parameter, from its name; it decides initialization, weight decay, Muon and muP's learning rates.


class Role(Enum):
    EMBEDDING = "embedding"  # token and position tables
    HEAD = "head"
    HIDDEN = "hidden"  # matrices inside the layers
    OUTPUT = "output"  # those of them that write to the residual stream
    NORM = "norm"
    BIAS = "bias"
    FILTER = "filter"  # taps of convolutions
    RECURRENCE = "recurrence"  # decay, step and skip of a recurrence

    @property
    def is_matrix_of_layer(self) -> bool:
        return self in (Role.HIDDEN, Role.OUTPUT)

    @property
    def decays(self) -> bool:
        """Matrices, tables and filters decay, vectors do not."""
        return self not in (Role.NORM, Role.BIAS, Role.RECURRENCE)


def roles_of(parameters: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Role]:
    """By name; in a model of transformers, whose names say nothing, by shape."""
    if config.transformers is None:
        return {name: role_of(name, config) for name in parameters}
    return {name: Role.HIDDEN if parameter.ndim > 1 else Role.BIAS for name, parameter in parameters.items()}


def role_of(name: str, config: ModelConfig) -> Role:
    """layers.3.mixer.output.weight -> OUTPUT."""
    declared = declared_parameter(name, config)
    if declared is not None:
        return Role(declared.role)
    *path, leaf = name.split(".")
    if path[-1].endswith("norm"):
        return Role.NORM
    if path[0] == "outputs":
        return Role.BIAS if leaf == "bias" else Role.HEAD
    if leaf == "bias":
        return Role.BIAS
    if path[-1] in ("embedding", "positions", "segments"):
        return Role.EMBEDDING
    if path[0] == "head":
        return Role.HEAD
    return Role.OUTPUT if path[-1] in ("output", "down") else Role.HIDDEN


def declared_parameter(name: str, config: ModelConfig) -> MixerParameter | None:
    """The mixer's own declaration of its parameter; None for all that is no mixer."""
    path = name.split(".")
    if path[0] != "layers" or path[2] != "mixer":
        return None
    mixer = config.mixer_named(config.mixer_of(int(path[1])))
    return _declared(mixer, config.width)[".".join(path[3:])]


@lru_cache(maxsize=64)
def _declared(mixer: Mixer, width: int) -> dict[str, MixerParameter]:
    return {parameter.name: parameter for parameter in mixer.parameters(width)}


def initial_std(role: Role, config: ModelConfig) -> float:
    """Standard deviation of a drawn parameter. "scaled" and "mup" divide the outputs of layers by the root of
    the additions to the residual stream, 2 for each layer that has mixer and MLP (GPT-2, section 2.3; Megatron-LM);
    "mup" divides matrices of layers by sqrt(width / base) as well (table 8)."""
    std = config.init_std
    if role is Role.OUTPUT and config.init_method != "normal":
        std /= config.residual_additions**0.5
    if role.is_matrix_of_layer and config.init_method == "mup":
        std *= (config.mup_base_width / config.width) ** 0.5
    return std


def rate_factor(role: Role, config: ModelConfig) -> float:
    """muP for Adam: matrices of layers learn at base / width of the rate (table 8)."""
    return config.mup_base_width / config.width if role.is_matrix_of_layer and config.init_method == "mup" else 1.0


# Weights that one product takes lie next to each other in memory.


def place_joint_weights(model: Transformer) -> None:
    """Moves the weights of query, key and value, and of gate and up, next to each other (parallel/linear.py), where
    they are whole and in memory. Quantized layers stay as they are."""
    for layers in _joint_layers(model):
        place_jointly([layer.get_parameter("weight") for layer in layers])


def place_decoding_weights(model: Transformer) -> None:
    """The same for a model of one process that decodes; on a CPU float32 weights lie by inputs, also those of other
    linear layers and of the head."""
    head = model.head
    if head is None or head.weight.device.type != "cpu" or head.weight.dtype != torch.float32:
        place_joint_weights(model)
        return
    joint = _joint_layers(model)
    for layers in joint:
        place_jointly([layer.get_parameter("weight") for layer in layers], by_input=True)
    placed = {id(layer) for layers in joint for layer in layers}
    for module in model.modules():
        if type(module) in (ColumnParallelLinear, RowParallelLinear, Head) and id(module) not in placed:
            place_jointly([module.get_parameter("weight")], by_input=True)


def _joint_layers(model: Transformer) -> list[list[nn.Module]]:
    """Layers whose products are one."""
    groups: list[list[nn.Module]] = []
    for layer in model.layers.values():
        if isinstance(layer.mixer, GroupedQueryAttention):
            groups.append([layer.mixer.query, layer.mixer.key, layer.mixer.value])
        if isinstance(layer.mlp, GatedMlp):
            groups.append([layer.mlp.gate, layer.mlp.up])
    return [layers for layers in groups if all(type(layer) is ColumnParallelLinear for layer in layers)]

"""Initial weights: each full parameter is drawn from (seed, its name), then sharded, so every layout starts equal."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gristmill.training.model.roles import Role, declared_parameter, initial_std, role_of
from gristmill.training.model.transformer import Transformer
from gristmill.training.model_config import ModelConfig


def initialise(model: Transformer, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Fills every parameter. Drawn in float32 on the CPU, so that the values do not depend on device and precision."""
    fill(model, first_values(model.config, seed, device, dtype))


def first_values(
    config: ModelConfig, seed: int, device: torch.device, dtype: torch.dtype
) -> Callable[[str, Tensor], Tensor]:
    """The initial value of a parameter by its name, sharded as the parameter is."""

    def first_value(name: str, parameter: Tensor) -> Tensor:
        whole = draw(stored_name(name, config), parameter.shape, seed, config).to(device, dtype)
        return shard_like(whole, parameter)

    return first_value


def draw(name: str, shape: torch.Size, seed: int, config: ModelConfig) -> Tensor:
    """Initial value of one full parameter, float32."""
    role, declared = role_of(name, config), declared_parameter(name, config)
    if declared is not None and declared.initial is not None:
        return declared.initial(torch.rand(shape, generator=_generator(name, seed)))
    if role is Role.NORM:
        return torch.zeros(shape) if name.endswith("bias") or config.norm_plus_one else torch.ones(shape)
    if role is Role.BIAS:
        return torch.zeros(shape)
    return torch.randn(shape, generator=_generator(name, seed)) * initial_std(role, config)


def _generator(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
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
                replaced[id(parameter)] = parameter if new is parameter else nn.Parameter(new)
            module.register_parameter(leaf, replaced[id(parameter)])
    for module in model.modules() if replaced else ():
        for leaf, buffer in module.named_buffers(recurse=False):
            setattr(module, leaf, buffer.to(next(iter(replaced.values())).device))


def parameter_dtype(name: str, config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Of a parameter in a model that computes in dtype: that, but at least float32 where its mixer declares it so."""
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
    return "embedding.weight" if name == "head.weight" and config.tied_embeddings else name

"""The role of a parameter, from its name; it decides initialisation, weight decay, Muon and muP's learning rates."""

from collections.abc import Mapping
from enum import Enum
from functools import lru_cache

from torch import Tensor

from gristmill.training.mixer import Mixer, MixerParameter
from gristmill.training.model_config import ModelConfig


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
    if role is Role.OUTPUT and config.initialisation != "normal":
        std /= config.residual_additions**0.5
    if role.is_matrix_of_layer and config.initialisation == "mup":
        std *= (config.mup_base_width / config.width) ** 0.5
    return std


def rate_factor(role: Role, config: ModelConfig) -> float:
    """muP for Adam: matrices of layers learn at base / width of the rate (table 8)."""
    return config.mup_base_width / config.width if role.is_matrix_of_layer and config.initialisation == "mup" else 1.0

"""Declaration of a mixer: its options, parameters, costs and how it is split over tensor ranks. Without torch.

A mixer is one file of `training/config/mixers/` with one subclass of `Mixer`, whose fields are the options that a
recipe sets under `model.mixers.NAME`."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from math import prod, sqrt
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import AfterValidator, ValidationError

from gristmill.foundation.config import Config
from gristmill.foundation.errors import nearest_name
from gristmill.training.config.layers import LayerConfig

ParameterRole = Literal["hidden", "output", "norm", "bias", "filter", "recurrence"]
MixerSharding = Literal["output", "input", "key_value", "replicated"]


@dataclass(frozen=True)
class MixerParameter:
    """shape: of the unsharded parameter. sharding: the dimension that is split over the tensor ranks, output 0, input
    1, key_value 0 over the key/value heads. role decides weight decay, Muon and the first values (model/init.py);
    matrices are hidden or output. fp32: never cast to the precision of the computation; its module holds no parameter
    that is. initial: the first values from numbers drawn uniformly in [0, 1), a tensor of the parameter's shape; None:
    as the role has it."""

    name: str
    shape: tuple[int, ...]
    sharding: MixerSharding = "replicated"
    role: ParameterRole = "hidden"
    fp32: bool = False
    initial: Callable[[Any], Any] | None = None

    @property
    def is_matrix(self) -> bool:
        return self.role in ("hidden", "output")

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class FirstTaps:
    """torch's first values of a convolution: uniform up to 1 / sqrt(taps)."""

    taps: int

    def __call__(self, uniform: Any) -> Any:
        return (2 * uniform - 1) / sqrt(self.taps)


class Share(NamedTuple):
    """Work of one tensor rank. rows: samples, each of `tokens` tokens; compute and statistics: bytes of a number in
    the computation (2 in bf16) and in statistics (4). sequence_parallel: the residual stream has this rank's tokens.
    cuda: the fused kernels of GPUs run. context: ranks that share a sample's tokens.
    ring: their keys and values travel."""

    rows: int
    tokens: int
    tensor: int = 1
    compute: int = 2
    statistics: int = 4
    sequence_parallel: bool = True
    cuda: bool = True
    context: int = 1
    ring: bool = False

    @property
    def sequence(self) -> int:
        """Tokens of a sample on all context ranks."""
        return self.tokens * self.context


class Mixer(Config):
    """Base class. symbol: its letter in `model.pattern`. module: FILE:CLASS of the torch module, which is called with
    (ModelConfig, mixer, TensorAxis) and whose forward is that of `Attention`. not_of_weights: options that may change
    where weights are taken over, since they do not change results. carries_state: what a token reads depends on the
    order of the tokens before it, so that they cannot form a tree. attends: softmax attention, under the masks and
    rotary angles of the pass. marks_mixing: its module calls `metadata.mix` for all that is not computed token by
    token, so that the rest can be computed again for some tokens. settings_of_model: there are no options, `of` reads
    the model. compiles: a mixer that carries a state says so where `train.compile` was tried with it. static_shapes:
    its layers are compiled for each shape anew, since the compiler fails on them with sizes that it does not know.
    widths: options that go with the model's width where a model of the same shape has another. head_widths: with that
    of its heads."""

    symbol: ClassVar[str]
    module: ClassVar[str]
    widths: ClassVar[tuple[str, ...]] = ()
    head_widths: ClassVar[tuple[str, ...]] = ()
    not_of_weights: ClassVar[tuple[str, ...]] = ()
    carries_state: ClassVar[bool] = True
    attends: ClassVar[bool] = False
    marks_mixing: ClassVar[bool] = False
    compiles: ClassVar[bool] = False
    static_shapes: ClassVar[bool] = False
    settings_of_model: ClassVar[bool] = False

    @classmethod
    def of(cls, model: Any, options: Mapping[str, Any], layer: LayerConfig) -> Self:
        """The mixer of a layer of the model (a ModelConfig)."""
        return cls(**options)

    def problem(self, width: int, sequence_length: int) -> str | None:
        """Fault of the options for a model of this size, with the nearest legal value; None if nothing is."""
        return None

    def tensor_problem(self, width: int, tensor: int) -> str | None:
        """Why it cannot be split over so many tensor ranks; None if it can."""
        return None

    def parameters(self, width: int) -> tuple[MixerParameter, ...]:
        """In the order of the module's."""
        raise NotImplementedError

    def scan_flops(self, width: int, tokens: int) -> float:
        """Forward FLOPs of one sample beside those of the matrices and filters."""
        raise NotImplementedError

    def causal_flops(self, width: int, tokens: int) -> float:
        """As scan_flops, without what a causal mask hides."""
        return self.scan_flops(width, tokens)

    def activation_bytes(self, width: int, share: Share) -> float:
        """Bytes that autograd keeps between the normed input, which is not counted, and the output's product, of which
        the input is counted."""
        raise NotImplementedError

    def whole_bytes(self, width: int, share: Share) -> float:
        """Bytes of those that are no token's own or lie where `metadata.mix` is called: a swap by token
        (training/model/layer_hook.py) moves it whole."""
        return self.activation_bytes(width, share)

    def context_numbers(self, width: int, tensor: int) -> tuple[float, float]:
        """Numbers that the other context ranks get of one run of tokens in a forward pass (Segments): in the dtype of
        the computation, and in that of statistics."""
        return 0.0, 0.0

    def state_bytes(self, width: int, share: Share) -> float:
        """The decoding state after share.tokens tokens."""
        raise NotImplementedError

    def multiply_adds(self, width: int) -> int:
        """Multiply-adds of one token with the matrices and filters, whose every number it meets once."""
        return sum(
            parameter.count for parameter in self.parameters(width) if parameter.is_matrix or parameter.role == "filter"
        )


def norm_bytes(vectors: float, width: int, share: Any, rmsnorm: bool) -> float:
    """Bytes that autograd keeps of a norm: LayerNorm its input (in fp32 on GPUs) and two statistics a vector, our
    RMSNorm its input as it is and one. share: with the bytes of compute and statistics, and cuda."""
    if rmsnorm:
        return float(vectors * (width * share.compute + share.statistics))
    return float(vectors * (width * (share.statistics if share.cuda else share.compute) + 2 * share.statistics))


# Mixers by name: the files of `training/config/mixers/`. Without torch.

PACKAGE = "gristmill.training.config.mixers"
NO_MIXER = "none"  # the layer is an MLP alone


def mixer_names() -> tuple[str, ...]:
    """Each file of the folder, those of installed packages, and none."""
    folder = importlib.import_module(PACKAGE)
    return (*sorted([file.name for file in pkgutil.iter_modules(folder.__path__)] + list(installed_mixers())), NO_MIXER)


@lru_cache(maxsize=1)
def installed_mixers() -> dict[str, EntryPoint]:
    """Mixers of installed packages, by name."""
    return {point.name: point for point in entry_points(group="gristmill.mixers")}


def with_options() -> tuple[str, ...]:
    """Those whose options are set under `model.mixers`."""
    return tuple(name for name in mixer_names() if name != NO_MIXER and not mixer_class(name).settings_of_model)


def mixer_class(name: str) -> type[Mixer]:
    """The mixer that a file or a package declares."""
    if name in installed_mixers():
        return installed_mixers()[name].load()
    module = importlib.import_module(f"{PACKAGE}.{name}")
    (mixer,) = (
        declared
        for declared in vars(module).values()
        if isinstance(declared, type) and issubclass(declared, Mixer) and declared.__module__ == module.__name__
    )
    return mixer


def known_mixer(name: str) -> str:
    """The name. Raises ValueError with the nearest one, and all."""
    names = mixer_names()
    if name in names:
        return name
    near = nearest_name(name, names)
    hint = f"did you mean {near!r}? " if near else ""
    raise ValueError(f"there is no mixer {name!r}; {hint}mixers are {', '.join(names)}")


def symbols() -> dict[str, str]:
    """Letters of `model.pattern` and the mixers they name: {"*": "attention", "M": "mamba2"}."""
    return {mixer_class(name).symbol: name for name in mixer_names() if name != NO_MIXER}


class MixerOptions(dict[str, dict[str, Any]]):
    """Options by mixer; hashable, since a model's config is a key of caches."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted((name, sorted(options.items())) for name, options in self.items())))


def _validated(options: Mapping[str, dict[str, Any]]) -> MixerOptions:
    for name, settings in options.items():
        if known_mixer(name) not in with_options():
            raise ValueError(f"mixer {name} has no options; its settings are fields of model")
        _check_options(name, settings)
    return MixerOptions(options)


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    declared = mixer_class(name)
    try:
        declared(**options)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] != "extra_forbidden":
            raise ValueError(f"{name}.{field}: {first['msg']}") from None
        near = nearest_name(field, declared.model_fields, cutoff=0.3)
        hint = f"did you mean {near!r}? " if near else ""
        known = ", ".join(declared.model_fields)
        raise ValueError(f"{name}.{field}: unknown field; {hint}options are {known}") from None


class _NameSchema:
    """The names, when a schema of recipes is written."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"type": "string", "enum": list(mixer_names())}


class _OptionsSchema:
    """The options of each mixer, likewise."""

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        options = {name: mixer_class(name).model_json_schema() for name in with_options()}
        return {"type": "object", "properties": options, "additionalProperties": False}


MixerName = Annotated[str, _NameSchema()]
Options = Annotated[dict[str, dict[str, Any]], AfterValidator(_validated), _OptionsSchema()]


# Pattern strings: the layers of a hybrid model, one letter each, with the letters of Megatron-LM. Without torch.

STAGE = "|"


class PatternLayer(NamedTuple):
    """Meaning of a letter. A layer of a pattern is a mixer alone, an MLP alone, or a mixture of experts alone."""

    mixer: str
    has_mlp: bool
    has_experts: bool


def pattern_problem(pattern: str, layers: int) -> str | None:
    """Fault of the pattern of a model with so many layers; None if nothing is."""
    letters = {**symbols(), "-": "MLP", "E": "experts", STAGE: "next stage"}
    wrong = next((letter for letter in pattern if letter not in letters), None)
    if wrong is not None:
        known = ", ".join(f"{letter} ({meaning})" for letter, meaning in letters.items())
        return f"pattern has the letter {wrong!r}; letters are {known}"
    count = len(pattern) - pattern.count(STAGE)
    if count != layers:
        return f"pattern has {count} layers and layers={layers}; set layers: {count}, or change the pattern"
    if not all(pattern.split(STAGE)):
        return "pattern has a stage without a layer; put letters on both sides of each |"
    return None


@lru_cache(maxsize=64)
def pattern_layers(pattern: str) -> tuple[PatternLayer, ...]:
    """ "M*-|E" -> mamba2, attention, an MLP, experts."""
    mixers = symbols()
    return tuple(
        PatternLayer(mixers.get(letter, "none"), letter in "-E", letter == "E") for letter in pattern if letter != STAGE
    )


def pattern_stages(pattern: str) -> tuple[int, ...]:
    """The first layer of each stage but the first. "M-|M*-|M-" -> (2, 5)."""
    stages = pattern.split(STAGE)
    return tuple(sum(len(stage) for stage in stages[:index]) for index in range(1, len(stages)))

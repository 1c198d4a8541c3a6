"""Two-way mapping between the gristmill Transformer and one Hugging Face architecture."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gristmill.foundation.errors import InputError
from gristmill.training.config.layers import Scales
from gristmill.training.config.model import ModelConfig

# Conversion of one Hugging Face tensor from and to gristmill tensors: transpose, concatenate, interleave.

# D width, F features of a projection, H heads, K head width


@dataclass(frozen=True)
class TensorConversion:
    """join: gristmill to Hugging Face. split: the inverse; split(join(x)) == x."""

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], Sequence[Tensor]]


def _interleave(tensors: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """q, k, v [H * K, ...] -> [H * 3 * K, ...]: for each head its q, its k, its v."""
    heads = [tensor.unflatten(0, (config.heads, config.head_dim)) for tensor in tensors]
    return torch.stack(heads, dim=1).flatten(0, 2)


def _separate(tensor: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    heads = tensor.unflatten(0, (config.heads, 3, config.head_dim))
    return [heads[:, index].flatten(0, 1) for index in range(3)]


SAME = TensorConversion(lambda tensors, _: tensors[0], lambda tensor, _: [tensor])

# GPT-2 stores the transpose of a linear layer's weight ("Conv1D"), and q, k and v side by side.
TRANSPOSED = TensorConversion(lambda tensors, _: tensors[0].T, lambda tensor, _: [tensor.T])
TRANSPOSED_TRIPLE = TensorConversion(
    lambda tensors, _: torch.cat([tensor.T for tensor in tensors], dim=1),
    lambda tensor, _: [part.T for part in tensor.chunk(3, dim=1)],
)
TRIPLE = TensorConversion(lambda tensors, _: torch.cat(list(tensors)), lambda tensor, _: tensor.chunk(3))

# BLOOM interleaves q, k and v by head.
BY_HEAD = TensorConversion(_interleave, _separate)


@dataclass(frozen=True)
class WeightRule:
    """One Hugging Face tensor and the gristmill tensors it is made of. `{i}` is the layer index; layers: those that
    have it, None for all. With `{e}`, the tensors of all `experts` are one of gristmill's, stacked."""

    hf_name: str
    ours: tuple[str, ...]
    form: TensorConversion = SAME
    layers: tuple[int, ...] | None = None
    experts: int = 0

    def expanded(self, layers: int) -> list["WeightRule"]:
        """One rule for each layer that has the tensor."""
        if "{i}" not in self.hf_name:
            return [self]
        return [self._at(layer) for layer in (range(layers) if self.layers is None else self.layers)]

    def names(self) -> list[str]:
        """Their tensors: one, or one for each expert."""
        if not self.experts:
            return [self.hf_name]
        return [self.hf_name.replace("{e}", str(expert)) for expert in range(self.experts)]

    def to_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        joined = self.form.join([tensors[name] for name in self.ours], config)
        parts = joined.unbind() if self.experts else [joined]
        return {name: part.contiguous() for name, part in zip(self.names(), parts, strict=True)}

    def from_hf(self, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
        sources = [tensors[name] for name in self.names()]
        whole = torch.stack(sources) if self.experts else sources[0]
        parts = self.form.split(whole, config)
        return {name: part.contiguous() for name, part in zip(self.ours, parts, strict=True)}

    def _at(self, layer: int) -> "WeightRule":
        ours = tuple(name.replace("{i}", str(layer)) for name in self.ours)
        return replace(self, hf_name=self.hf_name.replace("{i}", str(layer)), ours=ours)


Fields = dict[str, Any]


class UnsupportedConfig(InputError):
    """config.json asks for what gristmill's own model does not have; transformers' code may run the folder."""


@dataclass(frozen=True)
class ModelFamily:
    """architecture: the class in transformers; model_type: its name in config.json.

    unsupported: fields of a config that the architecture cannot represent, as "name=value". write, read: to the fields
    of config.json and back. aliases: other names that the same tensors have in some folders."""

    architecture: str
    model_type: str
    unsupported: Callable[[ModelConfig], list[str]]
    rules: Callable[[ModelConfig], list[WeightRule]]
    write: Callable[[ModelConfig], Fields]
    read: Callable[[Mapping[str, Any]], Fields]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def to_hf(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """gristmill tensors by Hugging Face names."""
        converted: dict[str, Tensor] = {}
        for rule in self._all_rules(config):
            converted |= rule.to_hf(tensors, config)
        return converted

    def converted(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(our name, tensor) for Hugging Face tensors that `from_hf` takes, each read as it is asked for."""
        tensors = self._by_known_name(tensors)
        for rule in self._all_rules(config):
            yield from _converted(rule, tensors, config).items()

    def from_hf(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hugging Face tensors by gristmill names. Raises InputError if one is absent or unexpected."""
        converted: dict[str, Tensor] = {}
        taken = set()
        tensors = self._by_known_name(tensors)
        for rule in self._all_rules(config):
            for name in rule.names():
                if name not in tensors:
                    raise InputError(f"the weights lack {name}; this {self.architecture} is incomplete")
            converted |= _converted(rule, tensors, config)
            taken.update(rule.names())
        self._nothing_left(config, sorted(tensors.keys() - taken))
        return converted

    def _by_known_name(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return RenamedTensors(
            tensors, {self.aliases.get(_prefixed(name, tensors), _prefixed(name, tensors)): name for name in tensors}
        )

    def _nothing_left(self, config: ModelConfig, names: list[str]) -> None:
        left = [name for name in names if not name.endswith(NO_WEIGHTS)]
        if config.tied_embeddings:
            left = [name for name in left if name not in TIED]
        if left:
            raise InputError(f"the weights hold {left[0]} ({len(left)} such), which {self.architecture} does not have")

    def _all_rules(self, config: ModelConfig) -> Iterable[WeightRule]:
        for rule in self.rules(config):
            yield from rule.expanded(config.layers)


def _converted(rule: WeightRule, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    try:
        return rule.from_hf(tensors, config)
    except (RuntimeError, ValueError, IndexError) as error:
        raise InputError(f"the weights of {rule.names()[0]} do not fit the config ({error}); fetch both") from error


TIED = (
    "lm_head.weight",
    "embed_out.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
)  # copies of other weights
NO_WEIGHTS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
    ".position_ids",
)  # buffers that old versions saved


class RenamedTensors(Mapping[str, Tensor]):
    """The same tensors under other names, read as they are asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], originals: Mapping[str, str]):
        self.tensors, self.originals = tensors, originals

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[self.originals[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.originals)

    def __len__(self) -> int:
        return len(self.originals)


def _prefixed(name: str, tensors: Mapping[str, Tensor]) -> str:
    """The name in a model with a head, where a folder holds the model without one: the oldest ones of GPT-2, BLOOM and
    OPT do."""
    if "wte.weight" in tensors or "word_embeddings.weight" in tensors:
        return name if name == "lm_head.weight" else f"transformer.{name}"
    return f"model.{name}" if "decoder.embed_tokens.weight" in tensors and name.startswith("decoder.") else name


PLAIN: dict[str, Any] = {
    "attention": "causal",
    "mixer": "attention",
    "pattern": None,
    "qk_norm": False,
    "qkv_clip": None,
    "attention_softcap": None,
    "logit_softcap": None,
    "rope_scaling": None,
    "rope_width": 0,
    "rope_layers": None,
    "window_rope_base": None,
    "position_offset": 0,
    "parallel_residual": False,
    "norm_plus_one": False,
    "scales": Scales(),
    "embedding_norm": False,
    "final_norm": True,
    "gelu": "tanh",
    "segments": 0,
    "head_transform": False,
    "head_bias": False,
    "outputs": (),
}


def unsupported_fields(config: ModelConfig, *, windows: Any = False, **wanted: Any) -> list[str]:
    """Fields in which the config differs from `wanted`, or that no architecture supports, as name=value. windows: the
    architecture may limit attention to a window."""
    wanted = {**PLAIN, **wanted}
    moe, norm_order = wanted.pop("moe", None), wanted.pop("norm_order", "pre")
    unsupported = [
        f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value
    ]
    if config.moe != moe:
        unsupported.append("mixture of experts (moe)")
    if not windows and any(layer.window is not None for layer in config.layer_list):
        unsupported.append(f"window={config.window}")
    if any(layer.norm_order != norm_order for layer in config.layer_list):
        unsupported.append(f"norm_order={config.norm_order}")
    if config.init_method == "mup":
        unsupported.append("init_method=mup (which scales attention and head)")
    return unsupported


def without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def other_widths(config: ModelConfig) -> list[str]:
    """Fields that an architecture lacks whose heads together are as wide as the model."""
    return [f"head_width={config.head_dim}"] if config.head_dim * config.heads != config.width else []


def grouped_heads(config: ModelConfig) -> list[str]:
    """Fields that an architecture lacks that has as many key/value heads as heads."""
    return [f"kv_heads={config.kv_heads}"] if config.num_kv_heads != config.heads else []


def norm_rules(config: ModelConfig, pairs: Mapping[str, str]) -> list[WeightRule]:
    """The rules of norms, from Hugging Face names to ours."""
    return [
        WeightRule(f"{hf_name}.{leaf}", (f"{ours}.{leaf}",))
        for hf_name, ours in pairs.items()
        for leaf in config.norm_leaves
    ]


def linear_rules(pairs: Mapping[str, str], biases: bool) -> list[WeightRule]:
    """The rules of linear layers, from Hugging Face names to ours."""
    leaves = ("weight", "bias") if biases else ("weight",)
    return [WeightRule(f"{hf_name}.{leaf}", (f"{ours}.{leaf}",)) for hf_name, ours in pairs.items() for leaf in leaves]


def weight_and_bias(
    hf_name: str, ours: tuple[str, ...], weight: TensorConversion, bias: TensorConversion
) -> list[WeightRule]:
    """The rules of a weight and a bias."""
    return [
        WeightRule(f"{hf_name}.weight", tuple(f"{name}.weight" for name in ours), weight),
        WeightRule(f"{hf_name}.bias", tuple(f"{name}.bias" for name in ours), bias),
    ]


def require_value(fields: Mapping[str, Any], name: str, value: Any) -> None:
    if fields.get(name) != value:
        raise UnsupportedConfig(
            f"config.json says {name}={fields.get(name)!r}; gristmill imports {name}={value!r} only"
        )


GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}


def read_gelu(fields: Mapping[str, Any], name: str, default: str) -> str:
    """Our name of the form of gelu that the field `name` of config.json names."""
    stated = fields.get(name) or default
    if stated not in GELUS:
        raise UnsupportedConfig(f"config.json says {name}={stated!r}; gristmill imports {', '.join(GELUS)} here")
    return GELUS[stated]


def write_gelu(config: ModelConfig) -> str:
    return "gelu" if config.gelu == "exact" else "gelu_new"

"""Two-way mapping between the gristmill Transformer and one Hugging Face architecture."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gristmill.evaluation.models.conversion.tensor_conversion import Rule, TensorConversion
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig

Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """architecture: the class in transformers; model_type: its name in config.json.

    unsupported: fields of a config that the architecture cannot represent, as "name=value". write, read: to the fields
    of config.json and back."""

    architecture: str
    model_type: str
    unsupported: Callable[[ModelConfig], list[str]]
    rules: Callable[[ModelConfig], list[Rule]]
    write: Callable[[ModelConfig], Fields]
    read: Callable[[Mapping[str, Any]], Fields]

    def to_theirs(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """gristmill tensors by Hugging Face names."""
        found: dict[str, Tensor] = {}
        for rule in self._all_rules(config):
            found |= rule.to_theirs(tensors, config)
        return found

    def to_ours(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hugging Face tensors by gristmill names. Raises InputError if one is absent or unexpected."""
        found: dict[str, Tensor] = {}
        taken = set()
        tensors = _with_prefix(tensors)
        for rule in self._all_rules(config):
            for name in rule.names():
                if name not in tensors:
                    raise InputError(f"the weights lack {name}; this {self.architecture} is incomplete")
            found |= _converted(rule, tensors, config)
            taken.update(rule.names())
        self._nothing_left(config, sorted(tensors.keys() - taken))
        return found

    def _nothing_left(self, config: ModelConfig, names: list[str]) -> None:
        left = [name for name in names if not name.endswith(NO_WEIGHTS)]
        if config.tied_embeddings:
            left = [name for name in left if name not in TIED]
        if left:
            raise InputError(f"the weights hold {left[0]} ({len(left)} such), which {self.architecture} does not have")

    def _all_rules(self, config: ModelConfig) -> Iterable[Rule]:
        for rule in self.rules(config):
            yield from rule.expanded(config.layers)


def _converted(rule: Rule, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    try:
        return rule.to_ours(tensors, config)
    except RuntimeError as error:
        raise InputError(f"the weights of {rule.names()[0]} do not fit the config ({error}); fetch both") from error


TIED = ("lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias")  # copies of other weights
NO_WEIGHTS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
    ".position_ids",
)  # buffers that old versions saved


def _with_prefix(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Adds the prefix "transformer." to tensor names: the oldest GPT-2 and BLOOM folders hold the model without its
    head."""
    if "wte.weight" not in tensors and "word_embeddings.weight" not in tensors:
        return tensors
    return {name if name == "lm_head.weight" else f"transformer.{name}": value for name, value in tensors.items()}


PLAIN: dict[str, Any] = {
    "attention": "causal",
    "mixer": "attention",
    "pattern": None,
    "qk_norm": False,
    "logit_softcap": None,
    "rope_scaling": None,
    "embedding_norm": False,
    "final_norm": True,
    "gelu": "tanh",
    "segments": 0,
    "head_transform": False,
    "head_bias": False,
    "outputs": (),
}


def unsupported_fields(config: ModelConfig, windows: bool = False, **wanted: Any) -> list[str]:
    """Fields in which the config differs from `wanted`, or that no architecture supports, as name=value. windows: the
    architecture may limit attention to a window."""
    wanted = {**PLAIN, **wanted}
    moe, norm_order = wanted.pop("moe", None), wanted.pop("norm_order", "pre")
    found = [f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value]
    if config.moe != moe:
        found.append("mixture of experts (moe)")
    if not windows and any(layer.window is not None for layer in config.layer_list):
        found.append(f"window={config.window}")
    if any(layer.norm_order != norm_order for layer in config.layer_list):
        found.append(f"norm_order={config.norm_order}")
    if config.initialisation == "mup":
        found.append("initialisation=mup (which scales attention and head)")
    return found


def weight_and_bias(theirs: str, ours: tuple[str, ...], weight: TensorConversion, bias: TensorConversion) -> list[Rule]:
    """The rules of a weight and a bias."""
    return [
        Rule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), weight),
        Rule(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours), bias),
    ]


def require_value(fields: Mapping[str, Any], name: str, value: Any) -> None:
    if fields.get(name) != value:
        raise InputError(f"config.json says {name}={fields.get(name)!r}; gristmill imports {name}={value!r} only")

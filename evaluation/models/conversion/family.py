"""The two-way table between our transformer and one architecture of transformers: the same rules serve both ways."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gristmill.evaluation.models.conversion.forms import Form, Rule
from gristmill.foundation.errors import InputError
from gristmill.training.config import ModelConfig

Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """architecture: the class in transformers; model_type: its name in config.json.

    complaints: what of a config the architecture has no place for, as "name=value". write, read: the config in their
    fields and back in ours."""

    architecture: str
    model_type: str
    complaints: Callable[[ModelConfig], list[str]]
    rules: Callable[[ModelConfig], list[Rule]]
    write: Callable[[ModelConfig], Fields]
    read: Callable[[Mapping[str, Any]], Fields]

    def to_theirs(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our named tensors under their names."""
        return {
            rule.theirs: rule.form.join([tensors[name] for name in rule.ours], config).contiguous()
            for rule in self._all_rules(config)
        }

    def to_ours(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their named tensors under our names. Raises InputError if one is absent, or one is left over."""
        found: dict[str, Tensor] = {}
        taken = set()
        tensors = _with_prefix(tensors)
        for rule in self._all_rules(config):
            if rule.theirs not in tensors:
                raise InputError(f"the weights lack {rule.theirs}; this is no whole {self.architecture}")
            parts = rule.form.split(tensors[rule.theirs], config)
            found.update(zip(rule.ours, (part.contiguous() for part in parts), strict=True))
            taken.add(rule.theirs)
        self._nothing_left(config, sorted(tensors.keys() - taken))
        return found

    def _nothing_left(self, config: ModelConfig, names: list[str]) -> None:
        left = [name for name in names if not name.endswith(NO_WEIGHTS)]
        if config.tied_embeddings:
            left = [name for name in left if name != "lm_head.weight"]
        if left:
            raise InputError(f"the weights hold {left[0]} ({len(left)} such), which no {self.architecture} has")

    def _all_rules(self, config: ModelConfig) -> Iterable[Rule]:
        for rule in self.rules(config):
            yield from (rule.at(layer) for layer in range(config.layers)) if rule.per_layer else (rule,)


NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # buffers that old versions saved


def _with_prefix(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The oldest GPT-2 and BLOOM folders hold the model without its head, whose names lack "transformer."."""
    if "wte.weight" not in tensors and "word_embeddings.weight" not in tensors:
        return tensors
    return {name if name == "lm_head.weight" else f"transformer.{name}": value for name, value in tensors.items()}


def unlike(config: ModelConfig, **wanted: Any) -> list[str]:
    """The fields in which the config differs from what is wanted, or holds what no architecture of transformers has."""
    wanted = {"qk_norm": False, "logit_softcap": None, "embedding_norm": False, **wanted}
    found = [f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value]
    if any(layer.window is not None for layer in config.layer_list):
        found.append(f"window={config.window}")
    if any(layer.norm_order != "pre" for layer in config.layer_list):
        found.append(f"norm_order={config.norm_order}")
    if config.initialisation == "mup":
        found.append("initialisation=mup (which scales attention and head)")
    return found


def pair(theirs: str, ours: tuple[str, ...], weight: Form, bias: Form) -> list[Rule]:
    """The rules of a weight and a bias."""
    return [
        Rule(f"{theirs}.weight", tuple(f"{name}.weight" for name in ours), weight),
        Rule(f"{theirs}.bias", tuple(f"{name}.bias" for name in ours), bias),
    ]


def demand(fields: Mapping[str, Any], name: str, value: Any) -> None:
    if fields.get(name) != value:
        raise InputError(f"config.json says {name}={fields.get(name)!r}; gristmill imports {name}={value!r} only")

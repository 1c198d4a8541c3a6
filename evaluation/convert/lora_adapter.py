"""LoRA adapters of PEFT, added to the weights of the model they were trained on.

W + s B A, with s = alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA (Hu et al. 2021, section 4.1; Kalajdzievski
2023, section 3). Names and fields are those that huggingface/peft saves: adapter_config.json and
adapter_model.safetensors. What it can save beyond that is refused by name."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from torch import Tensor

from gristmill.evaluation.convert.safetensors_folder import SafetensorsFolder
from gristmill.foundation.errors import InputError

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "lm_head", "embed_out", "output_layer")
# Fields that change what an adapter computes, and the values of which this addition is right.
PLAIN_FIELDS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "lora_bias": (False, None),
    "layer_replication": ([], None), "target_parameters": ([], None), "trainable_token_indices": ([], {}, None),
    "alora_invocation_tokens": ([], None), "megatron_config": ({}, None), "use_qalora": (False, None),
    "arrow_config": ({}, None), "use_bdlora": (False, {}, None),
}  # fmt: skip
# Last words of the names of the matrices: (the side, whether it is of an embedding).
SIDES = {
    "lora_A": ("A", False), "lora_B": ("B", False), "lora_embedding_A": ("A", True), "lora_embedding_B": ("B", True),
}  # fmt: skip


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


@dataclass
class LowRank:
    """The two matrices by the names of their tensors. down: float[r, in], up: float[out, r]; of an embedding in is the
    vocabulary. scale: of their product."""

    down: str = ""
    up: str = ""
    scale: float = 1.0
    is_embedding: bool = False


class AdaptedWeights(Mapping[str, Tensor]):
    """The tensors of a base model by its names, with an adapter added as each is read. meta: the same without values.
    files: of the base and of the adapter. Raises InputError where the adapter is damaged, or not of this base."""

    def __init__(self, base: SafetensorsFolder, folder: Path, tied_embeddings: bool):
        self.base, self.folder, self.meta = base, folder, base.meta
        self.config = _read_config(folder)
        self.adapter = SafetensorsFolder(folder, WEIGHTS_NAME)
        self.files = (*base.files, *self.adapter.files)
        self.pairs: dict[str, LowRank] = {}
        self.replaced: dict[str, str] = {}  # tensors that the adapter holds whole: modules_to_save, embeddings
        for name in self.adapter:
            self._take(name)
        for target, pair in self.pairs.items():
            self._check(target, pair, tied_embeddings)

    def _take(self, name: str) -> None:
        if not name.startswith(PREFIX):
            raise self._wrong(f"{name} does not begin with {PREFIX}")
        module, _, leaf = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        if leaf not in SIDES:
            target = self._target(name.removeprefix(PREFIX).replace(".base_layer.", "."))
            if self.adapter.meta[name].shape != self.meta[target].shape:
                shapes = f"{list(self.adapter.meta[name].shape)}, and that of the base {list(self.meta[target].shape)}"
                raise self._wrong(f"{name} is {shapes}: its vocabulary was resized")
            self.replaced[target] = name
            return
        side, is_embedding = SIDES[leaf]
        target = self._target(f"{module}.weight")
        low_rank = self.pairs.setdefault(target, LowRank(is_embedding=is_embedding))
        if side == "A":
            low_rank.down = name
            low_rank.scale = self._scale(module, min(self.adapter.meta[name].shape))
        else:
            low_rank.up = name

    def _target(self, name: str) -> str:
        """The base's name of a weight. Files of a model without its head lack the first part of the names."""
        if name in self.meta:
            return name
        candidates = [ours for ours in self.meta if name.endswith(f".{ours}") or ours.endswith(f".{name}")]
        if len(candidates) != 1:
            raise self._wrong(f"the base model has no weight {name}")
        return candidates[0]

    def _scale(self, module: str, rank: int) -> float:
        """alpha / r of the module. Patterns are matched as peft does: against the end of its name."""
        alpha = _of_pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        expected = _of_pattern(self.config.get("rank_pattern"), module, self.config["r"])
        if rank != expected:
            raise self._wrong(f"{module} has rank {rank}, and {CONFIG_NAME} says {expected}")
        return float(alpha / (sqrt(rank) if self.config.get("use_rslora") else rank))

    def _check(self, target: str, pair: LowRank, tied_embeddings: bool) -> None:
        if not pair.down or not pair.up:
            raise self._wrong(f"of {target} it holds one matrix of two")
        if tied_embeddings and any(name in target for name in EMBEDDINGS):
            raise self._wrong(f"it changes {target}, which this model uses as embedding and as head")
        down, up = self.adapter.meta[pair.down].shape, self.adapter.meta[pair.up].shape
        shape = (up[0], down[1]) if len(up) == len(down) == 2 and up[1] == down[0] else None
        wanted = tuple(self.meta[target].shape)
        if shape is None or (shape[::-1] if self._is_transposed(pair) else shape) != wanted:
            raise self._wrong(f"{list(up)} times {list(down)} does not give {target} of {list(wanted)}")

    def _is_transposed(self, pair: LowRank) -> bool:
        return pair.is_embedding or bool(self.config.get("fan_in_fan_out"))

    def _wrong(self, problem: str) -> InputError:
        return InputError(f"{self.folder}: {problem}; give the base model it was trained on, or fetch the files again")

    def __getitem__(self, name: str) -> Tensor:
        weight = self.adapter[self.replaced[name]] if name in self.replaced else self.base[name]
        weight = weight.to(self.meta[name].dtype)
        if name not in self.pairs:
            return weight
        pair = self.pairs[name]
        delta = pair.scale * (self.adapter[pair.up].double() @ self.adapter[pair.down].double())
        return (weight.double() + (delta.T if self._is_transposed(pair) else delta)).to(weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def base_name(folder: Path) -> str:
    """The base model as the adapter names it: a hub address, or a path of the machine it was trained on."""
    return str(_read_config(folder).get("base_model_name_or_path") or "unknown")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: is not a JSON object; fetch the file again")
    for field, values in PLAIN_FIELDS.items():
        if config.get(field) not in values and (field in config or field == "peft_type"):
            raise InputError(
                f"{path}: {field} is {str(config.get(field))[:80]}, which cannot be added to the weights here; merge "
                "the adapter with peft (merge_and_unload) and import the folder that it saves"
            )
    for field in ("r", "lora_alpha"):
        if not isinstance(config.get(field), int | float) or not config[field] > 0:
            raise InputError(f"{path}: {field} is {config.get(field)!r}, not a positive number; fetch the file again")
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(field) or {}
        if not isinstance(pattern, dict) or not all(isinstance(value, int | float) for value in pattern.values()):
            raise InputError(f"{path}: {field} is no table of numbers; fetch the file again")
    return config


def _of_pattern(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """peft reads keys as regular expressions that end the module's name; only plain names are taken here, since a
    foreign expression may take endless time."""
    for key, value in (patterns or {}).items():
        plain = key.removeprefix("^")
        if module == plain or (not key.startswith("^") and module.endswith(f".{plain}")):
            return value
        if not plain.replace(".", "").replace("_", "").isalnum():
            raise InputError(f"{CONFIG_NAME}: the pattern {key[:80]!r} is not the name of a module; merge it with peft")
    return default

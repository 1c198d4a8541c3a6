"""The input of a search: a model, also one of the literature by name, a machine, a batch, and the fixed choices."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gristmill.foundation.config import read_yaml
from gristmill.foundation.errors import RecipeError, nearest_name
from gristmill.training.config.layers import divisors
from gristmill.training.config.layout import ON_DEVICE, OffloadConfig, Recompute, Schedule
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.planner.costs.model_shape import ModelShape, gpt, shape_of
from gristmill.training.planner.engine_profile import GRISTMILL, EngineProfile
from gristmill.training.planner.hardware import FITTED, GIB, Hardware, Sustained
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.layout_checks import CheckedModel, reasons_of


@dataclass(frozen=True)
class FixedChoices:
    """Choices that the user fixes; None leaves one to the search. wide: also try settings that are seldom fastest."""

    tensor: int | None = None
    pipeline: int | None = None
    replicate: int | None = None
    shard: int | None = None
    context: int | None = None
    virtual: int | None = None
    micro_batch: int | None = None
    schedule: Schedule | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    expert: int | None = None
    expert_tensor: int | None = None
    wide: bool = False


# Share of a GPU's memory that a layout must leave free: the 5 % by which the forecast may be off, and a little more for
# what it does not count (workspaces of other kernels, NCCL's buffers, gaps in the allocator).
MEMORY_MARGIN = 0.06


@dataclass(frozen=True)
class PlanRequest:
    """Input of a search. samples: of one step; tokens: of the whole training, for days and cost.

    memory_margin: share of each GPU's memory that is kept free. train: the recipe's training, whose fields beside the
    layout decide too which layouts run (its precision, its growing batch); None: one without a recipe. imbalance: rows
    that the busiest rank's experts get, over the mean."""

    shape: ModelShape
    hardware: Hardware
    gpus: int
    samples: int
    tokens: int | None = None
    framework: EngineProfile = GRISTMILL
    sustained: Sustained = FITTED
    float8: bool = False
    offload: OffloadConfig = ON_DEVICE
    fixed: FixedChoices = field(default_factory=FixedChoices)
    memory_margin: float = MEMORY_MARGIN
    train: TrainConfig | None = None
    imbalance: float = 1.0

    def training(self, layout: Layout) -> TrainConfig:
        """The recipe's `train` with this layout. Raises ValidationError where they exclude each other."""
        config = layout.config().model_copy(update={"offload": self.offload})
        return TrainConfig.model_validate(self._train_fields | {"layout": config})

    def illegal_reason(self, layout: Layout) -> str | None:
        """The first reason why the engine refuses a layout, with a fix; None if it runs.

        Of other programs' layouts, what the engine refuses whether its layers are compiled or not."""
        if layout not in self._reasons:
            self._reasons[layout] = self._first_error(layout)
        return self._reasons[layout]

    def _first_error(self, layout: Layout) -> str | None:
        try:
            train = self.training(layout)
        except ValidationError as error:
            return reasons_of(error)
        return next(self._checked.validation_errors(train, layout.gpus), None)

    @cached_property
    def _reasons(self) -> dict[Layout, str | None]:
        """Layout -> what `illegal_reason` found: a search asks more than once."""
        return {}

    @cached_property
    def _checked(self) -> CheckedModel:
        shape = self.shape
        return CheckedModel(shape.model.model_copy(update={"sequence_length": shape.sequence_length}), shape.vocab)

    @cached_property
    def _train_fields(self) -> dict[str, Any]:
        tokens = self.samples * self.shape.sequence_length
        train = self.train or TrainConfig(
            tokens=tokens,
            batch_tokens=tokens,
            compile=self.framework.compiles,
            float8=self.float8 and self.framework.is_ours,
        )
        return {name: getattr(train, name) for name in TrainConfig.model_fields}

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU without the margin."""
        return self.hardware.device.memory_gib * GIB * (1 - self.memory_margin)

    @property
    def host_bytes(self) -> float:
        """A GPU's share of the host's memory."""
        return self.hardware.host_memory_gib_per_gpu * GIB


def check(request: PlanRequest) -> None:
    """Raises RecipeError where a request is invalid, or where a fixed choice leaves no legal layout."""
    if request.gpus < 1:
        raise RecipeError(f"--gpus {request.gpus}: at least one GPU is needed")
    if request.samples < 1:
        raise RecipeError(
            f"a batch of {request.samples} samples; --batch-tokens must be at least the sequence length, "
            f"{request.shape.sequence_length}"
        )
    if not 0 <= request.memory_margin < 1:
        raise RecipeError(
            f"--memory-margin {request.memory_margin}: a share of the memory from 0 to below 1, such as 0.06"
        )
    if request.imbalance < 1:
        raise RecipeError(f"--imbalance {request.imbalance}: the busiest rank's rows over the mean; give 1 or more")
    limit = request.hardware.gpus
    if limit is not None and request.gpus > limit:
        raise RecipeError(f"--gpus {request.gpus}, but the clusters of {request.hardware.name} have {limit} in all")
    for reason in fixed_choice_errors(request):
        raise RecipeError(reason)


def fixed_choice_errors(request: PlanRequest) -> Iterator[str]:
    """Why the fixed choices leave no legal layout, each with a fix. First the axes, which must divide the GPUs; then
    what must divide the batch or the layers."""
    fixed, shape = request.fixed, request.shape
    if fixed.tensor is not None:
        reason = request.illegal_reason(
            Layout(tensor=fixed.tensor, sequence_parallel=bool(fixed.sequence_parallel), recompute="full")
        )
        if reason is not None:
            yield f"--{reason}"
    if not shape.has_experts and (fixed.expert or 1) * (fixed.expert_tensor or 1) > 1:
        yield "--expert: the model has no experts; leave it out, or give the model some (model.moe)"
    axes = {"tensor": fixed.tensor, "context-axis": fixed.context, "pipeline": fixed.pipeline}
    axes |= {"replicate": fixed.replicate, "shard": fixed.shard}
    wanted = {name: size for name, size in axes.items() if size is not None}
    product = prod(wanted.values())
    if request.gpus % product:
        product_text = " x ".join(f"--{name} {size}" for name, size in wanted.items())
        count = -(-request.gpus // product) * product
        few = (
            f"more than --gpus {request.gpus}"
            if product > request.gpus
            else f"which {request.gpus} is not a multiple of"
        )
        yield f"{product_text} = {product} GPUs, {few}; use --gpus {count}, or leave an axis open"
    layers, stages = len(shape.blocks), (fixed.pipeline or 1) * (fixed.virtual or 1)
    if fixed.pipeline is not None and stages > layers:
        yield f"--pipeline {fixed.pipeline} with {fixed.virtual or 1} stages each: {stages} stages, but {layers} layers"
    if fixed.micro_batch is not None and request.samples % fixed.micro_batch:
        sizes = ", ".join(map(str, divisors(request.samples)[:12]))
        yield f"--micro-batch {fixed.micro_batch} does not divide {request.samples} samples a step; try one of {sizes}"


# Models of the literature by name, and model files, to plan a layout without a recipe.

# (layers, width, heads) of arXiv 2104.04473, table 1; its vocabulary is 51200 and its sequence length 2048.
_GPT = {
    "gpt-1.7b": (24, 2304, 24),
    "gpt-3.6b": (30, 3072, 32),
    "gpt-7.5b": (36, 4096, 32),
    "gpt-18b": (40, 6144, 48),
    "gpt-39b": (48, 8192, 64),
    "gpt-76b": (60, 10240, 80),
    "gpt-146b": (80, 12288, 96),
    "gpt3-175b": (96, 12288, 96),
    "gpt-310b": (96, 16384, 128),
    "mt-nlg-530b": (105, 20480, 128),
    "gpt-1t": (128, 25600, 160),
}
# (layers, width, heads, key/value heads, hidden width) of arXiv 2407.21783, table 3; vocabulary 128256, 8192 tokens.
_LLAMA3 = {
    "llama3-8b": (32, 4096, 32, 8, 14336),
    "llama3-70b": (80, 8192, 64, 8, 28672),
    "llama3-405b": (126, 16384, 128, 8, 53248),
}
# config.json of the published weights: mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B-Base, Qwen/Qwen3-235B-A22B;
# vocabulary, and fields of the model at its planned sequence length of 4096.
_MIXTURES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral-8x7b": (
        32000,
        {
            "layers": 32,
            "width": 4096,
            "heads": 32,
            "kv_heads": 8,
            "ffn_hidden_size": 14336,
            "moe": {"experts": 8, "top_k": 2},
        },
    ),
    "qwen3-30b-a3b": (
        151936,
        {"layers": 48, "width": 2048, "heads": 32, "moe": {"experts": 128, "top_k": 8, "ffn_hidden_size": 768}},
    ),
    "qwen3-235b-a22b": (
        151936,
        {"layers": 94, "width": 4096, "heads": 64, "moe": {"experts": 128, "top_k": 8, "ffn_hidden_size": 1536}},
    ),
}
_QWEN3 = {"kv_heads": 4, "head_width": 128, "qk_norm": True}
MODEL_NAMES = (*_GPT, *_LLAMA3, *_MIXTURES)


def named_shape(name: str, sequence_length: int | None = None) -> ModelShape:
    """Raises RecipeError with the nearest name."""
    if name in _GPT:
        return gpt(*_GPT[name], sequence_length=sequence_length or 2048)
    if name in _LLAMA3:
        layers, width, heads, kv_heads, hidden = _LLAMA3[name]
        model = ModelConfig(
            layers=layers,
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            ffn_hidden_size=hidden,
            sequence_length=sequence_length or 8192,
        )
        return shape_of(model, 128256)
    if name in _MIXTURES:
        vocab, fields = _MIXTURES[name]
        family = _QWEN3 if name.startswith("qwen3") else {}
        return shape_of(ModelConfig(**fields, **family, sequence_length=sequence_length or 4096), vocab)
    near = nearest_name(name, MODEL_NAMES, cutoff=0.3)
    hint = f"did you mean {near}? " if near else ""
    raise RecipeError(f"--model {name}: no such file or name; {hint}names are {', '.join(MODEL_NAMES)}")


def load_shape(reference: str, sequence_length: int | None = None, vocab: int | None = None) -> ModelShape:
    """The shape of a name, or of a YAML file: a recipe's (`model`, `tokenizer.vocab_size`) or a model's bare fields.

    Raises RecipeError where the file, a field or the vocabulary is missing or wrong."""
    path = Path(reference)
    if path.suffix not in (".yaml", ".yml"):
        shape = named_shape(reference, sequence_length)
        return shape if vocab is None else shape_of(shape.model, vocab, sequence_length)
    content = _read(path)
    fields = dict(content.get("model", content))
    size = vocab or fields.pop("vocab_size", None) or _section(content, "tokenizer").get("vocab_size")
    if not isinstance(size, int):
        raise RecipeError(f"{path}: no tokenizer.vocab_size; add it, or give --vocab")
    fields.pop("vocab_size", None)
    if sequence_length is not None:
        fields["sequence_length"] = sequence_length
    try:
        return shape_of(ModelConfig(**fields), size)
    except (ValidationError, TypeError) as error:
        raise RecipeError(f"{path}: {_sentences(error)}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path.read_bytes(), str(path)).value
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: holds no fields; begin with layers, width, heads")
    return content


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _sentences(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    problems = []
    for detail in error.errors():
        place = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            near = nearest_name(place, ModelConfig.model_fields, cutoff=0.3)
            hint = f"did you mean {near}?" if near else f"fields are {', '.join(ModelConfig.model_fields)}"
            problems.append(f"unknown field {place}; {hint}")
        else:
            problems.append(f"{place}: {detail['msg']}" if place else detail["msg"])
    return "; ".join(problems)

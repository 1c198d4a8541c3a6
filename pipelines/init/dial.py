"""One dial for the size of a run: minutes, depth, or floating-point operations, with this machine's measured rate.

Width is 64 times the depth, as in nanochat (karpathy/nanochat, scripts/base_train.py); tokens are 20 a parameter
(Hoffmann et al. 2022, arXiv 2203.15556, table 3) where time and text allow."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gristmill.foundation.errors import RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.launch.processes import device_of_task, keep_freed_memory
from gristmill.training.objectives.objective import TrainingData, stack_samples
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig

DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
WIDTH_PER_LAYER, HEAD_WIDTH = 64, 64
TOKENS_PER_PARAMETER = 20
MAX_EPOCHS = 4  # repeated text is nearly as good as new up to here (Muennighoff et al. 2023, arXiv 2305.16264)
MIN_STEPS = 20
MIN_TRAINING_SECONDS = 10.0
SMALL_EPOCHS = 40  # a corpus too small for a run of this length is repeated so often, at most
EVALUATION_SECONDS = 8.0  # of evaluate and report, until they are rehearsed
TRAINING_SHARE = 0.95  # of the time of the stage train that its steps take, until it is rehearsed
# Each learning rate goes with this power of the model's width (docs/defaults.md, Transfer)
WIDTH_EXPONENTS = {
    "learning_rate": -0.5,
    "embedding_learning_rate": -0.5,
    "head_learning_rate": -0.5,
    "muon_learning_rate": 0.0,
}


@dataclass(frozen=True)
class TrainingRehearsal:
    """fixed: seconds of the stage train beside its steps. after: seconds of evaluate and report."""

    tokens_per_second: float
    fixed: float
    after: Mapping[str, float]


@dataclass(frozen=True)
class Setting:
    """text_bytes, text_tokens: of the training text. overhead: forecast seconds of all that is not training. info: of
    each measured rate."""

    text_bytes: float
    text_tokens: float
    vocabulary: int
    precision: str
    overhead: float
    info: Callable[[str], None] = lambda line: None

    @property
    def max_tokens(self) -> float:
        return SMALL_EPOCHS * self.text_tokens


@dataclass(frozen=True)
class ModelSize:
    depth: int
    vocabulary: int
    sequence_length: int

    @property
    def width(self) -> int:
        return WIDTH_PER_LAYER * self.depth

    @property
    def fields(self) -> dict[str, Any]:
        heads = self.width // HEAD_WIDTH
        return {
            "layers": self.depth,
            "width": self.width,
            "heads": heads,
            "sequence_length": self.sequence_length,
            "qk_norm": True,
            "embedding_norm": True,
            "embedding_std": 1.0,
            "init_std": round(self.width**-0.5, 4),
            "zero_outputs": True,
        }

    @property
    def parameters(self) -> int:
        """Parameters of the layers and the two tables: 4 width^2 of attention and 8 width^2 of a gated MLP a layer."""
        return self.depth * 12 * self.width**2 + 2 * self.vocabulary * self.width


@dataclass(frozen=True)
class Choice:
    """epochs: how often the text is read. seconds: forecast by stage, and of the command's start. why: one line for the
    recipe's reader."""

    size: ModelSize
    tokens: int
    batch_tokens: int
    tokens_per_second: float
    epochs: float
    seconds: Mapping[str, float]
    why: str

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def flops(self) -> float:
        """6 N D (Kaplan et al. 2020, arXiv 2001.08361, table 1)."""
        return 6.0 * self.size.parameters * self.tokens


def rate_at_width(name: str, rate: float, ratio: float) -> float:
    """The rate of this name in OptimizerConfig for a model of `ratio` times the width for which it is `rate`. An
    embedding's 0.2 at 768 is 0.4 at 192; Muon's rate stays."""
    return float(rate * ratio ** WIDTH_EXPONENTS[name])


def optimizer_of(size: ModelSize) -> dict[str, Any]:
    """Muon on the matrices (Jordan et al. 2024) and AdamW on the rest, at the rates that were best at width 128 for
    2,048 tokens a step (docs/defaults.md); those of the tables are given for width 768, as nanochat's."""
    ratio = size.width / 768
    return {
        "name": "muon",
        "muon_learning_rate": 0.03,
        "muon_momentum": 0.9,
        "learning_rate": 0.008,
        "embedding_learning_rate": round(rate_at_width("embedding_learning_rate", 0.2, ratio), 4),
        "head_learning_rate": round(rate_at_width("head_learning_rate", 0.004, ratio), 5),
        "betas": [0.8, 0.95],
        "epsilon": 1e-10,
        "weight_decay": 0.0,
    }


SCHEDULE = {"shape": "wsd", "warmup_share": 0.05, "decay_share": 0.4, "decay_shape": "linear", "final_ratio": 0.0}


def batch_of(size: ModelSize) -> int:
    """Tokens of a step: 8 sequences for the smallest models, more for larger ones."""
    return size.sequence_length * (8 if size.depth < 6 else 16)


def measured_rate(size: ModelSize, precision: str) -> float:
    """Tokens a second of the run's own training step, on random text (init/dial.py)."""
    from gristmill.foundation.progress import Reporter  # torch takes seconds to load

    with tempfile.TemporaryDirectory() as folder:
        rate = steps_per_second(
            size.fields,
            size.vocabulary,
            {"batch_tokens": batch_of(size), "precision": precision, "optimizer": optimizer_of(size)},
            Path(folder),
            Reporter.silent(),
        )
    return rate * batch_of(size)


def choose_by_minutes(minutes: float, setting: Setting) -> Choice:
    """The deepest model that sees TOKENS_PER_PARAMETER within the time, or the shallowest if none does."""
    seconds = (60 * minutes - setting.overhead) * TRAINING_SHARE
    if seconds < MIN_TRAINING_SECONDS:
        raise RecipeError(
            f"--minutes {minutes:g}: all but the training takes about {setting.overhead:.0f} s for "
            f"{setting.text_bytes / 1e6:.1f} MB of text; give at least "
            f"{(setting.overhead + 2 * MIN_TRAINING_SECONDS) / 60:.1f} minutes, or a smaller folder"
        )
    best: Choice | None = None
    for depth in DEPTHS:
        size = ModelSize(depth, setting.vocabulary, _sequence_length(depth))
        rate = _rate(size, setting)
        possible = seconds * rate
        enough = TOKENS_PER_PARAMETER * size.parameters
        if best is not None and possible < enough:
            break
        best = _choice(size, min(possible, setting.max_tokens), rate, setting)
        if possible < 2.2 * enough:  # the next depth costs more than twice
            break
        if setting.max_tokens < enough:
            break
    assert best is not None
    return best


def choose_by_depth(depth: int, setting: Setting) -> Choice:
    size = ModelSize(depth, setting.vocabulary, _sequence_length(depth))
    tokens = min(TOKENS_PER_PARAMETER * size.parameters, setting.max_tokens)
    return _choice(size, tokens, _rate(size, setting), setting)


def choose_by_flops(flops: float, setting: Setting) -> Choice:
    """C = 6 N D with D = 20 N, so N = sqrt(C / 120): the deepest model of at most so many parameters."""
    sizes = [ModelSize(depth, setting.vocabulary, _sequence_length(depth)) for depth in DEPTHS]
    fitting = [size for size in sizes if size.parameters <= (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5]
    size = fitting[-1] if fitting else sizes[0]
    return _choice(size, min(flops / (6 * size.parameters), setting.max_tokens), _rate(size, setting), setting)


def rehearsed(
    choice: Choice, setting: Setting, before: Mapping[str, float], training: TrainingRehearsal, minutes: float | None
) -> Choice:
    """The choice with the forecast of a rehearsal, and with as many tokens as fit into the minutes, if these decide.
    before: seconds of the start and of the stages up to training."""
    tokens: float = choice.tokens
    rate = training.tokens_per_second
    if minutes is not None:
        left = 60 * minutes - sum(before.values()) - training.fixed - sum(training.after.values())
        tokens = min(max(left, MIN_TRAINING_SECONDS) * rate, setting.max_tokens)
    tokens = _whole_steps(tokens, choice.batch_tokens)
    seconds = {**before, "train": training.fixed + tokens / rate, **training.after}
    return _described(choice.size, int(tokens), rate, seconds, setting)


def _rate(size: ModelSize, setting: Setting) -> float:
    rate = measured_rate(size, setting.precision)
    setting.info(f"depth {size.depth}, {size.parameters / 1e6:.2f}M parameters: {rate:,.0f} tokens a second")
    return rate


def _sequence_length(depth: int) -> int:
    return 256 if depth < 6 else 512


def _choice(size: ModelSize, tokens: float, rate: float, setting: Setting) -> Choice:
    whole = _whole_steps(tokens, batch_of(size))
    seconds = {"all but training": setting.overhead, "train": whole / rate / TRAINING_SHARE}
    return _described(size, whole, rate, seconds, setting)


def _whole_steps(tokens: float, batch: int) -> int:
    return max(batch * MIN_STEPS, int(tokens) // batch * batch)


def _described(size: ModelSize, tokens: int, rate: float, seconds: Mapping[str, float], setting: Setting) -> Choice:
    epochs = tokens / max(1.0, setting.text_tokens)
    why = f"{tokens / 1e6:.2f}M tokens, {tokens / size.parameters:.1f} a parameter, {epochs:.1f} times the text"
    if epochs > MAX_EPOCHS:
        why += f"; text read over {MAX_EPOCHS} times teaches less each time: more text would serve better"
    return Choice(size, tokens, batch_of(size), rate, epochs, seconds, why)


# The rate of training steps of a model on this machine, by the trainer itself on random tokens.

WARM_STEPS, STEPS = 3, 6


class RandomText:
    """Samples of random tokens, in the form of the indexed data."""

    fingerprint = "random"

    def __init__(self, vocab_size: int, sequence_length: int):
        self.vocab_size, self.sequence_length = vocab_size, sequence_length

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        return stack_samples([self._sample(number) for number in numbers])

    def source_of(self, number: int) -> str:
        return "random"

    def _sample(self, number: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng(number).integers(0, self.vocab_size, self.sequence_length + 1)
        weights = np.ones(self.sequence_length, np.float32)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights}


def steps_per_second(
    model: Mapping[str, Any],
    vocabulary: int,
    train: Mapping[str, Any],
    folder: Path,
    reporter: Reporter,
    number: int = 0,
) -> float:
    """The median of STEPS steps after WARM_STEPS, each whole: data, passes, update, metrics. train: batch_tokens,
    precision and optimizer, as in a recipe. number: of the GPU, where there are several."""
    keep_freed_memory()
    config = ModelConfig(**model)
    batch_tokens = train["batch_tokens"]
    settings = TrainConfig(
        **train,
        tokens=(WARM_STEPS + STEPS) * batch_tokens,
        validation={"every": 0},
        checkpoint={"every": 0},
        monitoring={"trackers": []},
    )
    text = RandomText(vocabulary, config.sequence_length)
    data = TrainingData(text, None, 0, mask_documents=False, bytes_per_token={}, training_bytes_per_token={})
    mesh = single_process(device_of_task(number))
    Run(RunConfig(config, settings, 0), data, mesh, folder, reporter, None).train()
    lines = (folder / "logs" / "timing.jsonl").read_text("utf-8").splitlines()
    rates = [json.loads(line)["tokens_per_second"] for line in lines]
    return median(rates[WARM_STEPS:]) / batch_tokens

"""Time to loss: the recipe that `gristmill init` writes beside those of nanoGPT and nanochat, on the same tokens.

    python benchmarks/recipes.py [--results FOLDER]

Each recipe has depth 3 and width 192 (init's and nanochat's 64 a layer), a vocabulary of 2,048, 256 tokens a sample
and 4,096 a step, in float32 on one thread: about 20 minutes of one core. Its rates, all at once, are taken times 1/2,
1 and 2 (and on, while the end of the grid is best) with the first seed; the best runs with two more seeds. Held-out
loss is taken every 10 steps.

A figure is the peer's FLOPs to its final loss over ours to the same loss: the geometric mean over the seeds, which
decide weights and order of samples for both, with Student's interval of 95 %. Where ours ends higher, it is the peer's
FLOPs to our final loss over all of ours. Runs are kept in --results, so that a stopped program goes on."""

import html
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from measure import Figure, arguments, print_figures
from peers import nanochat, nanogpt
from rich.console import Console
from rich.table import Table

from gristmill.foundation.progress import Reporter
from gristmill.pipelines.init.dial import ModelSize, batch_of, optimizer_of
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig, TrainConfig
from gristmill.training.metrics import TrainingData, read_metrics
from gristmill.training.objectives.objective import stack_samples
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
SIZE = ModelSize(depth=3, vocabulary=2048, sequence_length=256)
BATCH = batch_of(SIZE) // SIZE.sequence_length
STEPS, EVERY, HELD_OUT = 100, 10, 32
HELD_OUT_FILES = 40  # one file in so many
RATES = (0.5, 1.0, 2.0)
SEEDS = (1, 2, 3)
STUDENT = {2: 4.303, 1: 12.706}  # 97.5 % of Student's t by degrees of freedom


@dataclass(frozen=True)
class Text:
    """train, held_out: token ids. bytes_per_token: of the held-out text."""

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float


@dataclass(frozen=True)
class Curve:
    """Held-out bits per byte after so many FLOPs, from first to last."""

    flops: tuple[float, ...]
    bits: tuple[float, ...]

    def flops_to(self, bits: float) -> float:
        """FLOPs until the loss is first so low, interpolated in logarithms of FLOPs; infinite where it never is."""
        for index, value in enumerate(self.bits):
            if value <= bits:
                if index == 0:
                    return self.flops[0]
                before, share = self.bits[index - 1], (self.bits[index - 1] - bits) / (self.bits[index - 1] - value)
                assert before >= bits
                low, high = math.log(self.flops[index - 1]), math.log(self.flops[index])
                return math.exp(low + share * (high - low))
        return math.inf


class Windows:
    """Samples of the text in an order that the seed decides."""

    fingerprint, vocab_size = "windows", SIZE.vocabulary

    def __init__(self, tokens: np.ndarray, seed: int | None):
        count = (len(tokens) - 1) // SIZE.sequence_length
        order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
        self.tokens, self.starts = tokens, order * SIZE.sequence_length

    def sample(self, k: int) -> dict[str, np.ndarray]:
        start = self.starts[k % len(self.starts)]
        window = self.tokens[start : start + SIZE.sequence_length + 1]
        return {"tokens": window[:-1], "targets": window[1:], "weights": np.ones(SIZE.sequence_length, np.float32)}

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        return stack_samples([self.sample(k) for k in numbers])

    def source_of(self, k: int) -> str:
        return "books"


@lru_cache(1)
def text(folder: Path) -> Text:
    """Books as plain text, tokens of a byte-level BPE of the training files."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    with zstandard.open(folder / "corpora" / "books_xhtml.jsonl.zst", "rt", encoding="utf-8") as file:
        for number, line in enumerate(file):
            plain = html.unescape(re.sub(r"<[^>]+>", " ", json.loads(line)["html"]))
            parts[number % HELD_OUT_FILES == 0].append(re.sub(r"\s+", " ", plain))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE.vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(parts[False][:300], trainer)
    ids = {held: [id for part in tokenizer.encode_batch(pieces) for id in part.ids] for held, pieces in parts.items()}
    held_out_bytes = sum(len(piece.encode()) for piece in parts[True])
    return Text(np.array(ids[False]), np.array(ids[True]), held_out_bytes / len(ids[True]))


def flops_per_token(parameters: Iterator[tuple[str, torch.Tensor]], tied: bool) -> float:
    """6 a number of each matrix that multiplies, and 6 of each layer's causal attention by width and length."""
    matrices = sum(
        value.numel()
        for name, value in parameters
        if value.ndim == 2 and "positions" not in name and (tied or "embedding" not in name)
    )
    return 6.0 * (matrices + SIZE.depth * SIZE.width * SIZE.sequence_length)


def train_ours(data: Text, seed: int, rate: float, steps: int, folder: Path) -> Curve:
    """By `Run`, as the stage `train` does, with what `gristmill init` writes."""
    written = OptimizerConfig(**optimizer_of(SIZE))
    optimizer = written.model_dump(exclude_unset=True) | {
        name: rate * getattr(written, name) for name in ("learning_rate", "muon_learning_rate")
    }
    tokens = BATCH * SIZE.sequence_length
    train = TrainConfig(
        tokens=steps * tokens,
        batch_tokens=tokens,
        precision="fp32",
        optimizer=optimizer,
        lr_schedule={"shape": "wsd", "warmup_share": 0.05, "decay_share": 0.4, "final_ratio": 0.0},
        validation={"every": EVERY, "samples": HELD_OUT},
        checkpoint={"every": 0},
        monitoring={"trackers": ()},
    )
    model = ModelConfig(**SIZE.fields)
    samples, held_out = Windows(data.train, seed), Windows(data.held_out, None)
    inputs = TrainingData(samples, held_out, 0, False, {"books": data.bytes_per_token})
    folder.mkdir(parents=True)
    run = Run(RunConfig(model, train, seed), inputs, single_process(), folder, Reporter.silent())
    cost = flops_per_token(iter(run.model.parameters.items()), tied=True)
    run.train()
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "validation" in line]
    bits = [line["validation"]["loss"] / math.log(2) / data.bytes_per_token for line in lines]
    return Curve(tuple(line["tokens"] * cost for line in lines), tuple(bits))


def train_peer(name: str, data: Text, seed: int, rate: float, steps: int, folder: Path) -> Curve:
    """A plain loop: the same samples in the same order, gradients clipped at 1."""
    torch.manual_seed(seed)
    factor: Callable[[float], float]
    if name == "nanochat":
        model: Any = nanochat.NanoChat(SIZE.depth, SIZE.width, 2, SIZE.sequence_length, SIZE.vocabulary)
        optimizers, factor = model.optimizers(rate), nanochat.rate_factor
    else:
        model = nanogpt.NanoGPT(SIZE.depth, SIZE.width, SIZE.width // 64, SIZE.sequence_length, SIZE.vocabulary)
        nanogpt.initialize(model)
        optimizers, factor = nanogpt.optimizers(model, rate), nanogpt.rate_factor
    samples, held_out = Windows(data.train, seed), Windows(data.held_out, None).batch(range(HELD_OUT))
    cost = flops_per_token(model.named_parameters(), tied=name == "nanogpt")
    flops, bits = [], []
    for step in range(steps):
        for optimizer in optimizers:
            for members in optimizer.param_groups:
                members["lr"] = members["initial_lr"] * factor(step / steps)
        model(*_pair(samples.batch(range(step * BATCH, (step + 1) * BATCH)))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            with torch.no_grad():
                loss = model(*_pair(held_out)).item()
            flops.append((step + 1) * BATCH * SIZE.sequence_length * cost)
            bits.append(loss / math.log(2) / data.bytes_per_token)
    return Curve(tuple(flops), tuple(bits))


def _pair(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.as_tensor(batch["tokens"]), torch.as_tensor(batch["targets"])


class Runs:
    """Curves by recipe, rate and seed, trained when they are asked for and kept in a folder."""

    def __init__(self, data: Text, folder: Path, steps: int):
        self.data, self.folder, self.steps = data, folder, steps

    def curve(self, recipe: str, rate: float, seed: int) -> Curve:
        name = f"{recipe}-{rate:g}-{seed}-{self.steps}"
        path = self.folder / f"{name}.json"
        if path.is_file():
            return Curve(**{key: tuple(values) for key, values in json.loads(path.read_text()).items()})
        arguments = (self.data, seed, rate, self.steps, self.folder / f"{name}-{os.getpid()}")
        curve = train_ours(*arguments) if recipe == "ours" else train_peer(recipe, *arguments)
        path.write_text(json.dumps(asdict(curve)))
        print(f"{name}: {curve.bits[-1]:.4f} bits per byte", flush=True)
        return curve

    def best_rate(self, recipe: str) -> float:
        """The best multiple of the recipe's rates with the first seed; the grid grows while its end is best."""
        bits = {rate: self.curve(recipe, rate, SEEDS[0]).bits[-1] for rate in RATES}
        while (best := min(bits, key=bits.__getitem__)) in (min(bits), max(bits)) and len(bits) < 6:
            new = best / 2 if best == min(bits) else best * 2
            bits[new] = self.curve(recipe, new, SEEDS[0]).bits[-1]
        return best


def speed_up(ours: Curve, peer: Curve) -> float:
    """The peer's FLOPs to its final loss over ours to the same; where ours ends higher, the peer's to our final loss
    over all of ours."""
    if ours.bits[-1] <= peer.bits[-1]:
        return peer.flops[-1] / ours.flops_to(peer.bits[-1])
    return peer.flops_to(ours.bits[-1]) / ours.flops[-1]


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(geometric mean, lower end, upper end of Student's 95 %)."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    half = STUDENT[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def figures(runs: Runs, seeds: tuple[int, ...]) -> list[Figure]:
    recipes = ("ours", "nanogpt", "nanochat")
    rates = {recipe: runs.best_rate(recipe) for recipe in recipes}
    curves = {recipe: [runs.curve(recipe, rates[recipe], seed) for seed in seeds] for recipe in recipes}
    table = Table("recipe", "rates times", "FLOPs", "bits per byte", "by seed")
    for recipe in recipes:
        bits = [curve.bits[-1] for curve in curves[recipe]]
        cells = (f"{rates[recipe]:g}", f"{curves[recipe][0].flops[-1]:.3g}", f"{statistics.mean(bits):.4f}")
        table.add_row(recipe, *cells, ", ".join(f"{value:.4f}" for value in bits))
    Console(width=120).print(table)
    lines = []
    for recipe, goal in (("nanogpt", 1.3), ("nanochat", 1.05)):
        ratio, low, high = interval([speed_up(*pair) for pair in zip(curves["ours"], curves[recipe], strict=True)])
        ours, peer = (statistics.mean(curve.bits[-1] for curve in curves[name]) for name in ("ours", recipe))
        unit = f"bits per byte; ratio of FLOPs {low:.2f} to {high:.2f}"
        lines.append(Figure(f"time_to_loss_{recipe}", ours, unit, peer, recipe, ratio, goal))
    return lines


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--results", type=Path, default=Path("work/recipes"), help="folder that keeps each run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.mkdir(parents=True, exist_ok=True)
    runs = Runs(text(options.data or SHARED), options.results, 20 if options.quick else STEPS)
    print_figures(figures(runs, SEEDS[:2] if options.quick else SEEDS))


if __name__ == "__main__":
    main()

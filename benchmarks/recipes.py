"""Time to loss: the recipe that `gristmill init` writes beside those of nanoGPT and nanochat, on the same tokens.

    python benchmarks/recipes.py [--depth 3] [--samples 1600] [--rates RECIPE=MULTIPLE ...] [--seeds 3]
    python benchmarks/recipes.py --changes [NAME ...] [--pages] [--seeds 3]

Each recipe has depth 3 and width 192 (init's and nanochat's 64 a layer), a vocabulary of 2,048 and 256 tokens a sample,
in float32 on one thread: about 25 minutes of one core. A step is what `init` writes, 2,048 tokens, and 4,096 for the
peers; nanochat runs with 2,048 too, so that the batch's share of the difference shows. Rates, all at once, are taken
times 1 and 2 (and on, while the end of the grid is best) with the first seed; the best runs with two more seeds. With
--rates the named recipes run at the given multiples. Held-out loss is taken ten times.

A figure is the peer's FLOPs to its final loss over ours to the same loss: the geometric mean over the seeds, which
decide weights and order of samples for both, with Student's interval of 95 %. Where ours ends higher, it is the peer's
FLOPs to our final loss over all of ours. The same in CPU time stands in the unit. Runs are kept in --results, so that a
stopped program goes on.

--changes trains depth 2 and width 128 on 0.61 M tokens with one change each, all of CHANGES or those that it names, and
prints the difference to init's recipe, of equal seeds, with Student's interval of 95 % (docs/defaults.md has the
effects). With --pages the text is short pages."""

import html
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from measure import Figure, arguments, print_figures
from peers import nanochat, nanogpt
from rich.console import Console
from rich.table import Table
from support.muon_variants import MUON_CHANGES, MuonVariant, replaced_muon

from gristmill.foundation.progress import Reporter
from gristmill.pipelines.init.dial import SCHEDULE, ModelSize, batch_of, optimizer_of
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig, TrainConfig
from gristmill.training.metrics import read_metrics
from gristmill.training.objectives.objective import TrainingData, stack_samples
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parent.parent.parent / "shared" / "data")
VOCABULARY, SEQUENCE_LENGTH = 2048, 256
SIZE = ModelSize(3, VOCABULARY, SEQUENCE_LENGTH)
PEER_BATCHES = {"nanogpt": 16, "nanochat": 16, "nanochat_batch_8": 8}
VARIANTS = {"nanochat_value_residual": 8}  # by --rates alone
SAMPLES, EVALUATIONS, HELD_OUT = 1600, 10, 32  # of a run
SMALL_SIZE, SMALL_SAMPLES = ModelSize(2, VOCABULARY, SEQUENCE_LENGTH), 2400  # of --changes
# Each a change of the recipe that init writes, by section: what --changes trains beside it
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "init": {},
    "AdamW for all": {"optimizer": {"name": "adamw"}},
    "Muon's rate 0.05": {"optimizer": {"muon_learning_rate": 0.05}},
    "Muon's momentum 0.95": {"optimizer": {"muon_momentum": 0.95}},
    "half the embedding's rate": {"optimizer": {"embedding_learning_rate": 0.245}},
    "twice the embedding's rate": {"optimizer": {"embedding_learning_rate": 0.98}},
    "twice the head's rate": {"optimizer": {"head_learning_rate": 0.0196}},
    "betas 0.9, 0.95": {"optimizer": {"betas": [0.9, 0.95]}},
    "weight decay 0.1 on matrices": {"optimizer": {"weight_decay": 0.1, "decay_tables": False}},
    "1,024 tokens a step": {"train": {"batch": 4}},
    "4,096 tokens a step": {"train": {"batch": 16}},
    "z-loss 1e-4": {"train": {"z_loss": 1e-4}},
    "no warm-up": {"schedule": {"warmup_share": 0.0}},
    "cooldown over 0.2": {"schedule": {"decay_share": 0.2}},
    "cooldown over 0.7": {"schedule": {"decay_share": 0.7}},
    "cooldown 1 - sqrt": {"schedule": {"decay_shape": "one_minus_sqrt"}},
    "no norm of queries and keys": {"model": {"qk_norm": False}},
    "no norm of the embedding": {"model": {"embedding_norm": False}},
    "outputs not zero at first": {"model": {"zero_outputs": False}},
    "tied tables": {
        "model": {"tied_embeddings": True, "embedding_std": 0.02},
        "optimizer": {"embedding_learning_rate": 0.02, "head_learning_rate": None},
    },
    "logits capped at 15": {"model": {"logit_softcap": 15.0}},
    "ReLU^2": {"model": {"mlp": "relu2"}},
    "biases": {"model": {"biases": True}},
    "a window of 128 in every other layer": {"model": {"window": [128, None]}},
    "the batch grows from 1,024 tokens over 92,160": {
        "train": {"batch_ramp": {"start_tokens": 1024, "increment_tokens": 256, "over_tokens": 92_160}}
    },
    "norms without weights": {"model": {"norm": "plain_rmsnorm"}},
    "init before": {  # what init wrote until November 2026
        "model": {
            "tied_embeddings": True, "qk_norm": False, "embedding_norm": False, "embedding_std": None,
            "init_std": 0.053, "zero_outputs": False,
        },
        "optimizer": {
            "learning_rate": 9.8e-3, "muon_learning_rate": 0.02, "muon_momentum": 0.95, "betas": [0.9, 0.95],
            "epsilon": 1e-8, "weight_decay": 0.1, "embedding_learning_rate": None, "head_learning_rate": None,
        },
        "schedule": {"decay_shape": "one_minus_sqrt"},
        "train": {"batch": 16},
    },
}  # fmt: skip
NAMED_CHANGES = MUON_CHANGES | {"document masks": {"data": {"masked": True}}}  # for which --changes asks by name
HELD_OUT_FILES = 40  # one file in so many
RATES = (1.0, 2.0)
SEEDS = (1, 2, 3, 4, 5)
STUDENT = {4: 2.776, 3: 3.182, 2: 4.303, 1: 12.706}  # 97.5 % of Student's t by degrees of freedom


@dataclass(frozen=True)
class Text:
    """train, held_out: token ids. bytes_per_token: of the held-out text. end: id behind each document, or None: the
    text is long documents without one."""

    train: np.ndarray
    held_out: np.ndarray
    bytes_per_token: float
    end: int | None = None


@dataclass(frozen=True)
class Curve:
    """Held-out bits per byte after so many FLOPs, from first to last. seconds: CPU time of the run."""

    flops: tuple[float, ...]
    bits: tuple[float, ...]
    seconds: float = 0.0

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
    """Samples of the text in an order that the seed decides. Nothing learns or scores a document's first token. masked:
    positions restart and attention stays inside each document."""

    fingerprint, vocab_size = "windows", VOCABULARY

    def __init__(self, tokens: np.ndarray, seed: int | None, end: int | None = None, masked: bool = False):
        self.end, self.masked = end, masked
        count = (len(tokens) - 1) // SEQUENCE_LENGTH
        order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
        self.tokens, self.starts = tokens, order * SEQUENCE_LENGTH

    def sample(self, k: int) -> dict[str, np.ndarray]:
        start = self.starts[k % len(self.starts)]
        window = self.tokens[start : start + SEQUENCE_LENGTH + 1]
        ends = np.zeros(SEQUENCE_LENGTH, bool) if self.end is None else window[:-1] == self.end
        drawn = {"tokens": window[:-1], "targets": window[1:], "weights": 1 - ends.astype(np.float32)}
        if self.masked:
            documents, places = np.cumsum(ends) - ends, np.arange(SEQUENCE_LENGTH)
            first = np.searchsorted(documents, np.arange(documents[-1] + 1))
            drawn |= {"documents": documents, "positions": places - first[documents]}
        return drawn

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        return stack_samples([self.sample(k) for k in numbers])

    def source_of(self, k: int) -> str:
        return "books"


@lru_cache(1)
def text(folder: Path, pages: bool = False) -> Text:
    """Books as plain text, or English pages of tldr of about 150 tokens, shuffled, each with an end; tokens of a
    byte-level BPE of the training files."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    name = "tldr" if pages else "books_xhtml"
    with zstandard.open(folder / "corpora" / f"{name}.jsonl.zst", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    if pages:
        records = [record for record in records if record["language"] == "en"]
        records = [records[place] for place in np.random.default_rng(0).permutation(len(records))]
    for number, record in enumerate(records):
        plain = record["text"] if pages else re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", record["html"])))
        parts[number % HELD_OUT_FILES == 0].append(plain)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<end>"] * pages,
    )
    tokenizer.train_from_iterator(parts[False][: None if pages else 300], trainer)
    end = tokenizer.token_to_id("<end>") if pages else None
    ids = {
        held: [id for part in tokenizer.encode_batch(pieces) for id in [*part.ids, *([end] * pages)]]
        for held, pieces in parts.items()
    }
    held_out_bytes = sum(len(piece.encode()) for piece in parts[True])
    return Text(np.array(ids[False]), np.array(ids[True]), held_out_bytes / len(ids[True]), end)


def flops_per_token(parameters: Iterator[tuple[str, torch.Tensor]], size: ModelSize, tied: bool) -> float:
    """6 a number of each matrix that multiplies, and 6 of each layer's causal attention by width and length."""
    matrices = sum(
        value.numel()
        for name, value in parameters
        if value.ndim == 2 and "positions" not in name and (tied or "embedding" not in name)
    )
    return 6.0 * (matrices + size.depth * size.width * size.sequence_length)


@dataclass(frozen=True)
class Written:
    """What `gristmill init` writes for a size, with changes by section. held_out: samples. evaluations: of a run."""

    size: ModelSize = SIZE
    changes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    held_out: int = HELD_OUT
    evaluations: int = EVALUATIONS

    def section(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        return fields | self.changes.get(name, {})


def train_ours(
    data: Text, seed: int, rate: float, batch: int, steps: int, folder: Path, recipe: Written = Written()
) -> Curve:
    """By `Run`, as the stage `train` does, with what `gristmill init` writes."""
    written = OptimizerConfig(**recipe.section("optimizer", optimizer_of(recipe.size)))
    optimizer = written.model_dump(exclude_unset=True) | {
        name: rate * value for name, value in written if name.endswith("learning_rate") and value is not None
    }
    tokens = batch * SEQUENCE_LENGTH
    train = TrainConfig(
        tokens=steps * tokens,
        batch_tokens=tokens,
        precision="fp32",
        optimizer=optimizer,
        lr_schedule=recipe.section("schedule", SCHEDULE),
        validation={"every": steps // recipe.evaluations, "samples": recipe.held_out},
        checkpoint={"every": 0},
        monitoring={"trackers": ()},
        **{name: value for name, value in recipe.section("train", {}).items() if name != "batch"},
    )
    model = ModelConfig(**recipe.section("model", recipe.size.fields))
    masked = bool(recipe.changes.get("data"))
    samples, held_out = (
        Windows(ids, order, data.end, masked) for ids, order in ((data.train, seed), (data.held_out, None))
    )
    inputs = TrainingData(samples, held_out, 0, masked, {"books": data.bytes_per_token})
    folder.mkdir(parents=True)
    variant = recipe.changes.get("muon")
    with replaced_muon(MuonVariant(**variant) if variant else None, steps):
        run = Run(RunConfig(model, train, seed), inputs, single_process(), folder, Reporter.silent())
    cost = flops_per_token(iter(run.model.parameters.items()), recipe.size, model.tied_embeddings)
    started = time.process_time()
    run.train()
    seconds = time.process_time() - started
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "validation" in line]
    bits = [line["validation"]["loss"] / math.log(2) / data.bytes_per_token for line in lines]
    return Curve(tuple(line["tokens"] * cost for line in lines), tuple(bits), seconds)


def train_peer(name: str, data: Text, seed: int, rate: float, batch: int, steps: int, size: ModelSize) -> Curve:
    """A plain loop: the same samples in the same order, gradients clipped at 1. nanochat has a head for each 128 of
    width, rounded up."""
    torch.manual_seed(seed)
    factor: Callable[[float], float]
    if name.startswith("nanochat"):
        shape = (size.depth, size.width, -(-size.width // 128), SEQUENCE_LENGTH, VOCABULARY)
        model: Any = nanochat.NanoChat(*shape, value_residual=name == "nanochat_value_residual")
        optimizers, factor = model.optimizers(rate), nanochat.rate_factor
    else:
        model = nanogpt.NanoGPT(size.depth, size.width, size.width // 64, SEQUENCE_LENGTH, VOCABULARY)
        nanogpt.initialize(model)
        optimizers, factor = nanogpt.optimizers(model, rate), nanogpt.rate_factor
    samples, held_out = Windows(data.train, seed), Windows(data.held_out, None).batch(range(HELD_OUT))
    cost = flops_per_token(model.named_parameters(), size, name == "nanogpt")
    flops, bits = [], []
    started = time.process_time()
    for step in range(steps):
        for optimizer in optimizers:
            for members in optimizer.param_groups:
                members["lr"] = members["initial_lr"] * factor(step / steps)
        model(*_pair(samples.batch(range(step * batch, (step + 1) * batch)))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        if (step + 1) % (steps // EVALUATIONS) == 0 or step + 1 == steps:
            with torch.no_grad():
                loss = model(*_pair(held_out)).item()
            flops.append((step + 1) * batch * SEQUENCE_LENGTH * cost)
            bits.append(loss / math.log(2) / data.bytes_per_token)
    return Curve(tuple(flops), tuple(bits), time.process_time() - started)


def _pair(batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.as_tensor(batch["tokens"]), torch.as_tensor(batch["targets"])


def kept(results: Path, name: str, train: Callable[[Path], Curve]) -> Curve:
    """The curve of this name, trained where `results` has none. train: gets a folder that is not there yet."""
    path = results / f"{name}.json"
    if path.is_file():
        stored = json.loads(path.read_text())
        return Curve(tuple(stored["flops"]), tuple(stored["bits"]), stored["seconds"])
    with tempfile.TemporaryDirectory(dir=results) as folder:
        curve = train(Path(folder) / "run")
    path.write_text(json.dumps(asdict(curve)))
    print(f"{name}: {curve.bits[-1]:.4f} bits per byte, {curve.seconds:.0f} s of CPU time", flush=True)
    return curve


class Runs:
    """Curves by recipe, rate and seed, trained when they are asked for and kept in a folder."""

    def __init__(self, data: Text, folder: Path, samples: int, size: ModelSize):
        self.data, self.folder, self.samples, self.size = data, folder, samples, size
        self.batches = {"ours": batch_of(size) // SEQUENCE_LENGTH} | PEER_BATCHES | VARIANTS

    def curve(self, recipe: str, rate: float, seed: int) -> Curve:
        batch = self.batches[recipe]
        settings = (self.data, seed, rate, batch, self.samples // batch)
        ours = partial(train_ours, *settings, recipe=Written(self.size))
        name = f"{recipe}-{rate:g}-{seed}-{self.samples}-depth-{self.size.depth}"
        return kept(self.folder, name, ours if recipe == "ours" else lambda _: train_peer(recipe, *settings, self.size))

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


def time_speed_up(ours: Curve, peer: Curve) -> float:
    """`speed_up` in CPU time, which goes with the FLOPs of a run."""
    return speed_up(ours, peer) * (peer.seconds / peer.flops[-1]) / (ours.seconds / ours.flops[-1])


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(geometric mean, lower end, upper end of Student's 95 %)."""
    mean, half = mean_and_half([math.log(ratio) for ratio in ratios])
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def mean_and_half(values: list[float]) -> tuple[float, float]:
    """(mean, half of Student's interval of 95 %); of one value the half is not a number."""
    if len(values) == 1:
        return values[0], math.nan
    return statistics.mean(values), STUDENT[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def effect(bits: list[float], of_first: list[float]) -> str:
    """The difference of final losses, seed by seed."""
    return "{:+.4f} +- {:.4f}".format(*mean_and_half([own - other for own, other in zip(bits, of_first, strict=True)]))


def figures(runs: Runs, seeds: tuple[int, ...], rates: dict[str, float]) -> list[Figure]:
    """rates: of the recipes to compare; empty: all recipes, each with its best rate."""
    rates = rates or {recipe: runs.best_rate(recipe) for recipe in ("ours", *PEER_BATCHES)}
    curves = {recipe: [runs.curve(recipe, rate, seed) for seed in seeds] for recipe, rate in rates.items()}
    names = ("recipe", "tokens a step", "rates times", "FLOPs", "CPU s", "bits per byte", "to the first", "by seed")
    table, of_first = Table(*names), [curve.bits[-1] for curve in curves[next(iter(rates))]]
    for recipe in rates:
        bits = [curve.bits[-1] for curve in curves[recipe]]
        first, step_tokens = curves[recipe][0], runs.batches[recipe] * SEQUENCE_LENGTH
        cells = (f"{step_tokens}", f"{rates[recipe]:g}", f"{first.flops[-1]:.3g}", f"{first.seconds:.0f}")
        by_seed = ", ".join(f"{value:.4f}" for value in bits)
        table.add_row(recipe, *cells, f"{statistics.mean(bits):.4f}", effect(bits, of_first), by_seed)
    Console(width=140).print(table)
    lines = []
    for recipe, goal in (("nanogpt", 1.3), ("nanochat", 1.05), ("nanochat_batch_8", 1.05)):
        if not {"ours", recipe} <= set(curves):
            continue
        pairs = list(zip(curves["ours"], curves[recipe], strict=True))
        ratio, low, high = interval([speed_up(*pair) for pair in pairs])
        by_time = "{:.2f} ({:.2f} to {:.2f})".format(*interval([time_speed_up(*pair) for pair in pairs]))
        ours, peer = (statistics.mean(curve.bits[-1] for curve in curves[name]) for name in ("ours", recipe))
        unit = f"bits per byte; ratio of FLOPs {low:.2f} to {high:.2f}, of CPU time {by_time}"
        lines.append(Figure(f"time_to_loss_{recipe}", ours, unit, peer, recipe, ratio, goal))
    return lines


def train_changes(data: Text, folder: Path, names: list[str], seeds: tuple[int, ...], samples: int) -> None:
    """Prints the final loss of each of these CHANGES, and its difference to that of init's recipe."""
    of_init: list[float] = []
    for name in dict.fromkeys(["init", *(names or CHANGES)]):
        changes = (CHANGES | NAMED_CHANGES)[name]
        batch = changes.get("train", {}).get("batch", batch_of(SMALL_SIZE) // SEQUENCE_LENGTH)
        settings, recipe = (1.0, batch, samples // batch), Written(SMALL_SIZE, changes, evaluations=1)
        runs = {seed: f"{name}-{seed}-{samples}{'' if data.end is None else '-pages'}" for seed in seeds}
        curves = [
            kept(folder, run, partial(train_ours, data, seed, *settings, recipe=recipe)) for seed, run in runs.items()
        ]
        bits = [curve.bits[-1] for curve in curves]
        of_init = of_init or bits
        print(f"{name}: {statistics.mean(bits):.4f} bits per byte, {effect(bits, of_init)} to init", flush=True)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--results", type=Path, default=Path("work/recipes"), help="folder that keeps each run")
    parser.add_argument("--depth", type=int, default=SIZE.depth, help="layers; the width is 64 a layer")
    parser.add_argument("--samples", type=int, help=f"of a run: {SAMPLES}, of --changes {SMALL_SAMPLES}")
    parser.add_argument(
        "--rates", nargs="+", default=[], metavar="RECIPE=MULTIPLE", help="recipes, `ours` too; no grid"
    )
    parser.add_argument("--changes", nargs="*", metavar="NAME", help="init's recipe with one change each, at depth 2")
    parser.add_argument("--pages", action="store_true", help="--changes: short pages of tldr in place of books")
    parser.add_argument("--seeds", type=int, choices=(1, 2, 3, 4, 5), help="3; of --changes 1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.mkdir(parents=True, exist_ok=True)
    if options.changes is not None:
        seeds, samples = SEEDS[: options.seeds or 1], options.samples or SMALL_SAMPLES
        if "document masks" in options.changes and not options.pages:
            parser.error("the books' documents are longer than samples; give --pages with document masks")
        data = text(options.data or SHARED, options.pages)
        train_changes(data, options.results, options.changes, seeds, samples)
        return
    size = ModelSize(options.depth, VOCABULARY, SEQUENCE_LENGTH)
    runs = Runs(
        text(options.data or SHARED), options.results, 320 if options.quick else options.samples or SAMPLES, size
    )
    rates = {recipe: float(multiple) for recipe, _, multiple in (pair.partition("=") for pair in options.rates)}
    print_figures(figures(runs, SEEDS[: options.seeds or (2 if options.quick else 3)], rates))


if __name__ == "__main__":
    main()

"""The runs of an ablation: a small model for each arm, seed and learning rate, and the bits of the held-out texts.

The size of the models and the length of the runs follow from a budget."""

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.workdir import find_checkpoint
from gristmill.evaluation.scoring.loglikelihood import Request, score
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.ablate.corpora import Texts
from gristmill.pipelines.ablate.paired_samples import DocumentDraw, PairedSamples
from gristmill.pipelines.init.dial import steps_per_second
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.workdir.data_forms import sampling
from gristmill.tokenizers.tokenizer import Tokenizer, load_tokenizer
from gristmill.training.checkpoint.checkpoint import load_model
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.launch.processes import device_of_task
from gristmill.training.objectives.objective import TrainingData
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig

SCORED_TOKENS = 8192  # of a batch
PRECISIONS = {"cpu": "fp32", "cuda": "bf16"}
SCORES_NAME = "scores.npy"
# Of Muon's rate for matrices to AdamW's for the rest, as in the demo. Differences between clean text and text with a
# tenth of the words moved spread over seeds by .0016 bits a byte under Muon and by .028 under AdamW at the same rate
# (three seeds, .15M parameters, 200,000 tokens of books, 2026-11-25): the same decision costs a hundredth.
MUON_RATE_RATIO = 2.5
WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class RunTask:
    """One model. recipe: of the arm, for its weights. index, keys: of its documents. folder: of the run; scores.npy,
    loss.npy and run.json stand there at the end. schedule: of the learning rate. init_from: the folder of a run that
    this one goes on from, None for drawn weights. texts: to score; None for a run that others go on from."""

    name: str
    recipe: Recipe
    index: Path
    keys: Path
    tokenizer: Path
    folder: Path
    model: dict[str, Any]
    batch_tokens: int
    learning_rate: float
    schedule: dict[str, Any]
    draw: DocumentDraw
    init_from: Path | None
    texts: Texts | None

    @property
    def scores(self) -> Path:
        return self.folder / SCORES_NAME

    @property
    def curve(self) -> Path:
        return self.folder / "loss.npy"

    @property
    def seconds(self) -> float:
        """CPU time of training and scoring."""
        return float(json.loads((self.folder / "run.json").read_bytes())["cpu_seconds"])


def optimizer_of(learning_rate: float) -> dict[str, Any]:
    return {
        "name": "muon",
        "learning_rate": learning_rate,
        "muon_learning_rate": MUON_RATE_RATIO * learning_rate,
    }


def run(task: RunTask) -> None:
    """Trains from where it was stopped, scores, and writes scores.npy, float64[texts]: the bits of each text."""
    if (task.folder / "run.json").is_file():
        return
    torch.set_num_threads(1)  # the workers share the cores
    device = device_of_task(zlib.crc32(task.folder.name.encode()))  # the same one after a stop
    started = time.process_time()
    tokenizer = load_tokenizer(task.tokenizer)
    model = ModelConfig(**task.model)
    train = TrainConfig(
        tokens=task.draw.tokens,
        batch_tokens=task.batch_tokens,
        precision=PRECISIONS[device.type],
        optimizer=optimizer_of(task.learning_rate),
        lr_schedule=task.schedule,
        init_from=None if task.init_from is None else str(find_checkpoint(task.init_from)),
        validation={"every": 0},
        checkpoint={"every": 200, "keep_last": 1},
        monitoring={"trackers": []},
    )
    config = sampling(task.recipe, read_dataset(task.index))
    samples = PairedSamples(task.index, task.keys, model.sequence_length, task.draw, config)
    data = TrainingData(samples, None, tokenizer.end_of_document, False, {})
    task.folder.mkdir(parents=True, exist_ok=True)
    seed = task.draw.seed
    Run(RunConfig(model, train, seed), data, single_process(device), task.folder, Reporter.silent()).train()
    save_array(task.curve, losses(task.folder))
    if task.texts is not None:
        save_array(task.scores, bits_of_model(task.folder, tokenizer, task.texts, device))
    record = {"cpu_seconds": time.process_time() - started}
    write_atomic(task.folder / "run.json", json.dumps(record).encode())


@dataclass(frozen=True)
class RescoreTask:
    """Other texts for a model that stands in the folder of a run. path: of the bits, float64[texts]."""

    run: Path
    tokenizer: Path
    texts: Texts
    path: Path


def score_again(task: RescoreTask) -> None:
    if not task.path.is_file():
        torch.set_num_threads(1)
        task.path.parent.mkdir(parents=True, exist_ok=True)
        device = device_of_task(zlib.crc32(task.run.name.encode()))
        save_array(task.path, bits_of_model(task.run, load_tokenizer(task.tokenizer), task.texts, device))


def bits_of_model(folder: Path, tokenizer: Tokenizer, texts: Texts, device: torch.device) -> np.ndarray:
    """float64[texts]: see bits_of_texts."""
    model, config = load_model(find_checkpoint(folder), device)
    return bits_of_texts(LocalCausalLM(model, config.sequence_length), tokenizer, texts)


def losses(folder: Path) -> np.ndarray:
    """float64[steps, 2]: tokens seen and the loss in nats a token."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return np.array([[line["tokens"], line["loss"]] for line in lines if "loss" in line and "tokens" in line])


def bits_of_texts(causal_lm: LocalCausalLM, tokenizer: Tokenizer, texts: Texts) -> np.ndarray:
    """float64[texts]: bits of each text behind its context, or behind the end-of-document token where that is empty, in
    disjoint windows. Of a long context the end is read."""
    requests, owners = [], []
    length = causal_lm.sequence_length
    for number, (text, context) in enumerate(zip(texts.texts, texts.contexts, strict=True)):
        ids = tokenizer.encode(text)
        before = [tokenizer.end_of_document, *(tokenizer.encode(context) if context else ())]
        for start in range(0, len(ids), length):
            window = ids[start : start + length]
            prefix = [*before, *ids[:start]] if context else [*before, *ids[:start]][-1:]
            requests.append(Request(tuple(prefix[-max(1, length + 1 - len(window)) :]), tuple(window)))
            owners.append(number)
    nats = [-scored.logprob for scored in score(causal_lm, requests, SCORED_TOKENS, share=False)]
    return np.bincount(owners, weights=nats, minlength=len(texts.texts)) / np.log(2)


def save_array(path: Path, values: np.ndarray) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, values)


def measured_rate(task: tuple[dict[str, Any], int, int, Path, int]) -> float:
    """Tokens a second of one worker. task: fields of the model, vocabulary, tokens of a batch, a folder, the number of
    the worker."""
    model, vocabulary, batch_tokens, folder, number = task
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    precision = PRECISIONS[device_of_task(number).type]
    train = {"batch_tokens": batch_tokens, "precision": precision, "optimizer": optimizer_of(1e-3)}
    return steps_per_second(model, vocabulary, train, folder, Reporter.silent(), number) * batch_tokens


# The size of an ablation's models and the length of their runs, from a budget in seconds or operations.

# (layers, width, sequence length, sequences of a step): .1 to 5 million parameters with small vocabularies, which a CPU
# trains in minutes to hours, and 14 to 90 million with a vocabulary of 8,192, for a GPU.
SIZES = (
    (2, 64, 128, 8),
    (2, 128, 256, 16),
    (3, 192, 256, 16),
    (4, 256, 256, 16),
    (5, 320, 256, 16),
    (6, 384, 512, 32),
    (8, 512, 512, 64),
    (12, 768, 1024, 64),
)
HEAD_WIDTH = 32
TOKENS_PER_PARAMETER = 4.0  # below which a smaller model is taken: arms are compared, not trained to the end
MAX_EPOCHS = 4.0  # of the smallest arm (Muennighoff et al. 2023, arXiv 2305.16264)
MIN_STEPS = 20
# Tried on the baseline, the highest not the one with the lowest loss: noise between seeds grows faster with the rate
# than the loss falls. A tenth of the words moved, two repetitions of five seeds (.13M parameters, 122,880 tokens of
# books, 2026-11-26): effect and standard error +.0077 .0039 and +.0047 .0020 at 1.6e-2, the rate of the lowest loss,
# +.0099 .0016 and +.0083 .0008 at 8e-3, +.0084 .0012 and +.0088 .0007 at 4e-3.
RATES = (2e-3, 4e-3, 8e-3)
TUNING_SHARE = 0.25  # of a run's tokens
LOW_RATE = 0.1  # of the tuned rate: verdicts at both must agree (arXiv 2512.24503)
COOLDOWN_SHARE = 0.2  # of a run's tokens, the phase in which the rate falls
SCORING_SHARE = 0.2  # of the time, for scoring and starting


@dataclass(frozen=True)
class ProxySize:
    """The model of every run of an experiment."""

    layers: int
    width: int
    sequence_length: int
    batch_sequences: int
    vocabulary: int

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "width": self.width,
            "heads": self.width // HEAD_WIDTH,
            "sequence_length": self.sequence_length,
            "tied_embeddings": True,
            "init_std": round(0.6 * self.width**-0.5, 3),
        }

    @property
    def parameters(self) -> int:
        """Number in the layers and the tied table: 4 width^2 of attention and 8 width^2 of a gated MLP a layer."""
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width

    @property
    def batch_tokens(self) -> int:
        return self.sequence_length * self.batch_sequences


@dataclass(frozen=True)
class Budget:
    """seconds or flops: of all runs, one of them None. seeds: models of each arm and rate. cooldown: arms share all but
    the last COOLDOWN_SHARE of a run."""

    seconds: float | None
    flops: float | None
    seeds: int
    cooldown: bool = False

    def num_runs(self, num_arms: int) -> float:
        """Whole runs that an experiment is worth, those that tune the rate included."""
        arms = num_arms * COOLDOWN_SHARE + 1 - COOLDOWN_SHARE if self.cooldown else num_arms
        return arms * self.seeds * 2 + len(RATES) * TUNING_SHARE


def choose_size(
    budget: Budget, num_arms: int, vocabulary: int, smallest: int, engine: Engine, folder: Path
) -> tuple[ProxySize, int]:
    """(the largest model that sees enough tokens within the budget, the tokens of each run). smallest: training tokens
    of the smallest arm. Remembered in `folder`, so that a command that was stopped goes on with the same."""
    path = folder / f"size-{fingerprint([asdict(budget), num_arms, vocabulary])[:12]}.json"
    if path.is_file():
        stored = json.loads(path.read_bytes())
        return ProxySize(**stored["size"]), stored["tokens"]
    chosen = largest_size(
        vocabulary,
        smallest,
        lambda size: affordable_tokens(budget, size, num_arms, engine, folder),
    )
    write_atomic(path, canonical_json({"size": asdict(chosen[0]), "tokens": chosen[1]}))
    return chosen


def largest_size(vocabulary: int, smallest: int, affordable: Callable[[ProxySize], float]) -> tuple[ProxySize, int]:
    """affordable: tokens of a run of this size within the budget."""
    best: tuple[ProxySize, int] | None = None
    for fields in SIZES:
        size = ProxySize(*fields, vocabulary)
        tokens = min(affordable(size), MAX_EPOCHS * smallest)
        if best is not None and tokens < TOKENS_PER_PARAMETER * size.parameters:
            break
        best = size, max(MIN_STEPS, int(tokens / size.batch_tokens)) * size.batch_tokens
    assert best is not None
    return best


def affordable_tokens(budget: Budget, size: ProxySize, num_arms: int, engine: Engine, folder: Path) -> float:
    num_runs = budget.num_runs(num_arms)
    if budget.flops is not None:
        return budget.flops / (6 * size.parameters * num_runs)
    assert budget.seconds is not None
    workers = [
        (size.fields, size.vocabulary, size.batch_tokens, folder / "rate" / f"{size.width}-{number}", number)
        for number in range(engine.workers)
    ]
    rate = min(engine.map(measured_rate, workers, "ablate: measuring this machine"))
    return budget.seconds * (1 - SCORING_SHARE) * engine.workers * rate / num_runs

"""The runs of an ablation: a small model for each arm, seed and learning rate, and the bits of the held-out texts."""

import json
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.workdir import find_checkpoint
from gristmill.evaluation.scoring.loglikelihood import Request, score
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.ablate.corpora import Texts
from gristmill.pipelines.ablate.paired_samples import DocumentDraw, PairedSamples
from gristmill.pipelines.init.rate import steps_per_second
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.workdir.data_forms import sampling
from gristmill.tokenizers.tokenizer import Tokenizer, load_tokenizer
from gristmill.training.checkpoint.checkpoint import load_model
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.launch.processes import device_of_task
from gristmill.training.metrics import TrainingData
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

"""The runs of an ablation: a small model for each arm, seed and learning rate, and the bits of the held-out texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.workdir import find_checkpoint
from gristmill.evaluation.scoring.loglikelihood import Request, score
from gristmill.foundation.files import atomic_path
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.init.rate import steps_per_second
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.training_data import sampling
from gristmill.tokenizers.tokenizer import Tokenizer, load_tokenizer
from gristmill.training.checkpoint.checkpoint import load_model
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.metrics import TrainingData
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig

SCORED_TOKENS = 8192  # of a batch
PRECISION = "fp32"


@dataclass(frozen=True)
class RunTask:
    """One model. recipe: of the arm, for its weights. folder: of the run; scores.npy and loss.npy stand there at the
    end. texts: to score."""

    name: str
    recipe: Recipe
    index: Path
    tokenizer: Path
    folder: Path
    model: dict[str, Any]
    tokens: int
    batch_tokens: int
    learning_rate: float
    seed: int
    texts: tuple[str, ...]

    @property
    def scores(self) -> Path:
        return self.folder / "scores.npy"

    @property
    def curve(self) -> Path:
        return self.folder / "loss.npy"


def run(task: RunTask) -> None:
    """Trains from where it was stopped, scores, and writes scores.npy, float64[texts]: the bits of each text."""
    if task.scores.is_file():
        return
    torch.set_num_threads(1)  # the workers share the cores
    tokenizer = load_tokenizer(task.tokenizer)
    model = ModelConfig(**task.model)
    train = TrainConfig(
        tokens=task.tokens,
        batch_tokens=task.batch_tokens,
        precision=PRECISION,
        optimizer={"learning_rate": task.learning_rate},
        lr_schedule={"warmup_share": 0.05},
        validation={"every": 0},
        checkpoint={"every": 200, "keep_last": 1},
        monitoring={"trackers": []},
    )
    config = sampling(task.recipe, read_dataset(task.index))
    samples = open_samples(task.index, "train", model.sequence_length, task.seed, config)
    data = TrainingData(samples, None, tokenizer.end_of_document, config.mask_documents, {})
    task.folder.mkdir(parents=True, exist_ok=True)
    Run(RunConfig(model, train, task.seed), data, single_process(), task.folder, Reporter.silent()).train()
    save_array(task.curve, losses(task.folder))
    trained, _ = load_model(find_checkpoint(task.folder))
    save_array(task.scores, bits_of_texts(LocalCausalLM(trained, model.sequence_length), tokenizer, task.texts))


def losses(folder: Path) -> np.ndarray:
    """float64[steps, 2]: tokens seen and the loss in nats a token."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    return np.array([[line["tokens"], line["loss"]] for line in lines if "loss" in line and "tokens" in line])


def bits_of_texts(causal_lm: LocalCausalLM, tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """float64[texts]: bits of each text behind the end-of-document token, in disjoint windows."""
    requests, owners = [], []
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), causal_lm.sequence_length):
            before = ids[start - 1] if start else tokenizer.end_of_document
            requests.append(Request((before,), tuple(ids[start : start + causal_lm.sequence_length])))
            owners.append(number)
    nats = [-scored.logprob for scored in score(causal_lm, requests, SCORED_TOKENS, share=False)]
    return np.bincount(owners, weights=nats, minlength=len(texts)) / np.log(2)


def save_array(path: Path, values: np.ndarray) -> None:
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.save(file, values)


def measured_rate(task: tuple[dict[str, Any], int, int, Path]) -> float:
    """Tokens a second of one worker. task: fields of the model, vocabulary, tokens of a batch, a folder."""
    model, vocabulary, batch_tokens, folder = task
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    train = {"batch_tokens": batch_tokens, "precision": PRECISION}
    return steps_per_second(model, vocabulary, train, folder, Reporter.silent()) * batch_tokens

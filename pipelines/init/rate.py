"""The rate of training steps of a model on this machine, by the trainer itself on random tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gristmill.foundation.progress import Reporter
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.launch.processes import device_of_task, keep_freed_memory
from gristmill.training.metrics import TrainingData
from gristmill.training.objectives.objective import stack_samples
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig

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

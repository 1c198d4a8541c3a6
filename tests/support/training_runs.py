"""Small training runs on numbers that can be learned."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.foundation.progress import Reporter
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.objectives.objective import TrainingData, stack_samples
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig

MODEL = ModelConfig(layers=4, width=32, heads=4, kv_heads=2, sequence_length=16)
STEPS, BATCH = 12, 4


class Counting:
    """Samples that can be learned: the next token is the last one's fivefold plus 0, 1 or 2. Every third is masked."""

    vocab_size, fingerprint = 50, "counting"

    def sample(self, k: int) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(k)
        tokens = np.empty(MODEL.sequence_length + 1, dtype=np.int64)
        tokens[0] = generator.integers(self.vocab_size)
        for index, noise in enumerate(generator.integers(0, 3, MODEL.sequence_length)):
            tokens[index + 1] = (5 * tokens[index] + noise) % self.vocab_size
        weights = np.ones(MODEL.sequence_length, dtype=np.float32)
        weights[10:] = float(k % 3 > 0)
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights}

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        return stack_samples([self.sample(k) for k in numbers])

    def source_of(self, k: int) -> str:
        return ("even", "odd")[k % 2]


def train_config(**changes: Any) -> TrainConfig:
    settings = {
        "tokens": STEPS * BATCH * MODEL.sequence_length,
        "batch_tokens": BATCH * MODEL.sequence_length,
        "precision": "fp32",
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"every": 3},
        "validation": {"every": 6, "samples": 5},
    }
    return TrainConfig(**(settings | changes))


def new_run(
    folder: Path,
    mesh: Any = None,
    evaluate: Any = None,
    reporter: Reporter | None = None,
    model: ModelConfig = MODEL,
    replicas: Any = None,
    **changes: Any,
) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    data = TrainingData(
        Counting(),
        Counting(),
        0,
        mask_documents=False,
        bytes_per_token={"even": 4.0},
        training_bytes_per_token={"even": 4.0, "odd": 2.0},
    )
    mesh = mesh or single_process()
    config = RunConfig(model, train_config(**changes), seed=7, replicas=replicas)
    return Run(config, data, mesh, folder, reporter or Reporter.silent(), evaluate)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}

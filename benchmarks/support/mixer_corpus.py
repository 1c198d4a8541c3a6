"""Bits per byte of mixers on a corpus, at equal parameters and tokens, by gristmill's own training loop."""

import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.stages.train import bytes_per_token
from gristmill.pipelines.workdir.data_forms import open_format
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.objectives.objective import TrainingData
from gristmill.training.parallel.mesh import single_process
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.run import Run, RunConfig

MAMBA2 = {"head_width": 32, "state": 32}
# Two-sided 95 % quantiles of Student's t by number of seeds.
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def models(recipe: Recipe) -> dict[str, ModelConfig]:
    """Of as many layers and, to half a percent, parameters as the recipe's own: the width of the MLPs differs."""
    own, _ = recipe.training()
    alone = dict(own.mixers["tcnca"]) | {"kernel": 1, "blocks": 1, "depth": 1}
    kinds: dict[str, dict[str, Any]] = {
        "attention": {"mixer": "attention", "mixers": {}, "positions": "rope"},
        "SSD": {"mixer": "mamba2", "mixers": {"mamba2": MAMBA2}},
        "hybrid": {"mixer": ("mamba2", "mamba2", "attention", "mamba2"), "mixers": {"mamba2": MAMBA2}},
        "TCNCA": {},
        "chunked attention": {"mixers": {"tcnca": alone}},
    }

    def model(name: str, hidden: int) -> ModelConfig:
        return ModelConfig.model_validate(own.model_dump() | kinds[name] | {"ffn_hidden_size": hidden})

    def parameters(config: ModelConfig) -> int:
        return parameter_count(shape_of(config, recipe.tokenizer.vocab_size))

    wanted, column = parameters(own), 3 * own.width * own.layers
    return {
        name: model(name, own.ffn_hidden_size + round((wanted - parameters(model(name, own.ffn_hidden_size))) / column))
        for name in kinds
    }


def open_data(recipe: Recipe, index: Path) -> TrainingData:
    training, validation = (open_format("windows", index, split, recipe) for split in ("train", "validation"))
    per_token = bytes_per_token(read_dataset(index), "validation")
    return TrainingData(training, validation, 0, recipe.index.mask_documents, per_token)


def bits_per_byte(folder: Path, config: RunConfig, data: TrainingData) -> float:
    """Of the held-out documents after the last step, mean over the sources."""
    folder.mkdir(parents=True)
    Run(config, data, single_process(), folder, Reporter.silent()).train()
    last = next(line for line in reversed(read_metrics(folder / METRICS_NAME)) if "validation" in line)
    return statistics.mean(source["bits_per_byte"] for source in last["validation"]["sources"].values())


def compare(kept: Path, index: Path, seeds: int, tokens: int | None) -> dict[str, list[float]]:
    """Bits per byte by model, one a seed. Each result is kept in a file of the folder; those that are there are not
    computed again."""
    recipe = load_recipe("tcnca_tiny")
    _, plain = recipe.training()
    changes = {"checkpoint": {"every": 0}} | ({"tokens": tokens} if tokens else {})
    train, data = TrainConfig.model_validate(plain.model_dump() | changes), open_data(recipe, index)

    def result(model: ModelConfig, seed: int) -> float:
        settings = [model.model_dump(), train.model_dump(), seed, data.samples.fingerprint]
        path = kept / f"{fingerprint(json.loads(json.dumps(settings, default=str)))}.json"
        if not path.is_file():
            with tempfile.TemporaryDirectory() as work:
                found = bits_per_byte(Path(work) / "run", RunConfig(model, train, seed), data)
            write_atomic(path, json.dumps(found).encode())
        return float(path.read_text())

    kept.mkdir(parents=True, exist_ok=True)
    return {name: [result(model, seed) for seed in range(1, seeds + 1)] for name, model in models(recipe).items()}


def interval(values: list[float]) -> float:
    """Half the 95 % confidence interval of the mean; not a number for one value."""
    if len(values) < 2:
        return math.nan
    return STUDENT_T[len(values)] * statistics.stdev(values) / len(values) ** 0.5

"""The loss of mixtures against a dense model at equal FLOPs per token: the recipe `moe_tiny` with several seeds each.

Five models see the same tokens in the same order: the dense one, the recipe's mixture, PR-MoE, and PR-MoE with a layer
less, alone and taught by PR-MoE for half the run. --data is the work folder of the recipe, whose stages up to `index`
must be complete:

    gristmill run moe_tiny --to index --workdir DIR
    python benchmarks/moe_quality.py --data DIR

The figure `moe_balance` is the load of the busiest expert of the recipe's mixture after 200 steps. Without --data a
table shows that load for each way of balancing, on tokens whose frequencies are heavily skewed."""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table

from gristmill.foundation.progress import Reporter
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.workdir.data_forms import open_format
from gristmill.training.checkpoint.checkpoint import step_folder, steps_in
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.model.moe.router import ExpertBalance
from gristmill.training.objectives.objective import TrainingData, stack_samples
from gristmill.training.parallel.mesh import single_process
from gristmill.training.planner.costs.model_shape import flops_per_token, shape_of
from gristmill.training.planner.costs.parameters import active_parameters, parameter_count
from gristmill.training.run import CHECKPOINTS, Run, RunConfig

# Two-sided 95 % quantiles of Student's t by number of seeds.
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
SKEWED_STEPS = 200
BALANCES = (  # name, bias_update_rate, balance_loss
    ("nothing", 0.0, 0.0),
    ("bias", 3e-3, 0.0),
    ("loss", 0.0, 1e-2),
    ("bias and loss", 1e-3, 1e-2),
)


class Skewed:
    """Samples of a Markov chain over 512 tokens: 40 % are one of eight tokens, the commonest is 15 % of all, and the
    others depend on the token before (tokens drawn independently would teach the model to treat all alike)."""

    vocab_size, fingerprint = 512, "skewed"
    common = 8

    def __init__(self, sequence_length: int):
        self.sequence_length = sequence_length
        weights = np.arange(1, self.vocab_size + 1) ** -1.0  # Zipf's law
        self.chances = weights / weights.sum()

    def sample(self, k: int) -> dict[str, np.ndarray]:
        ranks = np.random.default_rng(k).choice(self.vocab_size, self.sequence_length + 1, p=self.chances)
        tokens = ranks.copy()
        for place in range(1, len(ranks)):
            if ranks[place] >= self.common:
                tokens[place] = (31 * tokens[place - 1] + ranks[place]) % self.vocab_size
        return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": np.ones(self.sequence_length, np.float32)}

    def batch(self, numbers: range) -> dict[str, np.ndarray]:
        return stack_samples([self.sample(k) for k in numbers])

    def source_of(self, k: int) -> str:
        return "skewed"


def models_of(mixture: ModelConfig) -> dict[str, ModelConfig]:
    """By name; of equal FLOPs per token but for the router, and but for the student, which has a layer less.

    PR-MoE's token goes through a plain MLP and one expert, each half as wide as the dense MLP."""
    fields = mixture.model_dump()
    half = mixture.ffn_hidden_size // 2
    residual = {
        "experts": 8,
        "top_k": 1,
        "ffn_hidden_size": half,
        "residual": True,
        "bias_update_rate": mixture.moe.bias_update_rate,
        "balance_loss": mixture.moe.balance_loss,
    }
    pr_moe = fields | {"ffn_hidden_size": half, "moe": residual}
    return {
        "dense": ModelConfig(**(fields | {"moe": None})),
        "mixture": mixture,
        "PR-MoE": ModelConfig(**pr_moe),
        "student alone": ModelConfig(**(pr_moe | {"layers": mixture.layers - 1})),
        "student taught": ModelConfig(**(pr_moe | {"layers": mixture.layers - 1})),
    }


def train(folder: Path, model: ModelConfig, config: TrainConfig, seed: int, data: TrainingData) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    trained_run(folder, model, config, seed, data)
    return read_metrics(folder / METRICS_NAME)


def trained_run(folder: Path, model: ModelConfig, config: TrainConfig, seed: int, data: TrainingData) -> Run:
    folder.mkdir(parents=True)
    run = Run(RunConfig(model, config, seed), data, single_process(), folder, Reporter.silent())
    run.train()
    return run


def mean_load(lines: list[dict[str, Any]]) -> float:
    """Load of the busiest expert over the mean, of a step's worst layer; mean over the steps."""
    return statistics.mean(line["expert_load"] for line in lines)


def final_loss(lines: list[dict[str, Any]]) -> float:
    return next(line["validation"]["loss"] for line in reversed(lines) if "validation" in line)


def compare(work: Path, index: Path, seeds: int, tokens: int | None) -> tuple[dict[str, list[float]], float]:
    """(final validation losses by model, load of the mixture's busiest expert over the mean after 200 steps)."""
    recipe = load_recipe("moe_tiny")
    mixture, plain = recipe.training()
    changes = {"checkpoint": {"every": 0}} | ({"tokens": tokens} if tokens else {})
    config = TrainConfig.model_validate(plain.model_dump() | changes)
    training, validation = (open_format("windows", index, split, recipe) for split in ("train", "validation"))
    masked = recipe.index.mask_documents
    data = TrainingData(training, validation, 0, mask_documents=masked, bytes_per_token={})
    found: dict[str, list[float]] = {name: [] for name in models_of(mixture)}
    loads_of_seeds = []
    for seed in range(1, seeds + 1):
        for name, model in models_of(mixture).items():
            folder, used = work / f"{name}-{seed}", config
            if name == "student taught":
                root = work / f"PR-MoE-{seed}" / CHECKPOINTS
                teacher = {"checkpoint": str(step_folder(root, steps_in(root)[-1])), "stop_at_fraction": 0.5}
                used = TrainConfig.model_validate(
                    config.model_dump() | {"objective": "distillation", "teacher": teacher}
                )
            lines = train(folder, model, used, seed, data)
            found[name].append(final_loss(lines))
            if name == "mixture":
                loads_of_seeds.append(mean_load(lines[-len(lines) // 3 :]))  # the last 100 of the recipe's 300 steps
    table = Table("model", "parameters", "for a token", "FLOPs/token", "validation loss", "95 % interval")
    for name, model in models_of(mixture).items():
        shape = shape_of(model, recipe.tokenizer.vocab_size)
        losses = found[name]
        spread = STUDENT_T[seeds] * statistics.stdev(losses) / seeds**0.5 if seeds > 1 else float("nan")
        table.add_row(
            name,
            f"{parameter_count(shape) / 1e6:.2f} M",
            f"{active_parameters(shape) / 1e6:.2f} M",
            f"{flops_per_token(shape) / 1e6:.2f} M",
            f"{statistics.mean(losses):.4f}",
            f"± {spread:.4f}",
        )
    Console(width=120).print(table)
    return found, statistics.mean(loads_of_seeds)


def unseen_load(run: Run, samples: Any, first: int, count: int) -> float:
    """Load of the busiest expert over the mean, of the worst layer, summed over `count` samples that were not trained
    on (1 + MaxVio_global of arXiv 2408.15664, section 2)."""
    balance = ExpertBalance(run.model.stages.values(), run.mesh)
    for k in range(first, first + count, 16):
        tokens = np.stack([samples.sample(k + row)["tokens"] for row in range(16)])
        run.model.stages[0](torch.from_numpy(tokens))  # with gradients, since the routers count in training only
    return balance.worst_load(balance.take_counts()).item()


def loads(work: Path) -> None:
    """Balance after 200 steps on skewed tokens, for each way of balancing: of single batches (mean of `expert_load` of
    the last 20 steps) and of 256 unseen samples together."""
    mixture, _ = load_recipe("moe_tiny").training()
    samples = Skewed(mixture.sequence_length)
    data = TrainingData(samples, None, 0, mask_documents=False, bytes_per_token={})
    config = TrainConfig(
        tokens=SKEWED_STEPS * 2048,
        batch_tokens=2048,
        precision="fp32",
        optimizer={"learning_rate": 3e-3},
        checkpoint={"every": 0},
    )
    table = Table("200 steps on skewed tokens", "bias_update_rate", "balance_loss", "batches", "unseen samples")
    for name, rate, balance_loss in BALANCES:
        moe = mixture.moe.model_dump() | {"bias_update_rate": rate, "balance_loss": balance_loss}
        model = ModelConfig(**(mixture.model_dump() | {"moe": moe}))
        run = trained_run(work / name, model, config, 1, data)
        batches = mean_load(read_metrics(work / name / METRICS_NAME)[-20:])
        unseen = unseen_load(run, samples, run.trainer.progress.samples, 256)
        table.add_row(name, str(rate), str(balance_loss), f"{batches:.2f}", f"{unseen:.2f}")
    Console(width=120).print(table)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 6))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.data is None:
            loads(work)
            return
        tokens = 20 * 2048 if options.quick else None
        losses, load = compare(work, options.data / "index", 1 if options.quick else options.seeds, tokens)
        dense, mixture = (statistics.mean(losses[name]) for name in ("dense", "mixture"))
        measured = [
            Figure("moe_loss", dense - mixture, "nats below the dense model"),
            Figure("moe_balance", 1 / load, "mean load over the busiest", goal=1 / 1.3),
        ]
        print_figures(measured)


if __name__ == "__main__":
    main()

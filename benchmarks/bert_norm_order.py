"""The two orders of layer norm in BERT at growing depth: figure 7 of Megatron-LM (arXiv 1909.08053) on narrow models.

The original order, norms behind the residual additions, is BERT's; the rearranged one, norms before the blocks, made
the model of 3.9 billion parameters trainable. Every pair of models has the same seed, samples, steps and learning rate.
--data is a work folder whose stages up to `index` are complete, with a small vocabulary, so that a few hundred steps
learn more than the frequencies of the tokens:

    gristmill run bert_tiny --to index --workdir DIR
    python benchmarks/bert_norm_order.py --data DIR --figure bert_norm_order.svg

--curves keeps the curve of each run, and runs that are there are not trained again; --depths, --seeds and --orders
choose some of them."""

import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.sentence_pairs import open_pairs
from gristmill.evaluation.convert.hf.bert import ORIGINAL, REARRANGED
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.pipelines.workdir.data_forms import sampling
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.metrics import METRICS_NAME, read_metrics
from gristmill.training.objectives.masked import SPECIAL_TOKENS
from gristmill.training.objectives.objective import TrainingData
from gristmill.training.parallel.mesh import single_process
from gristmill.training.run import Run, RunConfig

ORDERS: dict[str, dict[str, Any]] = {"original": ORIGINAL, "rearranged": REARRANGED}
DEPTHS = (4, 12, 24)
SEEDS = (1, 2, 3)
LENGTH, SAMPLES, STEPS = 32, 32, 250
LEARNING_RATE = 3e-3
# Of a narrow model: 0.02, as BERT has it, is 1 / sqrt(2500); 0.1 is near 1 / sqrt(64).
INIT_STD = 0.1
HIGHEST_SHOWN = 5.0  # the figure cuts off the first steps and short leaps above it


def model_of(order: str, depth: int) -> ModelConfig:
    """Rotary positions in both orders: narrow models learn their neighbours from them in a tenth of the steps."""
    shape = {"layers": depth, "width": 64, "heads": 4, "sequence_length": LENGTH, "segments": 2, "init_std": INIT_STD}
    return ModelConfig.model_validate(ORDERS[order] | {"positions": "rope"} | shape)


def train_config(steps: int) -> TrainConfig:
    return TrainConfig(
        tokens=steps * SAMPLES * LENGTH,
        batch_tokens=SAMPLES * LENGTH,
        objective="masked",
        objective_options={"whole_words": False, "max_ngram": 1, "sentence_order": False},
        precision="fp32",
        optimizer={"learning_rate": LEARNING_RATE},
        lr_schedule={"shape": "linear", "warmup_share": 0.1},
        validation={"every": 0},
        checkpoint={"every": 0},
    )


def losses(config: RunConfig, data: TrainingData) -> list[float]:
    """The masked-token loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        Run(config, data, single_process(), Path(folder), Reporter.silent()).train()
        lines = read_metrics(Path(folder) / METRICS_NAME)
    return [line["loss"] if line["loss"] is not None else math.nan for line in lines]


def kept_losses(folder: Path | None, config: RunConfig, data: TrainingData) -> list[float]:
    """As `losses`, from the folder where the same run's are there."""
    if folder is None:
        return losses(config, data)
    settings = [config.model.model_dump(), config.train.model_dump(), config.seed, data.samples.fingerprint]
    path = folder / f"{fingerprint(json.loads(json.dumps(settings, default=str)))}.json"
    if not path.is_file():
        write_atomic(path, json.dumps(losses(config, data)).encode())
    found: list[float] = json.loads(path.read_bytes())
    return found


def final(curve: list[float]) -> float:
    """Mean of the last tenth of the steps."""
    return statistics.mean(curve[-max(1, len(curve) // 10) :])


def open_data(root: Path) -> TrainingData:
    recipe, tokenizer = load_recipe("bert_tiny"), load_tokenizer(root / "tokenizer")
    pairs = open_pairs(
        root / "index", "train", LENGTH - SPECIAL_TOKENS, recipe.seed, sampling(recipe, read_dataset(root / "index"))
    )
    return TrainingData(
        pairs, None, tokenizer.end_of_document, mask_documents=False, bytes_per_token={}, pieces=tokenizer.pieces
    )


def print_table(curves: dict[Any, list[Any]]) -> None:
    table = Table("layers", *(f"{order}: loss (lowest, highest seed)" for order in ORDERS))
    for depth in sorted({depth for _, depth in curves}):
        cells = []
        for order in ORDERS:
            ends = [final(curve) for curve in curves[order, depth]]
            cells.append(f"{statistics.mean(ends):.3f} ({min(ends):.3f}, {max(ends):.3f})")
        table.add_row(str(depth), *cells)
    Console(width=120).print(table)


def draw(path: Path, curves: dict[Any, list[Any]]) -> None:
    """Loss over steps, a panel for each depth, a line for each seed."""
    import matplotlib  # slow to load, and only for the figure

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "gristmill"
    depths = sorted({depth for _, depth in curves})
    figure, panels = plt.subplots(1, len(depths), figsize=(3 * len(depths), 3), sharey=True, squeeze=False)
    for panel, depth in zip(panels[0], depths, strict=True):
        for order, colour in zip(ORDERS, ("tab:red", "tab:blue"), strict=True):
            for number, curve in enumerate(curves[order, depth]):
                panel.plot(smoothed(curve), color=colour, linewidth=1, label=None if number else order)
        panel.set_title(f"{depth} layers")
        panel.set_xlabel("step")
    panels[0][0].set_ylabel("loss of masked tokens")
    panels[0][0].set_ylim(top=HIGHEST_SHOWN)
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})


def smoothed(curve: list[float], over: int = 10) -> list[float]:
    """Mean of the last `over` steps at every step."""
    return [statistics.mean(curve[max(0, step - over + 1) : step + 1]) for step in range(len(curve))]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--figure", type=Path, help="an .svg file for the curves")
    parser.add_argument("--curves", type=Path, help="a folder that keeps the curves")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data: name the work folder of the recipe bert_tiny")
    torch.set_num_threads(1)
    depths, seeds, steps = (DEPTHS[:2], SEEDS[:1], 20) if options.quick else (options.depths, options.seeds, STEPS)
    data, train = open_data(options.data), train_config(steps)
    curves = {
        (order, depth): [
            kept_losses(options.curves, RunConfig(model_of(order, depth), train, seed), data) for seed in seeds
        ]
        for depth in depths
        for order in options.orders
    }
    if len(options.orders) < len(ORDERS):
        return  # to keep the curves for a later run, beside which another one may train the other order
    print_table(curves)
    if options.figure is not None:
        draw(options.figure, curves)
    deepest = max(depths)
    gaps = [
        final(a) - final(b) for a, b in zip(curves["original", deepest], curves["rearranged", deepest], strict=True)
    ]
    print_figures([Figure("bert_norm_order", statistics.mean(gaps), f"nats below the original at {deepest} layers")])


if __name__ == "__main__":
    main()

"""What the models of a ladder read off the sample before them: held-out loss by whether the pair of a token and the one
before it stood earlier in the sample.

    python benchmarks/copying.py WORKDIR [--samples 240]

WORKDIR is the work folder of `gristmill ladder`, with the models of all its runs. A line for each: kind, width, tokens
and seed, nats a token of repeated pairs and of the others, and the difference, which grows where a model begins to copy
(Olsson et al. 2022, arXiv 2209.11895). About two CPU seconds a model (docs/defaults.md, Ladders)."""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.evaluation.inference.workdir import find_checkpoint
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.training.checkpoint.checkpoint import load_model

BATCH = 40


def repeated(samples: np.ndarray) -> np.ndarray:
    """bool[samples, tokens - 1]: whether each token but the first stood earlier in its sample behind the same token.
    Of 1 2 3 1 2 2: no, no, no, yes, no."""
    found = np.zeros((len(samples), samples.shape[1] - 1), bool)
    for row, sample in enumerate(samples.tolist()):
        seen: set[tuple[int, int]] = set()
        for place, pair in enumerate(pairwise(sample)):
            found[row, place] = pair in seen
            seen.add(pair)
    return found


def held_out(index: Path, length: int, count: int) -> np.ndarray:
    """[count, length + 1]: token ids, as many of each source, from places drawn with one seed."""
    sources = [source.name for source in read_dataset(index).sources if "validation" in source.splits]
    random, samples = np.random.default_rng(0), []
    for source in sources:
        tokens = IndexedReader(index / "validation" / source).tokens
        firsts = random.integers(0, len(tokens) - length, count // len(sources))
        samples += [np.asarray(tokens[first : first + length + 1], dtype=np.int64) for first in firsts]
    return np.stack(samples)


@torch.no_grad()
def losses(model: torch.nn.Module, samples: np.ndarray) -> np.ndarray:
    """Nats of each token but the first."""
    parts = []
    for batch in torch.from_numpy(samples).split(BATCH):
        logits = model(batch[:, :-1]).float()
        parts.append(F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none"))
    return torch.cat(parts).numpy()


def runs(workdir: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folders of the stage train, and the configuration in their manifests."""
    for folder in [*workdir.glob("train"), *workdir.glob("train.superseded-*")]:
        if (folder / MANIFEST_NAME).is_file():
            yield folder, read_manifest(folder).config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--samples", type=int, default=240)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for folder, config in runs(options.workdir):
        model, shape = load_model(find_checkpoint(folder), torch.device("cpu"))
        samples = held_out(options.workdir / "index", shape.sequence_length, options.samples)
        nats, again = losses(model, samples), repeated(samples)
        kind = "experts" if shape.moe else shape.pattern or "attention"
        rows.append(
            (kind, shape.width, config["train"]["tokens"], config["seed"], nats[again].mean(), nats[~again].mean())
        )
    table = Table("layers", "width", "tokens", "seed", "repeated", "others", "difference")
    for *run, own, others in sorted(rows):
        table.add_row(*map(str, run), f"{own:.3f}", f"{others:.3f}", f"{others - own:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

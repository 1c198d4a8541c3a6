"""Generated tokens per second with the layers' weights on the device, in host memory and on disk, by batch.

The same requests and tokens everywhere. A pass brings in all weights once, however many sequences it continues, so the
tokens per second of streamed weights grow with the batch until computing takes longer than copying (ZeRO-Inference). On
a CPU the device is host memory too, and the file on disk is read from the system's page cache once it has been there.
Figures: tokens/s by place and batch, with the ratio to resident weights at that batch; streamed_batch_gain is how much
faster the largest batch is than one sequence, with weights on disk."""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table

from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.sharded import load_streamed_checkpoint
from gristmill.training.checkpoint.checkpoint import (
    CheckpointContent,
    SavedModelConfig,
    load_model,
    save,
    saved_tensors,
    step_folder,
)
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from gristmill.training.parallel.mesh import single_process

VOCABULARY = 512
MODEL = ModelConfig(layers=8, width=768, heads=8, sequence_length=64)  # 57 M parameters
PROMPT, NEW_TOKENS = 8, 8
BATCHES = (1, 4, 16, 64)
PLACES = {"resident": "on the device", "host": "in host memory", "disk": "on disk"}


class NoText:
    """A decoder without text: tokens are compared."""

    end_of_document = -1
    ends: tuple[int, ...] = (-1,)

    def decode(self, ids: object) -> str:
        return ""


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    batches, rounds = (BATCHES[:2], 1) if options.quick else (BATCHES, 3)
    with tempfile.TemporaryDirectory() as name:
        checkpoint = saved_model(Path(name))
        models = {place: loaded(checkpoint, place) for place in PLACES}
        rates = {place: {batch: rate(model, batch, rounds) for batch in batches} for place, model in models.items()}
        agree(models, batches[-1])
    table = Table("batch", *PLACES.values(), title="tokens/s")
    for batch in batches:
        table.add_row(str(batch), *(f"{rates[place][batch]:.1f}" for place in PLACES))
    Console().print(table)
    figures = [
        Figure(f"generation_{place}_batch_{batch}", rates[place][batch], "tokens/s", rates["resident"][batch],
               "weights on the device", rates[place][batch] / rates["resident"][batch])
        for place in ("host", "disk") for batch in batches
    ]  # fmt: skip
    disk = rates["disk"]
    gain = Figure(
        "streamed_batch_gain",
        disk[batches[-1]],
        "tokens/s",
        disk[1],
        "one sequence",
        disk[batches[-1]] / disk[1],
        goal=1,
    )
    print_figures([*figures, gain])


def saved_model(folder: Path) -> Path:
    model = Transformer(MODEL, VOCABULARY)
    initialize(model, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    tensors = saved_tensors(dict(model.named_parameters()), {})
    save(folder, 0, CheckpointContent(tensors, SavedModelConfig.of(MODEL, VOCABULARY, 0)), single_process())
    return step_folder(folder, 0)


def loaded(checkpoint: Path, place: str) -> LocalCausalLM:
    if place == "resident":
        return LocalCausalLM(load_model(checkpoint)[0], MODEL.sequence_length)
    layout, mesh = LayoutConfig(), single_process()
    return load_streamed_checkpoint(checkpoint, place, torch.float32, layout, mesh).causal_lm(layout, mesh, VOCABULARY)


def rate(model: LocalCausalLM, batch: int, rounds: int) -> float:
    """Tokens a second, of the fastest round after one to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        tokens(model, batch)
        seconds.append(time.perf_counter() - started)
    return batch * NEW_TOKENS / min(seconds[1:])


def tokens(model: LocalCausalLM, batch: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    running = ContinuousBatch(model, NoText(), BatchLimits(batch))
    for _ in range(batch):
        prompt = tuple(rng.integers(1, VOCABULARY, PROMPT).tolist())
        running.add(GenerationRequest(prompt, GenerationSettings(NEW_TOKENS)))
    found: dict[int, tuple[int, ...]] = {}
    while not running.is_idle:
        for result in running.step():
            found[result.number] = tuple(result.generations[0].tokens)
    return [found[number] for number in range(batch)]


def agree(models: dict[str, LocalCausalLM], batch: int) -> None:
    """Raises AssertionError where a token differs."""
    expected = tokens(models["resident"], batch)
    assert all(tokens(model, batch) == expected for model in models.values())


if __name__ == "__main__":
    main()

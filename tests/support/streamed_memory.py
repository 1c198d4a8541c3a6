"""Memory of one step, or of one pass of inference, with the layers' weights on disk or in host memory. As a program:
FOLDER LAYOUT (JSON), or FOLDER "inference".

Prints {"before": bytes once a model of one such layer has taken a step, so that all code is loaded and the libraries
have their workspaces, "peak": the largest while the model is made and takes a step}. Of memory that is no file's, as
/proc/self/status has it, sampled every millisecond."""

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from gristmill.evaluation.inference.sharded import load_streamed_checkpoint
from gristmill.training.checkpoint.checkpoint import step_folder
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.launch.processes import return_freed_memory
from gristmill.training.parallel.mesh import single_process
from gristmill.training.parallel.offload.weight_stream import WeightStream
from tests.support.training_runs import new_run

MODEL = ModelConfig(layers=3, width=768, heads=8, sequence_length=16)
ONE_LAYER = MODEL.model_copy(update={"layers": 1})


def settings(layout: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens": 2 * 4 * 16,
        "batch_tokens": 4 * 16,
        "precision": "fp32",
        "layout": {"micro_batch": 2} | layout,
        "checkpoint": {"every": 0},
        "validation": {"every": 0},
    }


def train_config(layout: dict[str, Any]) -> TrainConfig:
    return TrainConfig(**settings(layout))


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def begin_and_wait(self: WeightStream, index: int) -> None:
    """In place of WeightStream._begin: a layer has arrived before the one ahead of it computes, so that the peak does
    not depend on which of the two is faster."""
    begin(self, index)
    self._layers[index].arrival.result()


begin = WeightStream._begin


class Sampler:
    """The largest `anonymous_bytes` while it runs."""

    def __enter__(self) -> "Sampler":
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes())


def train(folder: Path, model: ModelConfig, layout: dict[str, Any]) -> None:
    new_run(folder, model=model, **settings(layout)).trainer.step()


def measure(folder: Path, layout: dict[str, Any]) -> dict[str, int]:
    torch.set_num_threads(1)
    return_freed_memory()
    train(folder / "one_layer", ONE_LAYER, {})
    gc.collect()
    before = anonymous_bytes()
    with Sampler() as sampler:
        train(folder / "model", MODEL, layout)
    return {"before": before, "peak": sampler.peak}


def infer(checkpoint: Path, place: str) -> int:
    """Reads 16 tokens; returns the stated bytes: two layers' weights, embedding and head."""
    layout, mesh = LayoutConfig(), single_process()
    streamed = load_streamed_checkpoint(checkpoint, place, torch.float32, layout, mesh)
    with torch.inference_mode():
        model = streamed.causal_lm(layout, mesh, 50)
        model.head(model.hidden(torch.arange(16).view(1, 16))[0])
    ends = sum(weight.nbytes for name, weight in streamed.weights.items() if name not in streamed.stream.stored)
    return streamed.stream.held_bytes + ends


def measure_inference(folder: Path) -> dict[str, int]:
    torch.set_num_threads(1)
    return_freed_memory()
    for name, model in (("one_layer", ONE_LAYER), ("model", MODEL)):
        run = new_run(folder / name, model=model, **settings({}))
        run._save_if_due(True)
        del run
    infer(step_folder(folder / "one_layer" / "checkpoints", 0), "host")
    gc.collect()
    before = anonymous_bytes()
    with Sampler() as sampler:
        stated = infer(step_folder(folder / "model" / "checkpoints", 0), "disk")
    return {"before": before, "peak": sampler.peak, "stated": stated}


if __name__ == "__main__":
    WeightStream._begin = begin_and_wait
    folder = Path(sys.argv[1])
    inference = sys.argv[2] == "inference"
    print(json.dumps(measure_inference(folder) if inference else measure(folder, json.loads(sys.argv[2]))))

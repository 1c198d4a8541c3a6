"""gristmill's training step of one process, without data, guard and logs, for benchmarks of its memory."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.gradients import gradients_of
from gristmill.training.engine.local_model import LocalModel, build_local_model
from gristmill.training.optim.offload import build_optimizer
from gristmill.training.parallel.collectives import finish
from gristmill.training.parallel.mesh import single_process
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.run import RunConfig, build_forward_backward

SEED = 0
VOCABULARY = 50304
STATE_BYTES = 16  # a parameter: weight, gradient and two moments in fp32


@dataclass(frozen=True)
class Bench:
    """What is trained, and where. profile: of this machine, as `gristmill calibrate` writes it."""

    model: ModelConfig
    vocab: int
    device: torch.device
    profile: Path
    precision: str = "bf16"

    @property
    def parameters(self) -> int:
        return parameter_count(shape_of(self.model, self.vocab))


class TrainingStep:
    """With the optimizer and the activations where the layout puts them. The gradient's norm is computed; it is clipped
    where the training has a clip_norm."""

    def __init__(self, model: ModelConfig, vocab: int, train: TrainConfig, device: torch.device):
        mesh = single_process(device)
        self.clip_norm = train.optimizer.clip_norm
        self.parts: LocalModel = build_local_model(model, vocab, train, mesh, SEED)
        self.passes = build_forward_backward(self.parts, RunConfig(model, train, SEED), mesh, causal_loss())
        self.optimizer = build_optimizer(self.parts.parameters, train, model, mesh, self.parts.stream)
        self.gradients = gradients_of(self.optimizer, self.passes, self.parts, mesh)

    def __call__(self, batch: dict[str, Tensor]) -> float:
        """The mean loss before the update."""
        loss = self._both_passes(batch)
        self.gradients.ready()
        self.gradients.clip(math.sqrt(float(self.gradients.square_sum())), self.clip_norm)
        self.optimizer.step(1.0)
        self.parts.update_copies()
        self.gradients.clear()
        return loss.item()

    def passes_alone(self, batch: dict[str, Tensor]) -> None:
        """Forward and backward without an update."""
        self._both_passes(batch)
        self.gradients.clear()

    def _both_passes(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"].numel()
        self.gradients.begin(1.0)
        losses = self.passes.train(batch, [1 / tokens])
        assert losses is not None
        return losses[:, 0].sum() / tokens


def random_batch(vocab: int, samples: int, length: int, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, vocab, (samples, length + 1), generator=generator).to(device)
    weights = torch.ones(samples, length, device=device)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous(), "weights": weights}


def if_it_fits(run: Callable[[], float], device: torch.device) -> float | None:
    """The result of the run, or None where it runs out of memory. Afterwards the memory of both is free."""
    found = None
    try:
        found = run()
    except (
        RuntimeError
    ) as error:  # of the device: torch.OutOfMemoryError; of pinned host memory: torch.AcceleratorError
        if "out of memory" not in str(error):
            raise
    free(device)
    return found


def free(device: torch.device) -> None:
    """Gives back what nothing refers to, also in cycles of autograd and hooks."""
    gc.collect()
    if device.type == "cuda":
        finish(device)
        torch.cuda.empty_cache()

"""Forward and backward passes over the micro-batches of one step; gradient accumulation without a pipeline."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gristmill.training.model.transformer import Transformer

Batch = Mapping[str, Tensor]  # the arguments of Transformer.forward by name, each [samples of this data rank, ...]

# b samples of this data rank


def no_callback(phase: str) -> None:
    """Ignores phases."""


class ForwardBackward(Protocol):
    """Both methods return the samples' losses [b, 2] (see `loss.losses`) where the head is, and None elsewhere.

    train leaves the gradients of factor x (the sum of all losses), summed over the data ranks. begin is called with
    "forward" and "backward" as they begin (with a pipeline also "pipeline": messages and waiting for other stages)."""

    def train(self, batch: Batch, factor: float, begin: Callable[[str], None] = no_callback) -> Tensor | None: ...

    def evaluate(self, batch: Batch) -> Tensor | None: ...


class GradientAccumulation:
    """Runs micro-batches one after another; gradients are reduced over the data ranks once, with the last one."""

    def __init__(self, model: Transformer, micro_batch: int):
        self.model, self.micro_batch = model, micro_batch

    def train(self, batch: Batch, factor: float, begin: Callable[[str], None] = no_callback) -> Tensor:
        micro_batches = list(split(batch, self.micro_batch))
        losses = []
        with side_losses_scaled_by(factor, [self.model]):
            for index, micro in enumerate(micro_batches):
                self._sum_over_ranks(index == len(micro_batches) - 1)
                begin("forward")
                losses_b2 = self.model(**micro)
                begin("backward")
                (losses_b2[:, 0].sum() * factor).backward()
                losses.append(losses_b2.detach())
        return torch.cat(losses)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return torch.cat([self.model(**micro) for micro in split(batch, self.micro_batch)])

    def _sum_over_ranks(self, last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)


@contextmanager
def side_losses_scaled_by(factor: float, stages: Iterable[Transformer]) -> Iterator[None]:
    """While this runs, passes are training passes: experts add their own losses, times factor, to the gradients."""
    stages = list(stages)
    for stage in stages:
        stage.side_loss_factor = factor
    try:
        yield
    finally:
        for stage in stages:
            stage.side_loss_factor = None


def split(batch: Batch, micro_batch: int) -> Iterator[dict[str, Tensor]]:
    """Micro-batches in order; the last holds what is left."""
    for start in range(0, len(batch["x"]), micro_batch):
        yield {name: values[start : start + micro_batch] for name, values in batch.items()}

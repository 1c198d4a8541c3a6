"""Forward and backward over the micro-batches of one step, by a process that holds the whole depth of the model."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gristmill.training.model.transformer import Transformer

Batch = Mapping[str, Tensor]  # the arguments of Transformer.forward by name, each [samples of this data rank, ...]

# b samples of this data rank


def no_callback(phase: str) -> None:
    """For callers to whom it does not matter what is begun."""


class ForwardBackward(Protocol):
    """Both methods return the samples' losses [b, 2] (see `loss.losses`) where the head is, and None elsewhere.

    train leaves the gradients of factor x (the sum of all losses), summed over the data ranks. begin hears "forward"
    and "backward" (and, with a pipeline, "pipeline": messages, and waiting for other stages) as they begin."""

    def train(self, batch: Batch, factor: float, begin: Callable[[str], None] = no_callback) -> Tensor | None: ...

    def evaluate(self, batch: Batch) -> Tensor | None: ...


class GradientAccumulation:
    """Micro-batches one after another; gradients are summed over ranks once, with the last."""

    def __init__(self, part: Transformer, micro_batch: int):
        self.part, self.micro_batch = part, micro_batch

    def train(self, batch: Batch, factor: float, begin: Callable[[str], None] = no_callback) -> Tensor:
        micro_batches = list(split(batch, self.micro_batch))
        losses = []
        for index, micro in enumerate(micro_batches):
            self._sum_over_ranks(index == len(micro_batches) - 1)
            begin("forward")
            losses_b2 = self.part(**micro)
            begin("backward")
            (losses_b2[:, 0].sum() * factor).backward()
            losses.append(losses_b2.detach())
        return torch.cat(losses)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return torch.cat([self.part(**micro) for micro in split(batch, self.micro_batch)])

    def _sum_over_ranks(self, last: bool) -> None:
        if isinstance(self.part, FSDPModule):
            self.part.set_requires_gradient_sync(last)
            self.part.set_is_last_backward(last)


def split(batch: Batch, micro_batch: int) -> Iterator[dict[str, Tensor]]:
    """Micro-batches in order; the last holds what is left."""
    for start in range(0, len(batch["x"]), micro_batch):
        yield {name: values[start : start + micro_batch] for name, values in batch.items()}

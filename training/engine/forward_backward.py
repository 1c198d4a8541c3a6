"""Forward and backward passes over the micro-batches of one step; gradient accumulation without a pipeline."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gristmill.training.model.output import ModelOutput
from gristmill.training.model.transformer import OutputFunction, Transformer

Batch = Mapping[str, Tensor]  # fields by name, each [samples of this data rank, ...]
Factors = Sequence[float] | Tensor  # of the terms of the loss

# b samples of this data rank


def no_callback(phase: str) -> None:
    """Ignores phases."""


class Loss(Protocol):
    """The loss at the end of the model: float[b, terms]; the engine adds the terms, each with its factor."""

    @property
    def terms(self) -> Sequence[Any]: ...

    def __call__(self, model: ModelOutput, batch: Batch) -> Tensor: ...


class ForwardBackward(Protocol):
    """Results are those of the last stage, where it is on this process, and None elsewhere.

    train: leaves the gradients of the sum of factor x loss over terms and samples, summed over the data ranks; returns
    the losses float[b, terms]. begin is called with "forward" and "backward" as they begin (with a pipeline also
    "pipeline": messages and waiting for other stages). evaluate: what `output` makes of the model's output, a tensor
    or tensors by name, each [b, ...]; by default the losses. loss: None for a model that is not trained, which gives
    its hidden states."""

    loss: "Loss | None"

    def train(self, batch: Batch, factors: Factors, begin: Callable[[str], None] = no_callback) -> Tensor | None: ...

    def evaluate(self, batch: Batch, output: OutputFunction | None = None) -> Any: ...


class GradientAccumulation:
    """Runs micro-batches one after another; gradients are reduced over the data ranks once, with the last one, or with
    each where no rank has memory for those of the whole model (`reduces_each`)."""

    def __init__(self, model: Transformer, micro_batch: int, loss: Loss | None, reduces_each: bool = False):
        self.model, self.micro_batch, self.loss, self.reduces_each = model, micro_batch, loss, reduces_each
        self.before_backward: Callable[[bool], None] = lambda last: None  # told whether the pass completes gradients

    def train(self, batch: Batch, factors: Factors, begin: Callable[[str], None] = no_callback) -> Tensor:
        micro_batches = list(split(batch, self.micro_batch))
        losses = []
        with side_losses_scaled_by(factors[0], [self.model]), output_of([self.model], self.loss):
            for index, micro in enumerate(micro_batches):
                self._sum_over_ranks(index == len(micro_batches) - 1)
                begin("forward")
                losses_bn = self.model(micro["tokens"], **micro)
                begin("backward")
                self.before_backward(index == len(micro_batches) - 1)
                scaled_sum(losses_bn, factors).backward()
                losses.append(losses_bn.detach())
        return torch.cat(losses)

    @torch.no_grad()
    def evaluate(self, batch: Batch, output: OutputFunction | None = None) -> Any:
        with output_of([self.model], output or self.loss):
            return joined([self.model(micro["tokens"], **micro) for micro in split(batch, self.micro_batch)])

    def _sum_over_ranks(self, last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or self.reduces_each)
            self.model.set_is_last_backward(last)


@contextmanager
def side_losses_scaled_by(factor: float | Tensor, stages: Iterable[Transformer]) -> Iterator[None]:
    """While this runs, passes are training passes: experts add their own losses, times factor, to the gradients."""
    stages = list(stages)
    for stage in stages:
        stage.side_loss_factor = factor
    try:
        yield
    finally:
        for stage in stages:
            stage.side_loss_factor = None


@contextmanager
def output_of(stages: Iterable[Transformer], output: OutputFunction | None) -> Iterator[None]:
    """While this runs, the last stage returns `output` of the model's output."""
    stages = list(stages)
    for stage in stages:
        stage.output = output if stage.stage.scores and stage.head is not None else None
    try:
        yield
    finally:
        for stage in stages:
            stage.output = None


def scaled_sum(losses_bn: Tensor, factors: Factors) -> Tensor:
    """The sum of factor x loss over terms and samples."""
    factors_n = torch.as_tensor(factors, dtype=losses_bn.dtype, device=losses_bn.device)
    return (losses_bn.sum(dim=0) * factors_n).sum()


def joined(results: Sequence[Any]) -> Any:
    """The results of micro-batches, tensors or tensors by name, as that of the batch."""
    if isinstance(results[0], Mapping):
        return {name: torch.cat([each[name] for each in results]) for name in results[0]}
    return torch.cat(list(results))


def split(batch: Batch, micro_batch: int) -> Iterator[dict[str, Tensor]]:
    """Micro-batches in order; the last holds what is left."""
    for start in range(0, len(batch["tokens"]), micro_batch):
        yield {name: values[start : start + micro_batch] for name, values in batch.items()}

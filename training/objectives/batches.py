"""Batches: the samples of a step as tensors on this process's device.

Each data rank takes a contiguous range of the step's sample numbers. Which samples a step takes depends only on the
number of samples before it."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.objectives.objective import wrong
from gristmill.training.parallel.mesh import Axis


class SampleSource(Protocol):
    """The samples that batches are made of, by field; an objective is one."""

    def batch(self, numbers: range) -> Mapping[str, np.ndarray]: ...

    def source_of(self, k: int) -> str: ...


class Batches:
    """Prefetches the next batch in a thread. problem: what is wrong with the fields of a batch, None if nothing is."""

    def __init__(
        self,
        source: SampleSource,
        data: Axis,
        device: torch.device,
        problem: Callable[[Mapping[str, Tensor]], str | None] = lambda fields: None,
    ):
        self.source, self.data, self.device, self.problem = source, data, device, problem
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: dict[tuple[int, int], Future[dict[str, Tensor]]] = {}

    def take(self, first: int, count: int) -> dict[str, Tensor]:
        """This data rank's share of the samples first to first + count - 1."""
        reading = self._ahead.pop((first, count), None)
        batch = reading.result() if reading else self._read(first, count)
        return {name: values.to(self.device, non_blocking=True) for name, values in batch.items()}

    def prepare(self, first: int, count: int) -> None:
        """Starts reading the next batch that `take` will return."""
        self._ahead = {(first, count): self._thread.submit(self._read, first, count)}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, first: int, count: int) -> dict[str, Tensor]:
        share = count // self.data.size
        start = first + self.data.rank * share
        batch = collate(self.source, range(start, start + share))
        if (problem := self.problem(batch)) is not None:
            raise wrong(self.source, "sample", f"in the samples {start} to {start + share - 1} {problem}")
        if self.device.type != "cuda":
            return batch
        return {name: values.pin_memory() for name, values in batch.items()}  # else the copy to the GPU is waited for


def collate(source: SampleSource, numbers: range) -> dict[str, Tensor]:
    """The fields of the samples, each [samples, ...], integers as int64; and `samples`, their numbers. Raises
    RecipeError where an objective fails, or where its samples do not have the same fields and shapes."""
    batch = {name: _tensor(values) for name, values in source.batch(numbers).items()}
    batch["samples"] = torch.arange(numbers.start, numbers.stop)
    return batch


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64, copy=False) if values.dtype.kind in "iu" else values)


def range_problem(fields: Mapping[str, Any], model: ModelConfig, vocab_size: int) -> str | None:
    """Whether an input of the model is outside its table. fields: arrays or tensors of a sample or of a batch."""
    limits = {"tokens": vocab_size, "segments": model.segments or 1, "positions": model.sequence_length}
    for name, limit in limits.items():
        values = fields.get(name)
        if values is not None and (values.min() < 0 or values.max() >= limit):
            return f"{name} run from {values.min()} to {values.max()}, allowed are 0 to {limit - 1}"
    return None

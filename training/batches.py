"""Batches: the samples of a step as tensors on this process's device.

Each data rank takes a contiguous range of the step's sample numbers. Which samples a step takes depends only on the
number of samples before it."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gristmill.training.parallel.mesh import Axis

# Name of a sample's field -> name of the argument of Transformer.forward
ARGUMENTS = {"tokens": "x", "targets": "targets", "weights": "weights"}


class Samples(Protocol):
    """Interface of training data; `data_pipeline.indexed.samples.Samples` is one."""

    vocab_size: int
    fingerprint: str

    def sample(self, k: int) -> Mapping[str, np.ndarray]: ...

    def source_of(self, k: int) -> str: ...


class Batches:
    """Prefetches the next batch in a thread."""

    def __init__(self, samples: Samples, data: Axis, device: torch.device, mask_documents: bool):
        self.samples, self.data, self.device, self.mask_documents = samples, data, device, mask_documents
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
        batch = collate(self.samples, range(start, start + share), self.mask_documents)
        if self.device.type != "cuda":
            return batch
        return {name: values.pin_memory() for name, values in batch.items()}  # else the copy to the GPU is waited for


def collate(samples: Samples, numbers: range, mask_documents: bool) -> dict[str, Tensor]:
    """The arguments of Transformer.forward, each [samples, ...]."""
    drawn = [samples.sample(k) for k in numbers]
    batch = {argument: _stack(drawn, field) for field, argument in ARGUMENTS.items()}
    batch["samples"] = torch.tensor(numbers, dtype=torch.int64)
    if mask_documents:
        batch["positions"] = _stack(drawn, "positions")
        batch["documents"] = torch.stack([_document_numbers(sample["document_bounds"]) for sample in drawn])
    return batch


def _stack(drawn: list[Mapping[str, np.ndarray]], field: str) -> Tensor:
    return torch.from_numpy(np.stack([sample[field] for sample in drawn]))


def _document_numbers(bounds: np.ndarray) -> Tensor:
    """Which document each token is in. [0, 3, 5] -> [0, 0, 0, 1, 1]."""
    return torch.from_numpy(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)))

"""Writes a checkpoint whose tensors are read one after the other, so that no more than one is in memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from gristmill.foundation.known_digests import KnownDigests
from gristmill.training.checkpoint import CheckpointContent, commit, errors_of_ranks, fresh_folder, without_warning
from gristmill.training.parallel.mesh import single_process


class _Writer(FileSystemWriter):
    """As of other checkpoints, but a file for each tensor: torch holds all tensors of a file until it is written."""

    def __init__(self, folder: Path):
        super().__init__(folder, single_file_per_rank=False, sync_files=True, thread_count=1)

    def storage_meta(self) -> None:
        return None


class _StreamPlanner(DefaultSavePlanner):
    """Takes each tensor without values from the stream."""

    def __init__(self, stream: Iterator[tuple[str, Tensor]]):
        super().__init__()
        self.stream = stream

    def lookup_object(self, index: Any) -> Any:
        stated = super().lookup_object(index)
        if not stated.is_meta:
            return stated
        name, tensor = next(self.stream)
        if name != index.fqn or tensor.shape != stated.shape:
            raise ValueError(f"{name} {list(tensor.shape)} comes where {index.fqn} {list(stated.shape)} is written")
        return tensor.to(stated.dtype)


def save_streamed(
    root: Path,
    step: int,
    content: CheckpointContent,
    stream: Iterator[tuple[str, Tensor]],
    metadata: Callable[[], Mapping[str, Any]],
) -> None:
    """Writes the checkpoint of a step in one process. Tensors of the content on the meta device are taken from the
    stream, which must have them in the same order. metadata is asked for when all tensors are written."""
    folder, mesh = fresh_folder(root, step, single_process()), single_process()
    with without_warning(), errors_of_ranks():
        planner = _StreamPlanner(stream)
        dcp.save(dict(content.tensors), storage_writer=_Writer(folder), planner=planner, no_dist=True)
    commit(root, step, replace(content, metadata=metadata()), mesh, None, KnownDigests())

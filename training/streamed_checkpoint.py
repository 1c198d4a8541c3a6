"""Writes a checkpoint whose tensors are read one after the other, so that no more than one is in memory."""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from gristmill.foundation.known_digests import KnownDigests
from gristmill.training.checkpoint import CheckpointContent, commit, errors_of_ranks, fresh_folder, without_warning
from gristmill.training.parallel.mesh import single_process


class _Files(FileSystem):
    """Brings each file to the disk and hashes it on another thread, while the next tensor is read and written."""

    def __init__(self, pool: Executor):
        super().__init__()
        self.pool, self.digests, self.pending = pool, KnownDigests(), list[Future[None]]()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        holds_tensors = Path(path).name.startswith("__")
        with super().create_stream(path, mode) as stream:
            yield stream
            if not holds_tensors:
                stream.flush()
                os.fsync(stream.fileno())
        if holds_tensors:
            self.pending.append(self.pool.submit(self._finish, Path(path)))

    def _finish(self, path: Path) -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self.digests(path)

    def wait(self) -> KnownDigests:
        """The digests of all files. Raises OSError where one could not be brought to the disk."""
        for finished in self.pending:
            finished.result()
        return self.digests


class _Writer(FileSystemWriter):
    """As of other checkpoints, but a file for each tensor: torch holds all tensors of a file until it is written."""

    def __init__(self, folder: Path, files: _Files):
        super().__init__(folder, single_file_per_rank=False, sync_files=False, thread_count=1)
        self.fs = files

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
    with without_warning(), errors_of_ranks(), ThreadPoolExecutor(1) as pool:
        files, planner = _Files(pool), _StreamPlanner(stream)
        dcp.save(dict(content.tensors), storage_writer=_Writer(folder, files), planner=planner, no_dist=True)
        digests = files.wait()
    commit(root, step, replace(content, metadata=metadata()), mesh, None, digests)

"""When a run saves a checkpoint, and which checkpoints are kept."""

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from gristmill.foundation.files import DigestCache
from gristmill.training.checkpoint import checkpoint
from gristmill.training.checkpoint.checkpoint import (
    CheckpointContent,
    DiskFiles,
    commit,
    errors_of_ranks,
    fresh_folder,
    without_warning,
)
from gristmill.training.config.train import CheckpointConfig
from gristmill.training.parallel.mesh import Mesh, single_process


class Saver:
    """Saves checkpoints at regular steps. Asynchronous saving copies the state and writes it during the next steps,
    over its own process group; at most one checkpoint is being written."""

    def __init__(self, root: Path, config: CheckpointConfig, mesh: Mesh):
        if config.asynchronous:  # in torch's thread, to which `without_warning` does not reach
            warnings.filterwarnings("ignore", message=checkpoint.SINGLE_PROCESS_WARNING)
        self.root, self.config, self.mesh = root, config, mesh
        self.digests = DigestCache()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._writing: Future[None] | None = None
        self._group = dist.new_group(backend="gloo") if config.asynchronous and mesh.distributed else None

    def is_due(self, step: int) -> bool:
        return bool(self.config.every and step % self.config.every == 0)

    def save(self, step: int, content: checkpoint.CheckpointContent, finished: bool) -> None:
        """Saves the checkpoint of a step, or begins to where saving is asynchronous. finished: it is the last one."""
        self.wait()
        if not self.config.asynchronous:
            checkpoint.save(self.root, step, content, self.mesh, self.digests)
            self.prune(step, finished)
            return
        written = checkpoint.start_saving(self.root, step, content.tensors, self.mesh, self._group)
        self._writing = self._thread.submit(self._finish, written, step, content, finished)

    def wait(self) -> None:
        """Waits until the checkpoint being written is complete; raises its error."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def prune(self, step: int, finished: bool) -> None:
        """Removes the checkpoints that are no longer kept, after that of `step` was saved or loaded. Later ones, which
        are damaged, stay until they are replaced; a finished run keeps none of them."""
        if self.mesh.is_first:
            steps = checkpoint.steps_in(self.root)
            keep = kept_steps([saved_step for saved_step in steps if saved_step <= step], self.config, finished)
            checkpoint.prune(
                self.root, keep if finished else keep | {saved_step for saved_step in steps if saved_step > step}
            )

    def _finish(self, written: Future[Any], step: int, content: checkpoint.CheckpointContent, finished: bool) -> None:
        with checkpoint.errors_of_ranks():
            written.result()
        checkpoint.commit(self.root, step, content, self.mesh, self._group, self.digests)
        self.prune(step, finished)


def kept_steps(steps: Sequence[int], config: CheckpointConfig, finished: bool) -> set[int]:
    """The checkpoints to keep: the newest, the last `keep_last` regular ones, and every `keep_every`-th step. One saved
    because of a stop is not regular, so that the finished run equals one that never stopped.

    [100, 137, 200, 300] every 100, keep_last 2 -> {200, 300}."""
    regular = [step for step in steps if config.every and step % config.every == 0]
    if finished and steps[-1] not in regular:
        regular.append(steps[-1])
    for_ever = {step for step in regular if config.keep_every and step % config.keep_every == 0}
    return {steps[-1], *regular[-config.keep_last :]} | for_ever


# Writes a checkpoint whose tensors are read one after the other, so that no more than one is in memory.


class _Files(DiskFiles):
    """Brings each file to the disk and hashes it on another thread, while the next tensor is read and written."""

    def __init__(self, pool: Executor):
        super().__init__()
        self.pool, self.digests, self.pending = pool, DigestCache(), list[Future[None]]()

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

    def wait(self) -> DigestCache:
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

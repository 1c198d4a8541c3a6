"""When a run saves a checkpoint, and which checkpoints are kept."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gristmill.foundation.known_digests import KnownDigests
from gristmill.training import checkpoint
from gristmill.training.config import CheckpointConfig
from gristmill.training.parallel.mesh import Mesh


class Saver:
    """Saves checkpoints at regular steps. Asynchronous saving copies the state and writes it during the next steps,
    over its own process group; at most one checkpoint is being written."""

    def __init__(self, root: Path, config: CheckpointConfig, mesh: Mesh):
        self.root, self.config, self.mesh = root, config, mesh
        self.digests = KnownDigests()
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
            keep = kept_steps([one for one in steps if one <= step], self.config, finished)
            checkpoint.prune(self.root, keep if finished else keep | {one for one in steps if one > step})

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

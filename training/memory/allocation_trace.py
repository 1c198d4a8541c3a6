"""The tensors that a computation allocates and frees, in order: the trace that addresses are planned for."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gristmill.training.memory.address_plan import Block


class _Recorder(TorchDispatchMode):
    """Counts an event for each new storage and for each that is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.events = 0
        self.sizes: list[int] = []
        self.starts: list[int] = []
        self.ends: dict[int, int] = {}
        self._known: dict[int, int] = {}  # storage -> block

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {_identity(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and _identity(each) not in own and _identity(each) not in self._known:
                self._allocated(each)
        return result

    def _allocated(self, tensor: Tensor) -> None:
        storage, block = tensor.untyped_storage(), len(self.sizes)
        if not storage.nbytes():
            return
        identity = _identity(tensor)
        self._known[identity] = block
        self.starts.append(self.events)
        self.sizes.append(storage.nbytes())
        self.events += 1
        weakref.finalize(storage, self._freed, identity, block)

    def _freed(self, identity: int, block: int) -> None:
        self._known.pop(identity, None)
        self.ends[block] = self.events
        self.events += 1


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def recorded() -> Iterator[Callable[[], list[Block]]]:
    """Within it, what is allocated is recorded; afterwards the call returns the blocks, those that still live up to the
    end of the trace."""
    recorder = _Recorder()
    with recorder:
        yield lambda: [
            Block(start, recorder.ends.get(place, recorder.events), size)
            for place, (start, size) in enumerate(zip(recorder.starts, recorder.sizes, strict=True))
        ]


def layer_trace(compute: Callable[[Tensor], Tensor], x: Tensor) -> list[Block]:
    """The transient blocks of one layer's forward pass without gradients: those that are freed before its end."""
    with torch.no_grad(), recorded() as blocks:
        output = compute(x)
    end = max(block.end for block in blocks())
    found = [block for block in blocks() if block.end < end]
    del output
    return found

"""The optimizer of a model whose layers' weights are streamed: weights, gradients and state lie in a store, and the
host updates them piece by piece."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gristmill.training.memory.weight_stream import WeightStream
from gristmill.training.optim.adamw import AdamW, CountsWithinAnother, Operands
from gristmill.training.optim.muon import Muon
from gristmill.training.optim.subgroups import Piece, split_into_subgroups
from gristmill.training.parallel.local import local

PIECE_PARAMETERS = 1 << 20  # of a store on disk, that are updated together; two such pieces are in memory at once
BUFFERS = 2


@dataclass(frozen=True)
class _Fetched:
    """operands: of the update, in host memory. written: (where to, from) of what the update changes."""

    operands: list[Operands]
    written: list[tuple[Tensor, int, Tensor]]


class StreamedOptimizer(CountsWithinAnother):
    """host_gradients: of the streamed parameters, in the store, filled by the trainer; the other parameters are on the
    device with theirs. gradient_factor: of all streamed gradients, for clipping."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        make: Callable[[Callable[[Tensor], Tensor]], AdamW | Muon],
        stream: WeightStream,
        subgroup_parameters: int,
    ):
        stored, store = stream.stored, stream.store
        self.parameters, self.stored, self.store, self.stream = parameters, stored, store, stream
        self.optimizer = self.counted = make(lambda tensor: store.zeros(tensor.shape, tensor.dtype))
        self.host_gradients = {name: store.zeros(tensor.shape, tensor.dtype) for name, tensor in stored.items()}
        self.gradient_factor = 1.0
        size = subgroup_parameters if store.in_memory else min(subgroup_parameters, PIECE_PARAMETERS)
        self.subgroups = split_into_subgroups(parameters, size, self.optimizer.is_whole)
        self._buffers: list[list[Tensor]] = [[] for _ in range(BUFFERS)]

    def state(self) -> dict[str, Tensor]:
        return self.optimizer.state()

    @torch.no_grad()
    def step(self, rate_share: float) -> None:
        """Of a store on disk, one thread reads the next piece while this one is updated, then writes this one: it works
        in turn, so a buffer is written out before it is filled again."""
        self.stream.release()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer") as mover:
            written: Future[None] | None = None
            ahead = mover.submit(self._fetch, 0)
            for index in range(len(self.subgroups)):
                fetched = ahead.result()
                if index + 1 < len(self.subgroups):
                    ahead = mover.submit(self._fetch, index + 1)
                self.optimizer.update(fetched.operands, rate_share)
                if written is not None:
                    written.result()  # raises its error
                written = mover.submit(self._write, fetched)
            if written is not None:
                written.result()
        self._buffers = [[] for _ in range(BUFFERS)]  # a pass needs their memory
        self.optimizer.updates += 1

    @torch.no_grad()
    def _fetch(self, index: int) -> _Fetched:
        operands, written = [], []
        taken: dict[int, int] = {}
        for piece in self.subgroups[index]:
            whole = self.optimizer.is_whole(piece.name)
            tensors = [*self._parameter_and_gradient(piece), *self.optimizer.tensors_of(piece.name)]
            values = []
            for kind, tensor in enumerate(tensors):
                value = self._in_host_memory(tensor, piece, index, taken, kind)
                if kind != 1 and value.data_ptr() != tensor.data_ptr() + piece.start * tensor.element_size():
                    written.append((tensor, piece.start, value))
                values.append(value.view(tensor.shape) if whole else value)
            if piece.name in self.stored and self.gradient_factor != 1:
                values[1].mul_(self.gradient_factor)
            operands.append(Operands(piece.name, values[0], values[1], tuple(values[2:])))
        return _Fetched(operands, written)

    def _parameter_and_gradient(self, piece: Piece) -> tuple[Tensor, Tensor]:
        if piece.name in self.stored:
            return self.stored[piece.name], self.host_gradients[piece.name]
        parameter = self.parameters[piece.name]
        return local(parameter.detach()), local(parameter.grad)

    def _in_host_memory(self, tensor: Tensor, piece: Piece, index: int, taken: dict[int, int], kind: int) -> Tensor:
        """The piece's elements: the tensor's own where they are in host memory, else a copy in a buffer."""
        on_disk = self.store.on_disk(tensor)
        if tensor.device.type == "cpu" and not on_disk:
            return tensor.view(-1)[piece.start : piece.end]
        start = taken.get(kind, 0)
        taken[kind] = start + piece.size
        target = self._room(index % BUFFERS, kind, tensor.dtype)[start : start + piece.size]
        if on_disk:
            self.store.read(tensor, target, piece.start)
        else:
            target.copy_(tensor.reshape(-1)[piece.start : piece.end])
        return target

    def _room(self, buffer: int, kind: int, dtype: torch.dtype) -> Tensor:
        """A buffer's tensor for parameters (0), gradients (1) or one kind of state, as long as the largest subgroup."""
        kept = self._buffers[buffer]
        while len(kept) <= kind:
            size = max(sum(piece.size for piece in group) for group in self.subgroups)
            kept.append(torch.empty(size, dtype=dtype))
        return kept[kind]

    @torch.no_grad()
    def _write(self, fetched: _Fetched) -> None:
        for tensor, start, value in fetched.written:
            if self.store.on_disk(tensor):
                self.store.write(tensor, value.view(-1), start)
            else:
                tensor.view(-1)[start : start + value.numel()].copy_(value.view(-1))

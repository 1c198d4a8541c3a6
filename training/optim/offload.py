"""The optimizer of a recipe, and its state in host memory, in subgroups that host and device update side by side
(Deep Optimizer States, arXiv 2410.21316)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.optim.muon import Muon
from gristmill.training.optim.optimizer import AdamW, CountsWithinAnother, Operands, Optimizer, local_gradient
from gristmill.training.parallel.mesh import Mesh, local, ranges_of_shard
from gristmill.training.parallel.offload.swap import HostCopies, host_zeros_like
from gristmill.training.parallel.offload.weight_stream import WeightStream
from gristmill.training.planner.costs.host_update import on_device, operations, planned_stride

# Subgroups of one process's shard of the parameters, each updated and copied together.

# Pieces of a tensor begin at multiples of this, where a vectorized kernel begins a new vector in the whole tensor too:
# its update is then bitwise that of the whole.
PIECE_ELEMENTS = 4096


@dataclass(frozen=True)
class ShardPiece:
    """Elements [start, end) of a parameter's local shard, flattened. longest: their number on the first rank, whose
    shard is the longest; here there may be none."""

    name: str
    start: int
    end: int
    longest: int

    @property
    def size(self) -> int:
        return self.end - self.start


Subgroup = tuple[ShardPiece, ...]


def split_into_subgroups(
    parameters: Mapping[str, nn.Parameter], size: int, is_whole: Callable[[str], bool]
) -> list[Subgroup]:
    """Subgroups of at most `size` elements, in the parameters' order. is_whole: parameters that are not cut, such as a
    matrix that Muon makes orthogonal; one larger than `size` is a subgroup by itself. All ranks cut as the first one
    does, so that they meet in the subgroups with such a matrix.

    Shards of 6, 9 elements, size 10, if pieces of 4 -> (6, 4 of the 9), (5)."""
    size = max(PIECE_ELEMENTS, size // PIECE_ELEMENTS * PIECE_ELEMENTS)
    groups: list[Subgroup] = []
    pieces: list[ShardPiece] = []
    free = size
    for name, parameter in parameters.items():
        start, end, shard_elements = 0, _longest_shard(parameter), local(parameter.detach()).numel()
        while start < end:
            taken = end - start
            if taken > max(0, free) and not is_whole(name):
                taken = max(0, free) // PIECE_ELEMENTS * PIECE_ELEMENTS
            if pieces and (taken == 0 or taken > free):
                groups.append(tuple(pieces))
                pieces, free = [], size
                continue
            pieces.append(ShardPiece(name, min(start, shard_elements), min(start + taken, shard_elements), taken))
            start, free = start + taken, free - taken
    return [*groups, tuple(pieces)] if pieces else groups


def _longest_shard(parameter: nn.Parameter) -> int:
    axes = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
    return prod(len(part) for part in ranges_of_shard(parameter, [0] * axes))


BUFFERS = 2  # on the device: the state of one subgroup is updated while that of the next arrives


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Within the block torch computes with so many threads; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OffloadedOptimizer(CountsWithinAnother):
    """Each subgroup is always updated in the same place; whichever, the update is the same function of (parameter,
    gradient, state), so the result does not depend on the placement or the order where both are one processor.

    threads: of the host's updates; None: as many as torch uses. optimizer: with its state in host memory. The device
    keeps the parameters. Of what the host updates, host memory has a copy of the parameters, and the gradients
    (`host_gradients`, filled by the trainer)."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: AdamW | Muon,
        subgroups: Sequence[Subgroup],
        on_device: Sequence[bool],
        order: Sequence[int] | None = None,
        threads: int | None = None,
    ):
        self.threads = threads
        self.parameters, self.optimizer, self.subgroups, self.on_device = parameters, optimizer, subgroups, on_device
        self.counted = optimizer
        self.operations = operations(on_device, order)
        self.updated_on_device = frozenset(
            piece.name for group, device in zip(subgroups, on_device, strict=True) if device for piece in group
        )
        on_host = {
            piece.name for group, device in zip(subgroups, on_device, strict=True) if not device for piece in group
        }
        host_names = [name for name in parameters if name in on_host]
        self.host_gradients = {name: host_zeros_like(local(parameters[name].detach())) for name in host_names}
        self._host_parameters = {name: host_zeros_like(local(parameters[name].detach())) for name in host_names}
        self._parameters_are_copied = False
        device = local(next(iter(parameters.values())).detach()).device
        self.to_host, self.to_device = HostCopies(device), HostCopies(device)
        self._device = device
        self._buffers: list[list[Tensor]] = [[] for _ in range(BUFFERS)]
        self._buffer_of: dict[int, int] = {}

    def parameters_loaded(self) -> None:
        self._parameters_are_copied = False

    def state(self) -> dict[str, Tensor]:
        self.to_host.finish()
        return self.optimizer.state()

    @torch.no_grad()
    def step(self, rate_share: float) -> None:
        """Begins the operations in order. The host's updates run in this thread, so that copies and the device's
        updates, which are only begun, run beside them."""
        self._copy_parameters()
        self.to_host.finish()
        fetched: dict[int, tuple[list[Operands], torch.cuda.Event | None]] = {}
        stored: list[torch.cuda.Event | None] = []
        for kind, index in self.operations:
            if kind == "fetch":
                fetched[index] = self._fetch(index, len(stored) + len(fetched), stored)
            elif kind == "update" and self.on_device[index]:
                operands, arrived = fetched[index]
                if arrived is not None:
                    torch.cuda.current_stream(self._device).wait_event(arrived)
                self.optimizer.update(operands, rate_share)
            elif kind == "update":
                with with_threads(self.threads):
                    self.optimizer.update([self._on_host(piece) for piece in self.subgroups[index]], rate_share)
            elif kind == "store":
                stored.append(self._store(index, fetched.pop(index)[0]))
            else:
                self._publish(index)
        self.to_device.join()
        self.optimizer.updates += 1

    def _copy_parameters(self) -> None:
        """Once after the start or a loaded checkpoint; from then on the update keeps both copies equal."""
        if self._parameters_are_copied:
            return
        for name, copy in self._host_parameters.items():
            copy.copy_(local(self.parameters[name].detach()))
        self._parameters_are_copied = True

    def _on_host(self, piece: ShardPiece) -> Operands:
        state = tuple(_cut(tensor, piece, self._is_whole(piece)) for tensor in self.optimizer.tensors_of(piece.name))
        parameter, gradient = self._host_parameters[piece.name], self.host_gradients[piece.name]
        whole = self._is_whole(piece)
        return Operands(piece.name, _cut(parameter, piece, whole), _cut(gradient, piece, whole), state)

    def _fetch(
        self, index: int, turn: int, stored: Sequence[torch.cuda.Event | None]
    ) -> tuple[list[Operands], torch.cuda.Event | None]:
        """Copies the state of a subgroup into one of the buffers, once what was there is stored."""
        if turn >= BUFFERS and (before := stored[turn - BUFFERS]) is not None:
            torch.cuda.current_stream(self._device).wait_event(before)
        buffer = self._buffers[turn % BUFFERS]
        operands, arrived = [], None
        taken = 0
        for piece in self.subgroups[index]:
            whole = self._is_whole(piece)
            state = []
            for number, source in enumerate(self.optimizer.tensors_of(piece.name)):
                cut = _cut(source, piece, whole)
                target = self._buffer(buffer, number, index)[taken : taken + piece.size].view(cut.shape)
                arrived = self.to_device.copy(target, cut)
                state.append(target)
            taken += piece.size
            parameter = self.parameters[piece.name]
            own, gradient = local(parameter.detach()), local_gradient(parameter)
            operands.append(Operands(piece.name, _cut(own, piece, whole), _cut(gradient, piece, whole), tuple(state)))
        return operands, arrived

    def _buffer(self, buffer: list[Tensor], number: int, index: int) -> Tensor:
        """The buffer's tensor for one kind of state, as long as the largest subgroup that the device updates."""
        if number == len(buffer):
            sizes = [
                sum(piece.size for piece in group)
                for group, device in zip(self.subgroups, self.on_device, strict=True)
                if device
            ]
            dtype = self.optimizer.tensors_of(self.subgroups[index][0].name)[0].dtype
            buffer.append(torch.empty(max(sizes), dtype=dtype, device=self._device))
        return buffer[number]

    def _store(self, index: int, operands: Sequence[Operands]) -> torch.cuda.Event | None:
        event = None
        for piece, operand in zip(self.subgroups[index], operands, strict=True):
            whole = self._is_whole(piece)
            for target, source in zip(self.optimizer.tensors_of(piece.name), operand.state, strict=True):
                event = self.to_host.copy(_cut(target, piece, whole), source)
        return event

    def _publish(self, index: int) -> None:
        """The host's new weights, to the parameters on the device; FSDP casts them as it gathers them."""
        for piece in self.subgroups[index]:
            whole = self._is_whole(piece)
            own = _cut(local(self.parameters[piece.name].detach()), piece, whole)
            self.to_device.copy(own, _cut(self._host_parameters[piece.name], piece, whole))

    def _is_whole(self, piece: ShardPiece) -> bool:
        return self.optimizer.is_whole(piece.name)


def _cut(tensor: Tensor, piece: ShardPiece, whole: bool) -> Tensor:
    """The piece's elements, sharing memory; in the tensor's own shape where it is whole."""
    return tensor if whole else tensor.view(-1)[piece.start : piece.end]


# The optimizer of a model whose layers' weights are streamed: weights, gradients and state lie in a store, and the
# host updates them piece by piece.

PIECE_PARAMETERS = 1 << 20  # of a store on disk, that are updated together; two such pieces are in memory at once


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
        threads: int | None = None,
    ):
        self.threads = threads
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
        """Update one subgroup after the other. With a store on disk, one thread reads the next piece while this one is
        updated, then writes this one: it works in turn, so a buffer is written out before it is filled again."""
        self.stream.release()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="optimizer") as mover:
            written: Future[None] | None = None
            ahead = mover.submit(self._fetch, 0)
            for index in range(len(self.subgroups)):
                fetched = ahead.result()
                if index + 1 < len(self.subgroups):
                    ahead = mover.submit(self._fetch, index + 1)
                with with_threads(self.threads):
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

    def _parameter_and_gradient(self, piece: ShardPiece) -> tuple[Tensor, Tensor]:
        if piece.name in self.stored:
            return self.stored[piece.name], self.host_gradients[piece.name]
        parameter = self.parameters[piece.name]
        return local(parameter.detach()), local_gradient(parameter)

    def _in_host_memory(
        self, tensor: Tensor, piece: ShardPiece, index: int, taken: dict[int, int], kind: int
    ) -> Tensor:
        """The piece's elements: the tensor's own where they are in host memory, else a copy in a buffer."""
        on_disk = self.store.on_disk(tensor)
        if tensor.device.type == "cpu" and not on_disk:
            return tensor.view(-1)[piece.start : piece.end]
        start = taken.get(kind, 0)
        taken[kind] = start + piece.size
        target = self._buffer(index % BUFFERS, kind, tensor.dtype)[start : start + piece.size]
        if on_disk:
            self.store.read(tensor, target, piece.start)
        else:
            target.copy_(tensor.reshape(-1)[piece.start : piece.end])
        return target

    def _buffer(self, buffer: int, kind: int, dtype: torch.dtype) -> Tensor:
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


# The optimizer of a recipe.


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    train: TrainConfig,
    model: ModelConfig,
    mesh: Mesh,
    stream: WeightStream | None = None,
    threads: int | None = None,
) -> Optimizer:
    """On the parameters' device, or with its state in host memory or on disk as the layout says. stream: of the layers'
    weights. threads: of the host's updates; None: as many as torch uses."""
    config, offload = train.optimizer, train.layout.offload

    def make(zeros_like: Callable[[Tensor], Tensor]) -> AdamW | Muon:
        if config.name == "adamw":
            return AdamW(parameters, config, model, zeros_like)
        return Muon(parameters, config, model, zeros_like, mesh.stage.group)

    if stream is not None:
        return StreamedOptimizer(parameters, make, stream, offload.subgroup_parameters, threads)
    if not offload.active:
        return make(torch.zeros_like)
    optimizer = make(host_zeros_like)
    subgroups = split_into_subgroups(parameters, offload.subgroup_parameters, optimizer.is_whole)
    sizes = [sum(piece.longest for piece in group) for group in subgroups]
    stride = planned_stride(train.layout.hardware, sizes) if offload.optimizer == "auto" else None
    places = on_device(len(subgroups), offload, stride)
    return OffloadedOptimizer(parameters, optimizer, subgroups, places, threads=threads)

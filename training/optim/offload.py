"""The optimizer with its state in host memory, in subgroups that the host and the device update side by side (Deep
Optimizer States, arXiv 2410.21316)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gristmill.training.costs.host_update import operations
from gristmill.training.memory.host_copies import HostCopies, host_zeros_like
from gristmill.training.optim.adamw import AdamW, CountsWithinAnother, Operands
from gristmill.training.optim.muon import Muon
from gristmill.training.optim.subgroups import Piece, Subgroup
from gristmill.training.parallel.local import local

BUFFERS = 2  # on the device: the state of one subgroup is updated while that of the next arrives


class OffloadedOptimizer(CountsWithinAnother):
    """Each subgroup is always updated in the same place; whichever, the update is the same function of (parameter,
    gradient, state), so the result does not depend on the placement or the order where both are one processor.

    optimizer: with its state in host memory. The device keeps the parameters. Of what the host updates, host memory
    has a copy of the parameters, and the gradients (`host_gradients`, filled by the trainer)."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: AdamW | Muon,
        subgroups: Sequence[Subgroup],
        on_device: Sequence[bool],
        order: Sequence[int] | None = None,
    ):
        self.parameters, self.optimizer, self.subgroups, self.on_device = parameters, optimizer, subgroups, on_device
        self.counted = optimizer
        self.operations = operations(on_device, order)
        self.updated_on_device = frozenset(
            piece.name for group, device in zip(subgroups, on_device, strict=True) if device for piece in group
        )
        on_host = {
            piece.name for group, device in zip(subgroups, on_device, strict=True) if not device for piece in group
        }
        held = [name for name in parameters if name in on_host]
        self.host_gradients = {name: host_zeros_like(local(parameters[name].detach())) for name in held}
        self._host_parameters = {name: host_zeros_like(local(parameters[name].detach())) for name in held}
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

    def _on_host(self, piece: Piece) -> Operands:
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
                target = self._room(buffer, number, index)[taken : taken + piece.size].view(cut.shape)
                arrived = self.to_device.copy(target, cut)
                state.append(target)
            taken += piece.size
            parameter = self.parameters[piece.name]
            own, gradient = local(parameter.detach()), local(parameter.grad)
            operands.append(Operands(piece.name, _cut(own, piece, whole), _cut(gradient, piece, whole), tuple(state)))
        return operands, arrived

    def _room(self, buffer: list[Tensor], number: int, index: int) -> Tensor:
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
        for piece, each in zip(self.subgroups[index], operands, strict=True):
            whole = self._is_whole(piece)
            for target, source in zip(self.optimizer.tensors_of(piece.name), each.state, strict=True):
                event = self.to_host.copy(_cut(target, piece, whole), source)
        return event

    def _publish(self, index: int) -> None:
        """The host's new weights, to the parameters on the device; FSDP casts them as it gathers them."""
        for piece in self.subgroups[index]:
            whole = self._is_whole(piece)
            own = _cut(local(self.parameters[piece.name].detach()), piece, whole)
            self.to_device.copy(own, _cut(self._host_parameters[piece.name], piece, whole))

    def _is_whole(self, piece: Piece) -> bool:
        return self.optimizer.is_whole(piece.name)


def _cut(tensor: Tensor, piece: Piece, whole: bool) -> Tensor:
    """The piece's elements, sharing memory; in the tensor's own shape where it is whole."""
    return tensor if whole else tensor.view(-1)[piece.start : piece.end]

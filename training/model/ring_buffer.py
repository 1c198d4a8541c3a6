"""Ring buffers of decoding: the last inputs of a layer, in memory that neither grows nor moves."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# B rows, L columns kept, C channels


class _Slots:
    """Column t is in slot t % L; `columns` were written so far."""

    def __init__(self, slots_BLC: Tensor, columns: int):
        self.slots_BLC, self.columns = slots_BLC, columns


@dataclass(frozen=True)
class RingBuffer:
    """The last L columns before column `end`. A new column takes the place of the oldest, so only the newest buffer can
    be read: raises RuntimeError for one that was appended to already; `take` copies it before."""

    memory: _Slots
    end: int

    @staticmethod
    def of(last_BLC: Tensor) -> "RingBuffer":
        """last_BLC: the columns, oldest first. Copied."""
        length = last_BLC.shape[1]
        return RingBuffer(_Slots(last_BLC.detach().clone(memory_format=torch.contiguous_format), length), length)

    @property
    def length(self) -> int:
        return self.memory.slots_BLC.shape[1]

    def at(self, back: Sequence[int]) -> Tensor:
        """[B, len(back), C]: the columns so many places before `end`, 1 to L; 1 is the newest."""
        slots_BLC = self._slots()
        places = [(self.end - each) % self.length for each in back]
        return slots_BLC[:, places]

    def in_order(self) -> Tensor:
        """[B, L, C], oldest first. A copy."""
        slots_BLC = self._slots()
        return slots_BLC.roll(-(self.end % self.length), dims=1) if self.length else slots_BLC

    def append(self, column_BC: Tensor) -> "RingBuffer":
        slots_BLC = self._slots()
        if self.length:
            slots_BLC[:, self.end % self.length] = column_BC
        self.memory.columns = self.end + 1
        return RingBuffer(self.memory, self.end + 1)

    def slots(self) -> tuple[Tensor, Tensor]:
        """([B, L, C] as they lie, int64[L]: how many places before `end` each is, the newest 1)."""
        slots_BLC = self._slots()
        places_L = torch.arange(self.length, device=slots_BLC.device)
        return slots_BLC, (self.end - 1 - places_L) % self.length + 1

    def take(self, rows: Tensor) -> "RingBuffer":
        """The buffer of the given batch rows, in that order. A copy."""
        return RingBuffer(_Slots(self._slots()[rows], self.end), self.end)

    def _slots(self) -> Tensor:
        if self.memory.columns != self.end:
            raise RuntimeError("this decoding state was continued already; keep a copy of it (take) to continue twice")
        return self.memory.slots_BLC

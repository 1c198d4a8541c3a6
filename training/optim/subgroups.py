"""Subgroups of one process's shard of the parameters, each updated and copied together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.distributed.tensor import DTensor

from gristmill.training.parallel.local import local, ranges_of_shard

# Pieces of a tensor begin at multiples of this, where a vectorised kernel begins a new vector in the whole tensor too:
# its update is then bitwise that of the whole.
PIECE_ELEMENTS = 4096


@dataclass(frozen=True)
class Piece:
    """Elements [start, end) of a parameter's local shard, flattened. longest: their number on the first rank, whose
    shard is the longest; here there may be none."""

    name: str
    start: int
    end: int
    longest: int

    @property
    def size(self) -> int:
        return self.end - self.start


Subgroup = tuple[Piece, ...]


def split_into_subgroups(
    parameters: Mapping[str, nn.Parameter], size: int, is_whole: Callable[[str], bool]
) -> list[Subgroup]:
    """Subgroups of at most `size` elements, in the parameters' order. is_whole: parameters that are not cut, such as a
    matrix that Muon makes orthogonal; one larger than `size` is a subgroup by itself. All ranks cut as the first one
    does, so that they meet in the subgroups with such a matrix.

    Shards of 6, 9 elements, size 10, if pieces of 4 -> (6, 4 of the 9), (5)."""
    size = max(PIECE_ELEMENTS, size // PIECE_ELEMENTS * PIECE_ELEMENTS)
    groups: list[Subgroup] = []
    pieces: list[Piece] = []
    free = size
    for name, parameter in parameters.items():
        start, end, held = 0, _longest_shard(parameter), local(parameter.detach()).numel()
        while start < end:
            room = max(0, free)
            taken = end - start
            if taken > room:
                taken = taken if is_whole(name) else room // PIECE_ELEMENTS * PIECE_ELEMENTS
            if pieces and (taken == 0 or taken > free):
                groups.append(tuple(pieces))
                pieces, free = [], size
                continue
            pieces.append(Piece(name, min(start, held), min(start + taken, held), taken))
            start, free = start + taken, free - taken
    return [*groups, tuple(pieces)] if pieces else groups


def _longest_shard(parameter: nn.Parameter) -> int:
    axes = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
    return prod(len(part) for part in ranges_of_shard(parameter, [0] * axes))

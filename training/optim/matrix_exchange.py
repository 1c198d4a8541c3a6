"""Makes sharded matrices whole, each on one rank of a group, and sends the results back as shards (as the distributed
Muon of Dion, arXiv 2504.05295, and of Megatron-LM's `LayerWiseDistributedOptimizer` do)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gristmill.training.parallel.local import ranges_of_shard


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a parameter: all of it, or the index-th of [matrices, rows, columns]. place: of the parameter."""

    place: int
    index: int | None


@dataclass(frozen=True)
class _Piece:
    """The rows and columns of a matrix that one rank holds."""

    matrix: _Matrix
    rows: range
    columns: range

    @property
    def elements(self) -> int:
        return len(self.rows) * len(self.columns)

    def of(self, whole: Tensor) -> Tensor:
        return whole[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]


class MatrixExchange:
    """Of parameters [rows, columns] or [matrices, rows, columns], on meshes of the processes of the group.
    Each matrix has an owner; a rank sends each owner its piece of the owner's matrices in one all-to-all, and gets its
    pieces of all results in another. Copies of a shard (HSDP) send none twice: an owner asks the shards beside it."""

    def __init__(self, parameters: Sequence[DTensor], group: dist.ProcessGroup):
        self._parameters, self._group = parameters, group
        self._ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        matrices = [
            _Matrix(place, index)
            for place, parameter in enumerate(parameters)
            for index in (range(len(parameter)) if parameter.ndim == 3 else [None])
        ]
        costs = [prod(shape) * min(shape) for shape in (self._shape(matrix) for matrix in matrices)]
        owners = balanced(costs, len(self._ranks))
        owned: list[list[_Matrix]] = [[] for _ in self._ranks]
        for matrix, owner in zip(matrices, owners, strict=True):
            owned[owner].append(matrix)
        self._own = owned[rank]
        meshes = {parameter.device_mesh: _coordinates(parameter.device_mesh) for parameter in parameters}
        self._coordinates = [meshes[parameter.device_mesh] for parameter in parameters]
        ranks = range(len(self._ranks))
        self._sent = [self._pieces(owned[other], rank, other) for other in ranks]
        self._received = [self._pieces(self._own, other, rank) for other in ranks]
        self._returned = [self._pieces(self._own, other) for other in ranks]
        self._taken = [self._pieces(owned[other], rank) for other in ranks]
        self._first = [ranges_of_shard(parameter)[0].start for parameter in parameters]

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank owns, whole. shards: of each parameter, in order."""
        flat = self._all_to_all(self._sent, self._received, lambda piece: self._of_shard(piece, shards), shards[0])
        wholes = {matrix: shards[0].new_empty(self._shape(matrix)) for matrix in self._own}
        for piece, values in flat:
            piece.of(wholes[piece.matrix]).copy_(values)
        return list(wholes.values())

    def scatter(self, wholes: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """This rank's shards of all results. wholes: those of the matrices that `gather` returned. like: tensors as the
        shards are."""
        results = dict(zip(self._own, wholes, strict=True))
        flat = self._all_to_all(self._returned, self._taken, lambda piece: piece.of(results[piece.matrix]), like[0])
        shards = [torch.empty_like(shard) for shard in like]
        for piece, values in flat:
            self._of_shard(piece, shards).copy_(values)
        return shards

    def _all_to_all(
        self,
        sent: Sequence[Sequence[_Piece]],
        received: Sequence[Sequence[_Piece]],
        values_of: Callable[[_Piece], Tensor],
        like: Tensor,
    ) -> list[tuple[_Piece, Tensor]]:
        """The pieces from all ranks with their values. sent, received: by rank of the group."""
        parts = [values_of(piece).reshape(-1) for pieces in sent for piece in pieces]
        source = torch.cat(parts) if parts else like.new_empty(0)
        sizes = [[sum(piece.elements for piece in pieces) for pieces in side] for side in (sent, received)]
        target = like.new_empty(sum(sizes[1]))
        dist.all_to_all_single(target, source, sizes[1], sizes[0], group=self._group)
        pieces = [piece for each in received for piece in each]
        values = target.split([piece.elements for piece in pieces])
        return [
            (piece, each.view(len(piece.rows), len(piece.columns))) for piece, each in zip(pieces, values, strict=True)
        ]

    def _shape(self, matrix: _Matrix) -> torch.Size:
        return self._parameters[matrix.place].shape[-2:]

    def _of_shard(self, piece: _Piece, shards: Sequence[Tensor]) -> Tensor:
        shard, index = shards[piece.matrix.place], piece.matrix.index
        return shard if index is None else shard[index - self._first[piece.matrix.place]]

    def _pieces(self, matrices: Sequence[_Matrix], rank: int, owner: int | None = None) -> list[_Piece]:
        """What the rank holds of the matrices, without what another copy of its shard sends to the owner."""
        found = []
        for matrix in matrices:
            parameter = self._parameters[matrix.place]
            places = self._coordinates[matrix.place]
            coordinates = places[self._ranks[rank]]
            if owner is not None and not _beside(parameter, coordinates, places[self._ranks[owner]]):
                continue
            *lead, rows, columns = ranges_of_shard(parameter, coordinates)
            piece = _Piece(matrix, rows, columns)
            if piece.elements and (matrix.index is None or matrix.index in lead[0]):
                found.append(piece)
        return found


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each: the most expensive first, each to the rank with the least so far. Of 3, 3, 4, 2 over two ranks:
    4 and 2 to the first, 3 and 3 to the second: [1, 1, 0, 0]."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owners[place] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[place]] += costs[place]
    return owners


def _coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Of each process of the mesh."""
    places = product(*(range(length) for length in mesh.mesh.shape))
    return dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))


def _beside(parameter: DTensor, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both hold the same copy, where the mesh holds several."""
    return all(one[axis] == other[axis] for axis, placed in enumerate(parameter.placements) if placed.is_replicate())

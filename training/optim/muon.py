"""Muon (Keller Jordan, 2024): momentum, orthogonalized before it is applied. For the matrices of layers;
AdamW updates all other parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig
from gristmill.training.model.init import role_of
from gristmill.training.optim.optimizer import AdamW, CountsWithinAnother, Operands, operands_of
from gristmill.training.parallel.mesh import local, ranges_of_shard, stored_like

# Makes sharded matrices whole, each on one rank of a group, and sends the results back as shards (as the distributed
# Muon of Dion, arXiv 2504.05295, and of Megatron-LM's `LayerWiseDistributedOptimizer` do).


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
    """Exchange of parameters [rows, columns] or [matrices, rows, columns], on meshes of the processes of the group.
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
        pieces = [piece for elements in received for piece in elements]
        values = target.split([piece.elements for piece in pieces])
        return [
            (piece, elements.view(len(piece.rows), len(piece.columns)))
            for piece, elements in zip(pieces, values, strict=True)
        ]

    def _shape(self, matrix: _Matrix) -> torch.Size:
        return self._parameters[matrix.place].shape[-2:]

    def _of_shard(self, piece: _Piece, shards: Sequence[Tensor]) -> Tensor:
        shard, index = shards[piece.matrix.place], piece.matrix.index
        return shard if index is None else shard[index - self._first[piece.matrix.place]]

    def _pieces(self, matrices: Sequence[_Matrix], rank: int, owner: int | None = None) -> list[_Piece]:
        """Pieces of the matrices that the rank holds, without what another copy of its shard sends to the owner."""
        pieces = []
        for matrix in matrices:
            parameter = self._parameters[matrix.place]
            places = self._coordinates[matrix.place]
            coordinates = places[self._ranks[rank]]
            if owner is not None and not _beside(parameter, coordinates, places[self._ranks[owner]]):
                continue
            *lead, rows, columns = ranges_of_shard(parameter, coordinates)
            piece = _Piece(matrix, rows, columns)
            if piece.elements and (matrix.index is None or matrix.index in lead[0]):
                pieces.append(piece)
        return pieces


def balanced(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each: the most expensive first, each to the rank with the least so far. Of 3, 3, 4, 2 over two ranks:
    4 and 2 to the first, 3 and 3 to the second: [1, 1, 0, 0]."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        owners[place] = min(range(ranks), key=lambda rank: loads[rank])
        loads[owners[place]] += costs[place]
    return owners


def _coordinates(mesh: DeviceMesh) -> dict[int, tuple[int, ...]]:
    """Coordinates of each process of the mesh."""
    places = product(*(range(length) for length in mesh.mesh.shape))
    return dict(zip(mesh.mesh.flatten().tolist(), places, strict=True))


def _beside(parameter: DTensor, coordinates: Sequence[int], other: Sequence[int]) -> bool:
    """Whether both hold the same copy, where the mesh holds several."""
    return all(
        coordinates[axis] == other[axis] for axis, placed in enumerate(parameter.placements) if placed.is_replicate()
    )


# Newton-Schulz quintic a x + b x^3 + c x^5 whose fixed slope at 0 is steep: singular values reach 0.7 to 1.2 in 5
# rounds
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
ROUND_ELEMENTS = 2**28  # of the matrices that a rank makes orthogonal at once: 512 MB of bfloat16


class Muon(CountsWithinAnother):
    """A sharded matrix is made orthogonal on one rank, with the work balanced over them; each process then updates its
    own shard. group: the processes of a pipeline rank, on which its parameters lie."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        model: ModelConfig,
        zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
        group: dist.ProcessGroup | None = None,
    ):
        self.parameters, self.config, self.group = parameters, config, group
        self.matrices = {name: value for name, value in parameters.items() if role_of(name, model).is_matrix_of_layer}
        rest = {name: value for name, value in parameters.items() if name not in self.matrices}
        self.adamw = self.counted = AdamW(rest, config, model, zeros_like)
        self.momentum = {name: zeros_like(local(value.detach())) for name, value in self.matrices.items()}
        self._exchanges: dict[tuple[str, ...], MatrixExchange] = {}

    def tensors_of(self, name: str) -> tuple[Tensor, ...]:
        """The state of a parameter's shard."""
        return (self.momentum[name],) if name in self.matrices else self.adamw.tensors_of(name)

    def is_whole(self, name: str) -> bool:
        """Whether an update needs the whole parameter."""
        return name in self.matrices

    def step(self, rate_share: float) -> None:
        self.update([operands_of(self, name, value) for name, value in self.parameters.items()], rate_share)
        self.adamw.updates += 1

    @torch.no_grad()
    def update(self, operands: Sequence[Operands], rate_share: float) -> None:
        """Updates these with the state they carry; all ranks that share them call it with the same ones. A matrix is
        made orthogonal on its parameter's device, which holds the processes' links, wherever the rest is computed."""
        rate, decay = self.config.muon_learning_rate * rate_share, self.config.weight_decay
        by_group: dict[dist.ProcessGroup | None, list[Operands]] = {}
        for operand in operands:
            if operand.name in self.matrices:
                by_group.setdefault(self._group_of(self.matrices[operand.name]), []).append(operand)
        for group, members in by_group.items():
            for together in rounds(members, self.matrices, _round_elements(self.matrices[members[0].name], group)):
                for operand, direction in zip(together, self._directions(together, group), strict=True):
                    operand.parameter.mul_(1 - rate * decay).sub_(direction, alpha=rate)
        self.adamw.update([operand for operand in operands if operand.name not in self.matrices], rate_share)

    def state(self) -> dict[str, Tensor]:
        own = {f"{name}.momentum": stored_like(self.momentum[name], value) for name, value in self.matrices.items()}
        return own | self.adamw.state()

    def _group_of(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """The processes that share the parameter; None where this one holds all of it."""
        if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
            return None
        if parameter.device_mesh.ndim == 1:
            return parameter.device_mesh.get_group()
        assert self.group is not None and parameter.device_mesh.size() == dist.get_world_size(self.group)
        return self.group

    def _directions(self, operands: Sequence[Operands], group: dist.ProcessGroup | None) -> list[Tensor]:
        """This process's shards of the orthogonal updates with Nesterov momentum, times sqrt(max(1, rows / columns)).
        On GPUs in bfloat16, as in Keller Jordan's own code."""
        ahead = [self._ahead(operand) for operand in operands]
        if group is None:
            made = orthogonal_each(ahead)
        else:
            exchange = self._exchange(tuple(operand.name for operand in operands), group)
            made = exchange.scatter(orthogonal_each(exchange.gather(ahead)), ahead)
        return [
            (direction.to(operand.gradient.dtype) * self._factor(operand.name)).to(operand.gradient.device)
            for operand, direction in zip(operands, made, strict=True)
        ]

    def _exchange(self, names: tuple[str, ...], group: dist.ProcessGroup) -> MatrixExchange:
        if names not in self._exchanges:
            self._exchanges[names] = MatrixExchange([cast(DTensor, self.matrices[name]) for name in names], group)
        return self._exchanges[names]

    def _factor(self, name: str) -> float:
        rows, columns = self.matrices[name].shape[-2:]
        return float(max(1.0, rows / columns) ** 0.5)

    def _ahead(self, operands: Operands) -> Tensor:
        """This process's shard of the gradient with Nesterov momentum, on the parameter's device."""
        gradient, (momentum,) = operands.gradient, operands.state
        momentum.mul_(self.config.muon_momentum).add_(gradient)
        ahead = gradient.add(momentum, alpha=self.config.muon_momentum)
        ahead = ahead.to(local(self.matrices[operands.name].detach()).device)
        return ahead.to(torch.bfloat16) if ahead.is_cuda and ahead.dtype == torch.float32 else ahead


def _round_elements(parameter: Tensor, group: dist.ProcessGroup | None) -> int:
    """Elements of all ranks together. A process alone on a CPU takes one matrix at a time: batches gain nothing
    there."""
    ranks = 1 if group is None else dist.get_world_size(group)
    return ROUND_ELEMENTS * ranks if ranks > 1 or parameter.is_cuda else 0


def rounds(operands: Sequence[Operands], parameters: Mapping[str, Tensor], max_elements: int) -> list[list[Operands]]:
    """Matrices of one shape after each other, in runs of at most so many elements together (or one matrix). Of 2 x 3, 4
    x 4, 2 x 3 and 2 x 3 in runs of 12: the first with the third, the fourth, the second."""
    by_shape: dict[torch.Size, list[Operands]] = {}
    for operand in operands:
        by_shape.setdefault(parameters[operand.name].shape, []).append(operand)
    runs: list[list[Operands]] = []
    free_elements = 0
    for operand in (operand for same in by_shape.values() for operand in same):
        elements = parameters[operand.name].numel()
        if elements > free_elements:
            runs.append([])
            free_elements = max_elements
        runs[-1].append(operand)
        free_elements -= elements
    return runs


def orthogonal_each(matrices: Sequence[Tensor]) -> list[Tensor]:
    """`orthogonal` of each; on GPUs those of one shape are one batch of products."""
    if not (matrices and matrices[0].is_cuda):
        return [orthogonal(matrix) for matrix in matrices]
    made: dict[int, Tensor] = {}
    by_shape: dict[torch.Size, list[int]] = {}
    for place, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(place)
    for places in by_shape.values():
        made |= zip(places, orthogonal(torch.stack([matrices[place] for place in places])).unbind(), strict=True)
    return [made[place] for place in range(len(matrices))]


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the orthogonal factor of the matrix: singular values near 1, singular vectors kept. Of several matrices
    [experts, rows, columns], that of each."""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x

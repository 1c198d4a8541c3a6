"""Seconds that Muon takes to make the matrices of a rank's layers orthogonal (training/optim/muon.py)."""

from collections.abc import Iterator
from math import prod

from gristmill.training.costs.model_shape import ModelShape
from gristmill.training.costs.parameters import block_weights
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.network import gather_seconds, group_link
from gristmill.training.planner.rank_layers import RankLayers
from gristmill.training.planner.rates import Rates

ROUNDS = 5  # of Newton-Schulz
SENT_BYTES = 2  # of a number on the link: bfloat16


def orthogonal_seconds(shape: ModelShape, layout: Layout, rank_layers: RankLayers, rates: Rates) -> float:
    """The matrices are balanced over the ranks of a pipeline rank, but none is divided; one all-to-all brings a rank
    its matrices' shards, another takes the results to all copies of the shards."""
    ranks = layout.gpus // layout.pipeline
    total, longest, elements = 0.0, 0.0, 0
    for number, rows, columns in _matrices(shape, rank_layers):
        seconds = newton_schulz_seconds(rows, columns, rates)
        total, longest = total + number * seconds, max(longest, seconds)
        elements += number * rows * columns
    link = group_link(rates, ranks, 1, layout.gpus)
    sent = SENT_BYTES * elements / ranks
    exchange = gather_seconds(sent, ranks, link) + gather_seconds(sent * layout.replicate, ranks, link)
    return max(total / ranks, longest) + exchange


def newton_schulz_seconds(rows: int, columns: int, rates: Rates) -> float:
    """x <- a x + (b s + c s s) x with s = x x^T, five times: three products, and passes over the sums of m x m and
    m x n numbers."""
    m, n = sorted((rows, columns))
    products = rates.matmul(m, n, m) + rates.matmul(m, m, m) + rates.matmul(m, m, n)
    return ROUNDS * (products + rates.memory(SENT_BYTES * 3 * (m * m + m * n)))


def _matrices(shape: ModelShape, rank_layers: RankLayers) -> Iterator[tuple[int, int, int]]:
    """(number, rows, columns) of the matrices of the rank's layers; each expert's are matrices of their own."""
    for block, count in zip(shape.distinct, rank_layers.kinds, strict=True):
        for weight in block_weights(block) if count else ():
            if len(weight.shape) > 1 and not weight.name.endswith("bias"):
                yield count * prod(weight.shape[:-2]), weight.shape[-2], weight.shape[-1]

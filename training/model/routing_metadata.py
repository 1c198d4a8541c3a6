"""Routing metadata of a training pass: what routers need to know about the batch."""

from dataclasses import dataclass

from torch import Tensor

from gristmill.training.parallel.context import TokenShares

# B samples, T tokens of a sample


@dataclass(frozen=True)
class RoutingMetadata:
    """samples_B: the samples' numbers, from which dropped tokens are drawn. weights_BT: of the tokens in the loss; side
    losses are averaged with the same weights. factor: what the sum of all losses is multiplied by before the backward
    pass. seed: of the run. shares: the tokens of each context rank, None without a context axis."""

    samples_B: Tensor
    weights_BT: Tensor
    factor: float | Tensor
    seed: int
    shares: TokenShares | None = None

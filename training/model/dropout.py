"""Dropout with a mask that is a hash of the element's position, equal on every layout and on recomputation.

keep = hash(seed, layer, site, sample, position, feature): a 64-bit hash for each token and one for each feature, then
one int32 mixing round for each element. No random state is kept, saved or restored."""

from dataclasses import dataclass

import torch
from torch import Tensor

_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))  # SplitMix64's finaliser (Steele et al. 2014)
_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, as a signed number


@dataclass(frozen=True)
class Dropout:
    """The dropout of one forward pass. samples_B: the numbers k of the samples; positions_T: the tokens' places in
    their sample that this rank's residual stream holds; features_D: 0 to D - 1, a tensor that is handed in because
    torch.compile would fold the hash of a range it sees into an index, which overflows."""

    rate: float
    seed: int
    samples_B: Tensor
    positions_T: Tensor
    features_D: Tensor

    def __call__(self, x_BTD: Tensor, layer: int, site: int) -> Tensor:
        if self.rate == 0:
            return x_BTD
        kept = _keep(self, layer, site)
        return torch.where(kept, x_BTD * (1 / (1 - self.rate)), torch.zeros((), dtype=x_BTD.dtype, device=x_BTD.device))


def _keep(dropout: Dropout, layer: int, site: int) -> Tensor:
    """bool[B, T, D]; each element is kept with probability 1 - rate."""
    place = _place(dropout.seed, layer, site, dropout.samples_B.device)
    token_BT = _token_hashes(place, dropout.samples_B, dropout.positions_T)
    feature_D = _hash(place + dropout.features_D)
    low_BT1, high_BT1 = token_BT.to(torch.int32).unsqueeze(-1), (token_BT >> 32).to(torch.int32).unsqueeze(-1)
    mixed_BTD = feature_D.to(torch.int32) * (high_BT1 | 1) + low_BT1
    mixed_BTD = (mixed_BTD ^ _shifted(mixed_BTD, 15, bits=32)) * 0x2C1B3C6D
    mixed_BTD = mixed_BTD ^ _shifted(mixed_BTD, 13, bits=32)
    return mixed_BTD >= int((dropout.rate - 0.5) * 2**32)


def token_priorities(seed: int, layer: int, samples_B: Tensor, positions_T: Tensor) -> Tensor:
    """A random number for each token of each sample, int64[B, T]: a hash, equal on every layout."""
    return _token_hashes(_place(seed, layer, 2, samples_B.device), samples_B, positions_T)


def _place(seed: int, layer: int, site: int, device: torch.device) -> Tensor:
    return torch.tensor((seed * 1_000_003 + layer) * 1_009 + site, device=device)


def _token_hashes(place: Tensor, samples_B: Tensor, positions_T: Tensor) -> Tensor:
    return _hash(_hash(place + samples_B * _GOLDEN).unsqueeze(-1) + positions_T)


def _hash(x: Tensor) -> Tensor:
    x = x * _GOLDEN
    for shift, factor in _ROUNDS:
        x = (x ^ _shifted(x, shift, bits=64)) * factor
    return x ^ _shifted(x, 31, bits=64)


def _shifted(x: Tensor, places: int, bits: int) -> Tensor:
    """To the right with zeros; torch's own shift of signed numbers draws the sign in, which would clear every sign."""
    return (x >> places) & ((1 << (bits - places)) - 1)

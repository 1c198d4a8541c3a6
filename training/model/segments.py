"""The tokens of a context rank as runs of consecutive tokens, for mixers that read the tokens before theirs.

The ring's shares are not contiguous (zig-zag: two runs a rank), so each run is a row of its own, which receives what it
needs of the runs before it: the last tokens of them (halo), or the state behind them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.training.parallel.collectives import gather_tokens
from gristmill.training.parallel.context import TokenShares

# B rows, T tokens of a sample, C context ranks, Tc tokens of a context rank, n runs of L tokens on each rank
# R = B x n: every run of every row; S = C x n: runs of a sample in their order


class Segments:
    """documents_BT: of whole samples; None: one document a row. A sample's runs are equally long."""

    def __init__(self, shares: TokenShares, documents_BT: Tensor | None):
        self.shares, self.documents_BT = shares, documents_BT
        index_CT = shares.index_CT
        share = index_CT.shape[1]
        self.number = next(number for number in range(1, share + 1) if _are_runs(index_CT, number))
        self.length = share // self.number
        place_Cn = index_CT.unflatten(1, (self.number, -1))[:, :, 0] // self.length
        self.own_places = place_Cn[shares.axis.rank].tolist()
        self.order_S = place_Cn.flatten().argsort().to(shares.own_T.device)

    def split(self, x_BTcX: Tensor) -> Tensor:
        """[B, Tc, ...] -> [R, L, ...]."""
        return x_BTcX.unflatten(1, (self.number, -1)).flatten(0, 1)

    def join(self, x_RLX: Tensor) -> Tensor:
        """The inverse of `split`."""
        return x_RLX.unflatten(0, (-1, self.number)).flatten(1, 2)

    def own(self, per_token_BT: Tensor) -> Tensor:
        """[R, L]: of what every rank knows of all tokens, that of its runs."""
        return self.split(self.shares.own(per_token_BT))

    @property
    def documents_RL(self) -> Tensor | None:
        return None if self.documents_BT is None else self.own(self.documents_BT)

    def known_before(self, per_token_BT: Tensor, count: int, fill: int) -> Tensor:
        """[R, count]: of what every rank knows of all tokens, that of the tokens before each run; `fill` before the
        first token of all."""
        padded_BT = F.pad(per_token_BT, (count, 0), value=fill)
        windows = [padded_BT[:, place * self.length : place * self.length + count] for place in self.own_places]
        return torch.stack(windows, dim=1).flatten(0, 1)

    def before(self, x_RLX: Tensor, count: int) -> Tensor:
        """[R, count, X]: the tokens before each run, from the ranks that have them; zero where they are of another
        document than the run's first token."""
        if not count:
            return x_RLX[:, :0]
        runs = -(-count // self.length)
        tails_BSKX = self.gather(x_RLX[:, self.length - min(count, self.length) :])
        padded_BSKX = F.pad(tails_BSKX, (0, 0, 0, 0, runs, 0))
        windows = [padded_BSKX[:, place : place + runs].flatten(1, 2) for place in self.own_places]
        before_RKX = torch.stack(windows, dim=1).flatten(0, 1)
        before_RKX = before_RKX[:, before_RKX.shape[1] - count :]
        if self.documents_BT is None:
            return before_RKX
        first_R1 = self.own(self.documents_BT)[:, :1]
        same_RK = self.known_before(self.documents_BT, count, fill=-1) == first_R1
        return before_RKX * same_RK.unsqueeze(-1).to(before_RKX.dtype)

    def state_before(self, kept_RX: Tensor, added_RX: Tensor) -> Tensor:
        """The state before each run of a recurrence state = kept x state + added, which restarts where a document
        does. kept_RX, added_RX: of each run, broadcast against one another."""
        kept_BSX, added_BSX = self.gather(kept_RX), self.gather(added_RX)
        continues_BS = self._continues(added_BSX)
        # Zero, but a result of both, so that the backward passes of all ranks have the same collectives.
        state_BX, states = added_BSX[:, :0].sum(dim=1) + kept_BSX[:, :0].sum(dim=1), []
        for run in range(added_BSX.shape[1]):
            if run:
                state_BX = state_BX * kept_BSX[:, run - 1] + added_BSX[:, run - 1]
            if continues_BS is not None:
                state_BX = state_BX * continues_BS[:, run].view(-1, *[1] * (state_BX.dim() - 1))
            states.append(state_BX)
        return torch.stack([states[place] for place in self.own_places], dim=1).flatten(0, 1)

    def gather(self, x_RX: Tensor) -> Tensor:
        """[B, S, ...]: of every run of the sample in its order; backward, each rank gets the sum of the gradients of
        its runs."""
        x_BnX = x_RX.unflatten(0, (-1, self.number))
        flat_BSF = gather_tokens(x_BnX.flatten(2), self.shares.axis.group)
        return flat_BSF.index_select(1, self.order_S).unflatten(2, x_RX.shape[1:])

    def _continues(self, like: Tensor) -> Tensor | None:
        """[B, S]: 1 where a run begins inside a document."""
        if self.documents_BT is None:
            return None
        starts = self.documents_BT[:, :: self.length]
        before = F.pad(self.documents_BT[:, self.length - 1 :: self.length][:, :-1], (1, 0), value=-1)
        return (starts == before).to(like.dtype)


def _are_runs(index_CT: Tensor, number: int) -> bool:
    """Whether each share is so many runs of consecutive tokens."""
    if index_CT.shape[1] % number:
        return False
    return bool((index_CT.unflatten(1, (number, -1)).diff(dim=2) == 1).all())

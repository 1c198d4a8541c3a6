"""The context axis: which tokens of a sample each context rank has, and the collectives that move tokens between them.

Every rank reads whole samples; the first stage takes its share of the tokens and the loss its share of the targets, so
objectives see whole samples on every layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gristmill.training.parallel.collectives import all_tokens, sum_over_ranks
from gristmill.training.parallel.mesh import Axis

# B batch, T tokens of a sample, C context ranks, Tc = tokens of a context rank, H heads, K head width

Exchange = Callable[[Tensor, Axis], Tensor]

MAX_BLOCKS = 16  # of a rank, where documents are balanced
MIN_BLOCK = 64  # tokens of such a block
HOST_DOCUMENTS = "host_documents"  # field of a batch: `documents`, on the CPU


@dataclass(frozen=True)
class TokenShares:
    """The tokens of each context rank. index_CT: int64[C, Tc], rising in each row, on the CPU; own_T and order_T: those
    of this rank, and the place of each token in the shares one after another, on the device."""

    axis: Axis
    index_CT: Tensor
    own_T: Tensor
    order_T: Tensor

    @property
    def tokens(self) -> int:
        """Tokens of a sample."""
        return self.index_CT.numel()

    def own(self, per_token: Tensor, dim: int = 1) -> Tensor:
        """This rank's share of what is given for all tokens."""
        return per_token.index_select(dim, self.own_T)

    def all(self, x_BTcX: Tensor) -> Tensor:
        """All tokens [B, T, ...] in order on every rank, for work that every rank does in full; backward each takes its
        own tokens of the gradient, which is the same on all."""
        return all_tokens(x_BTcX, self.axis.rank, self.axis.group).index_select(1, self.order_T)

    def sum(self, x: Tensor) -> Tensor:
        """Sums over the tokens of a rank -> sums over all tokens, on every rank; backward the identity."""
        return sum_over_ranks(x, self.axis.group)


def token_shares(axis: Axis, index_CT: Tensor, device: torch.device) -> TokenShares:
    order_T = torch.empty_like(index_CT.flatten())
    order_T[index_CT.flatten()] = torch.arange(index_CT.numel())
    return TokenShares(axis, index_CT, copy_to(index_CT[axis.rank], device), copy_to(order_T, device))


def copy_to(host: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on the device, which the host does not wait for: it would for memory that is not
    pinned."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def contiguous_shares(tokens: int, ranks: int) -> Tensor:
    """8 tokens, 2 ranks -> [[0, 1, 2, 3], [4, 5, 6, 7]]."""
    return torch.arange(tokens).unflatten(0, (ranks, -1))


def zigzag_shares(tokens: int, ranks: int) -> Tensor:
    """Shares of 2 C equal blocks, of which rank r has blocks r and 2 C - 1 - r, so that all have the same work in
    causal attention. 8 tokens, 2 ranks -> [[0, 1, 6, 7], [2, 3, 4, 5]]."""
    blocks = torch.arange(tokens).unflatten(0, (2 * ranks, -1))
    return torch.cat([blocks[:ranks], blocks[ranks:].flip(0)], dim=1)


def balanced_shares(work_T: Tensor, ranks: int) -> Tensor:
    """Equal numbers of tokens and nearly equal work: blocks are handed out from the one with most work, each to the
    rank with least so far among those with room (Graham's rule, with a bound on the number). work_T: of each token.

    work [1, 2, 3, 4, 1, 2, 3, 4], blocks of 2, 2 ranks -> blocks of work 3, 7, 3, 7 -> [[0, 1, 2, 3], [4, 5, 6, 7]]."""
    share = len(work_T) // ranks
    number = _blocks_of_a_rank(share)
    work = work_T.double().unflatten(0, (ranks * number, -1)).sum(dim=1).tolist()
    loads: list[float] = [0.0] * ranks
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    for block in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        rank = min((index for index in range(ranks) if len(chosen[index]) < number), key=lambda index: loads[index])
        loads[rank] += work[block]
        chosen[rank].append(block)
    blocks = torch.arange(len(work_T)).unflatten(0, (ranks * number, -1))
    return torch.stack([blocks[sorted(own)].flatten() for own in chosen])


def _blocks_of_a_rank(share: int) -> int:
    """The largest power of two that divides the share, up to MAX_BLOCKS and blocks of MIN_BLOCK, but at least 2."""
    number = 2
    while number < MAX_BLOCKS and share % (2 * number) == 0 and share // (2 * number) >= MIN_BLOCK:
        number *= 2
    return number


def count_once(parameter: Tensor, ranks: int) -> Tensor:
    """A parameter that every context rank applies to all tokens: the sum of their gradients becomes that of one."""
    return _Divided.apply(parameter, ranks)


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def exchange_heads(x_BTcHK: Tensor, axis: Axis) -> Tensor:
    """All heads of this rank's tokens -> a share of the heads of all tokens [B, T, Hc, K], shares one after another
    (DeepSpeed Ulysses, arXiv 2309.14509)."""
    return _Exchange.apply(x_BTcHK, axis, _to_heads, _to_tokens)


def exchange_tokens(x_BTHcK: Tensor, axis: Axis) -> Tensor:
    """The inverse of `exchange_heads`."""
    return _Exchange.apply(x_BTHcK, axis, _to_tokens, _to_heads)


class _Exchange(torch.autograd.Function):
    """One of the two exchanges forward, its inverse backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, exchange: Exchange, inverse: Exchange) -> Tensor:
        ctx.axis, ctx.inverse = axis, inverse
        return exchange(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.inverse(gradient, ctx.axis), None, None, None


def _to_heads(x_BTcHK: Tensor, axis: Axis) -> Tensor:
    sent = x_BTcHK.unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return _exchanged(sent, axis).transpose(0, 1).flatten(1, 2)


def _to_tokens(x_BTHcK: Tensor, axis: Axis) -> Tensor:
    sent = x_BTHcK.unflatten(1, (axis.size, -1)).transpose(0, 1).contiguous()
    return _exchanged(sent, axis).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(sent_CX: Tensor, axis: Axis) -> Tensor:
    received_CX = torch.empty_like(sent_CX)
    dist.all_to_all_single(received_CX, sent_CX, group=axis.group)
    return received_CX


def around_the_ring(own: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """(rank, its tensor) for every rank, this one first. The next tensor travels while the caller works."""
    for step in range(axis.size):
        waiting = pass_on(own, axis) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, own
        if waiting is not None:
            own = waiting.wait()


@dataclass(frozen=True)
class Passing:
    """A tensor on its way from the rank before. sent: kept until it has left."""

    received: Tensor
    sent: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def pass_on(sent: Tensor, axis: Axis, tag: int = 0) -> Passing:
    """Starts sending a tensor to the next rank and receiving one of its shape from the rank before."""
    received = torch.empty_like(sent)
    after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    operations = [
        dist.P2POp(dist.isend, sent, group=axis.group, group_peer=after, tag=tag),
        dist.P2POp(dist.irecv, received, group=axis.group, group_peer=before, tag=tag),
    ]
    return Passing(received, sent, dist.batch_isend_irecv(operations))

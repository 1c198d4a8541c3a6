"""The four collectives of tensor parallelism on local tensors, each with its conjugate in the backward pass.

Megatron's f and g (arXiv 1909.08053, section 3) and their sequence-parallel forms (arXiv 2205.05198, section 4.2).
All are synchronous and give contiguous tensors: torch.compile loses the gradient of an asynchronous tensor that crosses
from eager code, and gloo sends contiguous tensors only. On an axis of size 1 each is the identity."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# B batch, T tokens, D width, R ranks; Tt = tokens on this tensor rank


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def reduce_scatter(own: Tensor, parts: Tensor, group: dist.ProcessGroup | None) -> None:
    """own becomes this rank's part of the sum over ranks; parts: of all ranks, one after another, on dimension 0.

    gloo's own sums all parts on every rank, of a copy: of 3 MB on two ranks that takes 4 ms, an exchange of the parts
    1.3 ms. Summed in the order of the ranks."""
    if parts.device.type != "cpu":
        dist.reduce_scatter_tensor(own, parts, group=group)
        return
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    first, second, *others = received.chunk(dist.get_world_size(group))
    torch.add(first, second, out=own)
    for other in others:
        own.add_(other)


def all_gather_tokens(x_BTtD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[B, Tt, D] on each rank -> [B, T, D] on all."""
    size, batch = dist.get_world_size(group), len(x_BTtD)
    gathered = x_BTtD.new_empty((size * batch, *x_BTtD.shape[1:]))
    dist.all_gather_into_tensor(gathered, x_BTtD.contiguous(), group=group)
    x_RBTtD = gathered.unflatten(0, (size, batch))
    return x_RBTtD.transpose(0, 1).flatten(1, 2).contiguous()


def reduce_scatter_tokens(x_BTD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Partial sums [B, T, D] on each rank -> this rank's tokens [B, Tt, D] of the sum."""
    x_RBTtD = x_BTD.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)
    own_BTtD = x_BTD.new_empty(x_RBTtD.shape[1:])
    reduce_scatter(own_BTtD, x_RBTtD.contiguous().flatten(0, 1), group)
    return own_BTtD


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.contiguous(), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return all_gather_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(gradient, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return reduce_scatter_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather_tokens(gradient, ctx.group), None


def copy_to_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """f: the identity forward, the sum over ranks backward; used before a column-parallel layer."""
    return _Copy.apply(x, group)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """g: the sum over ranks forward, the identity backward; used after a row-parallel layer."""
    return _Sum.apply(x, group)


def gather_tokens(x_BTtD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """f under sequence parallelism: all-gather of the tokens forward, reduce-scatter backward."""
    return _GatherTokens.apply(x_BTtD, group)


def scatter_tokens(x_BTD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """g under sequence parallelism: reduce-scatter over the tokens forward, all-gather backward."""
    return _ScatterTokens.apply(x_BTD, group)


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTtD: Tensor, rank: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.rank, ctx.share = rank, x_BTtD.shape[1]
        return all_gather_tokens(x_BTtD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor, None, None]:
        return gradient_BTD.narrow(1, ctx.rank * ctx.share, ctx.share).contiguous(), None, None


def all_tokens(x_BTtD: Tensor, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather of the tokens, after which every rank computes the same: backward each takes its tokens' gradient."""
    return _AllTokens.apply(x_BTtD, rank, group)


class _TakeShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rank: int, size: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.rows, ctx.group = len(x_ND), group
        return take_share(x_ND, rank, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_nD: Tensor) -> tuple[Tensor, None, None, None]:
        return all_gather_rows(gradient_nD, ctx.rows, ctx.group), None, None, None


class _JoinShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nD: Tensor, rows: int, rank: int, size: int, group: dist.ProcessGroup | None) -> Tensor:
        ctx.rank, ctx.size = rank, size
        return all_gather_rows(x_nD, rows, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None, None, None, None]:
        return take_share(gradient_ND, ctx.rank, ctx.size), None, None, None, None


def share_of_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows of a rank, in runs of ceil(rows / size). 5 rows over 2 ranks: (0, 3), (3, 2)."""
    share = -(-rows // size)
    start = min(rank * share, rows)
    return start, min(share, rows - start)


def take_share(x_ND: Tensor, rank: int, size: int) -> Tensor:
    """A copy of a rank's rows: a view would keep the memory of all rows."""
    start, length = share_of_rows(len(x_ND), rank, size)
    return x_ND.narrow(0, start, length).clone()


def all_gather_rows(x_nD: Tensor, rows: int, group: dist.ProcessGroup | None) -> Tensor:
    """Each rank's share of the rows -> all rows on all."""
    size = dist.get_world_size(group)
    share = -(-rows // size)
    padded = torch.cat([x_nD, x_nD.new_zeros((share - len(x_nD), *x_nD.shape[1:]))]).contiguous()
    gathered = padded.new_empty((share * size, *padded.shape[1:]))
    dist.all_gather_into_tensor(gathered, padded, group=group)
    return gathered[:rows].contiguous()


def split_rows(x_ND: Tensor, rank: int, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's run of rows that all ranks have; backward the gradients of all runs are gathered."""
    return _TakeShare.apply(x_ND, rank, size, group)


def join_rows(x_nD: Tensor, rows: int, rank: int, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """All rows from each rank's run; backward each rank takes the gradient of its run."""
    return _JoinShares.apply(x_nD, rows, rank, size, group)


# Seconds of a collective on a link, measured beside a run.

PROBE_REPEATS = 3
SMALL, LARGE = 2**12, 2**22  # bytes of the messages that tell latency and bandwidth
LARGE_ON_GPU = 2**26


def probe_link(group: Any, device: torch.device) -> dict[str, float]:
    """Seconds of one all-gather or reduce-scatter of few and of many bytes while nothing else runs: the fastest of
    three on the rank where it took longest, as calibration measures them. All ranks of the group call it."""
    large = LARGE_ON_GPU if device.type == "cuda" else LARGE
    return {str(size): _collective_seconds(size, group, device) for size in (SMALL, large)}


def _collective_seconds(size: int, group: Any, device: torch.device) -> float:
    ranks = dist.get_world_size(group)
    share = torch.zeros(max(1, size // 4 // ranks), device=device)
    whole = torch.zeros(len(share) * ranks, device=device)
    seconds = []
    for _ in range(PROBE_REPEATS + 1):  # the first warms up
        dist.barrier(group=group)
        finish(device)
        started = time.perf_counter()
        dist.all_gather_into_tensor(whole, share, group=group)
        reduce_scatter(share, whole, group)
        finish(device)
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(min(seconds[1:]) / 2, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return float(slowest)


def finish(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

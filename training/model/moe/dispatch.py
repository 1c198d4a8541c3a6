"""Linear layers of many experts at once: rows sorted by expert, each run times the weight of its expert.

Two backends of one function: a loop over the experts (any device and dtype; the oracle), and torch's grouped matmul
(CUDA, bfloat16), which reads the runs' ends on the device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.fused import fused
from gristmill.training.model.loss import upcast
from gristmill.training.parallel.linear import float8_rows, matmul
from gristmill.training.parallel.mesh import Mesh

# N rows, E experts, D inputs, F outputs

ALIGNMENT = 8  # rows of a run begin at multiples of 16 bytes in bfloat16, as the CUDA kernel wants strides of gradients


@dataclass(frozen=True)
class Runs:
    """Which rows belong to which expert. sizes: rows of each expert, as numbers of the host (loop); ends_E: the row
    after each expert's last one, int32 on the device (grouped). Exactly one of them is set."""

    sizes: tuple[int, ...] | None = None
    ends_E: Tensor | None = None


def uses_grouped(x: Tensor) -> bool:
    """The backend is chosen here and nowhere else. Grouped matmuls are slower than the loop on a CPU (1.4 to 2.9 times
    in torch 2.13) and take bfloat16 only on CUDA."""
    return _grouped_on(x.device, x.dtype)


def _grouped_on(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype == torch.bfloat16


def check_grouped_widths(device: torch.device, dtype: torch.dtype, config: ModelConfig, expert_tensor: int) -> None:
    """Raises RecipeError where the grouped matmul would refuse the rows of a layer's experts. expert_tensor: ranks that
    share an expert's hidden width."""
    if not _grouped_on(device, dtype):
        return
    for index, layer in enumerate(config.layer_list):
        for name, width in (
            ("width", config.width),
            ("moe.ffn_hidden_size", layer.expert_ffn_hidden_size // expert_tensor),
        ):
            if layer.experts and width % ALIGNMENT:
                divided = name == "moe.ffn_hidden_size" and expert_tensor > 1
                share = f" on each rank of layout.expert_tensor {expert_tensor}" if divided else ""
                raise RecipeError(
                    f"model.{name}: the experts of layer {index} are {width} wide{share}; on a GPU in bf16 their rows "
                    f"are multiples of 16 bytes: set a multiple of {ALIGNMENT}, or train.precision: fp32"
                )


def grouped_linear(x_ND: Tensor, weight_EFD: Tensor, runs: Runs, float8: bool = False) -> Tensor:
    """Rows x W^T with the weight of their expert. Rows behind the last run come out as zeros from the loop; of the
    grouped matmul, which leaves them undefined, there must be none. float8: in 8 bits, where matmuls are grouped."""
    if runs.sizes is not None:
        return _LoopLinear.apply(x_ND, weight_EFD, runs.sizes)
    if float8:
        return _Float8Grouped.apply(x_ND, weight_EFD, runs.ends_E)
    return F.grouped_mm(x_ND, weight_EFD.transpose(1, 2), offs=runs.ends_E)


class _Float8Grouped(torch.autograd.Function):
    """Outputs and gradients of inputs by products of e4m3 numbers, each row (of what is summed over) with a scale;
    gradients of weights in 16 bits (torchao's recipe rowwise_with_gw_hp)."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_EFD: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_EFD, ends_E)
        return _float8_product(x_ND, weight_EFD, ends_E, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor, Tensor, None]:
        x_ND, weight_EFD, ends_E = ctx.saved_tensors
        by_x = _float8_product(gradient_NF, weight_EFD.transpose(1, 2), ends_E)
        return by_x, F.grouped_mm(gradient_NF.T, x_ND, offs=ends_E), None


def _float8_product(x_NK: Tensor, weight_EMK: Tensor, ends_E: Tensor, fast: bool = False) -> Tensor:
    """x W^T of each run, [N, M] in the dtype of x. On CPUs, which have no such kernel, the same numbers of 8 bits are
    multiplied in float32. fast: of `linear.float8_linear`."""
    (x8, x_scale_N), (weight8, weight_scale_EM) = float8_rows(x_NK), float8_rows(weight_EMK)
    if x8.device.type == "cpu":
        wide_NK, wide_EMK = (
            values.float() * scale.unsqueeze(-1) for values, scale in ((x8, x_scale_N), (weight8, weight_scale_EM))
        )
        return F.grouped_mm(wide_NK, wide_EMK.transpose(1, 2), offs=ends_E).to(x_NK.dtype)
    return torch._scaled_grouped_mm(
        x8,
        weight8.transpose(1, 2),
        x_scale_N,
        weight_scale_EM,
        offs=ends_E,
        out_dtype=x_NK.dtype,
        use_fast_accum=fast,
    )


class _LoopLinear(torch.autograd.Function):
    """A matmul an expert. Autograd alone would fill a gradient of all experts for each of them."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_EFD: Tensor, sizes: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x_ND, weight_EFD)
        ctx.sizes = sizes
        y_NF = x_ND.new_empty(len(x_ND), weight_EFD.shape[1])
        for expert, rows in runs_of(sizes):
            matmul(x_ND[rows], weight_EFD[expert].T, out=y_NF[rows])
        y_NF[sum(sizes) :] = 0
        return y_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NF: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_EFD = ctx.saved_tensors
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = torch.empty_like(x_ND)
            for expert, rows in runs_of(ctx.sizes):
                matmul(gradient_NF[rows], weight_EFD[expert], out=x_gradient[rows])
            x_gradient[sum(ctx.sizes) :] = 0
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.empty_like(weight_EFD)
            for expert, rows in runs_of(ctx.sizes):
                matmul(gradient_NF[rows].T, x_ND[rows], out=weight_gradient[expert])
            for expert, size in enumerate(ctx.sizes):
                if size == 0:
                    weight_gradient[expert] = 0
        return x_gradient, weight_gradient, None


def runs_of(sizes: tuple[int, ...]) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have rows. (2, 0, 1) -> [(0, 0:2), (2, 2:3)]."""
    runs, start = [], 0
    for expert, size in enumerate(sizes):
        if size:
            runs.append((expert, slice(start, start + size)))
        start += size
    return runs


def padded_positions(counts_E: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Where sorted rows stand once each run begins at a multiple of ALIGNMENT, without a copy to the host.

    counts_E: rows of each expert, `rows` in all. Returns (position of each row, int64[rows]; end of each padded run,
    int32[E]; rows of the padded buffer, a bound that depends on no count and that the last run is extended to, so that
    no row of the buffer is left undefined). counts (3, 1), 4 rows -> positions 0, 1, 2, 8; ends 8, 20; 20 rows."""
    total = rows + len(counts_E) * ALIGNMENT
    padded_E = (counts_E + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends_E, row_ends_E = padded_E.cumsum(0), counts_E.cumsum(0)
    shift_E = (ends_E - padded_E) - (row_ends_E - counts_E)
    row_N = torch.arange(rows, device=counts_E.device)
    position_N = row_N + shift_E[torch.searchsorted(row_ends_E, row_N, right=True)]
    ends_E[-1:].fill_(total)  # setting an element would copy the number from the host
    return position_N, ends_E.to(torch.int32), total


class ChoicePlaces(NamedTuple):
    """Where the tokens' copies stand in the rows that experts read. token_R: the token of each row. row_NK: the row of
    each choice."""

    token_R: Tensor
    row_NK: Tensor


def sorted_places(order_M: Tensor, top_k: int) -> ChoicePlaces:
    """A row for each choice, sorted by expert. order_M: the choices (token x K + k) in that order."""
    return ChoicePlaces(order_M // top_k, inverse(order_M).unflatten(0, (-1, top_k)))


def padded_places(order_M: Tensor, accepted_E: Tensor, top_k: int) -> tuple[ChoicePlaces, Tensor]:
    """(places, end of each run) of rows sorted by expert whose runs are padded as `padded_positions` says. Choices that
    no expert accepts are at the end of the last run. Rows in between are copies of the first token."""
    counts_E = torch.cat([accepted_E[:-1], len(order_M) - accepted_E[:-1].sum(dim=0, keepdim=True)])
    position_M, ends_E, rows = padded_positions(counts_E, len(order_M))
    token_R = order_M.new_zeros(rows).index_copy_(0, position_M, order_M // top_k)
    row_NK = torch.empty_like(order_M).index_copy_(0, order_M, position_M).unflatten(0, (-1, top_k))
    return ChoicePlaces(token_R, row_NK), ends_E


def sum_of_rows(rows_RD: Tensor, row_NK: Tensor, weights_NK: Tensor | None = None) -> Tensor:
    """[N, D]: the sum of weight x row over the K rows of each token."""
    if rows_RD.device.type == "cuda":
        return fused(gathered_sum)(rows_RD, row_NK, weights_NK)
    return F.embedding_bag(row_NK, rows_RD, mode="sum", per_sample_weights=weights_NK)


def gathered_sum(rows_RD: Tensor, row_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    """`sum_of_rows` as a compiler makes one kernel of it; sums in float32 or better."""
    wide_NKD = upcast(rows_RD[row_NK])
    if weights_NK is not None:
        wide_NKD = wide_NKD * weights_NK.unsqueeze(-1)
    return wide_NKD.sum(dim=1).to(rows_RD.dtype)


# Expert parallelism: experts are sharded over ranks; an all-to-all sends each token to the ranks of its experts.
#
# A rank's tokens are those that no other rank of its pipeline rank has. The group of an exchange holds every expert
# once: rank e x expert_tensor + t has the e-th run of experts, and of their hidden width the t-th share. Tokens go to
# all expert_tensor ranks of their expert, whose partial results are added on the way back.

# N tokens of this rank, M tokens received, D width, E experts, Et = experts of this rank, F hidden width of an expert

OUTPUT, INPUT, BIAS, OUTPUT_BIAS = "output", "input", "bias", "output_bias"
_STORED = {
    OUTPUT: (Shard(0), Shard(1)),  # [E, F, D]: experts, then hidden width
    INPUT: (Shard(0), Shard(2)),  # [E, D, F]
    BIAS: (Shard(0), Shard(1)),  # [E, F]
    OUTPUT_BIAS: (Shard(0), Replicate()),  # [E, D]
}


@dataclass(frozen=True)
class ExpertAxis:
    """Where the experts of a layer lie. tensor_size: ranks that share an expert's hidden width. float8: their products
    are in 8 bits."""

    mesh: Mesh
    tensor_size: int = 1
    float8: bool = False

    @property
    def size(self) -> int:
        return self.mesh.expert.size

    @property
    def first_share(self) -> bool:
        """Whether this rank adds the bias of the outputs, which is added once."""
        return self.mesh.expert.rank % self.tensor_size == 0

    def parameter(self, shape: tuple[int, ...], placed: str) -> nn.Parameter:
        """A parameter of the full shape on the meta device."""
        whole = torch.empty(shape, device="meta")
        if self.mesh.distributed:
            whole = distribute_tensor(whole, self.mesh.expert_grid, _STORED[placed], src_data_rank=None)
        return nn.Parameter(whole)

    def local(self, parameter: Tensor, placed: str, dtype: torch.dtype) -> Tensor:
        """This rank's experts, in the dtype of the computation."""
        if isinstance(parameter, DTensor):
            gradient = (Shard(0), Partial()) if placed == OUTPUT_BIAS else _STORED[placed]
            parameter = parameter.to_local(grad_placements=gradient)
        return parameter.to(dtype)


class Exchange:
    """One exchange of tokens: `send` sorts them to the ranks of their experts, `bring_back` returns the results.

    counts_E: how many of this rank's tokens go to each expert. Takes one copy of the counts to the host: the sizes of
    an uneven all-to-all are numbers of the host."""

    def __init__(self, axis: ExpertAxis, counts_E: Tensor):
        self.axis, self.group = axis, axis.mesh.expert.group
        experts, shares = axis.size // axis.tensor_size, axis.tensor_size
        own_eEt = counts_E.unflatten(0, (experts, -1))
        sent_rEt = own_eEt.repeat_interleave(shares, dim=0)
        received_rEt = torch.empty_like(sent_rEt)
        dist.all_to_all_single(received_rEt, sent_rEt, group=self.group)
        sizes = torch.stack([sent_rEt.sum(1), received_rEt.sum(1)]).tolist()
        self.sent, self.received = sizes[0], sizes[1]
        self.counts_Et = received_rEt.sum(dim=0)
        # Rows come by source rank, then by expert; experts want theirs side by side.
        expert_of_run = torch.arange(received_rEt.numel(), device=counts_E.device) % received_rEt.shape[1]
        expert_M = torch.repeat_interleave(expert_of_run, received_rEt.flatten(), output_size=sum(self.received))
        self.order_M = torch.argsort(expert_M, stable=True)

    def send(self, sorted_ND: Tensor) -> Tensor:
        """Tokens sorted by expert -> those of this rank's experts [M, D], sorted by expert."""
        chunks = sorted_ND.split(self.sent[:: self.axis.tensor_size])
        copies = [chunk for chunk in chunks for _ in range(self.axis.tensor_size)]
        received_MD = _AllToAll.apply(torch.cat(copies), self.sent, self.received, self.group)
        return Permuted.apply(received_MD, self.order_M)

    def bring_back(self, results_MD: Tensor) -> Tensor:
        """The inverse of `send`: the results of the tokens this rank sent, in their order, summed over shares."""
        by_source_MD = Permuted.apply(results_MD, inverse(self.order_M))
        returned_ND = _AllToAll.apply(by_source_MD, self.received, self.sent, self.group)
        if self.axis.tensor_size == 1:
            return returned_ND
        chunks = returned_ND.split(self.sent)
        shares = self.axis.tensor_size
        return torch.cat([sum(chunks[i + 1 : i + shares], chunks[i]) for i in range(0, len(chunks), shares)])


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return all_to_all(x_ND, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor | None, ...]:
        return all_to_all(gradient_MD, ctx.received, ctx.sent, ctx.group), None, None, None


def all_to_all(x_ND: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Rows in runs by destination rank -> rows in runs by source rank. Ranks without rows take part."""
    y_MD = x_ND.new_empty((sum(received), *x_ND.shape[1:]))
    dist.all_to_all_single(y_MD, x_ND.contiguous(), received, sent, group=group)
    return y_MD


class Permuted(torch.autograd.Function):
    """x[order] for a permutation; the backward pass permutes back and adds nothing up."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_N: Tensor) -> Tensor:
        ctx.save_for_backward(order_N)
        return x_ND.index_select(0, order_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, None]:
        (order_N,) = ctx.saved_tensors
        return torch.empty_like(gradient_ND).index_copy_(0, order_N, gradient_ND), None


def inverse(order_N: Tensor) -> Tensor:
    """[2, 0, 1] -> [1, 2, 0]."""
    positions_N = torch.arange(len(order_N), device=order_N.device)
    return torch.empty_like(order_N).index_copy_(0, order_N, positions_N)

"""Mixture-of-experts layer: route tokens, exchange them with other ranks, apply the experts, combine the results."""

from collections.abc import Callable
from operator import call
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gristmill.training.config.layers import LayerConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import RoutingMetadata
from gristmill.training.model.loss import upcast
from gristmill.training.model.modules import MLPS, gelu_approximation
from gristmill.training.model.moe.dispatch import (
    BIAS,
    INPUT,
    OUTPUT,
    OUTPUT_BIAS,
    Exchange,
    ExpertAxis,
    Runs,
    grouped_linear,
    padded_places,
    padded_positions,
    runs_of,
    sorted_places,
    sum_of_rows,
    uses_grouped,
)
from gristmill.training.model.moe.router import Router, Routing, TokenPlaces
from gristmill.training.parallel.collectives import join_rows, share_of_rows, split_rows
from gristmill.training.parallel.linear import matmul
from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B samples, T tokens, N tokens of this rank, D width, E experts, K experts of a token


class MixtureOfExperts(nn.Module):
    """sum over a token's experts of gate x expert(x), plus the shared experts; for PR-MoE a plain MLP beside them, and
    both weighted by a softmax of a linear layer (DeepSpeed's moe/layer.py).

    Each token is routed by one rank. Under sequence parallelism a tensor rank has tokens of its own; without it the
    ranks have the same tokens, and each takes a run of them."""

    def __init__(self, config: ModelConfig, index: int, tensor: TensorAxis, expert_tensor: int):
        super().__init__()
        layer: LayerConfig = config.layer(index)
        assert config.moe is not None
        self.tensor, self.axis = tensor, ExpertAxis(tensor.mesh, expert_tensor, tensor.float8)
        self.router = Router(config, layer, index, tensor)
        self.experts = Experts(config, layer, self.axis)
        self.shared = self.residual = self.coefficient = None
        if config.moe.shared_experts:
            self.shared = MLPS[layer.mlp](config, tensor, layer.ffn_hidden_size)
        if config.moe.residual:
            self.residual = MLPS[layer.mlp](config, tensor, layer.ffn_hidden_size)
            self.coefficient = Coefficient(config.width, tensor)

    def forward(
        self, x_BTD: Tensor, metadata: RoutingMetadata | None = None, mix: Callable[..., Tensor] = call
    ) -> Tensor:
        """mix(function, x_BTD): stands around what is computed of all tokens together, and may give its result without
        calling it (`LayerHook.around_token_mixing`)."""

        def routed(x_BTD: Tensor) -> Tensor:
            own_ND, places = self._own_tokens(x_BTD)
            if metadata is not None and metadata.shares is not None:
                places = places.among_all(metadata.shares)
            routing = self.router(own_ND, places, metadata)
            return self._all_tokens(self._routed(own_ND, routing), x_BTD)

        y_BTD = mix(routed, x_BTD)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        if self.residual is not None and self.coefficient is not None:
            share_BT2 = self.coefficient(x_BTD)
            y_BTD = y_BTD * share_BT2[..., :1] + self.residual(x_BTD) * share_BT2[..., 1:]
        return y_BTD

    def _own_tokens(self, x_BTD: Tensor) -> tuple[Tensor, TokenPlaces]:
        """The tokens that this rank routes, and where they stand in the batch."""
        samples, tokens, rank, size = *x_BTD.shape[:2], self.tensor.rank, self.tensor.size
        flat_ND = x_BTD.flatten(0, 1)
        if self.tensor.shards_tokens:
            all_tokens = tokens * size
            own_T = torch.arange(rank * tokens, (rank + 1) * tokens, device=x_BTD.device)
            row_B = torch.arange(samples, device=x_BTD.device) * all_tokens
            return flat_ND, TokenPlaces((row_B.unsqueeze(1) + own_T).flatten(), samples, all_tokens)
        if size == 1:
            return flat_ND, TokenPlaces(torch.arange(len(flat_ND), device=x_BTD.device), samples, tokens)
        start, length = share_of_rows(len(flat_ND), rank, size)
        index_N = torch.arange(start, start + length, device=x_BTD.device)
        own_ND = split_rows(flat_ND, rank, size, self.tensor.mesh.tensor.group)
        return own_ND, TokenPlaces(index_N, samples, tokens)

    def _all_tokens(self, y_ND: Tensor, like_BTD: Tensor) -> Tensor:
        if self.tensor.size > 1 and not self.tensor.shards_tokens:
            rows = like_BTD.shape[0] * like_BTD.shape[1]
            y_ND = join_rows(y_ND, rows, self.tensor.rank, self.tensor.size, self.tensor.mesh.tensor.group)
        return y_ND.unflatten(0, like_BTD.shape[:2])

    def _routed(self, x_ND: Tensor, routing: Routing) -> Tensor:
        """sum over a token's experts of gate x expert(x)."""
        order_M = torch.argsort(routing.experts_NK.flatten(), stable=True)
        if self.axis.size == 1 and uses_grouped(x_ND):
            places, ends_E = padded_places(order_M, routing.accepted_E, routing.experts_NK.shape[1])
            results_RD = self.experts(_Copies.apply(x_ND, *places), Runs(ends_E=ends_E))
        else:
            places = sorted_places(order_M, routing.experts_NK.shape[1])
            sorted_MD = _Copies.apply(x_ND, *places)
            exchanges = self.axis.size > 1
            results_RD = (
                self._exchanged(sorted_MD, routing)
                if exchanges
                else self.experts.of_counts(sorted_MD, routing.accepted_E)
            )
        return _WeightedSum.apply(results_RD, routing.gates_NK.to(results_RD.dtype), *places)

    def _exchanged(self, sorted_MD: Tensor, routing: Routing) -> Tensor:
        """The rows computed where their experts are. Dropped rows, which are last, are not sent and come out as
        zeros."""
        exchange = Exchange(self.axis, routing.accepted_E)
        sent = sum(exchange.sent[:: self.axis.tensor_size])
        results_MD = exchange.bring_back(self.experts.of_counts(exchange.send(sorted_MD[:sent]), exchange.counts_Et))
        if sent == len(sorted_MD):
            return results_MD
        return torch.cat([results_MD, results_MD.new_zeros(len(sorted_MD) - sent, results_MD.shape[1])])


class Coefficient(nn.Module):
    """softmax(x W^T + b) over (experts, MLP)."""

    def __init__(self, width: int, tensor: TensorAxis):
        super().__init__()
        self.tensor = tensor
        self.weight = tensor.parameter((2, width), Sharding.REPLICATED)
        self.bias = tensor.parameter((2,), Sharding.REPLICATED)

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight_2D, bias_2 = (
            self.tensor.local(part, Sharding.REPLICATED, x_BTD.dtype) for part in (self.weight, self.bias)
        )
        return upcast(F.linear(x_BTD, weight_2D, bias_2)).softmax(dim=-1).to(x_BTD.dtype)


class _Copies(torch.autograd.Function):
    """A row for each choice of each token, where the experts read it; the backward pass adds the K gradients of a
    token, in one order on every device."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_R: Tensor, row_NK: Tensor) -> Tensor:
        ctx.save_for_backward(row_NK)
        return x_ND.index_select(0, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_NK,) = ctx.saved_tensors
        return sum_of_rows(gradient_RD, row_NK), None, None


class _WeightedSum(torch.autograd.Function):
    """[N, D]: the sum over a token's K experts of gate x row, without the rows in the order of the tokens. Rows that no
    choice points at take no part, and their gradient is zero."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, gates_NK: Tensor, token_R: Tensor, row_NK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, gates_NK, token_R, row_NK)
        return sum_of_rows(rows_RD, row_NK, gates_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, gates_NK, token_R, row_NK = ctx.saved_tensors
        gradient_RD = gradient_ND.index_select(0, token_R)
        gates_gradient_R = torch.linalg.vecdot(rows_RD, gradient_RD)
        gates_R = gates_NK.new_zeros(len(token_R)).index_copy_(0, row_NK.flatten(), gates_NK.flatten())
        return gradient_RD.mul_(gates_R.unsqueeze(1)), gates_gradient_R[row_NK], None, None


# The experts of a mixture-of-experts layer: one MLP each, applied to the tokens routed to it.

# N rows sorted by expert, D width, E experts, Et = experts of this rank, Ft = this rank's share of an expert's width


class ExpertLinear(nn.Module):
    """The weights of one linear layer of all experts, [E, outputs, inputs]."""

    def __init__(self, axis: ExpertAxis, shape: tuple[int, int, int], placed: str, bias: bool):
        super().__init__()
        self.axis, self.placed = axis, placed
        self.bias_placed = OUTPUT_BIAS if placed == INPUT else BIAS
        self.weight = axis.parameter(shape, placed)
        self.bias = axis.parameter(shape[:2], self.bias_placed) if bias else None

    def forward(self, x_ND: Tensor, runs: Runs) -> Tensor:
        y_NF = grouped_linear(x_ND, self.local_weight(x_ND.dtype), runs, self.axis.float8)
        if self.bias is None:
            return y_NF
        bias_EF = self.axis.local(self.bias, self.bias_placed, x_ND.dtype)
        if self.bias_placed == OUTPUT_BIAS and not self.axis.first_share:
            bias_EF = bias_EF * 0
        return y_NF + bias_EF[_expert_of_row(runs, len(x_ND), len(bias_EF), x_ND.device)]

    def local_weight(self, dtype: torch.dtype) -> Tensor:
        """This rank's experts and share of their width."""
        return self.axis.local(self.weight, self.placed, dtype)


class Experts(nn.Module):
    """The experts of one layer: SwiGLU or GELU MLPs of the layer's expert width."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, axis: ExpertAxis):
        super().__init__()
        self.gated, self.approximate = layer.mlp == "swiglu", gelu_approximation(config)
        wide = (layer.experts, layer.expert_ffn_hidden_size, config.width)
        narrow = (layer.experts, config.width, layer.expert_ffn_hidden_size)
        self.gate = ExpertLinear(axis, wide, OUTPUT, config.mlp_biases) if self.gated else None
        self.up = ExpertLinear(axis, wide, OUTPUT, config.mlp_biases)
        self.down = ExpertLinear(axis, narrow, INPUT, config.mlp_biases)

    def forward(self, x_ND: Tensor, runs: Runs) -> Tensor:
        """Results of the rows, which are sorted by expert. All calls come through here, where FSDP gathers the weights.
        Rows behind the last expert's come out of the loop as zeros; the grouped matmul must get none."""
        if self.gate is not None and self.up.bias is None and runs.sizes is not None:
            gate, up, down = (linear.local_weight(x_ND.dtype) for linear in (self.gate, self.up, self.down))
            return loop_swiglu(x_ND, gate, up, down, runs.sizes)
        if self.gate is None:
            hidden_NFt = F.gelu(self.up(x_ND, runs), approximate=self.approximate)
        else:
            hidden_NFt = F.silu(self.gate(x_ND, runs)) * self.up(x_ND, runs)
        return self.down(hidden_NFt, runs)

    def of_counts(self, x_ND: Tensor, counts_Et: Tensor) -> Tensor:
        """The same by the number of rows of each expert of this rank."""
        if not uses_grouped(x_ND):
            return self(x_ND, Runs(sizes=tuple(counts_Et.tolist())))
        return self._grouped(x_ND, counts_Et)

    def _grouped(self, x_MD: Tensor, counts_Et: Tensor) -> Tensor:
        """On runs that are padded for the grouped matmul, without a wait for the device; every row has an expert."""
        position_M, ends_Et, rows = padded_positions(counts_Et, len(x_MD))
        padded_RD = x_MD.new_zeros(rows, x_MD.shape[1]).index_copy(0, position_M, x_MD)
        return self(padded_RD, Runs(ends_E=ends_Et)).index_select(0, position_M)


def _expert_of_row(runs: Runs, rows: int, experts: int, device: torch.device) -> Tensor:
    """int64[rows]; rows behind the last run point at the last expert."""
    ends_E = torch.tensor(runs.sizes, device=device).cumsum(0) if runs.ends_E is None else runs.ends_E
    row_N = torch.arange(rows, device=device)
    return torch.searchsorted(ends_E, row_N.to(ends_E.dtype), right=True).clamp(max=experts - 1)


# The SwiGLU experts of a layer in a loop: forward and backward pass of one expert after another, so that what an
# expert computes stays in the processor's cache, and only its rows of the large tensors are touched.

# N rows sorted by expert, D width, E experts, F width of an expert


def loop_swiglu(x_ND: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """(silu(x gate^T) * (x up^T)) down^T with the weights of each row's expert; rows behind the last run come out as
    zeros. sizes: rows of each expert."""
    return _LoopSwiGLU.apply(x_ND, gate_EFD, up_EFD, down_EDF, sizes)


class _LoopSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, sizes: tuple[int, ...]
    ) -> Tensor:
        gate_NF, up_NF = (x_ND.new_empty(len(x_ND), gate_EFD.shape[1]) for _ in range(2))
        y_ND = torch.empty_like(x_ND)
        for expert, rows in runs_of(sizes):
            matmul(x_ND[rows], gate_EFD[expert].T, out=gate_NF[rows])
            matmul(x_ND[rows], up_EFD[expert].T, out=up_NF[rows])
            matmul(F.silu(gate_NF[rows]).mul_(up_NF[rows]), down_EDF[expert].T, out=y_ND[rows])
        y_ND[sum(sizes) :] = 0
        ctx.save_for_backward(x_ND, gate_EFD, up_EFD, down_EDF, gate_NF, up_NF)
        ctx.sizes = sizes
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_EFD, up_EFD, down_EDF, gate_NF, up_NF = ctx.saved_tensors
        dx_ND, d_gate, d_up, d_down = (torch.empty_like(operand) for operand in (x_ND, gate_EFD, up_EFD, down_EDF))
        for expert, rows in runs_of(ctx.sizes):
            gate, up, dy = gate_NF[rows], up_NF[rows], dy_ND[rows]
            silu = F.silu(gate)
            matmul(dy.T, silu * up, out=d_down[expert])
            d_hidden = matmul(dy, down_EDF[expert])
            d_up_rows = silu.mul_(d_hidden)
            d_gate_rows = torch.ops.aten.silu_backward(d_hidden.mul_(up), gate)
            matmul(d_gate_rows.T, x_ND[rows], out=d_gate[expert])
            matmul(d_up_rows.T, x_ND[rows], out=d_up[expert])
            matmul(d_gate_rows, gate_EFD[expert], out=dx_ND[rows]).add_(matmul(d_up_rows, up_EFD[expert]))
        dx_ND[sum(ctx.sizes) :] = 0
        for expert, size in enumerate(ctx.sizes):
            if size == 0:
                for gradient in (d_gate, d_up, d_down):
                    gradient[expert] = 0
        return dx_ND, d_gate, d_up, d_down, None

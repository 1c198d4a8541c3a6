"""Mixture-of-experts layer: route tokens, exchange them with other ranks, apply the experts, combine the results."""

from collections.abc import Callable
from operator import call
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gristmill.training.layer_config import LayerConfig
from gristmill.training.loss import upcast
from gristmill.training.model.experts import Experts
from gristmill.training.model.mlp import MLPS
from gristmill.training.model.router import Router, Routing, TokenPlaces
from gristmill.training.model.routing_metadata import RoutingMetadata
from gristmill.training.model_config import ModelConfig
from gristmill.training.parallel.collectives import join_rows, share_of_rows, split_rows
from gristmill.training.parallel.expert_parallel import Exchange, ExpertAxis, inverse
from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B samples, T tokens, N tokens of this rank, D width, E experts, K experts of a token


class MixtureOfExperts(nn.Module):
    """sum over a token's experts of gate x expert(x), plus the shared experts; for PR-MoE a plain MLP beside them, and
    both weighted by a softmax of a linear layer (DeepSpeed's moe/layer.py).

    Each token is routed by one rank. Under sequence parallelism a tensor rank has tokens of its own; without it the
    ranks have the same tokens, and each takes a run of them."""

    def __init__(self, config: ModelConfig, index: int, tensor: TensorAxis, expert_tensor: int):
        super().__init__()
        layer: LayerConfig = config.layer_list[index]
        assert config.moe is not None
        self.tensor, self.axis = tensor, ExpertAxis(tensor.mesh, expert_tensor)
        self.router = Router(config, layer, index, tensor)
        self.experts = Experts(config, layer, self.axis)
        self.shared = self.residual = self.coefficient = None
        if config.moe.shared_experts:
            self.shared = MLPS[layer.mlp](config, tensor, layer.hidden)
        if config.moe.residual:
            self.residual = MLPS[layer.mlp](config, tensor, layer.hidden)
            self.coefficient = Coefficient(config.width, tensor)

    def forward(
        self, x_BTD: Tensor, metadata: RoutingMetadata | None = None, mix: Callable[..., Tensor] = call
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and the number of this rank's tokens routed to each expert, int64[E]. mix(function, x_BTD):
        stands around what is computed of all tokens together, and may give its result without calling it; the numbers
        are then None."""
        counts_E = None

        def routed(x_BTD: Tensor) -> Tensor:
            nonlocal counts_E
            own_ND, places = self._own_tokens(x_BTD)
            if metadata is not None and metadata.shares is not None:
                places = places.among_all(metadata.shares)
            routing = self.router(own_ND, places, metadata)
            counts_E = routing.counts_E
            return self._all_tokens(self._routed(own_ND, routing), x_BTD)

        y_BTD = mix(routed, x_BTD)
        if self.shared is not None:
            y_BTD = y_BTD + self.shared(x_BTD)
        if self.residual is not None and self.coefficient is not None:
            share_BT2 = self.coefficient(x_BTD)
            y_BTD = y_BTD * share_BT2[..., :1] + self.residual(x_BTD) * share_BT2[..., 1:]
        return y_BTD, counts_E

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
        top_k = routing.experts_NK.shape[1]
        order_M = torch.argsort(routing.experts_NK.flatten(), stable=True)
        rank_M = inverse(order_M)
        sorted_MD = _Copies.apply(x_ND, order_M, rank_M, top_k)
        if self.axis.size == 1:
            results_MD = self.experts(sorted_MD, routing.accepted_E)
        else:
            results_MD = self._exchanged(sorted_MD, routing)
        return _WeightedSum.apply(results_MD, routing.gates_NK.to(results_MD.dtype), order_M, rank_M)

    def _exchanged(self, sorted_MD: Tensor, routing: Routing) -> Tensor:
        """The rows computed where their experts are. Dropped rows, which are last, are not sent and come out as
        zeros."""
        exchange = Exchange(self.axis, routing.accepted_E)
        sent = sum(exchange.sent[:: self.axis.tensor_size])
        results_MD = exchange.bring_back(self.experts(exchange.send(sorted_MD[:sent]), exchange.counts_Et))
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
    """Each row K times, in the order of the experts; the backward pass adds the K gradients of a row, in one order on
    every device."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, rank_M: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(rank_M)
        ctx.top_k = top_k
        return x_ND.index_select(0, order_M // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor | None, ...]:
        (rank_M,) = ctx.saved_tensors
        return F.embedding_bag(rank_M.unflatten(0, (-1, ctx.top_k)), gradient_MD, mode="sum"), None, None, None


class _WeightedSum(torch.autograd.Function):
    """[N, D]: the sum over a token's K experts of gate x row, without the rows in the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, gates_NK: Tensor, order_M: Tensor, rank_M: Tensor) -> Tensor:
        ctx.save_for_backward(rows_MD, gates_NK, order_M, rank_M)
        return F.embedding_bag(rank_M.view_as(gates_NK), rows_MD, mode="sum", per_sample_weights=gates_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor | None, ...]:
        rows_MD, gates_NK, order_M, rank_M = ctx.saved_tensors
        gradient_MD = gradient_ND.index_select(0, order_M // gates_NK.shape[1])
        gates_gradient_M = torch.linalg.vecdot(rows_MD, gradient_MD)
        gradient_MD.mul_(gates_NK.flatten().index_select(0, order_M).unsqueeze(1))
        return gradient_MD, gates_gradient_M.index_select(0, rank_M).view_as(gates_NK), None, None

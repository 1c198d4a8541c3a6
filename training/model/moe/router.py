"""The router of a mixture-of-experts layer: top-k experts and gates of each token, and the load balancing losses.

Everything is computed in float32 (or float64). What depends on more tokens than one (balance, capacity) looks at a
whole sample or a whole batch, never at a micro-batch or at one rank's tokens, so the layout does not change it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gristmill.training.config.layers import LayerConfig, MoeConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.metadata import RoutingMetadata
from gristmill.training.model.loss import upcast, upcast_dtype
from gristmill.training.model.modules import token_priorities
from gristmill.training.parallel.collectives import all_gather_rows
from gristmill.training.parallel.context import TokenShares
from gristmill.training.parallel.mesh import Axis, Mesh
from gristmill.training.parallel.tensor import Sharding, TensorAxis

# B samples, T tokens of a sample, N tokens of this rank, D width, E experts, K experts of a token, G groups of experts

SAVED_BUFFERS = ("balance_bias", "last_load")  # of a router, in a checkpoint


@dataclass(frozen=True)
class TokenPlaces:
    """Where this rank's tokens stand in the batch of B `samples` of T `tokens`. index_N: sample x T + position. shares:
    the tokens of each context rank."""

    index_N: Tensor
    samples: int
    tokens: int
    shares: TokenShares | None = None

    def among_all(self, shares: TokenShares) -> "TokenPlaces":
        """Places among all tokens, of places among this context rank's."""
        position_N = shares.own_T[self.index_N % self.tokens]
        return TokenPlaces(self.sample_N * shares.tokens + position_N, self.samples, shares.tokens, shares)

    @property
    def sample_N(self) -> Tensor:
        return self.index_N // self.tokens


class Routing(NamedTuple):
    """experts_NK: of each token; E where it was dropped. gates_NK: their weights, 0 where it was dropped. accepted_E:
    tokens routed to each expert, those within its capacity. A tuple, in which FSDP of torch 2.11 sees the tensors."""

    experts_NK: Tensor
    gates_NK: Tensor
    accepted_E: Tensor


class Router(nn.Module):
    """Scores x W^T of all experts -> the top k of them.

    balance_bias is added to the scores for the choice only (arXiv 2408.15664); last_load holds the counts of the step
    before, all tokens of its batch, for a balancing loss over the batch. Both are float32 buffers: they are saved, and
    no optimizer, precision or sharding touches them. pass_counts: tokens of the last call routed to each expert,
    int64[E]; step_counts: their sum over the passes of the current step."""

    balance_bias: Tensor | None
    last_load: Tensor | None
    step_counts: Tensor
    pass_counts: Tensor

    def __init__(self, config: ModelConfig, layer: LayerConfig, index: int, tensor: TensorAxis):
        super().__init__()
        assert config.moe is not None
        self.config, self.index, self.tensor = config.moe, index, tensor
        self.experts, self.top_k = layer.experts, layer.top_k
        self.weight = tensor.parameter((layer.experts, config.width), Sharding.SPLIT_TOKENS)
        self.register_buffer("balance_bias", torch.zeros(layer.experts) if self.config.bias_update_rate else None)
        keeps_load = self.config.balance_loss and self.config.balance_over == "batch"
        self.register_buffer("last_load", torch.ones(layer.experts) if keeps_load else None)
        self.register_buffer("step_counts", torch.zeros(layer.experts, dtype=torch.int64), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Moves the buffers with the module, but leaves their values as they are, whatever the weights are cast to."""
        before = {name: buffer for name in SAVED_BUFFERS if (buffer := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    def forward(self, x_ND: Tensor, places: TokenPlaces, metadata: RoutingMetadata | None) -> Routing:
        weight_ED = self.tensor.local(self.weight, Sharding.SPLIT_TOKENS, upcast_dtype(x_ND))
        logits_NE = upcast(x_ND) @ weight_ED.T
        scores_NE = logits_NE.softmax(dim=-1) if self.config.router == "softmax" else logits_NE.sigmoid()
        experts_NK = choose_experts(scores_NE.detach(), self.balance_bias, self.top_k, self.config)
        gates_NK = gates_of(scores_NE, experts_NK, self.config)
        self.pass_counts = counts_E = count(experts_NK, self.experts)
        if metadata is None:
            return Routing(experts_NK, gates_NK, counts_E)
        loss = self._side_loss(logits_NE, scores_NE, experts_NK, places, metadata)
        if loss is not None:
            gates_NK = _InjectGradient.apply(gates_NK, loss)
        if self.config.capacity_factor is None:
            return Routing(experts_NK, gates_NK, counts_E)
        kept_NK = self._within_capacity(experts_NK, places, metadata)
        accepted_NK = torch.where(kept_NK, experts_NK, self.experts)
        gates_NK = torch.where(kept_NK, gates_NK, 0)
        return Routing(accepted_NK, gates_NK, count(accepted_NK, self.experts + 1)[:-1])

    def add_pass_counts(self) -> None:
        """Adds the counts of the last call to those of the step."""
        self.step_counts += self.pass_counts

    def _side_loss(
        self, logits_NE: Tensor, scores_NE: Tensor, experts_NK: Tensor, places: TokenPlaces, metadata: RoutingMetadata
    ) -> Tensor | None:
        """This rank's share of the router's losses, ready for the backward pass; None if the recipe has none."""
        weights_N = metadata.weights_BT.flatten()[places.index_N].to(logits_NE.dtype)
        loss = None
        if self.config.router_z_loss:
            loss = self.config.router_z_loss * (weights_N * logits_NE.logsumexp(dim=-1).square()).sum()
        if self.config.balance_loss:
            shares_NE = scores_NE
            if self.config.router == "sigmoid":
                shares_NE = scores_NE / (scores_NE.sum(dim=-1, keepdim=True) + 1e-20)
            load_NE = self._relative_load(experts_NK, places).to(shares_NE.dtype)
            if self.config.balance_over == "sequence":
                weights_N = (metadata.weights_BT.sum(dim=1) / places.tokens)[places.sample_N].to(logits_NE.dtype)
            balance = self.config.balance_loss * (weights_N * (shares_NE * load_NE).sum(dim=-1)).sum()
            loss = balance if loss is None else loss + balance
        if loss is None:
            return None
        factor = metadata.factor
        return loss * (factor.to(loss.dtype) if isinstance(factor, Tensor) else factor)

    def _relative_load(self, experts_NK: Tensor, places: TokenPlaces) -> Tensor:
        """f of the balancing loss for each token: the load of each expert over its mean, in the token's own sample or
        in the batch before. [N, E] or [1, E]."""
        if self.last_load is not None:
            return (self.last_load / self.last_load.mean()).unsqueeze(0)
        cell_NK = places.sample_N.unsqueeze(1) * self.experts + experts_NK
        counts_BE = over_tensor_ranks(count(cell_NK, places.samples * self.experts), self.tensor)
        if places.shares is not None:
            counts_BE = places.shares.sum(counts_BE)
        mean = self.top_k * places.tokens / self.experts
        return counts_BE.unflatten(0, (places.samples, self.experts))[places.sample_N].double() / mean

    def _within_capacity(self, experts_NK: Tensor, places: TokenPlaces, metadata: RoutingMetadata) -> Tensor:
        """Which choices their experts take, bool[N, K]. Each expert takes a bounded number of a document's tokens, the
        bound being a share of the sample's length, so no token of another document counts, and with drop: last none
        behind the token itself. Ranks that have parts of one sample tell each other their choices."""
        alone = self.tensor.size == 1 and places.shares is None
        all_NK = experts_NK if alone else self._of_all_tokens(experts_NK, places)
        kept_NK = within_capacity(
            self._of_documents(all_NK.unflatten(0, (places.samples, places.tokens)), metadata.documents_BT),
            capacity(self.config.capacity_factor or 1.0, self.top_k, places.tokens, self.experts),
            self._priorities(places, metadata),
        ).flatten(0, 1)
        return kept_NK if alone else kept_NK[places.index_N]

    def _of_documents(self, experts_BTK: Tensor, documents_BT: Tensor | None) -> Tensor:
        """Numbers for the pairs of a document of the sample and an expert, int64[B, T, K]."""
        if documents_BT is None:
            return experts_BTK
        starts_BT = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0))
        return experts_BTK + (starts_BT.cumsum(dim=1) * self.experts).unsqueeze(-1)

    def _of_all_tokens(self, experts_NK: Tensor, places: TokenPlaces) -> Tensor:
        """The choices of all tokens of the tensor and context ranks, in the order of the batch."""
        axis, context = self.tensor.mesh.tensor, Axis() if places.shares is None else places.shares.axis
        total, gathered_NK, index_N = places.samples * places.tokens, experts_NK, places.index_N
        for ranks, rows in ((axis, total // context.size), (context, total)):
            if ranks.size > 1:
                gathered_NK, index_N = (all_gather_rows(share, rows, ranks.group) for share in (gathered_NK, index_N))
        return torch.empty_like(gathered_NK).index_copy_(0, index_N, gathered_NK)

    def _priorities(self, places: TokenPlaces, metadata: RoutingMetadata) -> Tensor:
        """int64[B, T]: the highest are taken first."""
        position_T = torch.arange(places.tokens, device=places.index_N.device)
        if self.config.drop == "last":
            return -position_T.expand(places.samples, -1)
        return token_priorities(metadata.seed, self.index, metadata.samples_B, position_T)


def routers(model: nn.Module) -> dict[str, Router]:
    """The routers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds beside the parameters, by name, sharing memory."""
    return {
        f"{name}.{buffer}": value
        for name, router in routers(model).items()
        for buffer in SAVED_BUFFERS
        if (value := getattr(router, buffer)) is not None
    }


class _InjectGradient(torch.autograd.Function):
    """gates, unchanged; the backward pass adds the gradient of a loss that no stage hands on (Megatron-LM's
    MoEAuxLossAutoScaler)."""

    @staticmethod
    def forward(ctx: Any, gates_NK: Tensor, loss: Tensor) -> Tensor:
        ctx.like = (loss.dtype, loss.device)
        return gates_NK.view_as(gates_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NK: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return gradient_NK, torch.ones((), dtype=dtype, device=device)


def choose_experts(scores_NE: Tensor, bias_E: Tensor | None, top_k: int, config: MoeConfig) -> Tensor:
    """The top k experts by score + bias, int64[N, K]. Group-limited: only experts of the best groups, a group's score
    being the sum of its best k / top_groups (arXiv 2412.19437, section 2.1.2), or its best (2405.04434, 2.2.2)."""
    choice_NE = scores_NE if bias_E is None else scores_NE + bias_E
    if config.groups > 1:
        by_group_NGe = choice_NE.unflatten(1, (config.groups, -1))
        summed = 1 if config.group_score == "best" else top_k // config.top_groups
        best_NG = by_group_NGe.topk(summed, dim=-1).values.sum(dim=-1)
        allowed_NG = torch.zeros_like(best_NG, dtype=torch.bool)
        allowed_NG.scatter_(1, best_NG.topk(config.top_groups, dim=-1).indices, True)
        choice_NE = by_group_NGe.masked_fill(~allowed_NG.unsqueeze(-1), -torch.inf).flatten(1)
    return choice_NE.topk(top_k, dim=-1).indices


def gates_of(scores_NE: Tensor, experts_NK: Tensor, config: MoeConfig) -> Tensor:
    """The scores of the chosen experts, without the bias; normalized and scaled if the config says so."""
    gates_NK = scores_NE.gather(1, experts_NK)
    if config.normalize_gates:
        gates_NK = gates_NK / (gates_NK.sum(dim=-1, keepdim=True) + 1e-20)
    return gates_NK if config.gate_scale == 1 else gates_NK * config.gate_scale


def count(numbers: Tensor, bins: int) -> Tensor:
    """How often each number from 0 to bins - 1 occurs, int64[bins]; unlike bincount, nothing waits for the device."""
    flat = numbers.flatten()
    return torch.zeros(bins, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def over_tensor_ranks(counts: Tensor, tensor: TensorAxis) -> Tensor:
    """The sum over the ranks that have the other tokens of the same samples."""
    if tensor.size > 1:
        dist.all_reduce(counts, group=tensor.mesh.tensor.group)
    return counts


def capacity(factor: float, top_k: int, tokens: int, experts: int) -> int:
    """Tokens of one document that an expert takes, in samples of `tokens`: factor x top_k x tokens / experts,
    rounded up. 1.0, 1, 10, 4 -> 3."""
    return -int(-(factor * top_k * tokens) // experts)


def within_capacity(cells_BTK: Tensor, limit: int, priority_BT: Tensor) -> Tensor:
    """bool[B, T, K]: whether a choice is among the `limit` of highest priority with the same number in the sample; a
    number stands for an expert, or for an expert and a document."""
    _, tokens, top_k = cells_BTK.shape
    by_priority_BT = torch.argsort(priority_BT, dim=1, descending=True, stable=True)
    ordered_BTK = cells_BTK.gather(1, by_priority_BT.unsqueeze(-1).expand(-1, -1, top_k))
    flat_BM = ordered_BTK.flatten(1)
    by_expert_BM = torch.argsort(flat_BM, dim=1, stable=True)
    sorted_BM = flat_BM.gather(1, by_expert_BM)
    position_M = torch.arange(tokens * top_k, device=flat_BM.device)
    first_BM = torch.searchsorted(sorted_BM, sorted_BM, right=False)
    kept_BM = torch.zeros_like(flat_BM, dtype=torch.bool).scatter_(1, by_expert_BM, position_M - first_BM < limit)
    kept_BTK = kept_BM.unflatten(1, (tokens, top_k))
    return torch.zeros_like(kept_BTK).scatter_(1, by_priority_BT.unsqueeze(-1).expand(-1, -1, top_k), kept_BTK)


# Load of the experts over a step, and the state updated from it: the balancing bias and the load of the last batch.


class ExpertBalance:
    """The routers of this process. All processes call the methods in the same order."""

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh):
        self.routers = [router for part in stages for router in routers(part).values()]
        self.mesh = mesh

    @torch.no_grad()
    def take_counts(self) -> list[Tensor]:
        """Number of tokens of the global batch routed to each expert of each router; resets the counters."""
        counts = [router.step_counts.clone() for router in self.routers]
        for router in self.routers:
            router.step_counts.zero_()
        if self.mesh.stage.size > 1 and counts:
            every = torch.cat(counts)
            dist.all_reduce(every, group=self.mesh.stage.group)
            counts = list(every.split([len(expert_counts) for expert_counts in counts]))
        return counts

    @torch.no_grad()
    def update(self, counts: list[Tensor]) -> None:
        """bias += rate x sign(mean - count) (arXiv 2408.15664, algorithm 1)."""
        for router, counts_E in zip(self.routers, counts, strict=True):
            load_E = counts_E.double()
            if router.balance_bias is not None:
                step_E = router.config.bias_update_rate * (load_E.mean() - load_E).sign()
                router.balance_bias.add_(step_E.to(router.balance_bias.dtype))
            if router.last_load is not None:
                router.last_load.copy_(load_E)

    def loads(self, counts: list[Tensor]) -> dict[str, Tensor]:
        """`worst_load` as "expert", and `rank_load` as "rank" where there is one; on the device."""
        rank_load = self.rank_load(counts)
        return {"expert": self.worst_load(counts), **({} if rank_load is None else {"rank": rank_load})}

    def worst_load(self, counts: list[Tensor]) -> Tensor:
        """The highest load of an expert over the mean of its layer, over all layers of the model: float64, on the
        device."""
        ratios = [counts_E.max() / counts_E.double().mean() for counts_E in counts]
        worst = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if ratios:
            worst = torch.stack(ratios).max()
        if self.mesh.distributed:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.mesh.world.group)
        return worst

    def rank_load(self, counts: list[Tensor]) -> Tensor | None:
        """Tokens of the busiest expert rank over the mean, summed over this stage's layers, which wait for it one by
        one; None where every rank has all experts. Two layers of [6, 2] and [3, 5] over two ranks: 11 / 8."""
        grid = self.mesh.expert_grid
        if grid is None or grid.size(0) == 1 or not counts:
            return None
        by_rank = [counts_E.double().view(grid.size(0), -1).sum(dim=1) for counts_E in counts]
        load_LR = torch.stack(by_rank)
        return load_LR.max(dim=1).values.sum() / load_LR.mean(dim=1).sum()

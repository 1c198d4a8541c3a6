"""Every parameter of a model with its shape and tensor-parallel sharding: exact counts, in total and for each rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Literal

from gristmill.training.planner.costs.model_shape import BlockShape, ModelShape

Sharding = Literal["output", "input", "key_value", "replicated", "expert_output", "expert_input", "expert"]


@dataclass(frozen=True)
class Weight:
    """shape: of the unsharded parameter. output and input: that dimension is split over the tensor ranks; key_value:
    over as many of them as there are key/value heads; replicated: each rank has all of it. expert, expert_output and
    expert_input: dimension 0 is split over the expert ranks, and of the last two dimension 1 or 2 over the ranks that
    share an expert."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding = "replicated"

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def of_experts(self) -> bool:
        return self.sharding.startswith("expert")

    def local_shape(self, tensor: int, rank: int, kv_heads: int = 0) -> tuple[int, ...]:
        """Shape on one tensor rank, in chunks of ceil(n / tensor): 250 over 4 -> 63, 63, 63, 61."""
        if self.sharding == "replicated" or tensor == 1:
            return self.shape
        if self.sharding == "key_value":
            pieces = gcd(kv_heads, tensor)
            return (chunk_length(self.shape[0], pieces, rank * pieces // tensor), *self.shape[1:])
        if self.sharding == "input":
            return (self.shape[0], chunk_length(self.shape[1], tensor, rank))
        return (chunk_length(self.shape[0], tensor, rank), *self.shape[1:])


def chunk_length(length: int, pieces: int, index: int) -> int:
    """Length of the index-th of `pieces` chunks, as torch.chunk and FSDP split them. 10 over 4 -> 3, 3, 3, 1."""
    share = ceil(length / pieces)
    return max(0, min(share, length - index * share))


def block_weights(block: BlockShape) -> list[Weight]:
    """The parameters of one layer, in the model's order, without the `layers.N.` before them."""
    weights = _mixer(block) if block.has_mixer else []
    if not block.has_mlp:
        return weights
    if not block.one_norm:
        weights += _norm("mlp_norm", block.width, block.norm_leaves)
    if block.norm_order == "sandwich":
        weights += _norm("mlp_output_norm", block.width, block.norm_leaves)
    if block.experts:
        return weights + _mixture(block)
    return weights + _mlp("mlp", block)


def _mixer(block: BlockShape) -> list[Weight]:
    weights = _norm("mixer_norm", block.width, block.norm_leaves)
    if block.norm_order == "sandwich":
        weights += _norm("mixer_output_norm", block.width, block.norm_leaves)
    declared = () if block.mixer is None else block.mixer.parameters(block.width)
    return weights + [Weight(f"mixer.{parameter.name}", parameter.shape, parameter.sharding) for parameter in declared]


def _mlp(name: str, block: BlockShape) -> list[Weight]:
    weights: list[Weight] = []
    for inner in ("gate", "up") if block.gated else ("up",):
        weights += _linear(f"{name}.{inner}", block.ffn_hidden_size, block.width, "output", block.biases)
    return weights + _linear(f"{name}.down", block.width, block.ffn_hidden_size, "input", block.biases)


def _mixture(block: BlockShape) -> list[Weight]:
    """Router, experts, and the MLP beside them."""
    experts, inner = block.experts, block.expert_ffn_hidden_size
    weights = [Weight("mlp.router.weight", (experts, block.width))]
    for name in ("gate", "up") if block.gated else ("up",):
        weights.append(Weight(f"mlp.experts.{name}.weight", (experts, inner, block.width), "expert_output"))
        if block.biases:
            weights.append(Weight(f"mlp.experts.{name}.bias", (experts, inner), "expert_output"))
    weights.append(Weight("mlp.experts.down.weight", (experts, block.width, inner), "expert_input"))
    if block.biases:
        weights.append(Weight("mlp.experts.down.bias", (experts, block.width), "expert"))
    if block.ffn_hidden_size:
        weights += _mlp("mlp.residual" if block.coefficient else "mlp.shared", block)
    if block.coefficient:
        weights += [Weight("mlp.coefficient.weight", (2, block.width)), Weight("mlp.coefficient.bias", (2,))]
    return weights


def embedding_weights(shape: ModelShape) -> list[Weight]:
    """The embedding, its norm, and the tables of learned positions and of segments."""
    weights = [Weight("embedding.weight", (shape.vocab, shape.width), "output")]
    if shape.model.positions == "learned":
        rows = shape.model.sequence_length + shape.model.position_offset
        weights.append(Weight("positions.weight", (rows, shape.width)))
    if shape.model.segments:
        weights.append(Weight("segments.weight", (shape.model.segments, shape.width)))
    if shape.model.embedding_norm:
        weights += _norm("embedding_norm", shape.width, shape.model.norm_leaves)
    return weights


def head_weights(shape: ModelShape, with_table: bool) -> list[Weight]:
    """The last norm, the output table and what stands around it, and the named outputs; with_table is false where the
    table is the embedding itself (tied, same stage)."""
    model, width, norm_leaves = shape.model, shape.width, shape.model.norm_leaves
    weights = _norm("final_norm", width, norm_leaves) if model.final_norm else []
    if with_table:
        weights.append(Weight("head.weight", (shape.vocab, width), "output"))
    if model.head_bias:
        weights.append(Weight("head.bias", (shape.vocab,), "output"))
    if model.head_transform:
        weights += _linear("head.transform", width, width, "replicated", bias=True)
        weights += _norm("head.transform.norm", width, norm_leaves)
    if model.has_pooler:
        weights += _linear("outputs.pooler", width, width, "replicated", bias=True)
    for output in model.outputs:
        weights += _linear(f"outputs.linear.{output.name}", output.size, width, "replicated", bias=True)
    return weights


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the model; a tied table counts once."""
    counts = [sum(w.count for w in block_weights(block)) for block in shape.distinct]
    ends = embedding_weights(shape) + head_weights(shape, not shape.tied)
    return sum(counts[kind] for kind in shape.kinds) + sum(w.count for w in ends)


def active_parameters(shape: ModelShape) -> int:
    """Active parameters of a token: of the experts, top_k of each layer."""
    idle = sum(
        _in_experts(block) // block.experts * (block.experts - block.top_k) for block in shape.blocks if block.experts
    )
    return parameter_count(shape) - idle


def expert_parameter_count(shape: ModelShape) -> int:
    """Parameters of the experts of all mixtures, without routers and what stands beside the experts."""
    return sum(_in_experts(block) for block in shape.blocks)


def _in_experts(block: BlockShape) -> int:
    return sum(weight.count for weight in block_weights(block) if weight.of_experts)


@dataclass(frozen=True)
class ExpertSharding:
    """How the parameters of experts are split: over expert ranks, over ranks that share an expert's width, and by FSDP
    over the ranks that hold the same experts."""

    expert: int = 1
    expert_tensor: int = 1
    shard: int = 1

    def local_shape(self, weight: Weight) -> tuple[int, ...]:
        """Shape on one rank, before FSDP. [64, 1024, 512] over 8 x 2, expert_output -> [8, 512, 512]."""
        experts, *rest = weight.shape
        if weight.sharding == "expert_output":
            rest[0] //= self.expert_tensor
        elif weight.sharding == "expert_input":
            rest[1] //= self.expert_tensor
        return (experts // self.expert, *rest)

    def count(self, weights: Iterable[Weight]) -> int:
        """Numbers of the experts' parameters on one rank before FSDP."""
        return sum(prod(self.local_shape(weight)) for weight in weights if weight.of_experts)

    def sharded_count(self, weights: Iterable[Weight]) -> int:
        """Numbers that the first rank of an FSDP group keeps."""
        total = 0
        for weight in weights:
            if weight.of_experts:
                shape = list(self.local_shape(weight))
                dim = expert_shard_dim(shape, self.shard)
                shape[dim] = chunk_length(shape[dim], self.shard, 0)
                total += prod(shape)
        return total


def expert_shard_dim(local_shape: Sequence[int], ranks: int) -> int:
    """The dimension in which FSDP splits a parameter of experts: the experts, or where they do not split evenly another
    one that does (torch pads dimension 0 only). [2, 48, 32] over 4 -> 1."""
    return next((dim for dim, size in enumerate(local_shape) if size % ranks == 0), 0)


def rank_count(weights: Iterable[Weight], tensor: int, rank: int, kv_heads: int) -> int:
    """Number of parameters on one tensor rank before they are sharded over the data axis."""
    return sum(prod(w.local_shape(tensor, rank, kv_heads)) for w in weights if not w.of_experts)


def sharded_count(weights: Iterable[Weight], tensor: int, rank: int, kv_heads: int, shard: int, index: int = 0) -> int:
    """Number of parameters on one rank under FSDP: each parameter's first dim is split over the shard axis.

    Index 0 holds the most. A norm of 64 over 5 ranks: 13, 13, 13, 13, 12."""
    total = 0
    for weight in weights:
        if weight.of_experts:
            continue
        rows, *rest = weight.local_shape(tensor, rank, kv_heads)
        total += chunk_length(rows, shard, index) * prod(rest)
    return total


def _norm(name: str, width: int, leaves: Sequence[str]) -> list[Weight]:
    return [Weight(f"{name}.{leaf}", (width,)) for leaf in leaves]


def _linear(name: str, outputs: int, inputs: int, sharding: Sharding, bias: bool) -> list[Weight]:
    weights = [Weight(f"{name}.weight", (outputs, inputs), sharding)]
    if bias:
        weights.append(Weight(f"{name}.bias", (outputs,), "replicated" if sharding == "input" else sharding))
    return weights

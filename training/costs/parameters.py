"""Every parameter of a model with its shape and tensor-parallel sharding: exact counts, in total and for each rank."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Literal

from gristmill.training.costs.model_shape import Block, ModelShape

Sharding = Literal["output", "input", "key_value", "replicated"]


@dataclass(frozen=True)
class Weight:
    """shape: of the unsharded parameter. output and input: that dimension is split over the tensor ranks; key_value:
    over
    as many of them as there are key/value heads; replicated: each rank has all of it."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding = "replicated"

    @property
    def count(self) -> int:
        return prod(self.shape)

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


def block_weights(block: Block) -> list[Weight]:
    """The parameters of one layer, in the model's order, without the `layers.N.` before them."""
    bias = block.biases
    weights = _norm("mixer_norm", block.width, block.norm_bias)
    weights += _linear("mixer.query", block.query_width, block.width, "output", bias)
    weights += _linear("mixer.key", block.kv_width, block.width, "key_value", bias)
    weights += _linear("mixer.value", block.kv_width, block.width, "key_value", bias)
    weights += _linear("mixer.output", block.width, block.query_width, "input", bias)
    if block.qk_norm:
        weights += _norm("mixer.query_norm", block.head_dim, block.norm_bias)
        weights += _norm("mixer.key_norm", block.head_dim, block.norm_bias)
    weights += _norm("mlp_norm", block.width, block.norm_bias)
    for name in ("gate", "up") if block.gated else ("up",):
        weights += _linear(f"mlp.{name}", block.hidden, block.width, "output", bias)
    return weights + _linear("mlp.down", block.width, block.hidden, "input", bias)


def embedding_weights(shape: ModelShape) -> list[Weight]:
    """The embedding, and the table of positions where they are learned."""
    weights = [Weight("embedding.weight", (shape.vocab, shape.width), "output")]
    if shape.model.positions == "learned":
        weights.append(Weight("positions.weight", (shape.model.sequence_length, shape.width)))
    return weights


def head_weights(shape: ModelShape, with_table: bool) -> list[Weight]:
    """The last norm and the output table; with_table is false where it is the embedding itself (tied, same stage)."""
    weights = _norm("final_norm", shape.width, shape.model.norm == "layernorm")
    if with_table:
        weights.append(Weight("head.weight", (shape.vocab, shape.width), "output"))
    return weights


def parameter_count(shape: ModelShape) -> int:
    """Parameters of the model; a tied table counts once."""
    counts = [sum(w.count for w in block_weights(block)) for block in shape.distinct]
    ends = embedding_weights(shape) + head_weights(shape, not shape.tied)
    return sum(counts[kind] for kind in shape.kinds) + sum(w.count for w in ends)


def paper_parameters(layers: int, width: int, vocab: int, sequence_length: int) -> float:
    """P = 12 l h^2 (1 + 13/12h + (V + s)/12lh), arXiv 2104.04473, section 5.1: the GPT with all its biases and norms.

    (105, 20480, 51200, 2048) -> 529.6e9. Leaves out the last norm's 2 h."""
    return 12 * layers * width**2 * (1 + 13 / (12 * width) + (vocab + sequence_length) / (12 * layers * width))


def rank_count(weights: Iterable[Weight], tensor: int, rank: int, kv_heads: int) -> int:
    """Number of parameters on one tensor rank before they are sharded over the data axis."""
    return sum(prod(w.local_shape(tensor, rank, kv_heads)) for w in weights)


def sharded_count(weights: Iterable[Weight], tensor: int, rank: int, kv_heads: int, shard: int, index: int = 0) -> int:
    """Number of parameters on one rank under FSDP: each parameter's first dim is split over the shard axis.

    Index 0 holds the most. A norm of 64 over 5 ranks: 13, 13, 13, 13, 12."""
    total = 0
    for weight in weights:
        rows, *rest = weight.local_shape(tensor, rank, kv_heads)
        total += chunk_length(rows, shard, index) * prod(rest)
    return total


def _norm(name: str, width: int, bias: bool) -> list[Weight]:
    return [Weight(f"{name}.{kind}", (width,)) for kind in ("weight", "bias")[: 1 + bias]]


def _linear(name: str, outputs: int, inputs: int, sharding: Sharding, bias: bool) -> list[Weight]:
    weights = [Weight(f"{name}.weight", (outputs, inputs), sharding)]
    if bias:
        weights.append(Weight(f"{name}.bias", (outputs,), "replicated" if sharding == "input" else sharding))
    return weights

"""Activation bytes that one micro-batch keeps for its backward pass: formulas of the literature, and of our engine.

Ours are counted operation by operation from what autograd saves; tests compare them with saved-tensor hooks.
n tokens of the micro-batch; n_r those in this rank's residual stream (n / t under sequence parallelism); c bytes of a
number in the computation (2 in bf16), e of statistics (4); q, kv, f this rank's widths.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from gristmill.training.config.layers import RMSNORMS
from gristmill.training.config.layout import CHUNK_LOGITS, SWAPS
from gristmill.training.config.mixer import Share, norm_bytes
from gristmill.training.config.mixers.attention import BLOCK, AttentionMixer
from gristmill.training.planner.block_time import ShardSizes, declared_linears, shard_sizes
from gristmill.training.planner.costs.model_shape import BlockShape, ModelShape
from gristmill.training.planner.engine_profile import EngineProfile
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import Layout

# The share of the tokens whose activations a layer swaps to host memory (MEMO, SIGMOD 2025): as large as the link
# hides behind a layer's forward pass and host memory holds; the others are recomputed.


@dataclass(frozen=True)
class SwapBytes:
    """Bytes that one layer keeps of one micro-batch on one rank. always: its input and the attention's output, which go
    to host memory whole; others: of the other activations."""

    always: float = 0.0
    others: float = 0.0

    def of_share(self, share: float) -> float:
        return self.always + share * self.others


@dataclass(frozen=True)
class SwapPlan:
    """share: of the tokens. bound: what keeps it from being larger. link_share, host_share: the largest by each, below
    0 or above 1 where it is no limit."""

    share: float
    bound: Literal["link", "host memory", "all tokens"]
    link_share: float
    host_share: float
    host_bytes: float
    layer_seconds: float

    def sentence(self) -> str:
        limit = {
            "link": "what the link copies while a layer computes",
            "host memory": "host memory",
            "all tokens": "nothing: all tokens are swapped",
        }[self.bound]
        return (
            f"The activations of {self.share:.0%} of the tokens go to host memory ({self.host_bytes / GIB:.1f} GiB of "
            f"a GPU's share), the others are recomputed; the limit is {limit} (a layer's forward pass takes "
            f"{self.layer_seconds:.3g} s; by the link {self.link_share:.0%}, by host memory {self.host_share:.0%})."
        )


def solve_share(
    sizes: SwapBytes, swapped_layers: float, layer_seconds: float, bytes_per_second: float, host_bytes: float
) -> SwapPlan:
    """max share: always + share x others <= bytes_per_second x layer_seconds, swapped_layers times it <= host_bytes.

    swapped_layers: layers of the rank, times the micro-batches that are alive. Where not even `always` is hidden or
    fits, the share is 0, and the copies show, or `host_bytes` of the plan exceeds what there is."""
    link = (bytes_per_second * layer_seconds - sizes.always) / sizes.others
    host = (host_bytes / max(swapped_layers, 1e-9) - sizes.always) / sizes.others
    share = max(0.0, min(1.0, link, host))
    bound: Literal["link", "host memory", "all tokens"] = "all tokens"
    if share < 1:
        bound = "link" if link < host else "host memory"
    return SwapPlan(share, bound, link, host, swapped_layers * sizes.of_share(share), layer_seconds)


def hidden_from_tokens(width: int, attention_factor: float, tflops: float, gb_per_second: float) -> float:
    """Sequence length from which a full swap hides behind a layer's forward pass, for a GPT layer with 4 width hidden.

    The layer keeps 16 s h numbers, 32 s h bytes in 16 bits, and computes 24 s h^2 + attention_factor s^2 h FLOPs (2 if
    causal attention skips what it masks, else 4): 32 s h / B = (24 s h^2 + a s^2 h) / F, so s = (32 F / B - 24 h) / a.
    At tensor size t both sides are divided by t."""
    return max(0.0, (32 * tflops * 1e12 / (gb_per_second * 1e9) - 24 * width) / attention_factor)


ROUNDING_BUFFERS = 2  # layers whose activations are on the device at once, under recompute: swap and tokens
INDEX_BYTES = 8  # of an int64


def korthikanti_layer(
    block: BlockShape,
    tokens: int,
    sequence_length: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes a layer of the 16-bit GPT with dropout keeps, arXiv 2205.05198, table 2 (s b h = tokens x width).

    sbh (34 + 5as/h); with t tensor ranks sbh (10 + 24/t + 5as/ht); with sequence parallelism all of it over t. The
    recomputation "attention" drops 5as/h, "full" keeps the layer's input only, 2 sbh. GPT-3 (width 12288, 96 heads,
    2048 tokens): 34 + 80 bytes an element."""
    sbh = tokens * block.width
    share = tensor if sequence_parallel else 1
    if recompute == "full":
        return 2 * sbh / share
    scores = 0.0 if recompute in ("attention", "operators") else 5 * block.heads * sequence_length / block.width
    return sbh * (10 / share + 24 / tensor + scores / tensor)


def korthikanti_ends(tokens: int, width: int, vocab: int, tensor: int, sequence_parallel: bool) -> tuple[float, float]:
    """(embedding, head): the mask of the embedding's dropout; last norm, output layer and fp32 logits.

    arXiv 2205.05198, section 4.3: sbh p/t and 4 sbh/t (1 + v/h); without sequence parallelism their unsharded forms."""
    share = tensor if sequence_parallel else 1
    return tokens * width / share, 4 * tokens * (width / share + vocab / tensor)


class ActivationBytes(NamedTuple):
    """kept: from a layer's forward to its backward pass; extra: only while that layer is recomputed."""

    kept: float
    extra: float


class ElementSizes(NamedTuple):
    """Bytes of one number in the computation and in statistics. cuda: the fused CUDA kernels run. float8: the weights
    of layers are cast to a byte and gathered so."""

    compute: int = 2
    statistics: int = 4
    cuda: bool = True
    float8: bool = False


def layer_bytes(
    block: BlockShape, shape: ModelShape, layout: Layout, framework: EngineProfile, sizes: ElementSizes
) -> ActivationBytes:
    """Activation bytes of one layer of the model under the layout's recomputation."""
    sequence_length, dropout, norm = shape.sequence_length, shape.model.dropout > 0, shape.model.norm
    if framework.activations == "literature" and block.heads and block.has_mlp and not block.experts:  # as the papers'
        return _megatron_layer(block, layout, sequence_length, framework)
    mixer = _mixer(block, layout, sequence_length, sizes, dropout, norm)
    mlp = _mlp(block, layout, sequence_length, sizes, dropout, norm)
    stream = _residual(block, layout, sequence_length) * sizes.compute
    if layout.recompute == "full":
        return ActivationBytes(stream, mixer + mlp)
    if layout.recompute == "attention":
        return ActivationBytes(stream + mlp, mixer)
    if layout.recompute in SWAPS:
        return ActivationBytes(0.0, ROUNDING_BUFFERS * (mixer + mlp))
    if layout.recompute == "operators":
        kept = _products(block, layout, sequence_length, sizes)
        return ActivationBytes(stream + kept, max(0.0, mixer + mlp - kept))
    return ActivationBytes(mixer + mlp, 0.0)


def swap_bytes(
    block: BlockShape, shape: ModelShape, layout: Layout, framework: EngineProfile, sizes: ElementSizes
) -> SwapBytes:
    """Bytes of one layer: what MEMO always swaps, and the rest. Routed experts count as attention does: what they keep,
    but for the tokens that they are given, and their result."""
    whole = layer_bytes(block, shape, replace(layout, recompute="none"), framework, sizes).kept
    always = _residual(block, layout, shape.sequence_length) * sizes.compute
    if block.mixer is not None:
        always += block.mixer.whole_bytes(block.width, _share(layout, shape.sequence_length, sizes))
    if block.experts:
        always += _experts(block, layout, shape.sequence_length, sizes)
        always -= _router_input(block, layout, shape.sequence_length, sizes)
        always += _residual(block, layout, shape.sequence_length) * sizes.compute
    always = min(whole, always)
    return SwapBytes(always, whole - always)


def attention_in_blocks(
    block: BlockShape, shape: ModelShape, layout: Layout, sizes: ElementSizes
) -> tuple[float, float]:
    """(bytes that the mixer keeps, bytes that its backward pass takes beside them) where a CPU attends in blocks of
    queries: gradients of its output, queries, keys and values, and of the scores and the weights of two blocks; zeros
    elsewhere."""
    share = _share(layout, shape.sequence_length, sizes)
    if not isinstance(block.mixer, AttentionMixer) or not block.mixer.block_weights(share):
        return 0.0, 0.0
    kept = _mixer(block, layout, shape.sequence_length, sizes, shape.model.dropout > 0, shape.model.norm)
    rows, tokens = share.rows * block.heads, share.sequence
    largest, before = (rows * min(BLOCK, tokens) * size for size in (tokens, max(0, tokens - BLOCK)))
    query = share.rows * tokens * block.mixer.query_width
    return kept, (4 * query + largest + before) * sizes.compute


def ends_bytes(shape: ModelShape, layout: Layout, framework: EngineProfile, sizes: ElementSizes) -> tuple[float, float]:
    """(embedding, head) activation bytes of one micro-batch, without the logits."""
    tokens = layout.micro_batch * shape.sequence_length // layout.context
    if framework.activations == "literature":
        first, last = korthikanti_ends(tokens, shape.width, 0, layout.tensor, layout.sequence_parallel)
        return (first if framework.dropout else 0.0), last
    residual = tokens // (layout.tensor if layout.sequence_parallel else 1)
    drop = residual * shape.width if shape.model.dropout else 0
    # The head keeps its own gradients: of the hidden states, and of its share of the table.
    table = -(-shape.vocab // layout.tensor) * shape.width
    norm = _norm(residual, shape.width, sizes, shape.model.norm)
    first = norm if shape.model.embedding_norm else 0.0
    return drop + first + 8 * tokens, norm + (tokens * shape.width + table) * sizes.compute


def logits_bytes(shape: ModelShape, layout: Layout, framework: EngineProfile, sizes: ElementSizes) -> float:
    """Bytes of the logits. Ours: on a GPU one chunk, its exponentials and its gradient; on a CPU the chunk, in which
    both are made."""
    tokens = layout.micro_batch * shape.sequence_length // layout.context
    count = tokens * -(-shape.vocab // layout.tensor)
    if framework.activations == "literature":
        return 4 * count if framework.loss == "unfused" else 2 * count
    if not sizes.cuda:
        return cpu_logits(tokens, -(-shape.vocab // layout.tensor), sizes.compute) * sizes.compute
    return min(count, CHUNK_LOGITS["cuda"][sizes.compute]) * (2 * sizes.statistics + 2 * sizes.compute)


def cpu_logits(tokens: int, vocab: int, number_bytes: int) -> int:
    """Logits of the largest chunk. 1,024 tokens of 50,304 in float32: 4 chunks of 256."""
    size = max(1, min(tokens, CHUNK_LOGITS["cpu"][number_bytes] // vocab))
    return -(-tokens // -(-tokens // size)) * vocab


def boundary_bytes(shape: ModelShape, layout: Layout, framework: EngineProfile, sizes: ElementSizes) -> float:
    """Bytes of a stage's input and output of one micro-batch, kept until its backward pass.

    With recomputation the first layer keeps the input already. Megatron frees its outputs once they are sent."""
    if framework.activations == "literature":
        return 0.0
    tokens = layout.micro_batch * shape.sequence_length // layout.context
    share = layout.tensor if layout.sequence_parallel else 1
    return (2 if layout.recompute in ("none", *SWAPS) else 1) * tokens * shape.width / share * sizes.compute


def _residual(block: BlockShape, layout: Layout, sequence_length: int) -> float:
    return shard_sizes(block, layout, sequence_length).residual


def _norm(tokens: float, width: int, sizes: ElementSizes, norm: str) -> float:
    return norm_bytes(tokens, width, sizes, norm in RMSNORMS)


def _norms(block: BlockShape, w: ShardSizes, sizes: ElementSizes, norm: str) -> float:
    """The norms around a mixer or an MLP: one, or two in a sandwich."""
    count = 2 if block.norm_order == "sandwich" else 1
    return count * _norm(w.residual / block.width, block.width, sizes, norm)


def _share(layout: Layout, sequence_length: int, sizes: ElementSizes) -> Share:
    return Share(
        layout.micro_batch,
        sequence_length // layout.context,
        layout.tensor,
        sizes.compute,
        sizes.statistics,
        layout.sequence_parallel,
        sizes.cuda,
        layout.context,
        layout.context > 1 and layout.context_method == "ring",
    )


def _mixer(
    block: BlockShape, layout: Layout, sequence_length: int, sizes: ElementSizes, dropout: bool, norm: str
) -> float:
    """Norm, its output (gathered), what the mixer itself keeps, dropout's mask; nothing without a mixer."""
    if block.mixer is None:
        return 0.0
    w = shard_sizes(block, layout, sequence_length)
    outside = _norms(block, w, sizes, norm) + w.residual * dropout
    inside = block.mixer.activation_bytes(block.width, _share(layout, sequence_length, sizes))
    return outside + w.tokens * block.width * sizes.compute + inside


def _mlp(
    block: BlockShape, layout: Layout, sequence_length: int, sizes: ElementSizes, dropout: bool, norm: str
) -> float:
    """Norm, its output (gathered), and gate, silu, up, product; or up and gelu."""
    if not block.has_mlp:
        return 0.0
    w = shard_sizes(block, layout, sequence_length)
    total = w.residual * dropout + (0 if block.one_norm else _norms(block, w, sizes, norm))
    if block.parallel and (norm in RMSNORMS or not sizes.cuda or sizes.compute == sizes.statistics):
        total -= 0 if block.one_norm else w.residual * sizes.compute  # both norms keep the same input
    if block.experts:
        total += _experts(block, layout, sequence_length, sizes)
        if not block.ffn_hidden_size:
            return total
    inner = 4 if block.gated else 1 if block.mlp == "relu" else 2
    shared = block.one_norm and not layout.sequence_parallel  # the input that the mixer keeps already
    return total + w.tokens * (block.width * (not shared) + inner * w.ffn_hidden_size) * sizes.compute


def _experts(block: BlockShape, layout: Layout, sequence_length: int, sizes: ElementSizes) -> float:
    """The router's input, scores, gates and permutations; the sorted tokens of this rank's experts and their inner
    activations (of the loop on a CPU gate and up alone, see moe/mixture.py); the results of its own tokens. Tokens are
    taken to be balanced over the experts."""
    w = shard_sizes(block, layout, sequence_length)
    inner = (
        (4 if block.gated and (sizes.cuda or block.biases) else 2)
        * block.expert_ffn_hidden_size
        // layout.expert_tensor
    )
    copies = w.routed_tokens * block.top_k
    wide = 0 if sizes.statistics == sizes.compute else block.width * sizes.statistics
    router = w.routed_tokens * (wide + block.experts * sizes.statistics)
    router += _router_input(block, layout, sequence_length, sizes) + copies * (3 * INDEX_BYTES + 2 * sizes.statistics)
    return router + copies * (layout.expert_tensor * (block.width + inner) + block.width) * sizes.compute


def _router_input(block: BlockShape, layout: Layout, sequence_length: int, sizes: ElementSizes) -> float:
    """Nothing where an MLP beside the experts keeps it."""
    if block.ffn_hidden_size and layout.tensor == 1:
        return 0.0
    return shard_sizes(block, layout, sequence_length).routed_tokens * block.width * sizes.compute


def _products(block: BlockShape, layout: Layout, sequence_length: int, sizes: ElementSizes) -> float:
    """Bytes that `recompute: operators` keeps: results of matmuls and of attention; of experts those of the grouped
    products of GPUs, not of the loop."""
    w = shard_sizes(block, layout, sequence_length)
    inner = (2 if block.gated else 1) * w.ffn_hidden_size
    outputs = block.has_mixer + bool(block.ffn_hidden_size)
    declared = sum(columns for _, columns in declared_linears(block, layout))
    mixer = w.query + 2 * w.key_value if block.heads else declared - block.width * block.has_mixer
    count: float = w.tokens * (mixer + outputs * block.width + inner) * sizes.compute
    if block.experts and sizes.cuda and sizes.compute == 2:
        rows = w.routed_tokens * block.top_k
        hidden = (2 if block.gated else 1) * block.expert_ffn_hidden_size
        count += rows * (hidden + layout.expert_tensor * block.width) * sizes.compute
    share = _share(layout, sequence_length, sizes)
    if not isinstance(block.mixer, AttentionMixer) or block.mixer.block_weights(share):
        return count
    return count + w.tokens * w.query * sizes.compute + w.tokens * w.heads * sizes.statistics


def _megatron_layer(
    block: BlockShape, layout: Layout, sequence_length: int, framework: EngineProfile
) -> ActivationBytes:
    tokens = layout.micro_batch * sequence_length // layout.context
    kept = "attention" if framework.attention == "flash" and layout.recompute == "none" else layout.recompute
    arguments = (block, tokens, sequence_length, layout.tensor, layout.sequence_parallel)
    whole = korthikanti_layer(*arguments, "none" if framework.attention == "unfused" else "attention")
    now = korthikanti_layer(*arguments, kept)
    return ActivationBytes(now, max(0.0, whole - now) if layout.recompute != "none" else 0.0)

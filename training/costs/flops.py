"""Floating-point operations of a training step: the formula of arXiv 2104.04473, and the exact count layer by layer.

A multiply-add is two operations. A matmul [a, b] @ [b, c] is 2 a b c forward and twice that backward. Attention is
counted in full (every query against every key, as PaLM and Megatron-LM do for MFU) or causally (unmasked pairs only).
"""

from collections.abc import Iterable

from gristmill.training.costs.model_shape import Block, ModelShape


def paper_flops(
    layers: int, width: int, vocab: int, samples: int, sequence_length: int, recompute: bool = True
) -> float:
    """A step of a GPT with 4 x width MLP: 96 B s l h^2 (1 + s/6h + V/16lh), arXiv 2104.04473, section 5.1.

    Full recomputation is counted as work there (4 forward passes of every layer); recompute=False gives the model's own
    72 B s l h^2 (1 + s/6h + V/12lh). GPT-3 (96 layers, 12288), V = 51200, 1536 samples of 2048 -> 4.5e18."""
    body = 24 * samples * sequence_length * layers * width**2 * (1 + sequence_length / (6 * width))
    head = 6 * samples * sequence_length * width * vocab
    return (4 if recompute else 3) * body + head


def block_matmul_flops(block: Block) -> int:
    """Forward FLOPs of one token in the weight matrices: 2 for each weight; of experts, for those it goes to."""
    mixer = 0 if block.mixer is None else block.mixer.multiply_adds(block.width)
    hidden = block.hidden + block.top_k * block.expert_hidden
    mlp = block.width * hidden * (3 if block.gated else 2)
    router = block.width * (block.experts + 2 * block.coefficient)
    return 2 * (mixer + mlp + router)


def block_macs_per_token(block: Block, sequence_length: int) -> int:
    """Multiply-adds of one token's forward pass, the cost that stages are balanced by: weights, and one query's
    scores (or a scan's share of one token)."""
    matmuls = block_matmul_flops(block) // 2
    if block.heads or block.mixer is None:
        return matmuls + block.query_width * min(block.window or sequence_length, sequence_length)
    return matmuls + int(block.mixer.scan_flops(block.width, sequence_length)) // sequence_length // 2


def attention_flops(block: Block, sequence_length: int, causal: bool = False) -> float:
    """Forward FLOPs of one sample: scores and their product with the values; or those of the layer's scan."""
    if block.mixer is None:
        return 0.0
    count = block.mixer.causal_flops if causal else block.mixer.scan_flops
    return count(block.width, sequence_length)


def step_flops(shape: ModelShape, samples: int, causal: bool = False, sequence_length: int | None = None) -> float:
    """Forward and backward FLOPs of `samples` samples without recomputation: the numerator of MFU."""
    tokens = sequence_length or shape.sequence_length
    blocks = sum(_forward(block, tokens, causal) for block in shape.blocks)
    head = 2 * tokens * shape.width * shape.vocab
    return 3 * samples * (blocks + head)


def recomputed_flops(blocks: Iterable[Block], samples: int, sequence_length: int, recompute: str) -> float:
    """FLOPs that recomputation adds to a step: full repeats a layer's forward pass, attention its core."""
    if recompute == "full":
        return samples * sum(_forward(block, sequence_length, False) for block in blocks)
    if recompute == "attention":
        return samples * sum(attention_flops(block, sequence_length) for block in blocks)
    return 0.0


def flops_per_token(shape: ModelShape, causal: bool = False) -> float:
    """Forward and backward FLOPs of one token: the model FLOPs of PaLM, arXiv 2204.02311, appendix B."""
    return step_flops(shape, 1, causal) / shape.sequence_length


def _forward(block: Block, sequence_length: int, causal: bool) -> float:
    return sequence_length * block_matmul_flops(block) + attention_flops(block, sequence_length, causal)

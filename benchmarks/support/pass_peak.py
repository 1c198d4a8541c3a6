"""Peak of one forward and backward pass on a CPU in one process, beside the weights: either where the loss is computed,
or where a layer's backward pass has gradients of its activations beside those that are left."""

from dataclasses import replace

from gristmill.training.config.layout import SWAPS
from gristmill.training.planner.activations import attention_in_blocks, cpu_logits, ends_bytes, layer_bytes, swap_bytes
from gristmill.training.planner.costs.parameters import block_weights
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.memory import MemoryModel


def pass_peak(memories: MemoryModel, layout: Layout) -> float:
    """Bytes of one micro-batch, with the gradients of the weights as its backward pass makes them.

    What is in host memory is not counted: on a CPU it is computed with where it lies."""
    shape, sizes = memories.shape, memories.sizes
    first, last = ends_bytes(shape, layout, memories.framework, sizes)
    kept = [_kept(memories, layout, number) for number in range(len(shape.blocks))]
    peaks = [first + sum(kept) + last + _loss_bytes(memories, layout)]
    gradients = shape.vocab * shape.width * sizes.statistics
    for number in reversed(range(len(kept))):
        block = shape.blocks[number]
        own = max(kept[number], _again(memories, layout, number))
        peaks.append(first + sum(kept[:number]) + own + gradients + _of_backward(memories, layout, number))
        attention, beside = attention_in_blocks(block, shape, layout, sizes)
        if beside and not _is_swapped(memories, layout, number):
            input_bytes = kept[number] if layout.recompute == "full" else 0.0
            weights = sum(each.count for each in block_weights(block) if each.name.startswith("mlp."))
            made = gradients + weights * sizes.statistics
            peaks.append(first + sum(kept[:number]) + input_bytes + attention + beside + made)
        gradients += sum(weight.count for weight in block_weights(block)) * sizes.statistics
    return max(peaks)


def _kept(memories: MemoryModel, layout: Layout, number: int) -> float:
    """Bytes of a layer from its forward to its backward pass."""
    policy = layout
    if layout.recompute in SWAPS and not _is_swapped(memories, layout, number):
        policy = replace(layout, recompute="none", offloaded_token_fraction=None)
    block = memories.shape.blocks[number]
    return layer_bytes(block, memories.shape, policy, memories.framework, memories.sizes).kept


def _again(memories: MemoryModel, layout: Layout, number: int) -> float:
    """Bytes of a layer once its backward pass has brought or computed back what it needs."""
    block, framework, sizes = memories.shape.blocks[number], memories.framework, memories.sizes
    if layout.recompute == "tokens" and _is_swapped(memories, layout, number):
        return (1 - layout.token_share) * swap_bytes(block, memories.shape, layout, framework, sizes).others
    if layout.recompute in SWAPS:
        return 0.0
    found = layer_bytes(block, memories.shape, layout, framework, sizes)
    return found.kept + found.extra


def _of_backward(memories: MemoryModel, layout: Layout, number: int) -> float:
    """What a layer's backward pass takes beyond the activations: the gradients of its output and of the matrix behind
    the MLP's hidden activations, and of these activations themselves. Undoing a GELU needs the gradient of its result
    and that of its input, undoing a gate's product that of both factors. One of them takes the place of an activation
    that is no longer needed, unless that lies in host memory; and the activations of tokens that were recomputed are
    put together with those from there."""
    block, sizes = memories.shape.blocks[number], memories.sizes
    tokens = layout.micro_batch * memories.shape.sequence_length
    gradients, activations = (3, 2) if block.gated else (2, 1)
    if not _is_swapped(memories, layout, number):
        gradients -= 1
    elif layout.recompute == "tokens":
        gradients += activations
    hidden = gradients * block.ffn_hidden_size
    return tokens * (block.width + hidden) * sizes.compute + block.ffn_hidden_size * block.width * sizes.statistics


def _is_swapped(memories: MemoryModel, layout: Layout, number: int) -> bool:
    return layout.recompute in SWAPS and number < len(memories.shape.blocks) - layout.num_layers_on_device


def _loss_bytes(memories: MemoryModel, layout: Layout) -> float:
    """A chunk's logits, and two products of its tokens; the hidden states, which nothing keeps. The table's gradient,
    which is kept, is there from the second chunk on."""
    shape, compute = memories.shape, memories.sizes.compute
    tokens = layout.micro_batch * shape.sequence_length
    logits = cpu_logits(tokens, shape.vocab, compute)
    chunks = -(-tokens * shape.vocab // logits)
    table = shape.vocab * shape.width * compute if chunks == 1 else 0
    return compute * (logits + tokens * shape.width + 2 * (tokens // chunks) * shape.width) - table

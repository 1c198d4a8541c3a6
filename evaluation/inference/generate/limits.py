"""How many sequences a batch runs at a time, what a pass over prompts reads, and the memory of the cache."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.generate.drafts import NO_DRAFTS, Drafting
from gristmill.evaluation.inference.generate.slots import BLOCK_TOKENS
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.startup import available_bytes
from gristmill.training.parallel.mesh import ALONE, Axis


@dataclass(frozen=True)
class BatchLimits:
    """sequences: of the running batch. prompt_tokens: of one pass over prompts; a longer prompt is a pass of its own.
    cache_blocks: of keys and values that all sequences together hold, BLOCK_TOKENS tokens each; None: no limit.
    drafting: of tokens that are guessed and read in one pass."""

    sequences: int
    prompt_tokens: int = 2048
    cache_blocks: int | None = None
    drafting: Drafting = NO_DRAFTS


def default_limits(
    causal_lm: CausalLM,
    sequences: int | None = None,
    drafting: Drafting = NO_DRAFTS,
    cache_bytes: int | None = None,
    ranks: Axis = ALONE,
) -> BatchLimits:
    """For the model's device: 32 sequences on a CPU, 256 on a GPU, and half of the memory that is free. cache_bytes: of
    keys and values on this rank. The ranks that hold the model together call this together and get the same.

    Where the memory of the cache does not follow its tokens, only as many sequences run as fit at the model's full
    length. Raises RecipeError where not one does, or less than a block."""
    token_bytes = causal_lm.slot_token_bytes()
    if drafting.model is not None:
        token_bytes += drafting.model.slot_token_bytes()
    is_cpu = causal_lm.device.type == "cpu"
    sequences, prompt_tokens = (sequences or 32, 2048) if is_cpu else (sequences or 256, 16_384)
    stated = cache_bytes is not None
    if cache_bytes is None:
        free_bytes = available_bytes() // ranks.size if is_cpu else torch.cuda.mem_get_info(causal_lm.device)[0]
        cache_bytes = free_bytes // 2
    tokens = _least(cache_bytes // max(1, token_bytes), ranks)
    if causal_lm.paged_cache:
        blocks = tokens // BLOCK_TOKENS
        if not blocks:
            raise RecipeError(f"a cache of {cache_bytes} bytes holds {tokens} tokens; give a larger --cache-gib")
        return BatchLimits(sequences, prompt_tokens, blocks, drafting)
    whole = tokens // causal_lm.sequence_length
    if stated and not whole:
        raise RecipeError(
            f"a cache of {cache_bytes} bytes holds {tokens} tokens, and a sequence may have "
            f"{causal_lm.sequence_length}; give a larger --cache-gib"
        )
    return BatchLimits(max(1, min(sequences, whole)), prompt_tokens, None, drafting)


def _least(number: int, ranks: Axis) -> int:
    """The least of all ranks' numbers, so that they make the same choices."""
    if ranks.size == 1:
        return number
    numbers = [0] * ranks.size
    dist.all_gather_object(numbers, number, group=ranks.group)
    return min(numbers)

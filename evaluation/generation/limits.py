"""How many sequences run at a time, and what a pass over prompts reads."""

from dataclasses import dataclass

import torch

from gristmill.evaluation.models.causal_lm import CausalLM


@dataclass(frozen=True)
class BatchLimits:
    """sequences: of the running batch. prompt_tokens: of one pass over prompts; a longer prompt is a pass of its own.
    cache_bytes: of keys and values on this rank; None: no limit."""

    sequences: int
    prompt_tokens: int = 2048
    cache_bytes: int | None = None

    def slots(self, causal_lm: CausalLM) -> int:
        """Sequences that fit the cache at the model's sequence length, at least one."""
        each = causal_lm.slot_token_bytes() * causal_lm.sequence_length
        if self.cache_bytes is None or not each:
            return self.sequences
        return max(1, min(self.sequences, self.cache_bytes // each))


def default_limits(causal_lm: CausalLM, sequences: int | None = None) -> BatchLimits:
    """For the model's device: 32 sequences and 4 GiB of cache on a CPU, 256 and half of the free memory on a GPU."""
    if causal_lm.device.type == "cpu":
        return BatchLimits(sequences or 32, cache_bytes=4 << 30)
    free_bytes, _ = torch.cuda.mem_get_info(causal_lm.device)
    return BatchLimits(sequences or 256, prompt_tokens=16_384, cache_bytes=free_bytes // 2)

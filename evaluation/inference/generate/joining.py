"""Sequences that join the running batch: which of those that wait are read in one pass over prompts, and its rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.generate.sequence import RunningSequence
from gristmill.evaluation.inference.generate.slots import MIN_SHARED_TOKENS, Slots, blocks_of, common_prefix
from gristmill.training.model.decoding_cache import SlotRows

# B rows, T tokens

# Of a pass over several prompts that are padded to one length. On a CPU padding never pays: one prompt fills the core,
# and without padding half of the scores need not be computed (5 to 10 % less time on the loads of benchmarks/serve.py).
MIN_FILL = {"cpu": 1.0}
MIN_FILL_ELSEWHERE = 0.8
SMALL_PASS_TOKENS = 256  # up to here padding costs less than another reading of the weights


@dataclass(frozen=True)
class JoiningSequence:
    """A sequence whose prompt is read next, with what it had generated when it lost its memory, and the slot that has
    the first `shared` tokens."""

    sequence: RunningSequence
    prompt: np.ndarray
    shared_with: int
    shared: int

    @property
    def tokens(self) -> int:
        return len(self.prompt) - self.shared

    @property
    def blocks(self) -> int:
        return blocks_of(first_columns(self.sequence))


def first_columns(sequence: RunningSequence) -> int:
    """Columns that a sequence needs to be read and to get its next token."""
    return min(sequence.length + 1, len(sequence.tokens))


def joining_sequence(sequence: RunningSequence, slots: Slots) -> JoiningSequence:
    prompt = sequence.text_tokens
    slot, shared = (0, 0) if sequence.reads_whole_prompt else slots.longest_prefix(prompt)
    return JoiningSequence(sequence, prompt, slot, shared)


def next_to_join(
    waiting: Sequence[RunningSequence], slots: Slots, causal_lm: CausalLM, prompt_tokens: int
) -> list[JoiningSequence]:
    """The first request that waits, and others whose prompts are read in the same pass at little cost: of about the
    same length where padding costs, and not continuing a prompt of this pass. prompt_tokens: of the pass, with
    padding where it costs."""
    candidates = [waiting[index] for index in range(min(slots.free, len(waiting)))]
    first, *others = (joining_sequence(sequence, slots) for sequence in candidates)
    chosen, different, tokens = [first], {first.prompt.tobytes()}, [first.tokens]
    blocks = first.blocks
    skips_padding = causal_lm.skips_padding
    fill = MIN_FILL.get(causal_lm.device.type, MIN_FILL_ELSEWHERE)
    for joining in others:
        if not slots.fits(blocks + joining.blocks):
            continue
        if joining.prompt.tobytes() in different and joining.shared == 0 and first.shared == 0:
            chosen.append(joining)
            blocks += joining.blocks
            continue
        needed = sum(tokens) + joining.tokens
        padded = max(*tokens, joining.tokens) * (len(tokens) + 1)
        is_full = (needed if skips_padding else padded) > prompt_tokens
        wastes = not skips_padding and padded > SMALL_PASS_TOKENS and needed < fill * padded
        if is_full or wastes or (joining.shared > 0) != (first.shared > 0) or _shares(joining, chosen, slots):
            continue
        chosen.append(joining)
        blocks += joining.blocks
        different.add(joining.prompt.tobytes())
        tokens.append(joining.tokens)
    return chosen


def _shares(joining: JoiningSequence, chosen: Iterable[JoiningSequence], slots: Slots) -> bool:
    """Whether it is better to wait until the prompts of this pass are in the cache."""
    if not slots.keeps_prefixes or joining.sequence.reads_whole_prompt:
        return False
    longest = max(common_prefix(joining.prompt, other.prompt) for other in chosen)
    return longest >= max(MIN_SHARED_TOKENS, 2 * joining.shared)


def prompt_rows(
    distinct: Sequence[JoiningSequence], slots: list[int], starts: Sequence[int], last_only: bool, device: torch.device
) -> tuple[np.ndarray, SlotRows]:
    """(tokens int64[B, T], rows) of a pass over the prompts without what they share, padded on the left. starts: tokens
    of each that are in its slot already. last_only: only the hidden states of the last tokens are needed."""
    first = slots[0]
    width = max(len(joining.prompt) - start for joining, start in zip(distinct, starts, strict=True))
    tokens_BT = np.zeros((len(distinct), width), dtype=np.int64)
    positions_BT = np.full((len(distinct), width), -1, dtype=np.int64)
    for row, (joining, start) in enumerate(zip(distinct, starts, strict=True)):
        own = len(joining.prompt) - start
        tokens_BT[row, width - own :] = joining.prompt[start:]
        positions_BT[row, width - own :] = np.arange(start, len(joining.prompt))
    rows = SlotRows(
        torch.tensor(slots, device=device),
        torch.from_numpy(positions_BT).to(device),
        max(len(joining.prompt) for joining in distinct),
        fresh=not any(starts),
        padded=bool((positions_BT < 0).any()),
        in_order=first == 0 and slots == list(range(len(slots))),
        last_only=last_only,
        first=first if slots == list(range(first, first + len(slots))) else None,
    )
    return tokens_BT, rows

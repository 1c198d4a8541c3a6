"""Prompts of the running batch: which of the waiting sequences join it in one pass over prompts; prompts that are read
in parts beside running sequences; and the log-probabilities of the tokens of a prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.generate.generation_request import TokenLogprob
from gristmill.evaluation.inference.generate.sequence import RunningSequence, log_softmax, top_logprobs
from gristmill.evaluation.inference.generate.slots import MIN_SHARED_TOKENS, Slots, blocks_of, common_prefix
from gristmill.evaluation.inference.local_causal_lm import DividedPass, LocalCausalLM
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


# Prompts that are read in parts: which one is next, and how much of it a step reads. A part is a few tokens, for each
# of them costs a look at all tokens before; and it may pass through the model's layers in several steps, since fewer
# tokens through all layers would read the weights and the cache once for each.

PART_TOKENS = 64  # of a part that passes through the layers in several steps
MIN_PART_TOKENS = 8
MAX_PROMPTS = 4  # that are read in parts at a time


def part_size(prompt_tokens: float, layers: int) -> tuple[int, int]:
    """(tokens of the next part, layers it passes in a step) where a step may read so many tokens of prompts.

    16 tokens through 6 layers are 96 of one layer: 48 tokens through 2 layers."""
    if prompt_tokens >= PART_TOKENS or layers == 1:
        return max(1, int(prompt_tokens)), layers
    passes = max(float(MIN_PART_TOKENS), prompt_tokens * layers)  # of one token through one layer
    count = -int(-passes // PART_TOKENS)
    return int(passes / count), count


@dataclass(eq=False)
class PromptInParts:
    """part: of the prompt, while it passes through the layers; it ends before token `end`."""

    sequence: RunningSequence
    part: DividedPass | None = None
    end: int = 0


class PromptParts:
    """Prompts of the running batch that are read in parts. The oldest and the shortest take turns."""

    def __init__(self, causal_lm: LocalCausalLM):
        self.causal_lm = causal_lm
        self.prompts: list[PromptInParts] = []
        self._oldest_is_next = True

    def __contains__(self, sequence: object) -> bool:
        return any(prompt.sequence is sequence for prompt in self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def add(self, sequence: RunningSequence) -> None:
        self.prompts.append(PromptInParts(sequence))

    def remove(self, sequences: Iterable[RunningSequence]) -> None:
        gone = set(sequences)
        self.prompts = [prompt for prompt in self.prompts if prompt.sequence not in gone]

    def in_turn(self, slot_of: dict[RunningSequence, int], slots: Slots) -> list[PromptInParts]:
        """The prompts, the oldest first or the shortest."""
        self._oldest_is_next = not self._oldest_is_next
        if self._oldest_is_next:
            return list(self.prompts)

        def missing(prompt: PromptInParts) -> int:
            return prompt.sequence.length - slots[slot_of[prompt.sequence]].cached

        return sorted(self.prompts, key=missing)

    def read(self, prompt: PromptInParts, slot: int, slots: Slots, prompt_tokens: float) -> tuple[float, Tensor | None]:
        """Reads about so many tokens. Returns how many, where those through some of the layers count in proportion,
        and the hidden state [1, 1, D] of the prompt's last token once it has passed all layers."""
        sequence, layers = prompt.sequence, self.causal_lm.layer_count
        start = slots[slot].cached
        if prompt.part is None:
            size, _ = part_size(prompt_tokens, layers)
            prompt.end = slots[slot].written = min(start + size, sequence.length)
            tokens_1T = torch.from_numpy(sequence.tokens[None, start : prompt.end])
            prompt.part = DividedPass(tokens_1T.to(self.causal_lm.device))
        size = prompt.end - start
        done = prompt.part.layers_done
        count = min(max(1, int(prompt_tokens * layers / size)), layers - done)
        rows = _part_rows(slot, start, prompt.end, self.causal_lm.device)
        hidden_BTD = self.causal_lm.read_some(prompt.part, rows, slots.cache, count)
        if hidden_BTD is not None:
            prompt.part, slots[slot].cached = None, prompt.end
        is_last = prompt.end == sequence.length
        return size * count / layers, hidden_BTD if is_last else None


def _part_rows(slot: int, start: int, end: int, device: torch.device) -> SlotRows:
    return SlotRows(
        torch.tensor([slot], device=device),
        torch.arange(start, end, device=device).unsqueeze(0),
        end,
        fresh=start == 0,
        padded=False,
        in_order=slot == 0,
        last_only=True,
        first=slot,
    )


# Log-probabilities of the tokens of a prompt.

# B rows, N positions, T tokens, D width, V rows of the table

LOGIT_CELLS = 1 << 22  # logits of a prompt that are computed at a time


def logits_of(causal_lm: CausalLM, hidden_ND: Tensor) -> Tensor:
    """Logits [N, V] in float32 or better."""
    logits_NV = causal_lm.head(hidden_ND)
    return logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()


def prompt_logprobs(causal_lm: CausalLM, hidden_TD: Tensor, prompt: np.ndarray, top: int) -> tuple[TokenLogprob, ...]:
    """Those of every token, None for the first. hidden: of the whole prompt."""
    scored = [TokenLogprob(int(prompt[0]), None)]
    size = max(1, LOGIT_CELLS // causal_lm.vocab_size)
    for first in range(0, len(prompt) - 1, size):
        end = min(first + size, len(prompt) - 1)
        logits_NV = logits_of(causal_lm, hidden_TD[first:end]).cpu().numpy()
        for logits_V, token in zip(logits_NV, prompt[first + 1 : end + 1].tolist(), strict=True):
            logprobs_V = log_softmax(logits_V)[: causal_lm.vocab_size]
            scored.append(TokenLogprob(token, float(logprobs_V[token]), top_logprobs(logprobs_V, top)))
    return tuple(scored)


def score_prompts(
    causal_lm: CausalLM, chosen: Sequence[JoiningSequence], row_of: Sequence[int], hidden_BTD: Tensor
) -> None:
    """Log-probabilities of the tokens of prompts, where asked for."""
    scores: dict[tuple[int, int], tuple[TokenLogprob, ...]] = {}
    for joining, row in zip(chosen, row_of, strict=True):
        if not joining.sequence.wants_prompt_logprobs:
            continue
        key = row, joining.sequence.settings.logprobs or 0
        if key not in scores:
            hidden_TD = hidden_BTD[row, hidden_BTD.shape[1] - len(joining.prompt) :]
            scores[key] = prompt_logprobs(causal_lm, hidden_TD, joining.prompt, key[1])
        joining.sequence.prompt_logprobs = scores[key]

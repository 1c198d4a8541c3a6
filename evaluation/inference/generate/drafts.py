"""Speculative decoding: guessed tokens are read in one pass with the last token, and those that the model chooses stay.

A guess is one token, not a distribution: the model draws its own token at each place with the random numbers it has
without guesses, and the first that differs ends the guess. So the tokens are those of decoding one by one, greedy or
sampled, up to rounding (the acceptance rule of arXiv 2211.17192 for a draft that is certain)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gristmill.evaluation.inference.causal_lm import CausalLM, DecodingCache
from gristmill.evaluation.inference.generate.prefill import logits_of
from gristmill.evaluation.inference.generate.sequence import RunningSequence, choose_next
from gristmill.evaluation.inference.generate.slots import BLOCK_TOKENS, Slot, Slots
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.training.model.decoding_cache import SlotRows

# B rows, T tokens, D width, V vocabulary

LONGEST_NGRAM, SHORTEST_NGRAM = 3, 2
CATCH_UP_TOKENS = 64  # that the draft model reads of a sequence at a time
PASS_TOKENS = {"cpu": 32}  # of a pass with guesses: up to here a token costs much less than a pass of its own
GPU_PASS_TOKENS = 512


@dataclass(frozen=True)
class Drafting:
    """tokens: guessed of a sequence at a time; 0: none is. model: that guesses them; None: what followed the last
    tokens before in the sequence."""

    tokens: int = 0
    model: LocalCausalLM | None = None


NO_DRAFTS = Drafting()


class Drafts(Protocol):
    """propose: guesses for the sequences in some slots, at most `counts` tokens each, by slot."""

    def propose(self, slots: Slots, counts: dict[int, int]) -> dict[int, list[int]]: ...


def guess_counts(slots: Slots, remaining: dict[int, int], draft_tokens: int, device: torch.device) -> dict[int, int]:
    """Tokens to guess by slot: no more than the sequence may still get, fewer where guesses failed, and none where the
    batch is large enough by itself. remaining: tokens that each may get beside the next one."""
    width = PASS_TOKENS.get(device.type, GPU_PASS_TOKENS) // slots.running - 1
    return {slot: max(0, min(slots[slot].guesses, most, draft_tokens, width)) for slot, most in remaining.items()}


class NgramDrafts:
    """Guesses what followed the last tokens when they stood in the sequence before (prompt lookup)."""

    def propose(self, slots: Slots, counts: dict[int, int]) -> dict[int, list[int]]:
        return {
            slot: ngram_draft(slots[slot].tokens[: slots[slot].cached + 1], count) for slot, count in counts.items()
        }


def ngram_draft(tokens: np.ndarray, count: int) -> list[int]:
    """Up to `count` tokens behind the latest earlier place of the last three tokens, else of the last two.

    [1, 2, 3, 4, 1, 2, 3] -> [4, 1, 2, 3]."""
    for length in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
        if count <= 0 or len(tokens) <= length:
            continue
        places = np.flatnonzero(tokens[length - 1 : -1] == tokens[-1])
        for back in range(2, length + 1):
            places = places[tokens[places + length - back] == tokens[-back]]
        if len(places):
            first = int(places[-1]) + length
            return [int(token) for token in tokens[first : first + count]]
    return []


class ModelDrafts:
    """Guesses the likeliest tokens under a smaller model of the same vocabulary. Its cache has the slots of the other
    model's, which `Slots` keeps in step."""

    def __init__(self, causal_lm: LocalCausalLM, slots: int):
        self.causal_lm, self.cache = causal_lm, causal_lm.new_cache(slots)

    def propose(self, slots: Slots, counts: dict[int, int]) -> dict[int, list[int]]:
        missing = {}
        for slot, count in counts.items():
            first, length = min(slots[slot].drafted, slots[slot].cached), slots[slot].cached + 1
            if count and length + count <= self.causal_lm.sequence_length:
                missing[slot] = slots[slot].tokens[first : min(length, first + CATCH_UP_TOKENS)]
                slots[slot].drafted = first
        drafts: dict[int, list[int]] = {slot: [] for slot in counts}
        while missing:
            tokens_B = self._read(slots, missing)
            behind = {slot for slot in missing if slots[slot].drafted <= slots[slot].cached}
            for slot in missing.keys() - behind:
                drafts[slot].append(tokens_B[slot])
            ahead = [slot for slot in missing if slot not in behind and len(drafts[slot]) < counts[slot]]
            missing = {slot: np.array(drafts[slot][-1:]) for slot in ahead}
        return drafts

    @torch.inference_mode()
    def _read(self, slots: Slots, tokens: dict[int, np.ndarray]) -> list[int]:
        """Reads the next tokens of some slots; the likeliest next token of every running slot."""
        width = max(map(len, tokens.values()))
        tokens_BT = np.zeros((slots.running, width), dtype=np.int64)
        positions_BT = np.full((slots.running, width), -1, dtype=np.int64)
        for slot, new in tokens.items():
            first = slots[slot].drafted
            tokens_BT[slot, width - len(new) :] = new
            positions_BT[slot, width - len(new) :] = np.arange(first, first + len(new))
            slots[slot].drafted = first + len(new)
        device = self.causal_lm.device
        rows = SlotRows.of_batch(torch.from_numpy(positions_BT), device)
        hidden_BTD = self.causal_lm.read(torch.from_numpy(tokens_BT).to(device), rows, self.cache)
        tokens_B: Sequence[int] = (
            self.causal_lm.head(hidden_BTD[:, -1])[:, : self.causal_lm.vocab_size].argmax(dim=1).tolist()
        )
        return list(tokens_B)


class Speculation:
    """Guesses for the sequences of a batch, and how many were right. drafts, cache: of what guesses, and of the draft
    model; None where there is none."""

    def __init__(self, causal_lm: CausalLM, drafting: Drafting, slots: int):
        self.causal_lm, self.draft_tokens = causal_lm, drafting.tokens
        self.guessed_tokens = self.accepted_tokens = 0
        self.drafts: Drafts | None = None
        self.cache: DecodingCache | None = None
        if drafting.tokens and causal_lm.reads_trees:
            self.drafts = NgramDrafts()
            if drafting.model is not None:
                self.drafts = ModelDrafts(drafting.model, slots)
                self.cache = self.drafts.cache

    def propose(self, slots: Slots, remaining: dict[int, int]) -> dict[int, list[int]]:
        """Guesses by slot. remaining: tokens that each may get beside the next one."""
        if self.drafts is None:
            return {}
        counts = guess_counts(slots, remaining, self.draft_tokens, self.causal_lm.device)
        for slot, count in counts.items():  # no other sequence gives its memory for a guess
            if not slots.reserve(slot, slots[slot].cached + 1 + count):
                counts[slot] = min(count, slots[slot].blocks * BLOCK_TOKENS - slots[slot].cached - 1)
        return self.drafts.propose(slots, counts) if any(counts.values()) else {}

    def verify(
        self, slots: Slots, live: dict[int, RunningSequence], drafts: dict[int, list[int]], hidden_BTD: Tensor
    ) -> None:
        """The model's own tokens at each place of the guesses, until the first that differs. live: by slot."""
        width, place = hidden_BTD.shape[1], 0
        going = {slot: width - 1 - len(drafts.get(slot, [])) for slot in live}  # column of the place
        while going:
            hidden_BD = hidden_BTD[list(going), [column + place for column in going.values()]]
            logits_BV = logits_of(self.causal_lm, hidden_BD)[:, : self.causal_lm.vocab_size]
            choose_next([live[slot] for slot in going], logits_BV)
            for slot in list(going):
                sequence, draft, kept = live[slot], drafts.get(slot, []), slots[slot]
                kept.cached += 1
                agrees = place < len(draft) and not sequence.done and kept.tokens[kept.cached] == draft[place]
                if not agrees:
                    del going[slot]
                    self._count_guesses(kept, len(draft), place)
                    slots.trim(slot, kept.cached)
            place += 1

    def _count_guesses(self, slot: Slot, guessed: int, accepted: int) -> None:
        """The next guess is longer where all of this one was right, shorter where none was."""
        self.guessed_tokens += guessed
        self.accepted_tokens += accepted
        if guessed and accepted == guessed:
            slot.guesses = min(2 * slot.guesses, self.draft_tokens)
        elif guessed and not accepted:
            slot.guesses = max(1, slot.guesses // 2)

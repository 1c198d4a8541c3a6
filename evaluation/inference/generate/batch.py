"""Continuous batching: requests join a running batch when a slot is free and leave it when they end.

A step reads the prompts of requests that join, in passes of their own, then one token of every sequence. A prompt that
is longer than a step may read is read in parts, one in each step, while the others go on."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.generate.drafts import Speculation
from gristmill.evaluation.inference.generate.generation_request import GenerationRequest, PieceStream, RequestResult
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.prefill import (
    MAX_PROMPTS,
    SMALL_PASS_TOKENS,
    JoiningSequence,
    PromptInParts,
    PromptParts,
    first_columns,
    joining_sequence,
    logits_of,
    next_to_join,
    prompt_rows,
    score_prompts,
)
from gristmill.evaluation.inference.generate.sequence import (
    RequestJob,
    RunningSequence,
    TokenDecoder,
    candidate_stream,
    choose_next,
)
from gristmill.evaluation.inference.generate.slots import (
    BLOCK_TOKENS,
    MIN_SHARED_TOKENS,
    CacheUse,
    Slots,
    blocks_of,
    common_prefix,
)
from gristmill.evaluation.inference.generate.structured import GrammarTokenizer
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.foundation.errors import InputError
from gristmill.training.model.decoding_cache import SlotRows

# B rows, T tokens, D width, V vocabulary, N positions


class ContinuousBatch:
    """One thread calls its methods. Of a sharded model, every rank makes the same calls in the same order. clock:
    seconds, in which prompt_seconds and decode_seconds count what steps took."""

    def __init__(
        self,
        causal_lm: CausalLM,
        decoder: TokenDecoder,
        limits: BatchLimits,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.causal_lm, self.decoder, self.limits, self._clock = causal_lm, decoder, limits, clock
        self.prompt_seconds = self.decode_seconds = 0.0
        count = limits.sequences
        self.speculation = Speculation(causal_lm, limits.drafting, count)
        self._slots = Slots(
            causal_lm.new_cache(count), count, causal_lm.reads_trees, self.speculation.cache, limits.cache_blocks
        )
        self._running: list[RunningSequence] = []  # by slot
        self._parts: PromptParts | None = None  # of prompts of those that run
        if isinstance(causal_lm, LocalCausalLM) and causal_lm.reads_trees:
            self._parts = PromptParts(causal_lm)
        self._part_is_next = False
        self._joined: list[PromptInParts] = []  # whose next parts are read with the next tokens
        self._waiting: deque[RunningSequence] = deque()
        self._jobs: dict[int, RequestJob] = {}
        self._job_of: dict[RunningSequence, RequestJob] = {}
        self._added = 0
        self._grammars = GrammarTokenizer(decoder)
        self.read_tokens = 0.0  # that passes computed: less than was asked where prefixes are shared
        self.read_prompt_tokens = 0.0  # of them those of prompts, with padding
        self.preemptions = 0

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence that the model and the cache hold."""
        length = self.causal_lm.sequence_length
        blocks = self.limits.cache_blocks
        return length if blocks is None else min(length, blocks * BLOCK_TOKENS)

    @property
    def embedding_width(self) -> int | None:
        """Numbers of a hidden state; None where the model gives logits alone."""
        return self.causal_lm.model.config.width if isinstance(self.causal_lm, LocalCausalLM) else None

    @property
    def cache_use(self) -> CacheUse:
        return CacheUse(self._slots.used_blocks, self.limits.cache_blocks, self._slots.evicted_blocks, self.preemptions)

    def check(self, request: GenerationRequest) -> None:
        """Raises InputError unless the request fits the model and the cache."""
        length = self.causal_lm.sequence_length
        request.check(length, self.causal_lm.vocab_size)
        longest = min(len(request.prompt) + request.settings.max_new_tokens, length)
        if longest > self.sequence_length:
            new = longest - len(request.prompt)
            raise InputError(
                f"the prompt's {len(request.prompt)} tokens and {new} new ones do not fit the cache of "
                f"{self.sequence_length} tokens; ask for fewer (max_tokens), or give the server a larger --cache-gib"
            )

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    def running_numbers(self) -> set[int]:
        """Requests that have begun: a prompt of theirs was read, or was to be read when a step failed."""
        waiting = {sequence for sequence in self._waiting if sequence.length == sequence.prompt_length}
        return {job.number for job in self._jobs.values() if not waiting.issuperset(job.sequences)}

    def add(self, request: GenerationRequest, stream: PieceStream | None = None) -> int:
        """Queues a request; returns its number. Raises InputError if it does not fit the model and the cache.

        stream is called with (number of the candidate, new text, log-probabilities) as soon as no later token can
        change the text."""
        self.check(request)
        number, self._added = self._added, self._added + 1
        sequences = [
            RunningSequence(
                request,
                candidate,
                self.decoder,
                self.causal_lm.sequence_length,
                candidate_stream(stream, candidate),
                None if request.settings.grammar is None else self._grammars.matcher(request.settings.grammar),
            )
            for candidate in range(request.settings.candidates)
        ]
        job = self._jobs[number] = RequestJob(number, request, sequences)
        self._job_of |= dict.fromkeys(sequences, job)
        self._waiting += sequences
        return number

    @torch.inference_mode()
    def cancel(self, number: int) -> None:
        """Takes a request out of the batch. One that has ended already is not an error."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        for sequence in job.sequences:
            del self._job_of[sequence]
            if sequence in self._waiting:
                self._waiting.remove(sequence)
        if self._parts is not None:
            self._parts.remove(job.sequences)
        self._release([slot for slot, sequence in enumerate(self._running) if sequence in job.sequences])

    @torch.inference_mode()
    def step(self, prompt_tokens: float | None = None) -> list[RequestResult]:
        """Reads prompts that join and one token of every running sequence; returns the requests that ended.

        prompt_tokens: about so many tokens of prompts are read, of a longer one a part; tokens that pass through some
        of the layers count in proportion. None: all that have a slot. All ranks of a sharded model give the same."""
        ended: list[RunningSequence] = []
        self._joined = []
        begun = self._clock()
        if prompt_tokens is None:
            while self._parts or self._joins:
                if self._parts:
                    self._read_part(self._parts, float(self.causal_lm.sequence_length))
                else:
                    self._read_prompts(self._next_to_join(max(self.limits.prompt_tokens, SMALL_PASS_TOKENS)))
                ended += self._end_done()
        elif prompt_tokens > 0:
            if self._parts is not None and self.reads_together:
                self._join_pass(self._parts, max(1, int(prompt_tokens)))
            else:
                self._read_within(prompt_tokens)
            ended += self._end_done()
            if self.causal_lm.device.type == "cuda":
                torch.cuda.synchronize(self.causal_lm.device)
        prompts_read = self._clock()
        self._make_room()
        if self.decoding or self._joined:
            self._decode()
            ended += self._end_done()
        self.prompt_seconds += prompts_read - begun
        self.decode_seconds += self._clock() - prompts_read
        return self._results(ended)

    @property
    def reads_together(self) -> bool:
        """Whether a step that may read some tokens of prompts reads them in the pass that decodes."""
        return self._parts is not None and self.causal_lm.skips_padding and self.speculation.drafts is None

    @property
    def decoding(self) -> int:
        """Sequences that wait for their next token."""
        return len(self._running) - len(self._parts or ())

    @property
    def reading(self) -> int:
        """Sequences whose prompts can be read now: they have a slot, or one is free."""
        return len(self._parts or ()) + (min(len(self._waiting), self._slots.free) if self._joins else 0)

    @property
    def _joins(self) -> bool:
        """Whether the first that waits can be read now."""
        return bool(self._waiting and self._slots.free and self._slots.fits(blocks_of(first_columns(self._waiting[0]))))

    def _make_room(self) -> None:
        """Blocks for the next token of every running sequence.

        Where memory is short, the youngest lose theirs and wait; then they are read again, up to the last token they
        have, and go on with their own random numbers. The oldest never waits, and the whole cache is enough for it."""
        needy = [
            sequence
            for slot, sequence in enumerate(self._running)
            if blocks_of(self._slots[slot].cached + 1) > self._slots[slot].blocks
            and sequence not in (self._parts or ())
        ]
        for sequence in sorted(needy, key=self._age):
            while sequence in self._running:
                slot = self._running.index(sequence)
                if self._slots.reserve(slot, self._slots[slot].cached + 1):
                    break
                self._preempt(max(self._running, key=self._age))

    def _age(self, sequence: RunningSequence) -> tuple[int, int]:
        return self._job_of[sequence].number, sequence.candidate

    def _preempt(self, sequence: RunningSequence) -> None:
        """Takes a sequence out of the running batch. Its cache is kept until the memory is taken."""
        if self._parts is not None:
            self._parts.remove([sequence])
        self._release([self._running.index(sequence)])
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _read_within(self, prompt_tokens: float) -> None:
        """Reads prompts that fit so many tokens, or a part of a longer one; each in turn where there are both."""
        if self._parts and (self._part_is_next or len(self._parts) == MAX_PROMPTS or not self._may_join(self._parts)):
            self._read_part(self._parts, prompt_tokens)
            self._part_is_next = False
            return
        self._part_is_next, is_first = True, True
        while prompt_tokens > 0 and self._may_join(self._parts):
            first, *others = self._next_to_join(int(prompt_tokens))
            reads_parts = self._parts is not None and not first.sequence.reads_whole_prompt
            if first.tokens <= prompt_tokens or (is_first and not reads_parts):
                before = self.read_prompt_tokens
                self._read_prompts([first, *others])
                prompt_tokens -= self.read_prompt_tokens - before
                is_first = False
                continue
            self._waiting.extendleft(joining.sequence for joining in reversed(others))
            if not is_first or self._parts is None:
                self._waiting.appendleft(first.sequence)
                return
            self._claim(first)
            self._parts.add(first.sequence)
            self._read_part(self._parts, prompt_tokens)
            return

    def _join_pass(self, parts: PromptParts, prompt_tokens: int) -> None:
        """Chooses the prompts of which the pass that decodes reads a part, so many tokens in all. Those that have begun
        and those that wait come first in turn."""
        self._part_is_next = not self._part_is_next
        if self._part_is_next:
            prompt_tokens = self._join_begun(parts, prompt_tokens)
        unfinished = len(parts)
        while prompt_tokens > 0 and self._may_join(parts):
            joining = joining_sequence(self._waiting[0], self._slots)
            if joining.sequence.reads_whole_prompt:
                if self._joined and joining.tokens > prompt_tokens:
                    break
                self._waiting.popleft()
                self._read_prompts([joining])
                prompt_tokens -= joining.tokens
                continue
            unfinished += joining.tokens > prompt_tokens
            if unfinished > MAX_PROMPTS:
                break
            self._waiting.popleft()
            self._claim(joining)
            parts.add(joining.sequence)
            prompt_tokens -= self._join(parts.prompts[-1], prompt_tokens)
        if not self._part_is_next:
            self._join_begun(parts, prompt_tokens)

    def _join_begun(self, parts: PromptParts, prompt_tokens: int) -> int:
        """Adds prompts that have begun to the pass; returns the tokens that are left."""
        slot_of = {sequence: slot for slot, sequence in enumerate(self._running)}
        for prompt in parts.in_turn(slot_of, self._slots):
            if prompt_tokens > 0 and prompt not in self._joined:
                prompt_tokens -= self._join(prompt, prompt_tokens)
        return prompt_tokens

    def _join(self, prompt: PromptInParts, prompt_tokens: int) -> int:
        """Adds the next tokens of a prompt to the pass; returns how many."""
        slot = self._slots[self._running.index(prompt.sequence)]
        prompt.end = slot.written = min(slot.cached + prompt_tokens, prompt.sequence.length)
        self._joined.append(prompt)
        self.read_prompt_tokens += prompt.end - slot.cached
        return prompt.end - slot.cached

    def _may_join(self, parts: PromptParts | None) -> bool:
        """Whether the first that waits can be read beside prompts that are read in parts: it does not begin as one of
        those does."""
        if not self._joins:
            return False
        if not parts:
            return True
        joining = joining_sequence(self._waiting[0], self._slots)
        shared = max(common_prefix(joining.prompt, prompt.sequence.text_tokens) for prompt in parts.prompts)
        return shared < max(MIN_SHARED_TOKENS, joining.shared + 1)

    def _read_part(self, parts: PromptParts, prompt_tokens: float) -> None:
        """Reads the next tokens of a prompt; behind the last the sequence gets its first token."""
        prompt, *_ = parts.in_turn({sequence: slot for slot, sequence in enumerate(self._running)}, self._slots)
        sequence = prompt.sequence
        tokens, hidden_BTD = parts.read(prompt, self._running.index(sequence), self._slots, prompt_tokens)
        self.read_prompt_tokens += tokens
        self.read_tokens += tokens
        if hidden_BTD is not None:
            parts.remove([sequence])
            sequence.pool(hidden_BTD[0])
            choose_next([sequence], logits_of(self.causal_lm, hidden_BTD[:, -1])[:, : self.causal_lm.vocab_size])

    def _decode(self) -> None:
        """One token of every sequence, or more where they were guessed, and parts of prompts that join. The rows of
        other prompts that are read in parts are padding, as are places on the left of rows with fewer tokens."""
        count, device, slots = len(self._running), self.causal_lm.device, self._slots
        parts = self._parts or ()
        live = [slot for slot in range(count) if self._running[slot] not in parts]
        drafts = self.speculation.propose(slots, {slot: self._running[slot].remaining - 1 for slot in live})
        joined = {
            self._running.index(prompt.sequence): prompt for prompt in self._joined if prompt.sequence in parts
        }  # by slot
        rows: dict[int, Sequence[int] | np.ndarray] = {
            slot: [slots[slot].tokens[slots[slot].cached], *drafts.get(slot, ())] for slot in live
        }
        rows |= {slot: slots[slot].tokens[slots[slot].cached : prompt.end] for slot, prompt in joined.items()}
        width = max(map(len, rows.values()))
        positions_BT, tokens_BT = np.full((count, width), -1), np.zeros((count, width), dtype=np.int64)
        for slot, tokens in rows.items():
            cached = slots[slot].cached
            positions_BT[slot, width - len(tokens) :] = np.arange(cached, cached + len(tokens))
            tokens_BT[slot, width - len(tokens) :] = tokens
        slot_rows = SlotRows.of_batch(torch.from_numpy(positions_BT), device, slots.shared_prefixes(live))
        if joined:
            slot_rows = replace(slot_rows, last_only=True)
        hidden_BTD = self._read(torch.from_numpy(tokens_BT).to(device), slot_rows)
        if drafts:
            self.speculation.verify(slots, {slot: self._running[slot] for slot in live}, drafts, hidden_BTD)
            return
        for slot, tokens in rows.items():
            slots[slot].cached += len(tokens)
        read = [slot for slot, prompt in joined.items() if prompt.end == prompt.sequence.length]
        if self._parts is not None:
            self._parts.remove([joined[slot].sequence for slot in read])
        for slot in read:
            self._running[slot].pool(hidden_BTD[slot])
        live = sorted([*live, *read])
        if not live:
            return
        logits_BV = logits_of(self.causal_lm, hidden_BTD[:, -1] if len(live) == count else hidden_BTD[live, -1])
        choose_next([self._running[slot] for slot in live], logits_BV[:, : self.causal_lm.vocab_size])

    def _next_to_join(self, prompt_tokens: int) -> list[JoiningSequence]:
        chosen = next_to_join(self._waiting, self._slots, self.causal_lm, prompt_tokens)
        taken = {id(joining.sequence) for joining in chosen}
        self._waiting = deque(sequence for sequence in self._waiting if id(sequence) not in taken)
        return chosen

    def _read_prompts(self, chosen: list[JoiningSequence]) -> None:
        """One pass over the prompts, each distinct one once; every sequence gets its first token."""
        places: dict[bytes, int] = {}
        row_of = [places.setdefault(joining.prompt.tobytes(), len(places)) for joining in chosen]
        first_of = [row_of.index(row) for row in range(len(places))]
        slots = [self._claim(joining) for joining in chosen]
        last_only = not any(joining.sequence.reads_whole_prompt for joining in chosen)
        hidden_BTD = self._pass([chosen[index] for index in first_of], [slots[index] for index in first_of], last_only)
        for index, (row, slot) in enumerate(zip(row_of, slots, strict=True)):
            source = slots[first_of[row]]
            if source != slot:
                self._slots.cache.copy(source, slot, len(chosen[index].prompt))
            self._slots[slot].cached = len(chosen[index].prompt)
        if len(places) < len(chosen):
            self._slots.cache.select([*range(slots[0]), *(slots[0] + row for row in row_of)])
        score_prompts(self.causal_lm, chosen, row_of, hidden_BTD)
        for joining, row in zip(chosen, row_of, strict=True):
            joining.sequence.pool(hidden_BTD[row, -len(joining.prompt) :])
        if all(joining.sequence.done for joining in chosen):
            return
        logits_BV = logits_of(self.causal_lm, hidden_BTD[:, -1])[row_of, : self.causal_lm.vocab_size]
        choose_next([joining.sequence for joining in chosen], logits_BV)

    def _claim(self, joining: JoiningSequence) -> int:
        shared_with, shared = joining.shared_with, joining.shared
        if shared:  # the slots before may have moved it
            shared_with, shared = self._slots.longest_prefix(joining.prompt)
        slot = self._slots.claim(joining.sequence.tokens, first_columns(joining.sequence), shared_with, shared)
        self._running.append(joining.sequence)
        return slot

    def _pass(self, distinct: list[JoiningSequence], slots: list[int], last_only: bool) -> Tensor:
        """Hidden states [B, T, D] of the prompts without what they share, padded on the left; or at least the last."""
        device, starts = self.causal_lm.device, [self._slots[slot].cached for slot in slots]
        tokens_BT, rows = prompt_rows(distinct, slots, starts, last_only, device)
        read = sum(len(joining.prompt) - start for joining, start in zip(distinct, starts, strict=True))
        self.read_prompt_tokens += read if self.causal_lm.skips_padding else tokens_BT.size
        return self._read(torch.from_numpy(tokens_BT).to(device), rows)

    def _read(self, tokens_BT: Tensor, rows: SlotRows) -> Tensor:
        self.read_tokens += tokens_BT.numel()
        return self.causal_lm.read(tokens_BT, rows, self._slots.cache)

    def _end_done(self) -> list[RunningSequence]:
        """Takes out the sequences that have all their tokens; one that wants none, once its prompt is read."""
        parts = self._parts or ()
        ended = [slot for slot, sequence in enumerate(self._running) if sequence.done and sequence not in parts]
        sequences = [self._running[slot] for slot in ended]
        for slot in ended:
            if self._running[slot].error is not None:
                self._slots.clear(slot)
        self._release(ended)
        return sequences

    def _release(self, slots: list[int]) -> None:
        if slots:
            self._running = [self._running[slot] for slot in self._slots.release(slots)]

    def _results(self, ended: Iterable[RunningSequence]) -> list[RequestResult]:
        results = []
        for sequence in ended:
            job = self._job_of.get(sequence)
            if job is None or not (sequence.error or all(other.done for other in job.sequences)):
                continue
            results.append(job.result())
            self.cancel(job.number)
        return results

"""Batched text generation with a KV cache, greedy or sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from gristmill.evaluation.config import SamplingConfig
from gristmill.evaluation.models.causal_lm import CausalLM
from gristmill.foundation.errors import InputError

# B rows, T tokens, S tokens before them and they, V vocabulary

GREEDY = SamplingConfig()
TextStream = Callable[[int, str], None]  # called with (prompt index, new text)


class Decoder(Protocol):
    end_of_document: int

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class GenerationSettings:
    """max_new_tokens: of one continuation. stops: a continuation ends before the first of these strings."""

    max_new_tokens: int
    sampling: SamplingConfig = GREEDY
    stops: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A continuation without its prompt. text ends before the stop string; tokens: all that were generated,
    without the end-of-document token. ended: by that token, by a stop string, or at the maximum length."""

    tokens: tuple[int, ...]
    text: str
    ended: Literal["document", "stop", "length"]


def generate(
    causal_lm: CausalLM,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    batch_tokens: int = 8192,
    stream: TextStream | None = None,
) -> list[Generation]:
    """One continuation for each prompt, in order; independent of the other prompts of the batch, up to rounding.

    `stream` is called as soon as no later token can change the text. A prompt as long as the model's sequence length
    raises InputError; a shorter one is continued up to that length."""
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < causal_lm.sequence_length:
            raise InputError(
                f"prompt {index} has {len(prompt)} tokens; the model takes 1 to {causal_lm.sequence_length - 1}: "
                "shorten it"
            )
    found: dict[int, Generation] = {}
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    while order:
        batch_size = max(1, batch_tokens // (len(prompts[order[0]]) + settings.max_new_tokens))
        batch, order = order[:batch_size], order[batch_size:]
        generation_rows = [_Row(index, decoder, settings, stream) for index in batch]
        _decode_batch(causal_lm, [prompts[index] for index in batch], generation_rows, settings.max_new_tokens)
        found.update({row.index: row.result() for row in generation_rows})
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def _decode_batch(
    causal_lm: CausalLM, prompts: Sequence[Sequence[int]], rows: Sequence["_Row"], max_new_tokens: int
) -> None:
    """Generates all continuations of a batch. Prompts are padded on the left, so that all rows end at one column."""
    longest = max(len(prompt) for prompt in prompts)
    padding_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=causal_lm.device)
    tokens_BT = torch.zeros((len(prompts), longest), dtype=torch.long, device=causal_lm.device)
    for index, prompt in enumerate(prompts):
        tokens_BT[index, longest - len(prompt) :] = torch.as_tensor(prompt)
        rows[index].seen.update(prompt)
    state = None
    steps = min(max_new_tokens, causal_lm.sequence_length - min(len(prompt) for prompt in prompts))
    for step in range(steps):
        first = 0 if step == 0 else longest + step - 1
        positions_BT, visible_BTS = _positions_and_mask(
            padding_B, first, first + tokens_BT.shape[1], causal_lm.sequence_length
        )
        hidden_BTD, state = causal_lm.extend(tokens_BT, positions_BT, visible_BTS, state)
        logits_BV = causal_lm.head(hidden_BTD[:, -1]).double().cpu().numpy()
        for index, row in enumerate(rows):
            row.add_token(logits_BV[index], full=len(prompts[index]) + step + 1 >= causal_lm.sequence_length)
        if all(row.done for row in rows):
            return
        tokens_BT = torch.tensor([[row.last] for row in rows], device=causal_lm.device)


def _positions_and_mask(
    padding_B: torch.Tensor, first: int, end: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions_BT, visible_BTS) of the columns first..end-1: padding on the left has no position and is not seen.

    Each column sees itself, padding too: an empty softmax is not a number. A full row waits at the last place."""
    columns_T = torch.arange(first, end, device=padding_B.device)
    columns_S = torch.arange(end, device=padding_B.device)
    positions_BT = (columns_T[None] - padding_B[:, None]).clamp(0, context - 1)
    causal_TS = columns_S[None] <= columns_T[:, None]
    itself_TS = columns_S[None] == columns_T[:, None]
    visible_BTS = (causal_TS[None] & (columns_S[None, None] >= padding_B[:, None, None])) | itself_TS[None]
    return positions_BT, visible_BTS


class _Row:
    """One sequence of a batch: samples tokens, detects its end, streams text that later tokens cannot change."""

    def __init__(
        self,
        index: int,
        decoder: Decoder,
        settings: GenerationSettings,
        stream: TextStream | None,
    ):
        self.index, self.decoder, self.stream = index, decoder, stream
        self.sampling, self.stops = settings.sampling, settings.stops
        self.rng = np.random.default_rng([settings.sampling.seed, index])
        self.tokens: list[int] = []
        self.seen: set[int] = set()
        self.text = ""
        self.streamed = 0
        self.ended: Literal["document", "stop", "length"] = "length"
        self.done = False

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.decoder.end_of_document

    def add_token(self, logits_V: np.ndarray, full: bool) -> None:
        """Samples one token, unless this row has ended."""
        if self.done:
            return
        token = sample_token(logits_V, self.sampling, self.seen, self.rng)
        if token == self.decoder.end_of_document:
            self.ended, self.done = "document", True
        else:
            self.tokens.append(token)
            self.seen.add(token)
            self.text = self.decoder.decode(self.tokens)
            starts = [start for start in map(self.text.find, self.stops) if start >= 0]
            if starts:
                self.text, self.ended, self.done = self.text[: min(starts)], "stop", True
        self.done = self.done or full
        self._flush()

    def _flush(self) -> None:
        """Streams the text that later tokens cannot change: without its last characters if a stop string may begin
        there."""
        if self.stream is None:
            return
        held = 0 if self.done else max([len(stop) for stop in self.stops] + [4])
        settled = self.text[self.streamed : len(self.text) - held]
        if settled:
            self.stream(self.index, settled)
            self.streamed += len(settled)

    def result(self) -> Generation:
        self.done = True
        self._flush()
        return Generation(tuple(self.tokens), self.text, self.ended)


def sample_token(logits_V: np.ndarray, sampling: SamplingConfig, seen: set[int], rng: np.random.Generator) -> int:
    """The next token. Penalty, temperature, top-k and top-p in the order of transformers; equal logits: lowest id.

    logits [2, 1, -1], penalty 2 on tokens 0 and 2 -> [1, 1, -2]: token 0 of the two equals."""
    logits = np.array(logits_V, dtype=np.float64)
    if not np.isfinite(logits).all():
        raise InputError("the model's logits are not numbers (NaN or infinity): the checkpoint is broken or diverged")
    if sampling.repetition_penalty != 1.0 and seen:
        ids = np.fromiter(seen, dtype=np.int64)
        logits[ids] = np.where(
            logits[ids] < 0, logits[ids] * sampling.repetition_penalty, logits[ids] / sampling.repetition_penalty
        )
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    kept, weights = candidates(logits / sampling.temperature, sampling)
    return int(kept[min(np.searchsorted(np.cumsum(weights), rng.random(), side="right"), len(kept) - 1)])


def candidates(logits_V: np.ndarray, sampling: SamplingConfig) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, their probabilities) after top-k and top-p, most likely first; at least one.

    top-p takes the likeliest tokens until their probabilities reach it: 0.5, 0.3, 0.2 and top_p 0.6 -> 0.625, 0.375."""
    order = np.argsort(-logits_V, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = np.exp(logits_V[kept] - logits_V[kept[0]])
    weights /= weights.sum()
    if sampling.top_p is not None:
        inside = np.cumsum(weights) - weights < sampling.top_p
        kept, weights = kept[inside], weights[inside]
    return kept, weights / weights.sum()

"""Continuations of prompts: batched, with a key/value cache, greedy or sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from gristmill.evaluation.config import SamplingConfig
from gristmill.evaluation.models.backbone import Backbone
from gristmill.foundation.errors import InputError

# B rows, T tokens, S tokens before them and they, V vocabulary

GREEDY = SamplingConfig()


class Decoder(Protocol):
    end_of_document: int

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Generated:
    """A continuation without its prompt. text ends before the stop string; tokens are all that were drawn, the
    end-of-document token left out. ended: by that token, by a stop string, or because the length was reached."""

    tokens: tuple[int, ...]
    text: str
    ended: Literal["document", "stop", "length"]


def generate(
    backbone: Backbone,
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: SamplingConfig = GREEDY,
    stops: Sequence[str] = (),
    batch_tokens: int = 8192,
    stream: Callable[[int, str], None] | None = None,
) -> list[Generated]:
    """One continuation a prompt, in order; the same whatever is generated beside it, up to rounding.

    `stream` is told (prompt index, new text) as soon as the text is settled. A prompt that fills the context raises
    InputError; one that nearly does is continued until the context is full."""
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < backbone.sequence_length:
            raise InputError(
                f"prompt {index} has {len(prompt)} tokens; the model takes 1 to {backbone.sequence_length - 1}: "
                "shorten it"
            )
    found: dict[int, Generated] = {}
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    while order:
        rows = max(1, batch_tokens // (len(prompts[order[0]]) + new_tokens))
        lot, order = order[:rows], order[rows:]
        writers = [_Writer(index, decoder, sampling, stops, stream) for index in lot]
        _write(backbone, [prompts[index] for index in lot], writers, new_tokens)
        found.update({writer.index: writer.result() for writer in writers})
    return [found[index] for index in range(len(prompts))]


@torch.inference_mode()
def _write(backbone: Backbone, prompts: Sequence[Sequence[int]], writers: Sequence["_Writer"], new_tokens: int) -> None:
    """Continues all prompts of a batch. Prompts stand flush right, so that all rows write at the same place."""
    longest = max(len(prompt) for prompt in prompts)
    padding_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=backbone.device)
    tokens_BT = torch.zeros((len(prompts), longest), dtype=torch.long, device=backbone.device)
    for index, prompt in enumerate(prompts):
        tokens_BT[index, longest - len(prompt) :] = torch.as_tensor(prompt)
        writers[index].seen.update(prompt)
    state = None
    steps = min(new_tokens, backbone.sequence_length - min(len(prompt) for prompt in prompts))
    for step in range(steps):
        first = 0 if step == 0 else longest + step - 1
        positions_BT, visible_BTS = _places(padding_B, first, first + tokens_BT.shape[1], backbone.sequence_length)
        hidden_BTD, state = backbone.extend(tokens_BT, positions_BT, visible_BTS, state)
        logits_BV = backbone.head(hidden_BTD[:, -1]).double().cpu().numpy()
        for index, writer in enumerate(writers):
            writer.write(logits_BV[index], full=len(prompts[index]) + step + 1 >= backbone.sequence_length)
        if all(writer.done for writer in writers):
            return
        tokens_BT = torch.tensor([[writer.last] for writer in writers], device=backbone.device)


def _places(padding_B: torch.Tensor, first: int, end: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions_BT, visible_BTS) of the columns first..end-1: padding on the left has no position and is not seen.

    Each column sees itself, padding too: an empty softmax is not a number. A full row waits at the last place."""
    columns_T = torch.arange(first, end, device=padding_B.device)
    columns_S = torch.arange(end, device=padding_B.device)
    positions_BT = (columns_T[None] - padding_B[:, None]).clamp(0, context - 1)
    causal_TS = columns_S[None] <= columns_T[:, None]
    itself_TS = columns_S[None] == columns_T[:, None]
    visible_BTS = (causal_TS[None] & (columns_S[None, None] >= padding_B[:, None, None])) | itself_TS[None]
    return positions_BT, visible_BTS


class _Writer:
    """One row: draws tokens, watches for its end, streams settled text."""

    def __init__(
        self,
        index: int,
        decoder: Decoder,
        sampling: SamplingConfig,
        stops: Sequence[str],
        stream: Callable[[int, str], None] | None,
    ):
        self.index, self.decoder, self.sampling, self.stops, self.stream = index, decoder, sampling, stops, stream
        self.rng = np.random.default_rng([sampling.seed, index])
        self.tokens: list[int] = []
        self.seen: set[int] = set()
        self.text = ""
        self.streamed = 0
        self.ended: Literal["document", "stop", "length"] = "length"
        self.done = False

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else self.decoder.end_of_document

    def write(self, logits_V: np.ndarray, full: bool) -> None:
        """Draws one token, unless this row has ended."""
        if self.done:
            return
        token = draw(logits_V, self.sampling, self.seen, self.rng)
        if token == self.decoder.end_of_document:
            self.ended, self.done = "document", True
        else:
            self.tokens.append(token)
            self.seen.add(token)
            self.text = self.decoder.decode(self.tokens)
            places = [place for place in map(self.text.find, self.stops) if place >= 0]
            if places:
                self.text, self.ended, self.done = self.text[: min(places)], "stop", True
        self.done = self.done or full
        self._flush()

    def _flush(self) -> None:
        """Streams what no later token can change: not the last characters while a stop string may be beginning."""
        if self.stream is None:
            return
        held = 0 if self.done else max([len(stop) for stop in self.stops] + [4])
        settled = self.text[self.streamed : len(self.text) - held]
        if settled:
            self.stream(self.index, settled)
            self.streamed += len(settled)

    def result(self) -> Generated:
        self.done = True
        self._flush()
        return Generated(tuple(self.tokens), self.text, self.ended)


def draw(logits_V: np.ndarray, sampling: SamplingConfig, seen: set[int], rng: np.random.Generator) -> int:
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
    """(token ids, their probabilities) that top-k and top-p leave, likeliest first; one is always left.

    top-p takes the likeliest tokens until their probabilities reach it: 0.5, 0.3, 0.2 and top_p 0.6 -> 0.625, 0.375."""
    order = np.argsort(-logits_V, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = np.exp(logits_V[kept] - logits_V[kept[0]])
    weights /= weights.sum()
    if sampling.top_p is not None:
        inside = np.cumsum(weights) - weights < sampling.top_p
        kept, weights = kept[inside], weights[inside]
    return kept, weights / weights.sum()

"""One sequence of a running batch: its tokens, its random draws, its text and its end."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.request import Ending, Generation, GenerationRequest, TokenLogprob
from gristmill.foundation.errors import InputError

# The text of a growing list of tokens, decoded piece by piece.


class TokenDecoder(Protocol):
    """ends: tokens that end a text."""

    ends: tuple[int, ...]

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenText:
    """`text` is the text of the tokens so far, without a character of which bytes are still to come. Each token costs
    the decoding of a few tokens, not of all: decoders look at no more than the token before (SentencePiece drops the
    space at the start, so the tokens before are decoded with the new ones)."""

    def __init__(self, decoder: TokenDecoder):
        self.decoder = decoder
        self.tokens: list[int] = []
        self.text = ""
        self._before = self._settled = 0  # tokens before _settled are in `text`; decoding begins at _before

    def add(self, token: int) -> None:
        self.tokens.append(token)
        known = self.decoder.decode(self.tokens[self._before : self._settled])
        whole = self.decoder.decode(self.tokens[self._before :])
        if len(whole) > len(known) and not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            self.text += whole[len(known) :]
            self._before, self._settled = self._settled, len(self.tokens)

    def whole(self) -> str:
        """The text of all tokens, with U+FFFD for bytes that make no character."""
        return self.decoder.decode(self.tokens)


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the first of the stop strings begins, from `start` on."""
    places = [place for place in (text.find(stop, start) for stop in stops) if place >= 0]
    return min(places) if places else None


def undecided(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    for size in range(min(len(text), max(map(len, stops), default=0)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


# V vocabulary


class RunningSequence:
    """A candidate of a request. `tokens` has the prompt and what was generated."""

    def __init__(
        self,
        request: GenerationRequest,
        candidate: int,
        decoder: TokenDecoder,
        sequence_length: int,
        stream: Callable[[str], None] | None = None,
    ):
        self.settings, self.stream = request.settings, stream
        self.prompt_length = len(request.prompt)
        self.max_new_tokens = min(request.settings.max_new_tokens, sequence_length - self.prompt_length)
        self.tokens = np.empty(self.prompt_length + self.max_new_tokens, dtype=np.int64)
        self.tokens[: self.prompt_length] = request.prompt
        draws = [request.settings.sampling.seed, request.draw, candidate]
        self._rng = np.random.default_rng(draws if candidate else draws[:2])
        self._seen = set(request.prompt) if request.settings.sampling.repetition_penalty != 1.0 else set()
        self._decoder, self._text = decoder, TokenText(decoder)
        self._result: str | None = None
        self._streamed = 0
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.ended: Ending = "length"
        self.done = self.max_new_tokens == 0
        self.error: InputError | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and generated ones."""
        return self.prompt_length + len(self._text.tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether the next token is the plain argmax."""
        return self.settings.sampling.temperature == 0.0 and self.settings.sampling.repetition_penalty == 1.0

    def choose(self, logits_V: np.ndarray, argmax: int) -> None:
        """Adds the next token. argmax: of the logits. An error ends this sequence alone."""
        token = argmax
        try:
            if not np.isfinite(logits_V[argmax]):
                raise InputError(NOT_FINITE)
            if not self.is_greedy:
                token = sample_token(logits_V, self.settings.sampling, self._seen, self._rng)
        except InputError as error:
            self.error, self.done = error, True
            return
        if self.settings.scores_tokens:
            logprobs_V = log_softmax(logits_V)
            top = top_logprobs(logprobs_V, self.settings.logprobs or 0)
            self.logprobs.append(TokenLogprob(token, float(logprobs_V[token]), top))
        if token in self._decoder.ends and not self.settings.ignore_end:
            self.ended, self.done = "document", True
        else:
            self._add(token)
        if self.done:
            self._finish()
        if self.stream is not None:
            self._flush(self.stream)

    def _add(self, token: int) -> None:
        self.tokens[self.length] = token
        searched = len(self._text.text)
        self._text.add(token)
        if self.settings.sampling.repetition_penalty != 1.0:
            self._seen.add(token)
        stops = self.settings.stops
        if stops and first_stop(self._text.text, stops, max(0, searched - max(map(len, stops)) + 1)) is not None:
            self.done = True
        self.done = self.done or len(self._text.tokens) >= self.max_new_tokens

    def _finish(self) -> None:
        text = self._text.whole()
        stop = first_stop(text, self.settings.stops)
        if stop is not None:
            self.ended, text = "stop", text[:stop]
        self._result = text

    def _flush(self, stream: Callable[[str], None]) -> None:
        """Streams the text that later tokens cannot change."""
        text = self._result
        if text is None:
            text = self._text.text
            text = text[: len(text) - undecided(text, self.settings.stops)]
        if len(text) > self._streamed:
            stream(text[self._streamed :])
            self._streamed = len(text)

    def generation(self) -> Generation:
        tokens = tuple(self._text.tokens)
        text = self._text.whole() if self._result is None else self._result
        return Generation(tokens, text, self.ended, tuple(self.logprobs))

    @property
    def mean_logprob(self) -> float:
        """For best_of. A continuation without tokens counts as certain."""
        values = [token.logprob for token in self.logprobs if token.logprob is not None]
        return sum(values) / len(values) if values else 0.0


# Choose the next token: greedy, or sampled with temperature, top-k, top-p, min-p and a repetition penalty.

# V vocabulary

NOT_FINITE = "the model's logits are not numbers (NaN or infinity): the checkpoint is broken or diverged"


def sample_token(logits_V: np.ndarray, sampling: SamplingConfig, seen: set[int], rng: np.random.Generator) -> int:
    """The next token. Penalty, temperature, top-k, top-p and min-p in the order of transformers; equal logits: lowest
    id. Raises InputError for logits that are not numbers.

    logits [2, 1, -1], penalty 2 on tokens 0 and 2 -> [1, 1, -2]: token 0 of the two equals."""
    logits = np.array(logits_V, dtype=np.float64)
    if not np.isfinite(logits).all():
        raise InputError(NOT_FINITE)
    if sampling.repetition_penalty != 1.0 and seen:
        ids = np.fromiter(seen, dtype=np.int64)
        logits[ids] = np.where(
            logits[ids] < 0, logits[ids] * sampling.repetition_penalty, logits[ids] / sampling.repetition_penalty
        )
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    kept, weights = candidates(logits / sampling.temperature, sampling)
    drawn = int(np.searchsorted(np.cumsum(weights), rng.random(), side="right"))
    return int(kept[min(drawn, len(kept) - 1)])


def candidates(logits_V: np.ndarray, sampling: SamplingConfig) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, their probabilities) after top-k, top-p and min-p, most likely first; at least one.

    top-p takes the likeliest tokens until their probabilities reach it: 0.5, 0.3, 0.2 and top_p 0.6 -> 0.625, 0.375.
    min-p keeps tokens with at least so large a share of the likeliest one's probability: min_p 0.5 -> the same two."""
    kept = likeliest(logits_V, sampling.top_k or len(logits_V))
    weights = np.exp(logits_V[kept] - logits_V[kept[0]])
    weights /= weights.sum()
    if sampling.top_p is not None:
        inside = np.cumsum(weights) - weights < sampling.top_p
        kept, weights = kept[inside], weights[inside]
    if sampling.min_p is not None:
        inside = weights >= sampling.min_p * weights[0]
        kept, weights = kept[inside], weights[inside]
    return kept, weights / weights.sum()


def likeliest(logits_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the largest logits, largest first; of equal ones the lowest id first. Sorts no more than it returns."""
    if count >= len(logits_V):
        return np.argsort(-logits_V, kind="stable")
    limit = np.partition(logits_V, len(logits_V) - count)[len(logits_V) - count]
    above = np.flatnonzero(logits_V > limit)
    equal = np.flatnonzero(logits_V == limit)[: count - len(above)]
    kept = np.concatenate([above, equal])
    return kept[np.lexsort((kept, -logits_V[kept]))]


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    """Natural log-probabilities, float64."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    logprobs: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def top_logprobs(logprobs_V: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest (token, log-probability), best first."""
    ids: Sequence[int] = likeliest(logprobs_V, count).tolist() if count else []
    return tuple((token, float(logprobs_V[token])) for token in ids)

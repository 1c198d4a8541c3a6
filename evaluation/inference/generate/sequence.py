"""One sequence of a running batch: its tokens, its random draws, its text and its end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from gristmill.evaluation.inference.generate.generation_request import (
    Ending,
    Generation,
    GenerationRequest,
    PieceStream,
    RequestResult,
    TokenLogprob,
)
from gristmill.evaluation.inference.generate.sampler import BROKEN, RowChoice, TokenCounts, choose_tokens, likeliest
from gristmill.evaluation.inference.generate.structured import GrammarMatcher
from gristmill.foundation.errors import InputError

SequenceStream = Callable[[str, tuple[TokenLogprob, ...]], None]

# The text of a growing list of tokens, decoded piece by piece.


class TokenDecoder(Protocol):
    """ends: tokens that end a text."""

    @property
    def ends(self) -> tuple[int, ...]: ...

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
        self._bytes_of: Callable[[int], bytes | None] = getattr(decoder, "bytes_of", lambda token: None)
        self._pending = b""  # of the tokens from _settled on, where each has bytes of its own

    def add(self, token: int) -> None:
        self.tokens.append(token)
        token_bytes = self._bytes_of(token)
        if token_bytes is not None:
            self._pending += token_bytes
            try:
                self.text += self._pending.decode()
            except UnicodeDecodeError:  # a character is incomplete, or the bytes are none: the decoder says which
                pass
            else:
                self._pending = b""
                self._before = self._settled = len(self.tokens)
                return
        self._decode_whole()

    def _decode_whole(self) -> None:
        known = self.decoder.decode(self.tokens[self._before : self._settled])
        whole = self.decoder.decode(self.tokens[self._before :])
        if len(whole) > len(known) and not whole.endswith("\N{REPLACEMENT CHARACTER}"):
            self.text += whole[len(known) :]
            self._before, self._settled = self._settled, len(self.tokens)
            self._pending = b""

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
        stream: SequenceStream | None = None,
        matcher: GrammarMatcher | None = None,
    ):
        self.settings, self.stream, self.candidate = request.settings, stream, candidate
        self.prompt_length = len(request.prompt)
        self.max_new_tokens = min(request.settings.max_new_tokens, sequence_length - self.prompt_length)
        self.tokens = np.empty(self.prompt_length + self.max_new_tokens, dtype=np.int64)
        self.tokens[: self.prompt_length] = request.prompt
        draws = [request.settings.sampling.seed, request.draw, candidate]
        self._rng = np.random.default_rng(draws if candidate else draws[:2])
        rules, penalty = request.settings.rules, request.settings.sampling.repetition_penalty
        counts = rules.counts_tokens or penalty != 1.0
        self._counts = TokenCounts(request.prompt if penalty != 1.0 else ()) if counts else None
        self.matcher = matcher
        own_ends = () if request.settings.ignore_end else tuple(decoder.ends)
        self.ends: tuple[int, ...] = (*own_ends, *request.settings.stop_token_ids)
        self._decoder, self._text = decoder, TokenText(decoder)
        self._result: str | None = None
        self._streamed = self._streamed_logprobs = 0
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.embedding: np.ndarray | None = None
        self.ended: Ending = "length"
        self.done = self.max_new_tokens == 0
        self.error: InputError | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and generated ones."""
        return self.prompt_length + len(self._text.tokens)

    @property
    def text_tokens(self) -> np.ndarray:
        """int64[length]: the prompt and what was generated."""
        return self.tokens[: self.length]

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt are asked for and not yet computed."""
        return self.settings.prompt_logprobs and not self.prompt_logprobs

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether the hidden states of all tokens of the prompt are needed, not of the last alone."""
        return self.wants_prompt_logprobs or self.settings.pooling == "mean"

    def pool(self, hidden_TD: Tensor) -> None:
        """Keeps the embedding that is asked for. hidden: of all tokens of the prompt, or at least of the last."""
        if self.settings.pooling is not None:
            pooled_D = hidden_TD.float().mean(dim=0) if self.settings.pooling == "mean" else hidden_TD[-1].float()
            self.embedding = pooled_D.cpu().numpy()

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_new_tokens - len(self._text.tokens)

    def next_choice(self) -> RowChoice:
        """How the next token is chosen. Draws a random number where the request samples."""
        settings = self.settings
        uniform = float(self._rng.random()) if settings.sampling.temperature > 0 else 0.0
        ends = self.ends if len(self._text.tokens) < settings.rules.min_tokens else ()
        allowed = None if self.matcher is None else self.matcher.allowed()
        return RowChoice(settings.sampling, uniform, settings.rules, self._counts, ends, allowed)

    def accept(self, token: int, logits_V: Tensor) -> None:
        """Adds the chosen token. An error ends this sequence alone."""
        try:
            if token == BROKEN:
                raise InputError(NOT_FINITE)
            if self.matcher is not None:
                self.matcher.accept(token)
        except InputError as error:
            self.error, self.done = error, True
            return
        if self.settings.scores_tokens:
            logprobs_V = log_softmax(logits_V.cpu().numpy())
            top = top_logprobs(logprobs_V, self.settings.logprobs or 0)
            self.logprobs.append(TokenLogprob(token, float(logprobs_V[token]), top))
        if token in self.ends:
            self.ended, self.done = "document", True
        else:
            self._add(token)
            if self.matcher is not None and self.matcher.is_complete:
                self.ended, self.done = "document", True
        if self.done:
            self._finish()
        if self.stream is not None:
            self._flush(self.stream)

    def _add(self, token: int) -> None:
        self.tokens[self.length] = token
        searched = len(self._text.text)
        self._text.add(token)
        if self._counts is not None:
            self._counts.add(token)
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

    def _flush(self, stream: SequenceStream) -> None:
        """Streams the text that later tokens cannot change, with the log-probabilities of the tokens since the last
        piece."""
        text = self._result
        if text is None:
            text = self._text.text
            text = text[: len(text) - undecided(text, self.settings.stops)]
        logprobs = tuple(self.logprobs[self._streamed_logprobs :]) if self.settings.logprobs is not None else ()
        if len(text) > self._streamed or (self.done and logprobs):
            stream(text[self._streamed :], logprobs)
            self._streamed, self._streamed_logprobs = max(self._streamed, len(text)), len(self.logprobs)

    def generation(self) -> Generation:
        tokens = tuple(self._text.tokens)
        text = self._text.whole() if self._result is None else self._result
        return Generation(tokens, text, self.ended, tuple(self.logprobs))

    @property
    def mean_logprob(self) -> float:
        """For best_of. A continuation without tokens counts as certain."""
        values = [token.logprob for token in self.logprobs if token.logprob is not None]
        return sum(values) / len(values) if values else 0.0


# Log-probabilities of tokens.

NOT_FINITE = "the model's logits are not numbers (NaN or infinity): the checkpoint is broken or diverged"


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    """Natural log-probabilities, float64."""
    shifted = logits_V.astype(np.float64) - float(logits_V.max())
    logprobs: np.ndarray = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def top_logprobs(logprobs_V: np.ndarray, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest (token, log-probability), best first."""
    ids: Sequence[int] = likeliest(logprobs_V, count).tolist() if count else []
    return tuple((token, float(logprobs_V[token])) for token in ids)


@dataclass
class RequestJob:
    number: int
    request: GenerationRequest
    sequences: list[RunningSequence]

    def result(self) -> RequestResult:
        error = next((sequence.error for sequence in self.sequences if sequence.error is not None), None)
        if error is not None:
            return RequestResult(self.number, error=error)
        ranked, count = self.sequences, self.request.settings.count
        if len(ranked) > count:
            ranked = sorted(ranked, key=lambda sequence: -sequence.mean_logprob)[:count]
        generations: tuple[Generation, ...] = tuple(sequence.generation() for sequence in ranked)
        first = self.sequences[0]
        return RequestResult(self.number, generations, first.prompt_logprobs, embedding=first.embedding)


def choose_next(sequences: Sequence[RunningSequence], logits_BV: Tensor) -> None:
    """The next token of every sequence that is not done."""
    live = [row for row, sequence in enumerate(sequences) if not sequence.done]
    if not live:
        return
    if len(live) < len(sequences):
        logits_BV = logits_BV[live]
    rows = [sequences[row].next_choice() for row in live]
    for row, token, logits_V in zip(live, choose_tokens(logits_BV, rows), logits_BV, strict=True):
        sequences[row].accept(token, logits_V)


def candidate_stream(stream: PieceStream | None, candidate: int) -> SequenceStream | None:
    return None if stream is None else lambda text, logprobs: stream(candidate, text, logprobs)

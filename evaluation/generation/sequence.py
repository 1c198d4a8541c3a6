"""One sequence of a running batch: its tokens, its random draws, its text and its end."""

from collections.abc import Callable

import numpy as np

from gristmill.evaluation.generation.request import Ending, Generation, GenerationRequest, TokenLogprob
from gristmill.evaluation.generation.sampler import NOT_FINITE, log_softmax, sample_token, top_logprobs
from gristmill.evaluation.generation.token_text import Decoder, TokenText, first_stop, undecided
from gristmill.foundation.errors import InputError

# V vocabulary


class RunningSequence:
    """A candidate of a request. `tokens` has the prompt and what was generated."""

    def __init__(
        self,
        request: GenerationRequest,
        candidate: int,
        decoder: Decoder,
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
        found = [each.logprob for each in self.logprobs if each.logprob is not None]
        return sum(found) / len(found) if found else 0.0

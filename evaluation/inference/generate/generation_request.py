"""Generation requests and results."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.sampler import NO_RULES, LogitRules
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError

GREEDY = SamplingConfig()
TextStream = Callable[[int, str], None]  # called with (number of the continuation, new text)
PieceStream = Callable[[int, str, "tuple[TokenLogprob, ...]"], None]  # and with the log-probabilities of new tokens
Ending = Literal["document", "stop", "length"]


@dataclass(frozen=True)
class GenerationSettings:
    """max_new_tokens: of one continuation; 0 gives the prompt's log-probabilities alone. stops: a continuation ends
    before the first of these strings. count: continuations of each prompt, the best of `best_of` (None: of count) by
    their mean log-probability a token. logprobs: log-probabilities of the tokens, with those of so many likeliest
    ones; prompt_logprobs: of the prompt's, too. ignore_end: no end token ends a continuation. rules: penalties and
    biases. stop_token_ids: tokens that end a continuation beside the model's. grammar: of llguidance, which the text
    follows. pooling: the result has the pooled hidden states of the prompt, the mean of all or the last."""

    max_new_tokens: int
    sampling: SamplingConfig = GREEDY
    stops: tuple[str, ...] = ()
    count: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    ignore_end: bool = False
    rules: LogitRules = NO_RULES
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None
    pooling: Literal["mean", "last"] | None = None

    @property
    def candidates(self) -> int:
        return max(self.count, self.best_of or 1)

    @property
    def scores_tokens(self) -> bool:
        """Whether the log-probabilities of generated tokens are computed."""
        return self.logprobs is not None or self.candidates > self.count


@dataclass(frozen=True)
class GenerationRequest:
    """prompt: token ids. draw: continuations are drawn by (settings.sampling.seed, draw, number of the candidate), so
    they do not depend on what else is in the batch."""

    prompt: tuple[int, ...]
    settings: GenerationSettings
    draw: int = 0

    def check(self, sequence_length: int, vocab_size: int) -> None:
        """Raises InputError unless the prompt fits the model."""
        longest = sequence_length - (1 if self.settings.max_new_tokens else 0)
        if not 0 < len(self.prompt) <= longest:
            raise InputError(f"the prompt has {len(self.prompt)} tokens; the model takes 1 to {longest}: shorten it")
        wrong = next((token for token in self.prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InputError(f"the prompt has token {wrong}; the model's vocabulary has 0 to {vocab_size - 1}")
        named = {"logit_bias": [token for token, _ in self.settings.rules.logit_bias]}
        named["stop_token_ids"] = [*self.settings.stop_token_ids]
        for name, tokens in named.items():
            wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise InputError(f"{name} has token {wrong}; the model's vocabulary has 0 to {vocab_size - 1}")


@dataclass(frozen=True)
class TokenLogprob:
    """logprob: of the token, natural logarithm under the model's own distribution, before temperature and filters; None
    for the first token of a prompt. top: the likeliest (token, logprob), best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Generation:
    """A continuation without its prompt. text ends before the stop string; tokens: all that were generated,
    without the end-of-document token. ended: by that token, by a stop string, or at the maximum length. logprobs: of
    the tokens and the end-of-document token that ended them, where they were asked for."""

    tokens: tuple[int, ...]
    text: str
    ended: Ending
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class RequestResult:
    """generations: the best first where best_of was given, else in the order of the draws. prompt_logprobs: of every
    token of the prompt, where asked for. embedding: float32[width], of settings.pooling. error: why there is nothing
    else here."""

    number: int
    generations: tuple[Generation, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: InputError | None = None
    embedding: np.ndarray | None = field(default=None, compare=False)


# Options of one request by the names of the OpenAI API, for prompt files and the server.

MAX_CANDIDATES, MAX_STOPS, MAX_TOP_LOGPROBS, MAX_BIASES = 128, 16, 20, 1024


class RequestOptions(Config):
    """None: the default of the command or the server. ignore_eos: no end token ends the text."""

    max_tokens: int | None = Field(None, ge=0, le=2**31)
    temperature: float | None = Field(None, ge=0.0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, allow_inf_nan=False)
    presence_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(None, ge=-2.0, le=2.0)
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(None, max_length=MAX_BIASES)
    min_tokens: int | None = Field(None, ge=0, le=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: tuple[int, ...] | None = Field(None, max_length=MAX_BIASES)
    ignore_eos: bool = False
    stop: tuple[str, ...] | None = Field(None, max_length=MAX_STOPS)
    n: int = Field(1, ge=1, le=MAX_CANDIDATES)
    best_of: int | None = Field(None, ge=1, le=MAX_CANDIDATES)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator("stop", mode="before")
    @classmethod
    def one_stop_is_a_list(cls, stop: object) -> object:
        return (stop,) if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def stops_and_counts_are_usable(self) -> Self:
        if self.stop is not None and "" in self.stop:
            raise ValueError("stop has an empty string, which would end every text at once; give the text to stop at")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of} is less than n={self.n}; draw at least as many as are returned")
        return self

    def settings(self, default: GenerationSettings, prompt_logprobs: bool = False) -> GenerationSettings:
        """GenerationSettings, with the default where an option is not given."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.seed is not None and self.seed < 0:
            given["seed"] = self.seed + 2**63  # OpenAI's seeds may be negative
        return GenerationSettings(
            max_new_tokens=default.max_new_tokens if self.max_tokens is None else self.max_tokens,
            sampling=SamplingConfig(**{**default.sampling.model_dump(), **given}),
            stops=default.stops if self.stop is None else self.stop,
            count=self.n,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_end=self.ignore_eos or default.ignore_end,
            rules=self.logit_rules(),
            stop_token_ids=self.stop_token_ids or default.stop_token_ids,
            grammar=default.grammar,
        )

    def logit_rules(self) -> LogitRules:
        return LogitRules(
            self.presence_penalty or 0.0,
            self.frequency_penalty or 0.0,
            tuple(sorted((self.logit_bias or {}).items())),
            self.min_tokens or 0,
        )

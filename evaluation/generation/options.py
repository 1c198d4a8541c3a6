"""Options of one request by the names of the OpenAI API, for prompt files and the server."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from gristmill.evaluation.config import SamplingConfig
from gristmill.evaluation.generation.request import GenerationSettings
from gristmill.foundation.config import Config

MAX_CANDIDATES, MAX_STOPS, MAX_TOP_LOGPROBS = 128, 16, 20


class RequestOptions(Config):
    """None: the default of the command or the server."""

    max_tokens: int | None = Field(None, ge=0, le=2**31)
    temperature: float | None = Field(None, ge=0.0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=2**63)
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
        return GenerationSettings(
            max_new_tokens=default.max_new_tokens if self.max_tokens is None else self.max_tokens,
            sampling=SamplingConfig(**{**default.sampling.model_dump(), **given}),
            stops=default.stops if self.stop is None else self.stop,
            count=self.n,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
        )

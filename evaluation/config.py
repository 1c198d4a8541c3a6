"""What a recipe says of evaluation. Every field but `data` decides the bytes of the results."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.foundation.config import Config


class SamplingConfig(Config):
    """How the next token is chosen. temperature 0 is greedy, and then the other fields but the penalty are idle.

    The order is that of transformers: repetition penalty (Keskar et al. 2019, CTRL, section 4.1), temperature, top-k,
    top-p (Holtzman et al. 2020, nucleus sampling)."""

    temperature: float = Field(0.0, ge=0.0)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0)
    seed: int = Field(0, ge=0, lt=2**63)


CPU_BATCH_TOKENS = 1024  # the activations of a small model stay in the cache: 8,192 took 1.5 times as long a token
GPU_BATCH_TOKENS = 65_536


class EvaluateConfig(Config):
    """The `evaluate` section of a recipe.

    tasks: `bits_per_byte` and `cloze` are made from the held-out documents; any other name is a task of
        evaluation/tasks/ over pinned local files.
    limit: at most so many documents of each task; None takes all.
    shots: worked examples before each question; None takes what the task says.
    batch_tokens: rows times padded length of one forward pass; None takes what suits the device.
    cloze_items: 400 questions of four choices have a standard error of at most 2.5 points (sqrt(0.25 / 400)).
    text_bytes: bits per byte is measured on the first documents of a source up to so many bytes, cut at a document.
    data: the folder below which the named tasks' files stand; pinned by digest, so its place decides nothing.
    samples: so many texts are continued for the report, by sample_tokens tokens each, greedy and sampled."""

    tasks: tuple[str, ...] = ("bits_per_byte", "cloze")
    data: str | None = Field(None, json_schema_extra={"execution": True})
    limit: int | None = Field(None, ge=1, lt=2**31)
    shots: int | None = Field(None, ge=0)
    batch_tokens: int | None = Field(None, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    weights: Literal["as_trained", "int8"] = "as_trained"
    cloze_items: int = Field(400, ge=1, le=1_000_000)
    cloze_choices: int = Field(4, ge=2, le=100)
    text_bytes: int = Field(300_000, ge=1)
    samples: int = Field(4, ge=0, le=10_000)
    sample_tokens: int = Field(48, ge=1, le=1_000_000)
    sampling: SamplingConfig = SamplingConfig(temperature=0.8, top_p=0.95)

    def pass_tokens(self, device: str) -> int:
        """batch_tokens, or what suits a device of this type ("cpu", "cuda")."""
        return self.batch_tokens or (CPU_BATCH_TOKENS if device == "cpu" else GPU_BATCH_TOKENS)

    @field_validator("tasks")
    @classmethod
    def tasks_are_named_once(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in tasks if tasks.count(name) > 1})
        if twice:
            raise ValueError(f"tasks names {', '.join(twice)} twice; name each task once")
        return tasks

    @model_validator(mode="after")
    def something_to_do(self) -> Self:
        if not self.tasks and not self.samples:
            raise ValueError(
                "no tasks and no samples, so nothing would be evaluated; try tasks: [bits_per_byte, cloze]"
            )
        return self

"""Configuration of the evaluation. Every field but `data` can change the results."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.foundation.config import Config
from gristmill.training.config.layers import MAX_SEQUENCE


class SamplingConfig(Config):
    """Sampling parameters of generation. temperature 0 is greedy decoding: only the repetition penalty applies to it.

    The order is that of transformers: repetition penalty (Keskar et al. 2019, CTRL, section 4.1), temperature, top-k,
    top-p (Holtzman et al. 2020, nucleus sampling), min-p (arXiv 2407.01082, section 3)."""

    temperature: float = Field(0.0, ge=0.0)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0)
    seed: int = Field(0, ge=0, lt=2**63)


OffloadParameters = Literal["none", "host", "disk"]
RECALL_TASKS = ("needle", "phonebook")  # generated, one task for each length
CPU_BATCH_TOKENS = 1024  # the activations of a small model stay in the cache: 8,192 took 1.5 times as long a token
GPU_BATCH_TOKENS = 65_536


class EvaluateConfig(Config):
    """The `evaluate` section of a recipe.

    tasks: `bits_per_byte` and `cloze` are made from the held-out documents, `needle` and `phonebook` are generated;
        any other name is a task of evaluation/tasks/ over pinned local files.
    limit: maximum number of documents of each task; None takes all.
    num_fewshot: few-shot examples before each question; None takes the task's own number.
    batch_tokens: rows times padded length of one forward pass; None takes a default for the device.
    cloze_items: 400 questions of four choices have a standard error of at most 2.5 points (sqrt(0.25 / 400)).
    group_by: bits per byte is measured by source, or by language; then languages are named with their script (ar_Arab).
    text_bytes: bits per byte is measured on the first documents of each source or language, up to so many bytes.
    data: folder of the named tasks' files. The files are pinned by digest, so its path does not change the results.
    num_continuations: number of held-out texts that are continued for the report, greedy and sampled.
    continuation_tokens: tokens of each of them."""

    tasks: tuple[str, ...] = ("bits_per_byte", "cloze")
    data: str | None = Field(None, json_schema_extra={"execution": True})
    limit: int | None = Field(None, ge=1, lt=2**31)
    num_fewshot: int | None = Field(None, ge=0)
    batch_tokens: int | None = Field(None, ge=1)
    precision: Literal["fp32", "bf16"] = "fp32"
    quantization: Literal["none", "int8", "int4", "smoothquant"] = "none"
    offload_parameters: OffloadParameters = Field(
        "none",
        description="where the weights of the layers lie: on the device, or in host memory or a file beside the "
        "checkpoint, from where each layer's are brought in as it computes",
        json_schema_extra={"execution": True},
    )
    cloze_items: int = Field(400, ge=1, le=1_000_000)
    cloze_choices: int = Field(4, ge=2, le=100)
    recall_lengths: tuple[Annotated[int, Field(ge=1, le=MAX_SEQUENCE)], ...] = Field(
        (),
        description="tokens of the questions of needle and phonebook; empty: the model's sequence length and its "
        "halves down to 128",
    )
    recall_items: int = Field(100, ge=1, le=1_000_000, description="questions of needle and phonebook for each length")
    recall_choices: int = Field(8, ge=2, le=100, description="numbers to choose from in needle and phonebook")
    group_by: Literal["source", "language"] = "source"
    text_bytes: int = Field(300_000, ge=1)
    num_continuations: int = Field(4, ge=0, le=10_000)
    continuation_tokens: int = Field(48, ge=1, le=1_000_000)
    sampling: SamplingConfig = SamplingConfig(temperature=0.8, top_p=0.95)

    def pass_tokens(self, device: str) -> int:
        """batch_tokens, or the default for a device of this type ("cpu", "cuda")."""
        return self.batch_tokens or (CPU_BATCH_TOKENS if device == "cpu" else GPU_BATCH_TOKENS)

    @field_validator("tasks")
    @classmethod
    def tasks_are_named_once(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in tasks if tasks.count(name) > 1})
        if twice:
            raise ValueError(f"tasks names {', '.join(twice)} twice; name each task once")
        return tasks

    @model_validator(mode="after")
    def streams_weights_as_trained(self) -> Self:
        if self.offload_parameters != "none" and self.quantization != "none":
            raise ValueError(
                f"offload_parameters: {self.offload_parameters} streams full-precision weights, not "
                f"{self.quantization}; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def something_to_do(self) -> Self:
        if not self.tasks and not self.num_continuations:
            raise ValueError(
                "no tasks and no samples, so nothing would be evaluated; try tasks: [bits_per_byte, cloze]"
            )
        return self

"""Configuration of a training run (`train` in a recipe). Without torch.

A field marked `execution` changes how the work is done, not the result."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.foundation.config import Config
from gristmill.training.config.layers import MAX_BATCH_TOKENS, MAX_RAMP_STEPS, MAX_TOKENS
from gristmill.training.config.layout import LayoutConfig

# Configuration of the optimizer, the learning rate schedule and the batch size ramp. Without torch.


OMIT_DEFAULT: dict[str, Any] = {"omit_default": True}  # such a field is no part of what a run is at its default


class OptimizerConfig(Config):
    """AdamW on every parameter, or Muon on the matrices of the layers and AdamW on the rest. Weight decay is not
    applied to vectors."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0, le=10)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(1e-8, gt=0, le=1)
    weight_decay: float = Field(0.1, ge=0, le=10)
    clip_norm: float | None = Field(1.0, gt=0, description="maximum global gradient norm; null: no clipping")
    muon_learning_rate: float = Field(0.02, gt=0, le=10)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    embedding_learning_rate: float | None = Field(
        None, gt=0, le=10, description="of the token embedding; null: learning_rate", json_schema_extra=OMIT_DEFAULT
    )
    head_learning_rate: float | None = Field(
        None, gt=0, le=10, description="of an untied head; null: learning_rate", json_schema_extra=OMIT_DEFAULT
    )
    decay_tables: bool = Field(
        True, description="weight decay also of embeddings and head; OLMo 2 has none", json_schema_extra=OMIT_DEFAULT
    )

    @field_validator("betas")
    @classmethod
    def betas_are_decay_rates(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"betas {list(value)} are the decay rates of running means; set both from 0 to below 1")
        return value


class ScheduleConfig(Config):
    """Learning rate schedule: linear warm-up from 0, then decay to final_ratio of the peak. Shares are of the run's
    tokens.

    over_tokens: length of the schedule if it is not that of the run, such as for a run that stops early."""

    shape: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    over_tokens: int | None = Field(None, ge=1)
    warmup_share: float = Field(0.02, ge=0, le=1)
    final_ratio: float = Field(0.1, ge=0, le=1)
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: the last share of the run, in which the rate falls")
    decay_shape: Literal["linear", "cosine", "one_minus_sqrt", "exponential"] = "one_minus_sqrt"

    @model_validator(mode="after")
    def phases_fit(self) -> Self:
        if self.shape == "inverse_sqrt" and not self.warmup_share:
            raise ValueError(
                "inverse_sqrt falls from the peak as sqrt(warm-up / tokens), so it needs a warm-up; set warmup_share "
                "above 0"
            )
        if self.shape == "wsd" and self.warmup_share + self.decay_share > 1 + 1e-9:
            raise ValueError(
                f"wsd: warmup_share {self.warmup_share:g} and decay_share {self.decay_share:g} overlap; lower one, so "
                "that their sum is at most 1"
            )
        return self


class RampConfig(Config):
    """The batch grows from start_tokens in equal increments until it is batch_tokens, after over_tokens of training."""

    start_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    increment_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    over_tokens: int = Field(ge=1, le=MAX_TOKENS)


EXECUTION: dict[str, Any] = {"execution": True}


class ValidationConfig(Config):
    """Validation loss by source, also after the last step. every: steps between validations; 0 turns them off."""

    every: int = Field(50, ge=0)
    samples: int = Field(32, ge=1)


class TrainingEvaluationConfig(Config):
    """Evaluation tasks during training, also after the last step. every: steps between evaluations; 0 turns them off.

    limit: documents of each task. It does not depend on the machine, so a resumed run has the same scores as one that
    was never stopped. budget_seconds: tasks that have not begun after this time are skipped; the scores then depend on
    the machine. The time spent is in logs/timing.jsonl."""

    every: int = Field(0, ge=0)
    tasks: tuple[str, ...] = ("bits_per_byte",)
    limit: int = Field(100, ge=1)
    budget_seconds: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def asks_something(self) -> Self:
        if self.every and not self.tasks:
            raise ValueError("evaluation.every is set but tasks is empty; name a task or set every: 0")
        return self


class GuardConfig(Config):
    """Which updates are skipped: those with a non-finite loss or gradient norm, and outliers, which are more than
    `sigmas` standard deviations above the mean of the last `window` steps (the rule of OLMo-core; null: none are
    skipped)."""

    sigmas: float | None = Field(None, gt=0)
    window: int = Field(128, ge=2)
    max_consecutive_skips: int = Field(10, ge=1, description="more skipped steps in a row stop the run")


class CheckpointConfig(Config):
    """every: steps between checkpoints; 0 saves at the end only. keep_every: checkpoints of its multiples are never
    removed."""

    every: int = Field(100, ge=0)
    keep_last: int = Field(2, ge=1)
    keep_every: int = Field(0, ge=0)
    asynchronous: bool = False
    stop_after_seconds: float | None = Field(
        None, gt=0, description="save and stop after this time; run again to go on"
    )


TrackerName = Literal["tensorboard", "wandb", "mlflow"]
TRACKER_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # module -> what pip installs


# Files of a run's folder of logs that the planner reads.
TIMING_NAME = "timing.jsonl"  # seconds of each step on rank 0
RANKS_NAME = "ranks.jsonl"  # seconds of all ranks in the measured steps
RUN_NAME = "run.json"  # the training, the processes, the device

# Of a line of metrics.jsonl: [first, behind the last] of the samples of each lost replica; of the stage's metadata: the
# number of such lines.
LEFT_OUT = "left_out_samples"
GRADIENT_NOISE = "gradient_noise"  # of a line of metrics.jsonl
STEPS_WITHOUT_REPLICAS = "steps_without_replicas"


class MonitoringConfig(Config):
    """Watchdog, logs and profiler. timeout_seconds: a step that takes longer stops the run with an error that names the
    rank and the phase."""

    timeout_seconds: float = Field(1800.0, gt=0)
    log_every: int = Field(1, ge=1, description="steps between lines of timing.jsonl; metrics.jsonl has every step")
    trackers: tuple[TrackerName, ...] = Field(
        ("tensorboard",),
        description="where losses, rates and scores go besides metrics.jsonl: tensorboard, wandb, mlflow",
    )
    project: str = Field("gristmill", min_length=1, description="project of W&B, experiment of MLflow")
    profile_steps: tuple[int, ...] = Field((), description="steps whose Chrome trace is written (`--profile`)")
    communication_every: int = Field(
        100,
        ge=0,
        description="every so many steps, and in step 10, the time in communication, of every rank and of the links is "
        "measured, for `gristmill explain`; 0 never",
    )
    noise_scale_every: int = Field(
        0,
        ge=0,
        description="every so many steps the gradient noise scale is measured, by a pass over a quarter of the batch "
        "more (the whole batch with pipelines, compile and cuda_graphs); 0 never",
    )


class TeacherConfig(Config):
    """A second, frozen model that the objective sees as `model.teacher`, over the first `stop_at_fraction` of the run's
    tokens (Mixture-of-Students, arXiv 2201.05596, section 4.4, stops distillation before the end)."""

    checkpoint: str = Field(
        description="a checkpoint with the same vocabulary; its digest, not its path, is part of what the run is",
        json_schema_extra=EXECUTION,
    )
    stop_at_fraction: float = Field(1.0, gt=0, le=1, description="share of the run's tokens after which it stops")


class TrainConfig(Config):
    """The `train` section of a recipe. tokens: of the whole training, rounded up to whole batches. batch_tokens: of one
    step, over all processes."""

    tokens: int = Field(ge=1, le=MAX_TOKENS)
    batch_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    batch_ramp: RampConfig | None = None
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**32,
        description="of the initial weights, the order of samples and dropout; null: the recipe's `seed`, which "
        "decides the corpus, its tokenizer and what is held out",
        json_schema_extra=EXECUTION,
    )
    precision: Literal["bf16", "fp32", "fp16", "fp64"] = "bf16"
    z_loss: float = Field(0.0, ge=0, le=1, description="weight of log(Z)^2 (PaLM, arXiv 2204.02311, section 5: 1e-4)")
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: ScheduleConfig = ScheduleConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: TrainingEvaluationConfig = TrainingEvaluationConfig()
    init_from: str | None = Field(
        None,
        description="a checkpoint whose weights the run begins with, like checkpoints/step-00000000 of `gristmill "
        "import`; its digest, not its path, is part of what the run is",
        json_schema_extra=EXECUTION,
    )
    upcycle: Literal["copy"] | None = Field(
        None, description="init_from is a dense checkpoint; copy: each expert begins as its layer's MLP"
    )
    objective: str = Field(
        "causal",
        description="causal, distillation, or a class in a Python file of your own, such as my_objective.py:Rewarded; "
        "the file's digest, not its path, is part of what the run is",
        json_schema_extra=EXECUTION,
    )
    objective_options: dict[str, Any] = Field({}, description="settings of the objective", json_schema_extra=EXECUTION)
    teacher: TeacherConfig | None = Field(None, description="a second, frozen model for distillation and the like")
    guard: GuardConfig = GuardConfig()
    float8: bool = Field(False, description="float8 linear layers on GPUs that have them")
    layout: LayoutConfig = Field(LayoutConfig(), json_schema_extra=EXECUTION)
    compile: bool = Field(False, json_schema_extra=EXECUTION)
    cuda_graphs: bool = Field(
        False,
        description="the forward and backward pass of a micro-batch run as one CUDA graph, in one process",
        json_schema_extra=EXECUTION,
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), json_schema_extra=EXECUTION)
    monitoring: MonitoringConfig = Field(MonitoringConfig(), json_schema_extra=EXECUTION)

    @field_validator("layout", mode="before", json_schema_input_type=LayoutConfig | Literal["auto"])
    @classmethod
    def left_to_the_planner(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def enough_tokens(self) -> Self:
        if self.tokens < self.batch_tokens:
            raise ValueError(
                f"tokens={self.tokens} is less than one batch (batch_tokens={self.batch_tokens}); lower batch_tokens"
            )
        schedule = self.lr_schedule
        warmup_tokens = schedule.warmup_share * (schedule.over_tokens or self.tokens)
        if schedule.shape == "inverse_sqrt" and warmup_tokens < self.batch_tokens:
            raise ValueError(
                f"lr_schedule: inverse_sqrt with a warm-up of {warmup_tokens:,.0f} tokens, less than one batch "
                f"(batch_tokens={self.batch_tokens}), never reaches its peak; raise warmup_share"
            )
        return self

    @model_validator(mode="after")
    def ramp_rises_to_the_batch(self) -> Self:
        ramp = self.batch_ramp
        if ramp is None:
            return self
        if ramp.start_tokens > self.batch_tokens:
            raise ValueError(
                f"batch_ramp.start_tokens={ramp.start_tokens} is above batch_tokens={self.batch_tokens}; a ramp grows: "
                "lower start_tokens"
            )
        steps = (self.batch_tokens - ramp.start_tokens) // ramp.increment_tokens
        if steps > MAX_RAMP_STEPS:
            raise ValueError(
                f"batch_ramp has {steps} increments; raise increment_tokens, such as to {self.batch_tokens // 100}"
            )
        return self

    @model_validator(mode="after")
    def upcycles_something(self) -> Self:
        if self.upcycle is not None and self.init_from is None:
            raise ValueError("upcycle needs a dense checkpoint; set init_from to its folder, or leave upcycle out")
        return self

    @model_validator(mode="after")
    def teacher_is_used(self) -> Self:
        if self.teacher is not None and self.objective == "causal":
            raise ValueError("teacher is set, which the objective causal does not use; set objective: distillation")
        if self.teacher is None and self.objective == "distillation":
            raise ValueError("distillation needs a teacher; set teacher: {checkpoint: FOLDER}")
        return self

    @model_validator(mode="after")
    def float8_beside_bf16(self) -> Self:
        if self.float8 and self.precision != "bf16":
            raise ValueError(f"float8 products come out in bf16, not {self.precision}; set precision: bf16")
        return self

    @model_validator(mode="after")
    def compiled_schedules(self) -> Self:
        if self.compile and self.layout.pipeline > 1 and self.layout.pipeline_schedule in ("zbv", "dualpipev"):
            raise ValueError(
                f"torch.compile cannot split the backward pass that schedule {self.layout.pipeline_schedule} needs; "
                "set compile: false or pipeline_schedule: interleaved"
            )
        return self

    def with_offload_folder(self, run: Path) -> "TrainConfig":
        """With the run's folder as that of weights on disk, where the recipe names none."""
        offload = self.layout.offload
        if offload.parameters != "disk" or offload.folder is not None:
            return self
        offload = offload.model_copy(update={"folder": str(run)})
        return self.model_copy(update={"layout": self.layout.model_copy(update={"offload": offload})})

"""Configuration of a training run: model, optimizer, schedules, and the layout over processes. No torch here.

A field marked `execution` changes how the work is done, not the result."""

from math import isqrt
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gristmill.foundation.config import Config

EXECUTION: dict[str, Any] = {"execution": True}

# Bounds that no real run reaches (the deepest published transformers have about 1,000 layers; Llama 3 405B is 16,384
# wide): a misplaced digit is named before memory is asked for.
MAX_LAYERS = 10_000
MAX_WIDTH = 1_000_000
MAX_SEQUENCE = 100_000_000
MAX_PROCESSES = 1_000_000
MAX_TOKENS = 10**18
MAX_BATCH_TOKENS = 10**12
MAX_RAMP_STEPS = 10_000

Mixer = Literal["attention"]
Mlp = Literal["swiglu", "gelu"]
NormOrder = Literal["pre", "post"]


class LayerConfig(Config):
    """One entry of the model's list of layers. window: tokens a position looks back, itself included; None is all."""

    mixer: Mixer = "attention"
    mlp: Mlp = "swiglu"
    window: int | None = None
    experts: None = None
    norm_order: NormOrder = "pre"


class ModelConfig(Config):
    """A transformer. The defaults are Llama's (arXiv 2302.13971); `learned` positions, `layernorm`, `gelu`, biases and
    tied embeddings together are GPT-2. `mixer`, `mlp`, `window` and `norm_order` take one value for all layers, or
    a pattern that is repeated over them: window [256, 256, null] looks far in every third layer."""

    layers: int = Field(ge=1, le=MAX_LAYERS)
    width: int = Field(ge=1, le=MAX_WIDTH)
    heads: int = Field(ge=1, le=MAX_WIDTH)
    kv_heads: int = Field(0, ge=0, le=MAX_WIDTH, description="key/value heads; 0 means as many as heads")
    head_width: int = Field(0, ge=0, le=MAX_WIDTH, description="0 means width / heads")
    hidden: int = Field(
        0, ge=0, le=MAX_WIDTH, description="0 means 4 x width for gelu, 8/3 x width rounded up to 64 for swiglu"
    )
    sequence_length: int = Field(512, ge=1, le=MAX_SEQUENCE, description="tokens of a sample")
    mixer: Mixer | tuple[Mixer, ...] = "attention"
    mlp: Mlp | tuple[Mlp, ...] = "swiglu"
    window: int | tuple[int | None, ...] | None = None
    norm_order: NormOrder | tuple[NormOrder, ...] = "pre"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float = Field(1e-5, gt=0)
    positions: Literal["rope", "learned", "alibi", "none"] = "rope"
    rope_base: float = Field(10000.0, gt=1)
    biases: bool = False
    tied_embeddings: bool = False
    embedding_norm: bool = Field(False, description="a norm right after the embedding, as BLOOM has (arXiv 2211.05100)")
    qk_norm: bool = False
    logit_softcap: float | None = Field(None, gt=0, description="logits become cap x tanh(logits / cap)")
    dropout: float = Field(0.0, ge=0, lt=1)
    initialisation: Literal["scaled", "normal", "mup"] = Field(
        "scaled", description="scaled: output layers by 1 / sqrt(2 layers), as Megatron; mup: arXiv 2203.03466, table 8"
    )
    init_std: float = Field(0.02, gt=0)
    mup_base_width: int = Field(256, ge=1, description="the width at which muP equals the standard form")

    @model_validator(mode="after")
    def heads_fit(self) -> Self:
        if not self.head_width and self.width % self.heads:
            raise ValueError(
                f"width={self.width} is not a multiple of heads={self.heads}; change one, or set head_width"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; try one of {divisors(self.heads)}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope turns pairs, so the head width {self.head_dim} must be even; set head_width")
        return self

    @model_validator(mode="after")
    def patterns_fill_the_layers(self) -> Self:
        for name in ("mixer", "mlp", "window", "norm_order"):
            pattern = getattr(self, name)
            if isinstance(pattern, tuple) and (not pattern or self.layers % len(pattern)):
                raise ValueError(
                    f"{name} has {len(pattern)} entries, which do not repeat evenly over {self.layers} layers"
                )
        if any(layer.window is not None and layer.window < 1 for layer in self.layer_list):
            raise ValueError("window counts the position itself: it must be at least 1, or null for no limit")
        return self

    @property
    def layer_list(self) -> tuple[LayerConfig, ...]:
        """One entry a layer: what pipeline cuts, the planner's costs and the model itself are made from."""
        return tuple(
            LayerConfig(
                mixer=_entry(self.mixer, index),
                mlp=_entry(self.mlp, index),
                window=_entry(self.window, index),
                norm_order=_entry(self.norm_order, index),
            )
            for index in range(self.layers)
        )

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        return self.head_width or self.width // self.heads

    def hidden_width(self, mlp: Mlp) -> int:
        """Width inside the MLP: the recipe's, or the customary one. width 256, swiglu -> 704."""
        if self.hidden:
            return self.hidden
        return 4 * self.width if mlp == "gelu" else -(-8 * self.width // (3 * 64)) * 64


Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}  # interleaved has as many as one asks for
Recompute = Literal["none", "full", "attention", "operators"]


class LayoutConfig(Config):
    """How many processes share each axis: their product is the number of processes.

    data is all data-parallel processes; of these, groups of data / replicate shard the state (FSDP), and the
    `replicate` groups hold copies (HSDP). tensor ranks are neighbours, pipeline ranks the farthest apart."""

    auto: bool = Field(False, description="`layout: auto`: the planner chooses, when the number of processes is known")
    hardware: str = Field("h100", description="the profile it plans for: a100-80g, h100, h200 or a file")
    data: int = Field(1, ge=1, le=MAX_PROCESSES)
    replicate: int = Field(1, ge=1, le=MAX_PROCESSES)
    tensor: int = Field(1, ge=1, le=MAX_PROCESSES)
    pipeline: int = Field(1, ge=1, le=MAX_PROCESSES)
    context: int = Field(1, ge=1, le=MAX_PROCESSES)
    expert: int = Field(1, ge=1, le=MAX_PROCESSES)
    sequence_parallel: bool = Field(True, description="norms and residuals on sequence shards; matters if tensor > 1")
    schedule: Schedule = "1f1b"
    virtual_stages: int = Field(
        0, ge=0, le=MAX_LAYERS, description="stages a pipeline rank holds; 0 means the schedule's usual number"
    )
    cuts: tuple[int, ...] | None = Field(None, description="first layer of each stage but the first; None cuts by cost")
    rank_order: tuple[int, ...] | None = Field(
        None,
        description="torchrun's ranks in the order pipeline, replicate, shard, context, tensor (the last fastest), "
        "beginning with rank 0; None: as they come",
    )
    micro_batch: int = Field(
        0, ge=0, le=MAX_BATCH_TOKENS, description="samples in a micro-batch; 0 lets the engine choose"
    )
    reshard_after_forward: bool = Field(True, description="true is ZeRO-3, false ZeRO-2; always false with a pipeline")
    recompute: Recompute = "none"
    recompute_every: int = Field(1, ge=1, description="1 recomputes in every layer, n in every n-th")

    @model_validator(mode="after")
    def axes_are_legal(self) -> Self:
        if self.data % self.replicate:
            raise ValueError(
                f"data={self.data} is not a multiple of replicate={self.replicate}; try one of {divisors(self.data)}"
            )
        for axis in ("context", "expert"):
            if getattr(self, axis) > 1:
                raise ValueError(f"the {axis} axis is not built yet; set {axis}: 1")
        return self

    @model_validator(mode="after")
    def rank_order_names_each_rank_once(self) -> Self:
        if self.rank_order is not None and sorted(self.rank_order) != list(range(self.world_size)):
            raise ValueError(
                f"rank_order must name each of the {self.world_size} ranks 0 to {self.world_size - 1} once; "
                "leave it out for the launcher's own order"
            )
        if self.rank_order is not None and self.rank_order[0] != 0:
            raise ValueError(
                f"rank_order begins with rank {self.rank_order[0]}, but rank 0, which writes the checkpoints, must "
                "come first; begin with the pipeline stage that holds it"
            )
        return self

    def position_of(self, rank: int) -> int:
        """Where a rank of the launcher stands in the mesh: its rank in torch's process group.

        Groups of torch are always in rising order of rank, so it is the ranks that are reordered, not the mesh."""
        return rank if self.rank_order is None else self.rank_order.index(rank)

    @model_validator(mode="after")
    def schedule_is_legal(self) -> Self:
        if self.pipeline == 1:
            return self
        usual = STAGES_PER_RANK.get(self.schedule)
        if usual and self.virtual_stages not in (0, usual):
            raise ValueError(f"schedule {self.schedule} holds {usual} stages a rank; leave virtual_stages out")
        if self.schedule == "interleaved" and self.virtual_stages == 1:
            raise ValueError("one stage a rank is not interleaved: set virtual_stages to 2 or more, or schedule: 1f1b")
        if self.schedule in ("zbv", "dualpipev") and self.recompute == "operators":
            raise ValueError(
                f"{self.schedule} splits the backward pass, which torch's operator-wise recomputation forbids; "
                "set recompute: full"
            )
        if self.cuts is not None and (
            len(self.cuts) != self.num_stages - 1 or list(self.cuts) != sorted(set(self.cuts))
        ):
            raise ValueError(
                f"cuts must be {self.num_stages - 1} rising layer numbers, one for each stage but the first"
            )
        return self

    @property
    def shard(self) -> int:
        return self.data // self.replicate

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def stages_per_rank(self) -> int:
        if self.pipeline == 1:
            return 1
        return self.virtual_stages or STAGES_PER_RANK.get(self.schedule, 2)

    @property
    def num_stages(self) -> int:
        return self.pipeline * self.stages_per_rank


class OptimizerConfig(Config):
    """AdamW on every parameter, or Muon on the matrices of the layers and AdamW on the rest. Vectors do not decay."""

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float | None = Field(1.0, gt=0, description="the global gradient norm is cut to this; null leaves it")
    muon_learning_rate: float = Field(0.02, gt=0)
    muon_momentum: float = Field(0.95, ge=0, lt=1)


class ScheduleConfig(Config):
    """The learning rate over the run, in shares of its tokens: warm-up from 0, then a shape down to final_ratio.

    over_tokens lays the shape out over so many tokens instead, as for a run that is planned to stop early."""

    shape: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = "cosine"
    over_tokens: int | None = Field(None, ge=1)
    warmup_share: float = Field(0.02, ge=0, le=1)
    final_ratio: float = Field(0.1, ge=0, le=1)
    decay_share: float = Field(0.2, gt=0, le=1, description="wsd: the last share of the run, in which the rate falls")
    decay_shape: Literal["linear", "cosine", "one_minus_sqrt", "exponential"] = "one_minus_sqrt"


class RampConfig(Config):
    """The batch grows from start_tokens in equal increments until it is batch_tokens, after over_tokens of training."""

    start_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    increment_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    over_tokens: int = Field(ge=1, le=MAX_TOKENS)


class ValidationConfig(Config):
    """The held-out loss by source, every so many steps and at the end; every: 0 leaves it out."""

    every: int = Field(50, ge=0)
    samples: int = Field(32, ge=1)


class TrainingEvaluationConfig(Config):
    """Tasks that the model is asked while it trains, every so many steps and at the end; every: 0 leaves it out.

    The budget is stated in documents: `limit` of each task, the same on every machine, so that a resumed run finds what
    an unbroken one does. budget_seconds leaves out the tasks not begun when it is spent: then the machine has a say in
    the results. What it took stands in logs/timing.jsonl."""

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
    """Which steps are skipped. A non-finite loss or gradient always is; an outlier when it stands `sigmas` standard
    deviations above the mean of the last `window` steps (the rule of OLMo-core; off while null)."""

    sigmas: float | None = Field(None, gt=0)
    window: int = Field(128, ge=2)
    max_consecutive_skips: int = Field(10, ge=1, description="more skipped steps in a row stop the run")


class CheckpointConfig(Config):
    """every: steps between checkpoints; 0 saves at the end only. keep_every: steps whose checkpoint stays for ever."""

    every: int = Field(100, ge=0)
    keep_last: int = Field(2, ge=1)
    keep_every: int = Field(0, ge=0)
    asynchronous: bool = False
    stop_after_seconds: float | None = Field(
        None, gt=0, description="save and stop after this time; run again to go on"
    )


class WatchConfig(Config):
    """timeout_seconds: a step that takes longer is named by rank and place, and the run is stopped."""

    timeout_seconds: float = Field(1800.0, gt=0)
    log_every: int = Field(1, ge=1, description="steps between lines of timing.jsonl; metrics.jsonl has every step")
    tensorboard: bool = True
    wandb_project: str | None = None
    profile_steps: tuple[int, ...] = Field((), description="steps whose Chrome trace is written (`--profile`)")
    communication_every: int = Field(
        100, ge=0, description="every so many steps torch's profiler measures the time in communication; 0 never"
    )


class TrainConfig(Config):
    """tokens of training (rounded up to whole batches), batch_tokens a step over all processes."""

    tokens: int = Field(ge=1, le=MAX_TOKENS)
    batch_tokens: int = Field(ge=1, le=MAX_BATCH_TOKENS)
    batch_ramp: RampConfig | None = None
    precision: Literal["bf16", "fp32", "fp16", "fp64"] = "bf16"
    z_loss: float = Field(0.0, ge=0, description="weight of log(Z)^2 (PaLM, arXiv 2204.02311, section 5: 1e-4)")
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: TrainingEvaluationConfig = TrainingEvaluationConfig()
    init_from: str | None = Field(
        None,
        description="a checkpoint whose weights the run begins with, like checkpoints/step-00000000 of `gristmill "
        "import`; its digest, not its path, is part of what the run is",
        json_schema_extra=EXECUTION,
    )
    guard: GuardConfig = GuardConfig()
    float8: bool = Field(False, description="float8 linear layers on GPUs that have them")
    layout: LayoutConfig = Field(LayoutConfig(), json_schema_extra=EXECUTION)
    compile: bool = Field(False, json_schema_extra=EXECUTION)
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), json_schema_extra=EXECUTION)
    watch: WatchConfig = Field(WatchConfig(), json_schema_extra=EXECUTION)

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
    def float8_beside_bf16(self) -> Self:
        if self.float8 and self.precision != "bf16":
            raise ValueError(f"float8 products come out in bf16, not {self.precision}; set precision: bf16")
        return self

    @model_validator(mode="after")
    def compiled_schedules(self) -> Self:
        if self.compile and self.layout.pipeline > 1 and self.layout.schedule in ("zbv", "dualpipev"):
            raise ValueError(
                f"torch.compile cannot split the backward pass that schedule {self.layout.schedule} needs; "
                "set compile: false or schedule: interleaved"
            )
        return self


def divisors(number: int) -> list[int]:
    """12 -> [1, 2, 3, 4, 6, 12]."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _entry(value: Any, index: int) -> Any:
    return value[index % len(value)] if isinstance(value, tuple) else value

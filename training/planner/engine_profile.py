"""Properties of training frameworks: kernels, precision of the stored state, overlap of communication and compute.

Ours, compiled and eager; Megatron-LM of 2021 (the constants are fitted to its table), of 2022, and Megatron-Core of
2024 and later; and the frameworks of the newer published tables.
"""

from typing import Literal

from pydantic import Field

from gristmill.foundation.config import Config
from gristmill.training.config.layout import Recompute, Schedule


class EngineProfile(Config):
    """Bytes are for one parameter; `overlap`: share of a transfer that can overlap with compute."""

    name: str
    activations: Literal["engine", "literature"] = Field(
        "engine", description="counted from what our engine's autograd saves, or by the published formulas"
    )
    attention: Literal["flash", "unfused"] = "flash"
    flash: Literal["best", "second"] = Field(
        "best", description="second: FlashAttention-2 also where a newer kernel is faster"
    )
    float8_cast_bytes: float = Field(3, ge=0, description="traffic of casting one number into 8 bits")
    kernels: Literal["fused", "eager"] = Field(
        "fused", description="fused: norms, activations, residuals in one pass each"
    )
    loss: Literal["fused", "unfused"] = Field(
        "fused", description="unfused: fp32 logits and their softmax are kept in memory"
    )
    data_parallel: Literal["replicate", "optimizer_shard", "fsdp"] = Field(
        "fsdp", description="replicate: all-reduce of gradients; optimizer_shard: ZeRO-1; fsdp: the layout's shard axis"
    )
    gathers_float8: bool = Field(False, description="FSDP gathers the weights of float8 layers in 8 bits")
    weight_bytes: float = Field(2, description="a weight as the matmuls read it")
    master_bytes: float = Field(4, description="its fp32 master copy, where the weight is not that itself")
    gradient_bytes: float = Field(4, description="a gradient as it is kept until the optimizer step")
    reduce_bytes: float = Field(4, description="a gradient on the link")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: the layers' parameters have one moment, and their matrices are made orthogonal"
    )
    moments_bytes: float = Field(8, description="both moments of Adam")
    accumulate_bytes: float = Field(8, description="traffic of adding one micro-batch's gradient to the sum")
    unshard_bytes: float = Field(0, description="traffic of FSDP's copies of a weight when it is gathered and used")
    optimizer_bytes: float = Field(32, description="traffic of clipping, one Adam step and the cast")
    tensor_overlap: float = Field(0.0, ge=0, le=1, description="of the tensor axis's collectives")
    tensor_hidden_async: float = Field(
        0.7, ge=0, le=1, description="the same where products and collectives are chunked (async_tensor_parallel)"
    )
    expert_overlap: float = Field(0.0, ge=0, le=1, description="of the exchange of tokens with experts")
    pipeline_overlap: float = Field(0.0, ge=0, le=1, description="of the sends between stages, interleaved schedule")
    data_overlap: float = Field(0.8, ge=0, le=1, description="of the data axis's collectives, without a pipeline")
    data_overlap_in_pipeline: float = Field(0.0, ge=0, le=1, description="the same with a pipeline")
    regather_in_backward: bool = Field(True, description="sequence parallelism gathers the layer's input again")
    selective: Literal["mixer", "core"] = Field(
        "mixer", description="what recompute: attention runs again: the whole mixer, or scores to values only"
    )
    products_again: float = Field(
        0.0, ge=0, le=1, description="of the matrix products, what recompute: operators runs again"
    )
    scatter_gather: bool = Field(True, description="each tensor rank sends its slice between stages")
    dropout: bool = False
    layers: Literal["even", "balanced"] = Field("even", description="stages of equal layers, or of equal cost")
    schedules: tuple[Schedule, ...] = Field(("1f1b", "interleaved"), description="schedules that a search tries")
    recomputes: tuple[Recompute, ...] = Field(
        ("none", "operators", "attention", "full"), description="recomputation modes that it offers, the cheapest first"
    )
    swaps: bool = Field(False, description="it offers recompute: swap and tokens, besides")
    step_seconds: float = Field(0.0, ge=0, description="work of a step outside the GPUs that nothing hides")

    @property
    def is_ours(self) -> bool:
        """Whether it is this engine, whose layouts must pass the engine's checks."""
        return self.name.startswith("gristmill")

    @property
    def compiles(self) -> bool:
        return self.name == "gristmill"

    def with_optimizer(self, name: str) -> "EngineProfile":
        return self if name == self.optimizer else EngineProfile.model_validate(self.model_dump() | {"optimizer": name})


# Our engine keeps a layer's gathered input, so nothing is gathered again; FSDP2 fetches a layer ahead; AdamW is fused.
# torch's own attention is FlashAttention-2.
GRISTMILL = EngineProfile(
    name="gristmill",
    flash="second",
    regather_in_backward=False,
    scatter_gather=False,
    layers="balanced",
    schedules=("1f1b", "interleaved", "zbv"),
)
# Without train.compile each norm, activation and residual is a pass of its own.
# Only for these does a search try swaps: compiled layers cannot compute some tokens again, and their full swap is not
# forecast from measurements of any GPU.
GRISTMILL_EAGER = EngineProfile.model_validate(
    GRISTMILL.model_dump() | {"name": "gristmill-eager", "kernels": "eager", "swaps": True, "gathers_float8": True}
)

# Eager on a CPU in float32 (with rates.FLOAT32): a weight is its own master copy, half the bytes of what is float32
# anyway count, and nothing hides a collective, which the processor itself carries out. FSDP copies each weight into a
# buffer and out of it, forward and backward (4 x 4), also where a process shares the weights with no other.
CPU_FLOAT32 = EngineProfile.model_validate(
    GRISTMILL.model_dump()
    | {
        "name": "gristmill-cpu-float32",
        "unshard_bytes": 16,
        "kernels": "eager",
        "loss": "unfused",
        "reduce_bytes": 2,
        "optimizer_bytes": 16,
        "data_overlap": 0.0,
        "data_overlap_in_pipeline": 0.0,
    }
)

# fp16 with fp32 masters (Micikevicius et al. 2018), gradients kept and reduced in fp16; scale-mask-softmax, bias-GeLU
# and bias-dropout-residual fused, dropout of attention not; no overlap where there is a pipeline (DDP "local").
# optimizer_bytes: unscale and copy 2+4, norm 4, clip 4+4, Adam 16+12, cast 4+2. accumulate: 2+2 read, 2 written.
MEGATRON_2021 = EngineProfile(
    name="megatron-2021",
    activations="literature",
    attention="unfused",
    selective="core",
    recomputes=("none", "full"),
    kernels="eager",
    loss="unfused",
    data_parallel="replicate",
    gradient_bytes=2,
    reduce_bytes=2,
    accumulate_bytes=6,
    optimizer_bytes=52,
    dropout=True,
    data_overlap=0.8,
    data_overlap_in_pipeline=0.0,
)

# The same, a year on (arXiv 2205.05198): sequence parallelism, selective recomputation, and the backward half of the
# tensor collectives behind the matmuls of the weights' gradients.
MEGATRON_2022 = EngineProfile.model_validate(
    MEGATRON_2021.model_dump()
    | {"name": "megatron-2022", "tensor_overlap": 0.5, "recomputes": ("none", "attention", "full")}
)

# bf16, distributed optimizer with overlapped reduce-scatter and all-gather, gradients summed in fp32 inside the matmul,
# whole fp32 logits (its fused loss is off unless asked for), tensor collectives split into chunks behind the matmuls,
# sends overlapped in the interleaved schedule; casts into 8 bits fused into the norm or activation before them.
MEGATRON_CORE = EngineProfile(
    name="megatron-core",
    activations="literature",
    float8_cast_bytes=0,
    loss="unfused",
    data_parallel="optimizer_shard",
    selective="core",
    recomputes=("none", "attention", "full"),
    accumulate_bytes=8,
    tensor_overlap=0.7,
    pipeline_overlap=0.8,
    data_overlap=0.9,
    data_overlap_in_pipeline=0.7,
)

# One micro-batch's exchange of tokens beside another's passes (--overlap-moe-expert-parallel-comm).
MEGATRON_CORE_OVERLAP = EngineProfile.model_validate(
    MEGATRON_CORE.model_dump() | {"name": "megatron-core-overlap", "expert_overlap": 0.9}
)

# torch's FSDP as Llama and GPT recipes of 2023 use it: eager kernels, FlashAttention-2 or its Triton forerunner, whole
# fp32 logits, AdamW that updates in several passes (clip 4+4, moments 16+12, weight 4+4).
TORCH_FSDP = EngineProfile.model_validate(
    GRISTMILL_EAGER.model_dump()
    | {"name": "torch-fsdp", "gathers_float8": False, "loss": "unfused", "layers": "even", "optimizer_bytes": 44}
)
# FSDP2 with layers compiled; its recomputation by operator keeps every second product (torchtitan,
# distributed/activation_checkpoint.py), which runs the others again.
TORCHTITAN = EngineProfile.model_validate(
    GRISTMILL.model_dump() | {"name": "torchtitan", "loss": "unfused", "layers": "even", "products_again": 0.5}
)
TORCHTITAN_EAGER = EngineProfile.model_validate(
    TORCHTITAN.model_dump() | {"name": "torchtitan-eager", "kernels": "eager", "optimizer_bytes": 44}
)
# CUDA written for one model: everything fused, cuDNN's attention, optimizer state cut over the ranks (its flag -z 1),
# gradients reduced in 16 bits.
LLM_C = EngineProfile.model_validate(
    GRISTMILL.model_dump()
    | {"name": "llm.c", "flash": "best", "data_parallel": "optimizer_shard", "gradient_bytes": 2, "reduce_bytes": 2}
)

FRAMEWORKS = {
    framework.name: framework
    for framework in (
        GRISTMILL,
        GRISTMILL_EAGER,
        MEGATRON_2021,
        MEGATRON_2022,
        MEGATRON_CORE,
        MEGATRON_CORE_OVERLAP,
        TORCH_FSDP,
        TORCHTITAN,
        TORCHTITAN_EAGER,
        LLM_C,
    )
}

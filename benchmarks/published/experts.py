"""Published runs of mixtures of experts on H100: Megatron-Core and Megatron-Bridge. Three of eight determine what a
mixture costs beside products and exchange; the others are blind, though two are of models of these three."""

from published.run import PublishedRun
from published.torch_fsdp import by_tokens

from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import ModelShape, shape_of
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.plan_request import named_shape

MCORE = "NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md, v0.9: 468 TFLOP/s; the layout is ours"
BRIDGE = (
    "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, and performance-summary-archive.md, containers 25.09 "
    "to 26.02, DGX-H100, balanced by force, nothing dropped"
)


def _parallel(tensor: int, pipeline: int, virtual: int, gpus: int, expert: int, micro: int) -> Layout:
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        replicate=gpus // (tensor * pipeline),
        virtual=virtual,
        micro_batch=micro,
        pipeline_schedule="interleaved" if virtual > 1 else "1f1b",
        sequence_parallel=tensor > 1,
        expert=expert,
    )


GPT_OSS = shape_of(
    ModelConfig(
        layers=36,
        width=2880,
        heads=64,
        kv_heads=8,
        head_width=64,
        ffn_hidden_size=2880,
        biases=True,
        window=(128, None),
        sequence_length=4096,
        moe={"experts": 128, "top_k": 4},
    ),
    201088,
)


def _bridge(
    name: str, shape: ModelShape, layout: Layout, samples: int, tokens: float, float8: bool, *, overlap: bool = False
) -> PublishedRun:
    framework = "megatron-core-overlap" if overlap else "megatron-core"
    return by_tokens(name, shape, layout, samples, tokens, BRIDGE, "h100", framework, float8)


# arXiv 2412.19437, section 4.2; its layer for a second token (MTP) counts as a layer like the others.
DEEPSEEK_V3 = shape_of(
    ModelConfig(
        layers=62,
        width=7168,
        heads=128,
        head_width=192,
        rope_width=64,
        ffn_hidden_size=18432,
        mixer="latent_attention",
        mixers={"latent_attention": {"key_value_rank": 512, "query_rank": 1536, "value_width": 128}},
        sequence_length=4096,
        moe={
            "experts": (0,) * 3 + (256,) * 59,
            "top_k": 8,
            "ffn_hidden_size": 2048,
            "shared_experts": 1,
            "router": "sigmoid",
        },
    ),
    129280,
)
MIXTRAL, QWEN3_30B, QWEN3_235B = (named_shape(name) for name in ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b"))

# The constants of hardware.Routed are fitted to these three.
EXPERTS_FITTED = (
    PublishedRun(
        "Mixtral 8x7B, 64 GPUs",
        MIXTRAL,
        _parallel(1, 4, 8, 64, 8, 1),
        256,
        468.0,
        MCORE,
        "h100",
        "megatron-core",
        False,
    ),
    _bridge("Qwen3 30B-A3B, 16 GPUs", QWEN3_30B, _parallel(1, 2, 24, 16, 8, 2), 512, 5275, True),
    _bridge("GPT-OSS 120B, 64 GPUs", GPT_OSS, _parallel(1, 4, 1, 64, 8, 4), 512, 5630, False),
)
EXPERTS = {
    "mixtures of experts, 16 to 1,024 H100": (
        # Its recipe overlaps the exchange (scripts/performance/configs/qwen/qwen3_workload_base_configs.py).
        _bridge(
            "Qwen3 235B-A22B, 256 GPUs", QWEN3_235B, _parallel(2, 8, 4, 256, 32, 1), 2048, 1575, True, overlap=True
        ),
        _bridge("Qwen3 235B-A22B, 26.02", QWEN3_235B, _parallel(2, 8, 4, 256, 32, 1), 8192, 1633, True, overlap=True),
        _bridge("Qwen3 30B-A3B, 26.02", QWEN3_30B, _parallel(1, 2, 12, 16, 8, 1), 1024, 5113, True),
        # VP 4 in the table: 32 stages of one or two layers (pp_layout in scripts/performance/configs/deepseek).
        _bridge(
            "DeepSeek-V3, 1,024 GPUs", DEEPSEEK_V3, _parallel(2, 8, 4, 1024, 64, 1), 8192, 1297, True, overlap=True
        ),
        _bridge("GPT-OSS 120B, 26.02", GPT_OSS, _parallel(1, 4, 1, 64, 8, 1), 1280, 5993, False),
    )
}

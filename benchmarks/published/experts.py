"""Published runs of mixtures of experts on H100: Megatron-Core and Megatron-Bridge. Nothing was fitted to them."""

from published.run import PublishedRun
from published.torch_fsdp import by_tokens

from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import ModelShape, shape_of
from gristmill.training.planner.known_models import named_shape
from gristmill.training.planner.layout import Layout

MCORE = "NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md, v0.9: 468 TFLOP/s; the layout is ours"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, container 25.11, DGX-H100, balanced by force"


def _parallel(tensor: int, pipeline: int, virtual: int, gpus: int, expert: int, micro: int) -> Layout:
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        replicate=gpus // (tensor * pipeline),
        virtual=virtual,
        micro_batch=micro,
        schedule="interleaved" if virtual > 1 else "1f1b",
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
        hidden=2880,
        biases=True,
        window=(128, None),
        sequence_length=4096,
        moe={"experts": 128, "top_k": 4},
    ),
    201088,
)


def _bridge(name: str, shape: ModelShape, layout: Layout, samples: int, tokens: float, float8: bool) -> PublishedRun:
    return by_tokens(name, shape, layout, samples, tokens, BRIDGE, "h100", "megatron-core", float8)


EXPERTS = {
    "mixtures of experts, 16 to 256 H100": (
        PublishedRun(
            "Mixtral 8x7B, 64 GPUs",
            named_shape("mixtral-8x7b"),
            _parallel(1, 4, 8, 64, 8, 1),
            256,
            468.0,
            MCORE,
            "h100",
            "megatron-core",
            False,
        ),
        _bridge("Qwen3 30B-A3B, 16 GPUs", named_shape("qwen3-30b-a3b"), _parallel(1, 2, 24, 16, 8, 2), 512, 5275, True),
        # The table leaves the batch of this row out; 4,096 samples are ours.
        _bridge(
            "Qwen3 235B-A22B, 256 GPUs",
            named_shape("qwen3-235b-a22b"),
            _parallel(2, 8, 4, 256, 32, 1),
            4096,
            1575,
            True,
        ),
        _bridge("GPT-OSS 120B, 64 GPUs", GPT_OSS, _parallel(1, 4, 1, 64, 8, 4), 512, 5630, False),
    )
}

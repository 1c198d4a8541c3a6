"""Published runs on B200: Megatron-Bridge's table for DGX B200. All are blind: the profile has the datasheet's peaks
and the H100's shares of them."""

from published.experts import DEEPSEEK_V3, GPT_OSS, QWEN3_30B, QWEN3_235B
from published.run import PublishedRun
from published.torch_fsdp import by_tokens

from gristmill.training.planner.costs.model_shape import ModelShape
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.plan_request import named_shape

BRIDGE = (
    "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, containers 25.11 and 26.02, DGX-B200, experts "
    "balanced by force, nothing dropped"
)


def _run(
    name: str,
    shape: ModelShape,
    sizes: tuple[int, int, int, int, int, int],
    gpus: int,
    samples: int,
    tokens: float,
    float8: bool,
) -> PublishedRun:
    """sizes: tensor, pipeline, context, stages a rank, expert, micro-batch."""
    tensor, pipeline, context, virtual, expert, micro = sizes
    layout = Layout(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        replicate=gpus // (tensor * pipeline * context),
        virtual=virtual,
        micro_batch=micro,
        pipeline_schedule="interleaved" if virtual > 1 else "1f1b",
        sequence_parallel=tensor > 1,
        expert=expert,
    )
    return by_tokens(f"{name}, {gpus} B200", shape, layout, samples, tokens, BRIDGE, "b200", "megatron-core", float8)


BLACKWELL = {
    "dense, 8 and 128 B200 in float8": (
        _run("Llama 3 8B", named_shape("llama3-8b"), (1, 1, 1, 1, 1, 2), 8, 128, 30624, True),
        _run("Llama 3 405B", named_shape("llama3-405b"), (4, 8, 2, 8, 1, 1), 128, 64, 661, True),
    ),
    "mixtures of experts, 8 to 256 B200": (
        # 62 layers do not split into 16 stages evenly.
        _run("DeepSeek-V3", DEEPSEEK_V3, (1, 16, 1, 1, 8, 1), 256, 2048, 2139, True),
        _run("GPT-OSS 120B", GPT_OSS, (1, 1, 1, 1, 8, 4), 64, 512, 8213, False),
        _run("Qwen3 30B-A3B", QWEN3_30B, (1, 1, 1, 1, 8, 1), 8, 512, 9299, True),
        _run("Qwen3 235B-A22B", QWEN3_235B, (1, 8, 1, 2, 8, 1), 64, 1024, 3269, True),
        _run("DeepSeek-V3, 26.02", DEEPSEEK_V3, (1, 16, 1, 1, 8, 1), 256, 4096, 2689, True),
        _run("GPT-OSS 120B, 26.02", GPT_OSS, (1, 1, 1, 1, 64, 4), 64, 1280, 8047, False),
        _run("Qwen3 30B-A3B, 26.02", QWEN3_30B, (1, 1, 1, 1, 8, 1), 8, 512, 9691, True),
        _run("Qwen3 235B-A22B, 26.02", QWEN3_235B, (1, 8, 1, 1, 8, 1), 256, 8192, 3805, True),
    ),
}

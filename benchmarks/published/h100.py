"""Published runs on H100: llm.c, Megatron-Core, NeMo in float8, Llama 3."""

from published.run import PublishedRun
from published.torch_fsdp import LLAMA2, by_tokens

from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import ModelShape, gpt, shape_of
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.plan_request import named_shape

# 2.80 s for 1,048,576 tokens: 482 TFLOP/s by 6 N and full attention. The H100's `sustained` is fitted to this run.
LLM_C_RUN = PublishedRun(
    "llm.c 1558M, 8 GPUs",
    gpt(48, 1600, 25, sequence_length=1024, vocab=50304),
    Layout(replicate=8, micro_batch=16),
    1024,
    482.0,
    "karpathy/llm.c, scripts/run_gpt2_1558M.sh, header",
    "h100",
    "llm.c",
    False,
)

NEMO = "NVIDIA/NeMo, docs/source/performance/performance_summary.md, container 24.07, float8"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, containers 25.09 to 26.02, float8"
MCORE = "NVIDIA/Megatron-LM, README.md, 2024: 47 % on 96 and 42 % on 4,608 H100; the layout is ours"
LLAMA_3 = "arXiv 2407.21783, table 4 (bf16, 8,192 tokens); it gives no stages a rank: ours are 4"


def _parallel(tensor: int, pipeline: int, virtual: int, gpus: int, micro: int = 1, context: int = 1) -> Layout:
    data = gpus // (tensor * pipeline * context)
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        replicate=data,
        context=context,
        virtual=virtual,
        micro_batch=micro,
        pipeline_schedule="interleaved" if virtual > 1 else "1f1b",
        sequence_parallel=tensor > 1,
    )


def _nemo(
    name: str, shape: ModelShape, layout: Layout, samples: int, tokens: float, source: str = NEMO
) -> PublishedRun:
    name = f"{name}, {layout.gpus} GPUs"
    return by_tokens(name, shape, layout, samples, tokens, source, "h100", "megatron-core", True)


_175B = gpt(96, 12288, 96)
_175B_WIDE = gpt(96, 12288, 96, sequence_length=4096, vocab=131072)
FLOAT8 = (
    _nemo("Llama 2 7B", LLAMA2["7b"], _parallel(1, 1, 1, 8), 128, 16847),
    _nemo("Llama 2 13B", LLAMA2["13b"], _parallel(1, 4, 10, 16), 128, 8646),
    _nemo("Llama 2 70B", LLAMA2["70b"], _parallel(4, 4, 20, 64), 128, 1707),
    _nemo("GPT-3 175B", _175B, _parallel(4, 8, 6, 128), 256, 726),
    _nemo("GPT-3 175B", _175B, _parallel(4, 8, 6, 512, 2), 2048, 782),
    _nemo("Llama 3 8B", named_shape("llama3-8b"), _parallel(1, 1, 1, 8), 128, 14451, BRIDGE),
    _nemo("Llama 3 70B", named_shape("llama3-70b"), _parallel(4, 8, 5, 64), 256, 1621, BRIDGE),
    _nemo("Llama 3 405B", named_shape("llama3-405b"), _parallel(8, 8, 8, 1024, 1, 2), 1536, 311, BRIDGE),
)


def _bf16(name: str, shape: ModelShape, layout: Layout, samples: int, tflops: float, source: str) -> PublishedRun:
    return PublishedRun(
        f"{name}, {layout.gpus} GPUs", shape, layout, samples, tflops, source, "h100", "megatron-core", False
    )


LARGE = (
    _bf16("GPT-3 175B", _175B_WIDE, _parallel(8, 12, 8, 96), 1152, 0.47 * 989, MCORE),
    _bf16("GPT-3 175B", _175B_WIDE, _parallel(8, 12, 8, 4608), 1152, 0.42 * 989, MCORE),
    _bf16("Llama 3 405B", named_shape("llama3-405b"), _parallel(8, 16, 4, 8192), 2048, 430, LLAMA_3),
    _bf16("Llama 3 405B", named_shape("llama3-405b"), _parallel(8, 16, 4, 16384), 2048, 400, LLAMA_3),
)
# Reported second-hand, without micro-batch sizes: those given here are ours.
SMALL = (
    by_tokens(
        "nanotron Llama 1B, 8 GPUs",
        shape_of(
            ModelConfig(
                layers=16,
                width=2048,
                heads=32,
                kv_heads=8,
                ffn_hidden_size=8192,
                sequence_length=4096,
                tied_embeddings=True,
            ),
            128256,
        ),
        Layout(replicate=8, micro_batch=3),
        264,
        42000,
        "marin #1826, quoting the Smol Training Playbook; the shape is Llama 3.2 1B's",
        "h100",
        "torch-fsdp",
    ),
    PublishedRun(
        "picotron SmolLM 1.7B, 8 GPUs",
        shape_of(
            ModelConfig(
                layers=24, width=2048, heads=32, ffn_hidden_size=8192, sequence_length=2048, tied_embeddings=True
            ),
            49152,
        ),
        Layout(replicate=8, micro_batch=4),
        256,
        0.49 * 989,
        "huggingface/picotron, README.md: nearly 50 %",
        "h100",
        "torch-fsdp",
        False,
    ),
)

H100 = {
    "Megatron-Core and Llama 3, 96 to 16,384 H100": LARGE,
    "NeMo in float8, 8 to 1,024 H100": FLOAT8,
    "small models, second-hand, 8 H100": SMALL,
}

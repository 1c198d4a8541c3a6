"""Published runs of PyTorch FSDP on A100 and H100, to compare the planner's forecasts with.

Runs whose source does not give the micro-batch or the kernels are left out. Tokens per second are converted to TFLOP/s
with our own FLOP count (full attention, no recomputation), since sources count differently.
"""

from published.run import PublishedRun

from gristmill.training.config.layout import Recompute
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import ModelShape, flops_per_token, shape_of
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.plan_request import named_shape

FOUNDRY = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md, rows at 2,048 tokens, FULL_SHARD"
# (layers, width, heads) of its scripts/train/yamls; vocabulary 50368, GELU of 4 x width, ALiBi, tied tables.
_MPT = {
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}


def _foundry(
    name: str, gpus: int, micro: int, accumulation: int, mfu: float, hardware: str, recompute: Recompute = "none"
) -> PublishedRun:
    layers, width, heads = _MPT[name]
    model = ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        sequence_length=2048,
        mlp="gelu",
        norm="layernorm",
        positions="alibi",
        tied_embeddings=True,
    )
    layout = Layout(shard=gpus, micro_batch=micro, recompute=recompute, reshard=True)
    peak = {"a100-80g": 312.0, "h100": 989.0}[hardware]
    return PublishedRun(
        name=f"MPT {name}, {gpus} GPUs",
        shape=shape_of(model, 50368),
        layout=layout,
        samples=gpus * micro * accumulation,
        tflops=mfu / 100 * peak,
        source=FOUNDRY,
        hardware=hardware,
        framework="torch-fsdp",
        recompute_counted=False,
    )


FOUNDRY_A100 = (
    _foundry("70b", 64, 8, 4, 53.33, "a100-80g", "full"),
    _foundry("70b", 32, 2, 16, 48.56, "a100-80g", "full"),
    _foundry("30b", 8, 3, 21, 55.30, "a100-80g", "full"),
    _foundry("13b", 8, 2, 3, 59.57, "a100-80g"),
    _foundry("7b", 8, 6, 2, 64.23, "a100-80g"),
    _foundry("3b", 8, 10, 2, 62.11, "a100-80g"),
    _foundry("1b", 8, 14, 4, 59.86, "a100-80g"),
    _foundry("760m", 8, 24, 2, 56.85, "a100-80g"),
)
FOUNDRY_H100 = (
    _foundry("70b", 64, 8, 4, 42.57, "h100", "full"),
    _foundry("70b", 32, 2, 16, 36.15, "h100", "full"),
    _foundry("30b", 32, 14, 3, 43.92, "h100", "full"),
    _foundry("30b", 16, 10, 3, 43.07, "h100", "full"),
    _foundry("30b", 8, 3, 21, 38.11, "h100", "full"),
    _foundry("13b", 64, 2, 1, 39.86, "h100"),
    _foundry("13b", 8, 2, 1, 39.79, "h100"),
    _foundry("7b", 8, 6, 1, 46.44, "h100"),
    _foundry("3b", 64, 6, 3, 40.80, "h100"),
    _foundry("3b", 16, 10, 3, 43.73, "h100"),
    _foundry("1b", 64, 20, 1, 40.85, "h100"),
    _foundry("1b", 8, 14, 1, 41.82, "h100"),
    _foundry("760m", 32, 24, 1, 37.57, "h100"),
    _foundry("760m", 8, 24, 2, 34.90, "h100"),
)


def by_tokens(
    name: str,
    shape: ModelShape,
    layout: Layout,
    samples: int,
    tokens: float,
    source: str,
    hardware: str,
    framework: str,
    float8: bool = False,
) -> PublishedRun:
    """A run whose source gives tokens per second per GPU."""
    tflops = tokens * flops_per_token(shape) / 1e12
    return PublishedRun(name, shape, layout, samples, tflops, source, hardware, framework, False, float8)


TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100 of 96 GB at 500 W"
TITAN_ASYNC = "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md, plain tensor axis"
TITAN_A100 = "pytorch/torchtitan, docs/performance.md of 2024: 64 A100, nothing compiled"
FMS = "foundation-model-stack/fms-fsdp, README.md: 128 A100, 4,096 tokens"
_8B, _70B = named_shape("llama3-8b"), named_shape("llama3-70b")


def _llama2(layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> ModelShape:
    model = ModelConfig(
        layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn_hidden_size=hidden, sequence_length=4096
    )
    return shape_of(model, 32000)


LLAMA2 = {
    "7b": _llama2(32, 4096, 32, 32, 11008),
    "13b": _llama2(40, 5120, 40, 40, 13824),
    "70b": _llama2(80, 8192, 64, 8, 28672),
}


def _sharded(gpus: int, micro: int, recompute: Recompute = "none", tensor: int = 1) -> Layout:
    return Layout(
        tensor=tensor,
        shard=gpus // tensor,
        micro_batch=micro,
        recompute=recompute,
        reshard=True,
        sequence_parallel=tensor > 1,
    )


_CAPPED = "h100-500w"
TORCHTITAN_H100 = (
    by_tokens("8B eager, 8 GPUs", _8B, _sharded(8, 2, "operators"), 16, 5762, TITAN, _CAPPED, "torchtitan-eager"),
    by_tokens("8B, 8 GPUs", _8B, _sharded(8, 2, "operators"), 16, 6667, TITAN, _CAPPED, "torchtitan"),
    by_tokens("8B, 128 GPUs", _8B, _sharded(128, 2, "operators"), 256, 6514, TITAN, _CAPPED, "torchtitan"),
    by_tokens("8B float8, 8 GPUs", _8B, _sharded(8, 2, "operators"), 16, 8532, TITAN, _CAPPED, "torchtitan", True),
    by_tokens("70B, 256 GPUs", _70B, _sharded(256, 16, "full", 8), 512, 597, TITAN_ASYNC, _CAPPED, "torchtitan"),
    by_tokens("70B float8", _70B, _sharded(256, 16, "full", 8), 512, 829, TITAN, _CAPPED, "torchtitan", True),
)
FSDP_A100 = (
    by_tokens(
        "Llama 3 8B, 64 GPUs", _8B, _sharded(64, 1, "operators"), 64, 2973, TITAN_A100, "a100-80g", "torchtitan-eager"
    ),
    by_tokens(
        "Llama 3 70B, 64 GPUs", _70B, _sharded(64, 1, "full"), 64, 331, TITAN_A100, "a100-80g", "torchtitan-eager"
    ),
    by_tokens(
        "Llama 2 13B, 64 GPUs", LLAMA2["13b"], _sharded(64, 2), 128, 2162, TITAN_A100, "a100-80g", "torchtitan-eager"
    ),
    by_tokens(
        "Llama 2 7B, 128 GPUs",
        LLAMA2["7b"],
        Layout(replicate=16, shard=8, micro_batch=2, reshard=True),
        256,
        3760,
        FMS,
        "a100-80g",
        "torch-fsdp",
    ),
    by_tokens(
        "Llama 2 70B, 128 GPUs", LLAMA2["70b"], _sharded(128, 6, "full"), 768, 380, FMS, "a100-80g", "torch-fsdp"
    ),
)

TORCH = {
    "llm-foundry, 8 to 64 A100": FOUNDRY_A100,
    "torchtitan and fms-fsdp, 64 and 128 A100": FSDP_A100,
    "torchtitan, 8 to 256 H100 at 500 W": TORCHTITAN_H100,
    "llm-foundry, 8 to 64 H100": FOUNDRY_H100,
}

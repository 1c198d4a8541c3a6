"""Time of a training step, compared with a plain model in the shape of nanoGPT (`peers/nanogpt.py`) or, with --peer
transformers, with transformers' Llama: the same architecture, weights and tokens, fused AdamW, clipping and precision;
equal losses are checked in the same run.

Without options: 6 layers of 384, context 256, 8 samples, one thread, eager, with 65 tokens (small) and with 50,304
(large). Each side runs in a process of its own: ours with the allocator as the stage `train` sets it, the peer with the
C library's, or with --same-allocator also as ours. --details prints what each side calls and holds. MFU is model FLOP/s
(6 a matrix element a token, attention counted in full) over the best matmul rate measured in this run (on GPUs, over
the data sheet's).

--scaling: tokens a second of two processes, one thread each, over twice those of one, of the same batch and in the
same precision. Each side is what one would run: the one process computes its batch as one micro-batch, without a
process group; two data ranks half of it each and two tensor ranks all of it, as one micro-batch too, the data ranks
with weights that stay whole between forward and backward pass; two pipeline ranks four micro-batches in 1F1B, of which
waiting for the first and the last takes a fifth."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import (
    Figure,
    OwnProcess,
    arguments,
    cpu_seconds,
    in_turn,
    own_seconds,
    own_wall_seconds,
    print_figures,
    wall_seconds,
)
from rich.console import Console
from rich.table import Table
from support.step_counts import StepCounts
from support.train_sides import Ours, Setting, batch, counts_of_a_step, loss_of_a_step, our_side, peer_side

from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.launch.processes import keep_freed_memory
from gristmill.training.metrics import device_peak
from gristmill.training.parallel.linear import product
from gristmill.training.parallel.mesh import build_mesh
from gristmill.training.planner.costs.model_shape import flops_per_token, shape_of
from tests.support.forked_pool import ForkedPool

SIZES = {  # layers, width, heads
    "10M": (6, 384, 6),
    "50M": (10, 640, 10),
    "124M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "1.5B": (48, 1600, 25),
}
VOCABULARIES = {"small": 65, "large": 50304}
GOALS = {"small_fp32": 1.03, "small_bf16": 1.12, "large_fp32": 1.12, "large_bf16": 1.35}
SCALED: dict[str, dict[str, Any]] = {
    "data": {"data": 2, "fsdp_reshard_after_forward": "never"},
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
}
PIPELINED = 4  # micro-batches of a pipeline


def parse() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"])
    parser.add_argument("--vocabularies", nargs="+", choices=VOCABULARIES, default=list(VOCABULARIES))
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16", "float8"), default=["fp32", "bf16"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[256], help="tokens of a sample")
    parser.add_argument("--samples", type=int, help="of a batch (default: of 2,048 tokens together)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--compiled", action="store_true", help="compiled beside eager")
    parser.add_argument("--only-compiled", action="store_true", help="compiled alone")
    parser.add_argument("--cuda-graphs", action="store_true", help="our passes are captured and replayed (GPUs)")
    parser.add_argument("--peer", choices=("nanogpt", "transformers"), default="nanogpt")
    parser.add_argument("--details", action="store_true", help="operators, copies and memory of each side")
    parser.add_argument("--same-allocator", action="store_true", help="also the peer keeps the memory of freed tensors")
    parser.add_argument("--scaling", action="store_true", help="also steps on two processes, one thread each")
    return parser.parse_args()


def main() -> None:
    options = parse()
    pool = ForkedPool(2) if options.scaling else None  # before torch computes anything here
    try:
        print_figures(measured(options, pool))
    finally:
        if pool is not None:
            pool.close()


def measured(options: argparse.Namespace, pool: ForkedPool | None) -> Iterator[Figure]:
    for threads in options.threads:
        torch.set_num_threads(threads)
        for setting in settings(options, threads):
            yield compare(setting, 3 if options.quick else 5, threads, options)
    if pool is not None:
        yield from scaling(pool, settings(options, 1))


def settings(options: argparse.Namespace, threads: int) -> list[Setting]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for size in options.sizes:
        for sequence in options.sequences:
            for vocabulary in options.vocabularies:
                for precision in options.precisions:
                    for compiled in compiled_or_not(options):
                        words = [f"{vocabulary}_{precision}", *([] if size == "10M" else [size])]
                        words += [] if sequence == 256 else [f"{sequence}_tokens"]
                        words += ["compiled"] * compiled + [f"{threads}_threads"] * (threads > 1)
                        words += ["cuda_graphs"] * options.cuda_graphs
                        words += ["transformers"] * (options.peer == "transformers")
                        words += ["same_allocator"] * options.same_allocator
                        found.append(
                            Setting(
                                "train_step_" + "_".join(words),
                                model_of(size, sequence, options.peer == "transformers"),
                                VOCABULARIES[vocabulary],
                                options.samples or max(1, 2048 // sequence),
                                "bf16" if precision == "float8" else precision,
                                compiled,
                                device,
                                options.peer == "transformers",
                                precision == "float8",
                                options.cuda_graphs,
                            )
                        )
    return found


def compiled_or_not(options: argparse.Namespace) -> tuple[bool, ...]:
    return (True,) if options.only_compiled else (False, True) if options.compiled else (False,)


def model_of(size: str, sequence: int, llama: bool) -> ModelConfig:
    layers, width, heads = SIZES[size]
    sizes: dict[str, Any] = {"layers": layers, "width": width, "heads": heads, "sequence_length": sequence}
    if llama:
        return ModelConfig(**sizes)
    gpt = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "gelu": "exact", "tied_embeddings": True}
    return ModelConfig(**sizes, **gpt)


def compare(setting: Setting, rounds: int, threads: int, options: argparse.Namespace) -> Figure:
    ours = OwnProcess(our_side, setting, threads)
    theirs = OwnProcess(peer_side, setting, threads, options.same_allocator)
    own = ours.ask(loss_of_a_step)
    if setting.device.type == "cuda":  # the peer's compilation may take minutes
        alone = min(ours.ask(wall_seconds) for _ in range(3))
        print(f"{setting.figure}: {setting.tokens / alone:,.0f} tokens/s before the peer is asked", flush=True)
    other = theirs.ask(loss_of_a_step)
    tolerance = 1e-4 if setting.precision == "fp32" else 5e-2 if setting.float8 else 2e-2
    if abs(own - other) > tolerance:
        raise SystemExit(f"{setting.figure}: losses differ: {own} and {other}")
    per_core = setting.device.type == "cpu" and threads == 1
    seconds, peer_seconds, ratio = in_turn(ours, theirs, rounds, own_seconds if per_core else own_wall_seconds)
    flops = flops_per_token(shape_of(setting.model, setting.vocab)) * setting.tokens
    peak = device_peak(setting.device) or matmul_peak(setting.precision, cpu_seconds if per_core else wall_seconds)
    Console().print(
        f"{setting.figure}: loss {own:.5f} and {other:.5f}; MFU {flops / seconds / peak:.1%} and "
        f"{flops / peer_seconds / peak:.1%} of {peak / 1e9:.0f} GFLOP/s",
        highlight=False,
    )
    if options.details:
        print_counts({name: side.ask(counts_of_a_step) for name, side in (("gristmill", ours), ("peer", theirs))})
    ours.close()
    theirs.close()
    return Figure(
        setting.figure,
        setting.tokens / seconds,
        "tokens/s/core" if per_core else "tokens/s",
        setting.tokens / peer_seconds,
        "transformers" if setting.llama else "nanoGPT",
        ratio,
        GOALS.get(setting.figure.removeprefix("train_step_")),
    )


def matmul_peak(precision: str, clock: Any) -> float:
    """Best FLOP/s of a square matmul, by torch's own or ours, which takes oneDNN in float32."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    best = 0.0
    for size in (512, 1024, 2048):
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        seconds = min(clock(partial(matmul, left, right)) for matmul in (torch.matmul, product) for _ in range(5))
        best = max(best, 2 * size**3 / seconds)
    return best


def print_counts(sides: dict[str, tuple[StepCounts, int]]) -> None:
    table = Table("side", "operators", "matrix products", "copies", "of the time", "peak memory")
    for name, (counts, state) in sides.items():
        peak = f"{(state + counts.peak_bytes) / 1e6:.0f} MB, {state / 1e6:.0f} of it parameters and moments"
        numbers = (str(counts.operators), str(counts.products), str(counts.copies))
        table.add_row(name, *numbers, f"{counts.copy_share:.1%}", peak)
    Console(width=120).print(table)


def scaling(pool: ForkedPool, compared: list[Setting]) -> list[Figure]:
    """Tokens a second of two processes over twice those of one, of the same global batch."""
    figures = []
    for setting in compared:
        (alone,) = pool.run(1, scaled_step, setting, None)
        for name, axes in SCALED.items():
            seconds = max(pool.run(2, scaled_step, setting, axes))
            figure = setting.figure.replace("train_step", f"train_step_scaling_{name}")
            figures.append(Figure(figure, alone / seconds / 2, "of the ideal"))
    return figures


def scaled_step(setting: Setting, axes: dict[str, Any] | None) -> float:
    """Wall seconds of the fastest of five steps. axes: of the layout; None: one process without a group."""
    keep_freed_memory()
    if axes is None:
        side, rows = Ours.of(setting), slice(None)
    else:
        share = setting.samples // axes.get("data", 1)
        micro_batch = max(1, share // PIPELINED) if "pipeline" in axes else share
        layout = {"micro_batch": micro_batch} | axes
        train = TrainConfig.model_validate(setting.train.model_dump() | {"layout": layout})
        mesh = build_mesh(train.layout, setting.model.num_kv_heads, setting.device)
        side, rows = Ours(setting, train, mesh), slice(mesh.data.rank * share, (mesh.data.rank + 1) * share)
    x, y = (part[rows] for part in batch(setting))
    side.step(x, y)
    times = []
    for _ in range(5):
        dist.barrier()
        times.append(wall_seconds(partial(side.step, x, y)))
    return min(times)


if __name__ == "__main__":
    main()

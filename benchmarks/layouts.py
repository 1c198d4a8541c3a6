"""Layouts of one model on forked processes of this machine: seconds a step, memory, and bytes sent on each axis.

Bytes are those a rank sends, of the rank that sends most: of each collective what a ring of the group's n ranks sends
(of S bytes whole, an all-reduce 2 (n - 1) / n S, its two halves (n - 1) / n S each), and what goes down the pipeline or
from context rank to context rank. Memory is the growth of a fresh process's peak over all steps. Seconds are of a
machine with fewer cores than processes, so they rank layouts by overhead, not by speed-up. The bubble is measured on
the schedules' own lists, played on a clock. The balance of context ranks is counted on the plans of ring attention:
pairs of tokens whose scores the busiest rank computes, over the mean."""

import resource
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining.stage import PipelineStage

from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import OptimizerConfig, TrainConfig
from gristmill.training.engine import fsdp
from gristmill.training.engine.gradients import clip, global_norm
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model.attention import ring
from gristmill.training.model.attention.ring_plan import VisibleTokens, ring_plan, ring_shares, visible_tokens
from gristmill.training.optim.optimizer import AdamW
from gristmill.training.parallel import context
from gristmill.training.parallel.mesh import Axis, Mesh, build_mesh
from gristmill.training.run import RunConfig, build_forward_backward
from tests.support.forked_pool import ForkedPool
from tests.support.schedule_simulation import actions, simulate

MODEL = ModelConfig(layers=8, width=128, heads=8, kv_heads=4, sequence_length=128)
VOCAB, SAMPLES = 1024, 16
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"data": 4},
    {"data": 4, "replicate": 4},
    {"data": 4, "fsdp_reshard_after_forward": "never"},
    {"tensor": 4},
    {"tensor": 4, "sequence_parallel": False},
    {"pipeline": 4},
    {"pipeline": 4, "pipeline_schedule": "interleaved"},
    {"pipeline": 4, "pipeline_schedule": "zbv"},
    {"data": 2, "tensor": 2, "pipeline": 2},
    {"data": 2, "tensor": 2, "pipeline": 2, "sequence_parallel": False},
    {"data": 2, "tensor": 2, "pipeline": 2, "recompute": "full"},
    {"data": 2, "tensor": 2, "pipeline": 2, "pipeline_schedule": "interleaved"},
    {"data": 4, "replicate": 2, "tensor": 2},
    {"context": 4},
    {"context": 4, "context_method": "all_to_all"},
    {"context": 2, "tensor": 2, "pipeline": 2},
]
QUICK = [0, 1, 4, 6, 9, 10, 14, 15]
SAMPLE, RANKS, PACKED = 65_536, 8, 8  # tokens of a sample, context ranks, samples of packed documents
# Which argument is handed in, and how often a ring of n ranks sends its bytes
COLLECTIVES: dict[str, tuple[int, Callable[[int], float]]] = {
    "all_reduce": (0, lambda n: 2 * (n - 1) / n),
    "all_gather_into_tensor": (1, lambda n: n - 1),
    "reduce_scatter_tensor": (1, lambda n: (n - 1) / n),
    "all_gather_single": (1, lambda n: n - 1),  # FSDP2's names of the same two
    "reduce_scatter_single": (1, lambda n: (n - 1) / n),
    "all_to_all_single": (1, lambda n: (n - 1) / n),  # also a reduce-scatter on CPUs
}


def measure(layout: dict[str, Any], steps: int) -> dict[str, Any]:
    """(seconds of the median step, bytes by axis of one step, growth of resident memory) of each rank."""
    train = TrainConfig(
        tokens=10**6,
        batch_tokens=SAMPLES * MODEL.sequence_length,
        precision="fp32",
        layout={"micro_batch": SAMPLES // layout.get("data", 1) // 4} | layout,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mesh = build_mesh(train.layout, MODEL.num_kv_heads, torch.device("cpu"))
    parts = build_local_model(MODEL, VOCAB, train, mesh, seed=1)
    passes = build_forward_backward(parts, RunConfig(MODEL, train, 1), mesh, causal_loss())
    optimizer = AdamW(parts.parameters, OptimizerConfig(), MODEL)
    share = SAMPLES // mesh.data.size
    drawn = torch.randint(
        0, VOCAB, (share, MODEL.sequence_length), generator=torch.Generator().manual_seed(mesh.data.rank)
    )
    batch = {"tokens": drawn, "targets": drawn.roll(-1, 1), "weights": torch.ones(drawn.shape)}

    def step() -> None:
        passes.train(batch, [1e-3])
        norm = global_norm(parts.norm_parameters, mesh).item()
        clip(parts.parameters.values(), norm, 1.0)
        optimizer.step(1.0)
        parts.clear_gradients()

    step()
    seconds = sorted(timed(step) for _ in range(steps))[steps // 2]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "bytes": counted(step, mesh), "memory": grown * 1024}


def timed(step: Any) -> float:
    dist.barrier()
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def counted(step: Any, mesh: Mesh) -> dict[str, float]:
    """Bytes sent on each axis in one step."""
    sums: dict[str, float] = defaultdict(float)
    axes = {dist.group.WORLD.group_name: "world"}  # the norm and the sums, a few numbers
    for axis, name in ((mesh.data, "data"), (mesh.tensor, "tensor")):
        if axis.size > 1:
            axes[axis.group.group_name] = name  # torch gives an axis over all processes the world's group

    def counting(name: str, position: int, sent: Callable[[int], float]) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **named: Any) -> Any:
            tensor = arguments[position] if len(arguments) > position else named.get("input", named.get("input_tensor"))
            group = named.get("group") or dist.group.WORLD
            exchanges = name == "all_to_all_single" and mesh.context.size > 1 and not reducing
            axis = "context" if exchanges else axes.get(group.group_name, "data")
            sums[axis] += tensor.numel() * tensor.element_size() * sent(group.size())
            return original(*arguments, **named)

        return call

    def sends(name: str) -> Any:
        original = getattr(PipelineStage, name)

        def call(stage: PipelineStage, index: int) -> Any:
            operations = original(stage, index)
            sums["pipeline"] += sum(each.tensor.numel() * each.tensor.element_size() for each in operations)
            return operations

        return call

    reducing: list[bool] = []
    reduce_scatter = fsdp.reduce_scatter

    def reduce(*arguments: Any) -> None:
        reducing.append(True)
        reduce_scatter(*arguments)
        reducing.pop()

    passing = context.pass_on

    def pass_on(sent: torch.Tensor, *arguments: Any) -> context.Passing:
        sums["context"] += sent.numel() * sent.element_size()
        return passing(sent, *arguments)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fsdp, "reduce_scatter", reduce))
        for module in (context, ring):
            stack.enter_context(mock.patch.object(module, "pass_on", pass_on))
        for name, how in COLLECTIVES.items():
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, counting(name, *how)))
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            stack.enter_context(mock.patch.object(PipelineStage, name, sends(name)))
        step()
    return dict(sums)


def main() -> None:
    options = arguments(__doc__).parse_args()
    chosen = [LAYOUTS[index] for index in QUICK] if options.quick else LAYOUTS
    axes = ("data", "tensor", "pipeline", "context")
    table = Table("layout", "processes", "s/step", "MB grown", *(f"MB {axis}" for axis in axes))
    results = {}
    for layout in chosen:
        world_size = prod(layout.get(axis, 1) for axis in axes)
        pool = ForkedPool(world_size)  # a fresh one each, so that memory is this layout's
        ranks = pool.run(world_size, measure, layout, 3)
        pool.close()
        worst = {axis: max(rank["bytes"].get(axis, 0) for rank in ranks) for axis in axes}
        results[str(layout)] = worst
        name = " ".join(f"{key} {value}" for key, value in layout.items()) or "one process"
        numbers = [max(rank["seconds"] for rank in ranks), max(rank["memory"] for rank in ranks) / 1e6]
        sent = [worst[axis] / 1e6 for axis in axes]
        table.add_row(name, str(world_size), *(f"{number:.3g}" for number in [*numbers, *sent]))
    Console(width=130).print(table)
    print_figures([*bubbles(), scatter_saving(results), *context_balance()])


def bubbles() -> list[Figure]:
    """Bubble (idle over useful time) at 4 ranks and 8 micro-batches; the ratio is 1F1B's over ours."""
    plain = simulate(actions("1f1b", 4, 8), 4, 4, 8).bubble
    found = []
    for schedule in ("interleaved", "zbv", "dualpipev"):
        own = simulate(actions(schedule, 4, 8), 4, 8, 8).bubble
        goal = 2.0 if schedule == "interleaved" else None  # (p - 1) / m over (p - 1) / (m v), v = 2
        found.append(Figure(f"bubble_{schedule}", own, "idle/useful", plain, "1F1B", plain / own, goal))
    return found


def context_balance() -> list[Figure]:
    """The busiest of 8 context ranks over their mean: whole samples against neighbouring shares, and packed documents
    (log-normal lengths, mean of the logarithm 7, deviation 1.5) against zig-zag shares; the ratio is of the excess."""
    whole = visible_tokens(SAMPLE, None, None, causal=True)
    neighbours = busiest(whole, context.contiguous_shares(SAMPLE, RANKS))
    zigzag = busiest(whole, ring_shares(whole.work_T, RANKS))
    before, after = [], []
    for seed in range(PACKED):
        lengths = np.random.default_rng(seed).lognormal(7, 1.5, SAMPLE).astype(int) + 1
        documents = torch.from_numpy(np.repeat(np.arange(SAMPLE), lengths)[:SAMPLE].copy()).unsqueeze(0)
        packed = visible_tokens(SAMPLE, documents, None, causal=True)
        before.append(busiest(packed, context.zigzag_shares(SAMPLE, RANKS)))
        after.append(busiest(packed, ring_shares(packed.work_T, RANKS)))
    unit = "busiest/mean"
    old, new = sum(before) / PACKED, sum(after) / PACKED
    return [
        Figure("context_balance_causal", zigzag, unit, neighbours, "neighbouring shares", neighbours / zigzag),
        Figure("context_balance_documents", new, unit, old, "zig-zag", old / new),
    ]


def busiest(visible: VisibleTokens, index_CT: torch.Tensor) -> float:
    """Pairs of tokens that the busiest rank computes over those of the mean rank."""
    pairs = []
    for rank in range(RANKS):
        shares = context.token_shares(Axis(RANKS, rank), index_CT, torch.device("cpu"))
        tiles = [tile for source in ring_plan(visible, shares, None).tiles for tile in source]
        pairs.append(sum((t.queries.stop - t.queries.start) * (t.keys.stop - t.keys.start) for t in tiles))
    return max(pairs) * RANKS / sum(pairs)


def scatter_saving(results: dict[str, dict[str, float]]) -> Figure:
    """Bytes sent between stages under sequence parallelism; the goal is a saving by the tensor size."""
    shard, whole = (results[str(layout)]["pipeline"] for layout in (LAYOUTS[9], LAYOUTS[10]))
    return Figure("scatter_gather_bytes", shard, "bytes/step", whole, "whole activations", whole / shard, 2.0)


if __name__ == "__main__":
    main()

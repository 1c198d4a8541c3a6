"""Explain the choice of the best layout: sentences with figures, and the published rule where one applies."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gristmill.foundation.errors import RecipeError
from gristmill.training.config.layout import SWAPS
from gristmill.training.planner.costs.parameters import parameter_count
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import Layout, bubble_share
from gristmill.training.planner.layout_candidates import stays_in_nodes
from gristmill.training.planner.network import expert_data_volumes, volumes
from gristmill.training.planner.plan_request import PlanRequest
from gristmill.training.planner.run_cost import cost, days
from gristmill.training.planner.run_cost import sentences as run_sentences
from gristmill.training.planner.search import LARGEST_ERROR, Forecast, Planner, SearchResult, search, support

PAPER = "arXiv 2104.04473"


def explain(plan: SearchResult) -> list[str]:
    """One sentence for each choice of the best layout."""
    best = plan.best
    sentences = [_summary(plan, best), *_support(plan, best), _memory(plan, best), *_offload(plan, best)]
    sentences += [s for s in (_tensor(plan, best), _pipeline(plan, best), _data(plan, best)) if s]
    sentences += [s for s in (_micro_batch(plan, best), _recompute(plan, best), _clusters(plan, best)) if s]
    return sentences + run_sentences(plan.request, best)


def compare(plan: SearchResult, own: Forecast) -> str:
    """Compare a recipe's own layout with the best."""
    best, limit = plan.best, plan.request.usable_bytes / GIB
    need = own.memory.total / GIB
    text = f"the recipe's layout ({own.layout.name()}): {own.tokens_per_second:,.0f} tokens/s, {need:.1f} GiB"
    if need > limit:
        return f"{text}, which does not fit the usable {limit:.1f} GiB; the best that fits: {best.layout.name()}"
    if own.tokens_per_second >= best.tokens_per_second:
        return f"{text}: nothing faster was found"
    return f"{text}: {_slower(own, best)} than the best, {best.layout.name()}"


def _summary(plan: SearchResult, best: Forecast) -> str:
    time = best.time
    parts = {
        "matmuls": time.matmul,
        "attention": time.attention,
        "memory-bound work": time.memory,
        "recomputation": time.recompute,
        "tensor collectives": time.tensor,
        "the exchange of tokens with experts": time.expert,
        "sends between stages": time.pipeline,
        "the bubble": time.bubble,
        "exposed data-parallel traffic": time.data,
        "the optimizer": time.optimizer,
        "contention of collectives with compute": time.contention,
    }
    largest = sorted(parts.items(), key=lambda item: -item[1])[:4]
    shares = ", ".join(f"{name} {seconds / time.total:.0%}" for name, seconds in largest if seconds > 0)
    return f"{best.layout.name()}: a step takes {_seconds(time.total)} ({shares}); MFU {best.mfu:.1%}."


def _support(plan: SearchResult, best: Forecast) -> list[str]:
    """Where no published run is like the forecast, or it is one of a mixture of experts."""
    _, unlike = support(plan.request, best.layout)
    if unlike:
        return [unlike]
    if not plan.request.shape.has_experts:
        return []
    load = plan.request.imbalance
    return [
        f"Forecasts of five published mixtures that nothing was fitted to are within {LARGEST_ERROR:.0%}; the busiest "
        f"rank's experts are assumed to get {load:.2f} times the mean number of tokens (--imbalance)."
    ]


def _memory(plan: SearchResult, best: Forecast) -> str:
    memory, limit = best.memory, plan.request.hardware.device.memory_gib
    state = (memory.parameters + memory.gradients + memory.optimizer) / GIB
    ranks = [rank.total / GIB for rank in Planner(plan.request).memory_by_rank(best.layout, best.split_points)]
    min_text = f" Pipeline rank {ranks.index(min(ranks))} needs the least, {min(ranks):.1f}." if len(ranks) > 1 else ""
    return (
        f"The rank with the most memory needs {memory.total / GIB:.1f} of {limit:.1f} GiB "
        f"({plan.request.memory_margin:.0%} are kept free): {state:.1f} of parameters, gradients and optimizer, "
        f"{memory.activations / GIB:.1f} of activations, "
        f"{memory.buffers / GIB:.1f} of buffers.{min_text}"
    )


def _offload(plan: SearchResult, best: Forecast) -> list[str]:
    offload, host = plan.request.offload, best.memory.host / GIB
    if offload.streams_weights:
        place = f"on disk ({best.memory.disk / GIB:.1f} GiB)" if offload.parameters == "disk" else "in host memory"
        return [f"The layers' weights, gradients and optimizer state are {place}; host memory holds {host:.1f} GiB."]
    if offload.active:
        return [f"The optimizer's state is in host memory, which holds {host:.1f} GiB of a GPU's share."]
    return []


def _tensor(plan: SearchResult, best: Forecast) -> str:
    size, node = best.layout.tensor, plan.request.hardware.node_gpus
    if size == 1:
        other = _rival(plan, best, lambda layout: layout.tensor)
        return f"No tensor axis: the best with tensor {other.layout.tensor} is {_slower(other, best)}." if other else ""
    if stays_in_nodes(best.layout, best.placement, "tensor", node):
        where = f"stays within a node of {node} ({PAPER}, takeaway 1)"
    else:
        where = f"crosses nodes of {node}, unlike takeaway 1 of {PAPER}: the memory it saves is worth more time here"
    share = best.time.tensor / best.time.total
    return (
        f"Tensor {size} {where}; its collectives take {share:.1%} of the step. {_against(plan, best, 'tensor', size)}"
    )


def _pipeline(plan: SearchResult, best: Forecast) -> str:
    layout = best.layout
    if layout.pipeline == 1:
        other = _rival(plan, best, lambda candidate: candidate.pipeline)
        return f"No pipeline: with {other.layout.pipeline} stages it is {_slower(other, best)}." if other else ""
    microbatches = layout.microbatches(plan.request.samples)
    bubble = bubble_share(layout.pipeline_schedule, layout.pipeline, layout.virtual, microbatches)
    text = (
        f"Pipeline {layout.pipeline} crosses nodes: only b s h bytes are sent between stages; {microbatches} "
        f"micro-batches leave a bubble of {bubble:.1%} of the work"
    )
    if layout.pipeline_schedule == "interleaved":
        text += f", (p-1)/(v m) = {layout.pipeline - 1}/({layout.virtual} x {microbatches}) ({PAPER}, section 2.2.2)"
    return f"{text}. {_against(plan, best, 'pipeline', layout.pipeline)}"


def _data(plan: SearchResult, best: Forecast) -> str:
    layout = best.layout
    if layout.data == 1:
        return ""
    text = f"Data {layout.data} uses the remaining GPUs as the outermost axis ({PAPER}, takeaway 2)"
    if plan.request.framework.data_parallel == "fsdp":
        how = "replicated state" if layout.shard == 1 else f"state sharded over {layout.shard} ranks"
        text += f", with {how}"
    hidden = best.time.data_overlap / max(1e-12, best.time.data_overlap + best.time.data)
    return (
        f"{text}; {hidden:.0%} of its communication overlaps with compute, "
        f"{_seconds(best.time.data)} per step does not."
    )


def _micro_batch(plan: SearchResult, best: Forecast) -> str:
    rivals = _by(plan, lambda rival: rival.micro_batch)
    rivals.pop(best.layout.micro_batch, None)
    if not rivals:
        return f"Micro-batch {best.layout.micro_batch} is the only one that fits."
    listed = ", ".join(f"{size}: {_slower(rival, best)}" for size, rival in sorted(rivals.items()))
    return f"Micro-batch {best.layout.micro_batch} is best ({PAPER}, takeaway 3); {listed}."


def _recompute(plan: SearchResult, best: Forecast) -> str:
    mode = best.layout.recompute
    if mode in SWAPS:
        planner = Planner(plan.request)
        return planner.swap_plan(best.layout).sentence()
    if mode == "none":
        return "Nothing is recomputed: all activations fit."
    without = replace(best.layout, recompute="none")
    need = Planner(plan.request).memory(without, best.split_points).total / GIB
    cost = best.time.recompute / best.time.total
    return f"Recomputation ({mode}) costs {cost:.0%} of the step; without any, the layout would need {need:.0f} GiB."


def _clusters(plan: SearchResult, best: Forecast) -> str:
    if not best.placement.crossing:
        return ""
    naive = Planner(plan.request).forecast(best.layout, best.memory, naive=True)
    text = f"Only the {best.placement.crossing[0]} axis crosses between clusters (Holmes, arXiv 2312.03549)"
    if best.split_points:
        text += f"; layers are split at {list(best.split_points)} for the clusters' different speeds"
    return f"{text}; with a rank order that ignores clusters a step would take {_seconds(naive.time.total)}."


def _by(plan: SearchResult, choice: Callable[[Layout], object]) -> dict[object, Forecast]:
    """Fastest forecast for each value of a choice."""
    fastest: dict[object, Forecast] = {}
    for forecast in plan.ranked:
        fastest.setdefault(choice(forecast.layout), forecast)
    return fastest


def _rival(plan: SearchResult, best: Forecast, choice: Callable[[Layout], object]) -> Forecast | None:
    return next((forecast for forecast in plan.ranked if choice(forecast.layout) != choice(best.layout)), None)


def _against(plan: SearchResult, best: Forecast, axis: str, size: int) -> str:
    rivals = _by(plan, lambda layout: getattr(layout, axis))
    sizes = [s for s in (size // 2, size * 2) if s]
    sentences = [
        f"{axis} {s} is {_slower(rivals[s], best)}" if s in rivals else f"with {axis} {s} no layout is legal and fits"
        for s in sizes
    ]
    return "; ".join(sentences).capitalize() + "."


def _slower(rival: Forecast, best: Forecast) -> str:
    return f"{1 - rival.tokens_per_second / best.tokens_per_second:.1%} slower"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


# A plan as JSON, and as tables for a terminal.

# Reasons shown in the table; the JSON has all.
SHOWN_FAILURES = 8


def to_json(plan: SearchResult, top: int = 20) -> dict[str, Any]:
    """The plan as JSON values: seconds, bytes and tokens, unrounded. layouts: the best `top`, ranked."""
    request, planner = plan.request, Planner(plan.request)
    return {
        "model": {
            "parameters": parameter_count(request.shape),
            "layers": len(request.shape.blocks),
            "width": request.shape.width,
        },
        "gpus": request.gpus,
        "hardware": request.hardware.name,
        "framework": request.framework.name,
        "batch_samples": request.samples,
        "sequence_length": request.shape.sequence_length,
        "constants": request.sustained.model_dump(),
        "num_candidates": plan.num_candidates,
        "layouts": [forecast_json(planner, forecast) for forecast in plan.ranked[:top]],
        "explanation": explain(plan) if plan.ranked else [],
        "failures": [{"reason": f.reason, "count": f.count, "example": f.example} for f in plan.failures],
    }


def forecast_json(planner: Planner, forecast: Forecast) -> dict[str, Any]:
    """One layout's forecast. bytes: of the rank with the most memory; bytes_sent: by a rank in one step, for each
    axis."""
    request, layout, placement = planner.request, forecast.layout, forecast.placement
    rank_layers = planner.steps.rank_layers(layout, forecast.split_points)[0]
    sent = volumes(
        request.shape,
        layout,
        request.samples,
        request.framework,
        planner.steps.parameters.dense(layout.tensor, rank_layers),
        sum(rank_layers.kinds),
    )
    experts = planner.steps.parameters.experts(layout, rank_layers)
    reduced, gathered = expert_data_volumes(experts, layout, request.samples, request.framework)
    sent = replace(sent, reduce=sent.reduce + reduced, gather=sent.gather + gathered)
    return {
        "layout": {f.name: getattr(layout, f.name) for f in fields(layout)},
        "name": layout.name(),
        "split_points": list(forecast.split_points) if forecast.split_points else None,
        "tokens_per_second": forecast.tokens_per_second,
        "tokens_per_second_range": list(forecast.tokens_per_second_range),
        "tokens_per_second_per_gpu": forecast.tokens_per_second / layout.gpus,
        "mfu": forecast.mfu,
        "tflops_per_gpu": forecast.tflops_per_gpu(request.shape),
        "days": days(request, forecast),
        "price": cost(request, forecast),
        "currency": request.hardware.currency,
        "seconds": {f.name: getattr(forecast.time, f.name) for f in fields(forecast.time)}
        | {"total": forecast.time.total},
        "bytes": {f.name: getattr(forecast.memory, f.name) for f in fields(forecast.memory)}
        | {"total": forecast.memory.total},
        "bytes_range": list(forecast.memory_range),
        "usable_bytes": request.usable_bytes,
        "bytes_by_pipeline_rank": [memory.total for memory in planner.memory_by_rank(layout, forecast.split_points)],
        "bytes_sent": {f.name: getattr(sent, f.name) for f in fields(sent)},
        "placement": {
            "rank_order": list(placement.rank_order) if placement.rank_order else None,
            "stage_clusters": list(placement.stage_clusters),
            "crossing": list(placement.crossing),
        },
    }


def tables(plan: SearchResult, top: int = 10) -> Group:
    """Tables of the ranked layouts, of the best one by part, its explanation, and the rejected layouts."""
    best = plan.best
    sentences = [Text(f"- {sentence}") for sentence in explain(plan)]
    parts: list[Any] = [ranking(plan, top), by_part(plan, best), *sentences]
    if plan.failures:
        parts += [Text(""), failures(plan)]
    return Group(*parts)


def ranking(plan: SearchResult, top: int) -> Table:
    request = plan.request
    batch = f"{request.samples:,} samples of {request.shape.sequence_length:,} tokens per step"
    title = f"{len(plan.ranked)} of {plan.num_candidates} layouts fit"
    machine = f"{request.gpus} x {request.hardware.name}"
    table = Table(title=f"{title} {machine}; the best {top}\n{batch}")
    for name in ("layout", "tokens/s", "range", "MFU", "step s", "GiB"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    if request.tokens is not None:
        table.add_column("days", justify="right")
        table.add_column(request.hardware.currency, justify="right")
    for forecast in plan.ranked[:top]:
        row = [
            forecast.layout.name(),
            f"{forecast.tokens_per_second:,.0f}",
            "-".join(
                f"{bound:,.3g}" if bound < 1000 else f"{bound / 1e3:,.0f}k"
                for bound in forecast.tokens_per_second_range
            ),
            f"{forecast.mfu:.1%}",
            f"{forecast.time.total:.3f}",
            "-".join(f"{bound / GIB:.1f}" for bound in forecast.memory_range),
        ]
        if request.tokens is not None:
            price = cost(request, forecast)
            row += [f"{days(request, forecast):,.1f}", "-" if price is None else f"{price:,.0f}"]
        table.add_row(*row)
    return table


def by_part(plan: SearchResult, forecast: Forecast) -> Table:
    """Seconds of a step and GiB of the rank with the most memory, by part."""
    table = Table(title=f"{forecast.layout.name()}: by part (GiB = 2^30 bytes)")
    for name, justify in (("time", "left"), ("s", "right"), ("share", "right"), ("memory", "left"), ("GiB", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    total = forecast.time.total
    times = [(f.name.replace("_", " "), getattr(forecast.time, f.name)) for f in fields(forecast.time)]
    left = [(name, f"{s:.4f}", f"{s / total:.1%}") for name, s in [*times, ("total", total)] if s > 0]
    memories = [(f.name, getattr(forecast.memory, f.name)) for f in fields(forecast.memory)]
    right = [(name, f"{size / GIB:.2f}") for name, size in [*memories, ("total", forecast.memory.total)] if size > 0]
    for index in range(max(len(left), len(right))):
        table.add_row(
            *(left[index] if index < len(left) else ("", "", "")), *(right[index] if index < len(right) else ("", ""))
        )
    return table


def failures(plan: SearchResult) -> Table:
    table = Table(title="rejected layouts")
    for name in ("layouts", "reason", "example"):
        table.add_column(name)
    for failure in plan.failures[:SHOWN_FAILURES]:
        table.add_row(str(failure.count), failure.reason, failure.example)
    rest = plan.failures[SHOWN_FAILURES:]
    if rest:
        table.add_row(str(sum(f.count for f in rest)), f"{len(rest)} more reasons, all in --json", "")
    return table


# Plot of throughput against the number of GPUs, with the best layout for each number.


def default_gpu_counts(gpus: int, node: int) -> list[int]:
    """Numbers of GPUs from one node up, doubling, up to gpus. 3072 of 8 -> 8, 16, ..., 2048, 3072."""
    counts, count = [], min(node, gpus)
    while count < gpus:
        counts.append(count)
        count *= 2
    return [*counts, gpus]


def throughput_by_gpus(request: PlanRequest, counts: Sequence[int]) -> list[tuple[int, Forecast | None]]:
    """(GPUs, best layout or None where nothing fits) for each number of GPUs, with the same batch."""
    curve: list[tuple[int, Forecast | None]] = []
    for count in counts:
        plan = search(replace(request, gpus=count))
        curve.append((count, plan.ranked[0] if plan.ranked else None))
    return curve


def plot_throughput(request: PlanRequest, curve: Sequence[tuple[int, Forecast | None]], path: Path) -> None:
    """Writes an image (png, svg or pdf, by the path's ending)."""
    # matplotlib is slow to load and used here only.
    from matplotlib.figure import Figure

    points = [(count, best) for count, best in curve if best is not None]
    if not points:
        raise RecipeError("the model fits on none of the numbers of GPUs, so there is nothing to plot")
    figure = Figure(figsize=(9, 6))
    axes = figure.subplots()
    axes.plot([c for c, _ in points], [b.tokens_per_second for _, b in points], marker="o")
    first = points[0]
    axes.plot(
        [c for c, _ in points],
        [first[1].tokens_per_second * c / first[0] for c, _ in points],
        linestyle=":",
        label="linear from the first",
    )
    for count, best in points:
        axes.annotate(
            _short(best), (count, best.tokens_per_second), textcoords="offset points", xytext=(6, -12), fontsize=7
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(f"GPUs ({request.hardware.name})")
    axes.set_ylabel("tokens per second")
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _short(best: Forecast) -> str:
    layout = best.layout
    return f"t{layout.tensor} p{layout.pipeline} d{layout.data} b{layout.micro_batch}\n{best.mfu:.0%} MFU"

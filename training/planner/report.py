"""A plan as JSON, and as tables for a terminal."""

from dataclasses import fields, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gristmill.training.costs.parameters import parameter_count
from gristmill.training.planner.explain import explain
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.plan_request import PlanRequest
from gristmill.training.planner.search import Forecast, Planner, SearchResult
from gristmill.training.planner.volumes import expert_data_volumes, volumes

# Reasons shown in the table; the JSON has all.
SHOWN_FAILURES = 8


def days(request: PlanRequest, forecast: Forecast) -> float | None:
    """Days of training for the token budget; None without one."""
    return None if request.tokens is None else request.tokens / forecast.tokens_per_second / 86400


def cost(request: PlanRequest, forecast: Forecast) -> float | None:
    """US dollars for the token budget; None without one or without a price."""
    length, price = days(request, forecast), request.hardware.usd_per_gpu_hour
    return None if length is None or price is None else length * 24 * price * request.gpus


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
        "layouts": [forecast_json(planner, one) for one in plan.ranked[:top]],
        "explanation": explain(plan) if plan.ranked else [],
        "failures": [{"reason": f.reason, "count": f.count, "example": f.example} for f in plan.failures],
    }


def forecast_json(planner: Planner, forecast: Forecast) -> dict[str, Any]:
    """One layout's forecast. bytes: of the rank with the most memory; bytes_sent: by a rank in one step, for each
    axis."""
    request, layout, placement = planner.request, forecast.layout, forecast.placement
    held = planner.steps.rank_layers(layout, forecast.split_points)[0]
    sent = volumes(
        request.shape,
        layout,
        request.samples,
        request.framework,
        planner.steps.parameters.dense(layout.tensor, held),
        sum(held.kinds),
    )
    experts = planner.steps.parameters.experts(layout, held)
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
        "usd": cost(request, forecast),
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
        table.add_column("USD", justify="right")
    for one in plan.ranked[:top]:
        row = [
            one.layout.name(),
            f"{one.tokens_per_second:,.0f}",
            "-".join(
                f"{bound:,.3g}" if bound < 1000 else f"{bound / 1e3:,.0f}k" for bound in one.tokens_per_second_range
            ),
            f"{one.mfu:.1%}",
            f"{one.time.total:.3f}",
            "-".join(f"{bound / GIB:.1f}" for bound in one.memory_range),
        ]
        if request.tokens is not None:
            price = cost(request, one)
            row += [f"{days(request, one):,.1f}", "-" if price is None else f"{price:,.0f}"]
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

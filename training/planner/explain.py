"""Explain the choice of the best layout: sentences with figures, and the published rule where one applies."""

from collections.abc import Callable
from dataclasses import replace

from gristmill.training.layout_config import SWAPS
from gristmill.training.planner.hardware import GIB
from gristmill.training.planner.layout import Layout
from gristmill.training.planner.placement import stays_in_nodes
from gristmill.training.planner.schedule import bubble_share
from gristmill.training.planner.search import Forecast, Planner, SearchResult

PAPER = "arXiv 2104.04473"


def explain(plan: SearchResult) -> list[str]:
    """One sentence for each choice of the best layout."""
    best = plan.best
    sentences = [_summary(plan, best), _memory(plan, best), *_offload(plan, best)]
    sentences += [s for s in (_tensor(plan, best), _pipeline(plan, best), _data(plan, best)) if s]
    sentences += [s for s in (_micro_batch(plan, best), _recompute(plan, best), _clusters(plan, best)) if s]
    return sentences


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


def _memory(plan: SearchResult, best: Forecast) -> str:
    memory, limit = best.memory, plan.request.hardware.device.memory_gib
    state = (memory.parameters + memory.gradients + memory.optimizer) / GIB
    ranks = [one.total / GIB for one in Planner(plan.request).memory_by_rank(best.layout, best.split_points)]
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
        other = _rival(plan, best, lambda one: one.tensor)
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
        other = _rival(plan, best, lambda one: one.pipeline)
        return f"No pipeline: with {other.layout.pipeline} stages it is {_slower(other, best)}." if other else ""
    microbatches = layout.microbatches(plan.request.samples)
    bubble = bubble_share(layout.schedule, layout.pipeline, layout.virtual, microbatches)
    text = (
        f"Pipeline {layout.pipeline} crosses nodes: only b s h bytes are sent between stages; {microbatches} "
        f"micro-batches leave a bubble of {bubble:.1%} of the work"
    )
    if layout.schedule == "interleaved":
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
    hidden = best.time.data_hidden / max(1e-12, best.time.data_hidden + best.time.data)
    return (
        f"{text}; {hidden:.0%} of its communication overlaps with compute, "
        f"{_seconds(best.time.data)} per step does not."
    )


def _micro_batch(plan: SearchResult, best: Forecast) -> str:
    rivals = _by(plan, lambda one: one.micro_batch)
    rivals.pop(best.layout.micro_batch, None)
    if not rivals:
        return f"Micro-batch {best.layout.micro_batch} is the only one that fits."
    listed = ", ".join(f"{size}: {_slower(one, best)}" for size, one in sorted(rivals.items()))
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
    found: dict[object, Forecast] = {}
    for one in plan.ranked:
        found.setdefault(choice(one.layout), one)
    return found


def _rival(plan: SearchResult, best: Forecast, choice: Callable[[Layout], object]) -> Forecast | None:
    return next((one for one in plan.ranked if choice(one.layout) != choice(best.layout)), None)


def _against(plan: SearchResult, best: Forecast, axis: str, size: int) -> str:
    rivals = _by(plan, lambda one: getattr(one, axis))
    sizes = [s for s in (size // 2, size * 2) if s]
    sentences = [
        f"{axis} {s} is {_slower(rivals[s], best)}" if s in rivals else f"with {axis} {s} no layout is legal and fits"
        for s in sizes
    ]
    return "; ".join(sentences).capitalize() + "."


def _slower(one: Forecast, best: Forecast) -> str:
    return f"{1 - one.tokens_per_second / best.tokens_per_second:.1%} slower"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"

"""What one training step calls and holds: operators, matrix products, copies, and memory."""

from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import profile

PRODUCTS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise")
COPIES = ("aten::copy_",)


@dataclass(frozen=True)
class StepCounts:
    """operators: calls of aten and oneDNN operators, nested ones too. products, copies: of them. copy_share: of the
    processor time. peak_bytes: the largest growth of what tensors hold since the step's begin."""

    operators: int
    products: int
    copies: int
    copy_share: float
    peak_bytes: int


def step_counts(step: Callable[[], object]) -> StepCounts:
    """Of one call, after one to warm up. Peak memory is of the CPU's tensors."""
    step()
    with profile(profile_memory=True) as profiled:
        step()
    calls, seconds = dict[str, int](), dict[str, float]()
    for each in profiled.key_averages():
        calls[each.key], seconds[each.key] = each.count, each.self_cpu_time_total
    held = peak = 0
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return StepCounts(
        operators=sum(count for name, count in calls.items() if name.startswith(("aten::", "mkldnn::"))),
        products=sum(calls.get(name, 0) for name in PRODUCTS),
        copies=sum(calls.get(name, 0) for name in COPIES),
        copy_share=sum(seconds.get(name, 0.0) for name in COPIES) / sum(seconds.values()),
        peak_bytes=peak,
    )

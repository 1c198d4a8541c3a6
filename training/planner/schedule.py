"""Bubble of a pipeline schedule, and the number of micro-batches whose activations are in memory at its peak.

p ranks, m micro-batches, v stages a rank. Sources: GPipe (arXiv 1811.06965), 1F1B and interleaved (arXiv 2104.04473,
section 2.2), zero bubble (arXiv 2401.10241, table 1 and section 5), DualPipe (arXiv 2412.19437, table 2).
"""

from gristmill.training.layout_config import Schedule


def bubble_share(schedule: Schedule, pipeline: int, virtual: int, microbatches: int) -> float:
    """Idle time over ideal time, for a backward pass of two forward passes, each of its halves one.

    1F1B, p = 4, m = 8: 3/8. Interleaved with v = 2: 3/16. zbv: 1/16."""
    if pipeline == 1:
        return 0.0
    return bubble_seconds(schedule, pipeline, virtual, 1.0, 2.0, microbatches) / (3.0 * microbatches)


def bubble_seconds(
    schedule: Schedule, pipeline: int, virtual: int, forward: float, backward: float, microbatches: int
) -> float:
    """Idle seconds of a rank in one step. forward and backward: of one micro-batch through all the rank's stages.

    gpipe and 1f1b (p-1)(F+B); interleaved that over v. zbv fills all but the first wave's way down the V, (p-1) half
    passes, from m = 2p on, and twice that at m = p (by simulation of torch's order). DualPipeV (p-1)(F + 2B - 3W) / 2,
    with B whole and W its weights' half."""
    if pipeline == 1:
        return 0.0
    hops, weights = pipeline - 1, min(forward, backward / 2)
    if schedule == "zbv":
        short = max(0.0, (2 * pipeline - microbatches) / pipeline)
        return hops / 2 * max(forward, backward - weights) * (1 + short)
    if schedule == "dualpipev":
        return hops / 2 * max(0.0, forward + 2 * backward - 3 * weights)
    return hops * (forward + backward) / virtual


def live_chunks(schedule: Schedule, pipeline: int, virtual: int, microbatches: int, rank: int) -> int:
    """Maximum number of stage-sized activations in memory on a pipeline rank (a rank's whole work is `virtual` of
    them).

    gpipe: all m. 1f1b: p - rank. Interleaved: 2 (p - rank - 1) + (v-1) p + 1, which on rank 0 is the
    p v + p - 1 of arXiv 2205.05198, section 4.2.3: 1 + (p-1)/(p v) of the model. zbv and dualpipev: 2p, as 1f1b."""
    total = microbatches * virtual
    if pipeline == 1:
        return 1
    if schedule == "gpipe":
        return total
    if schedule == "1f1b":
        return min(total, pipeline - rank)
    if schedule == "interleaved":
        return min(total, 2 * (pipeline - rank - 1) + (virtual - 1) * pipeline + 1)
    return min(total, 2 * pipeline + (schedule == "dualpipev"))


def min_microbatches(schedule: Schedule, pipeline: int, virtual: int) -> int:
    """Minimum number of micro-batches: one for each rank, for dualpipev two."""
    if pipeline == 1:
        return 1
    return 2 * pipeline if schedule == "dualpipev" else pipeline


def microbatches_fit(schedule: Schedule, pipeline: int, microbatches: int) -> bool:
    """Interleaved runs in rounds of p micro-batches (arXiv 2104.04473, section 2.2.2)."""
    return schedule != "interleaved" or microbatches % pipeline == 0

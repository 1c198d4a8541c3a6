"""The run of layers each pipeline stage holds, and what that makes each rank hold."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from gristmill.training.planner.flops import block_matmul_flops
from gristmill.training.planner.model_shape import ModelShape


class Stage(NamedTuple):
    """Layers first to last - 1; the first stage embeds, the last scores."""

    first: int
    last: int
    embeds: bool
    scores: bool

    @property
    def layers(self) -> int:
        return self.last - self.first


def stages_from_cuts(layers: int, cuts: Sequence[int]) -> tuple[Stage, ...]:
    """cuts: the first layer of each stage but the first. (8, [3, 6]) -> layers 0-2, 3-5, 6-7."""
    bounds = [0, *cuts, layers]
    last = len(bounds) - 2
    return tuple(Stage(a, b, i == 0, i == last) for i, (a, b) in enumerate(pairwise(bounds)))


@lru_cache(maxsize=4096)
def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Equal runs; where they cannot be, the stages in the middle take one more, since the ends embed and score.

    (10, 4) -> 2, 3, 3, 2: cuts (2, 5, 8)."""
    base, more = divmod(layers, stages)
    start = (stages - more) // 2 if more < stages - 1 else (stages - more) // 2 + (stages - more) % 2
    sizes = [base + (start <= i < start + more) for i in range(stages)]
    cuts, total = [], 0
    for size in sizes[:-1]:
        total += size
        cuts.append(total)
    return tuple(cuts)


def balanced_cuts(
    costs: Sequence[float], first: float, last: float, stages: int, speeds: Sequence[float] = ()
) -> tuple[int, ...]:
    """The cuts that make the slowest stage fastest: costs of the layers, of embedding (first) and of scoring (last).

    speeds: of each stage's machines, for uneven clusters (Holmes, arXiv 2312.03549, section 3.3). Exact: stages are
    filled greedily up to a bound, and the bound is bisected. 4 equal layers, last = 1, 2 stages -> (3,)."""
    speeds = speeds or [1.0] * stages
    low, high = 0.0, (sum(costs) + first + last) / min(speeds)
    best: tuple[int, ...] = even_cuts(len(costs), stages)
    for _ in range(40):
        bound = (low + high) / 2
        cuts = _fill(costs, first, last, stages, speeds, bound)
        if cuts is None:
            low = bound
        else:
            best, high = cuts, bound
    return best


@lru_cache(maxsize=1024)
def cost_cuts(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """Where the engine cuts (training/model/stage_splitting.py): multiply-adds of a token's forward pass, the head
    counted.

    Of the cuts whose dearest stage is cheapest it takes, from the last stage on, the one that leaves it least."""
    costs = [
        block_matmul_flops(block) / 2 + block.query_width * min(block.window or shape.context, shape.context)
        for block in shape.blocks
    ]
    head, equal = float(shape.width * shape.vocab), len(shape.distinct) == 1
    cuts: list[int] = []
    stop = len(costs)
    for used in range(stages, 1, -1):
        if stop < len(costs) and equal:
            bound = -(-stop // used) * costs[0]
        else:
            bound = _least_bound(costs[:stop], head if stop == len(costs) else 0.0, used)
        stop = min(_reach(costs, used - 1, bound), stop - 1)
        cuts.append(stop)
    return tuple(cuts[::-1])


def _least_bound(costs: Sequence[float], last: float, stages: int) -> float:
    """The time of the dearest stage under the best cuts; at most 1 part in 2**40 above it."""
    low, high = 0.0, sum(costs) + last
    for _ in range(40):
        middle = (low + high) / 2
        if _fill(costs, 0.0, last, stages, [1.0] * stages, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _reach(costs: Sequence[float], stages: int, bound: float) -> int:
    """How many layers, from the first, so many stages can hold within the bound."""
    layer = 0
    for _ in range(stages):
        time = 0.0
        while layer < len(costs) and time + costs[layer] <= bound * (1 + 1e-9):
            time, layer = time + costs[layer], layer + 1
    return layer


def _fill(
    costs: Sequence[float], first: float, last: float, stages: int, speeds: Sequence[float], bound: float
) -> tuple[int, ...] | None:
    """Cuts under which no stage takes longer than the bound, each with at least one layer; None if there are none."""
    cuts, layer = [], 0
    for stage in range(stages):
        time = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        taken = 0
        while layer < len(costs) - (stages - 1 - stage) and (time + costs[layer]) / speeds[stage] <= bound + 1e-12:
            time, taken, layer = time + costs[layer], taken + 1, layer + 1
        if taken == 0:
            return None
        cuts.append(layer)
    return tuple(cuts[:-1]) if layer == len(costs) else None


def rank_of_stage(stage: int, pipeline: int, schedule: str) -> int:
    """Loop (0 1 2 0 1 2) for interleaved, a V (0 1 2 2 1 0) for zbv and dualpipev."""
    lap, place = divmod(stage, pipeline)
    return pipeline - 1 - place if schedule in ("zbv", "dualpipev") and lap % 2 else place


def stages_of_rank(stages: Sequence[Stage], pipeline: int, schedule: str) -> list[list[Stage]]:
    held: list[list[Stage]] = [[] for _ in range(pipeline)]
    for index, stage in enumerate(stages):
        held[rank_of_stage(index, pipeline, schedule)].append(stage)
    return held


class StageHoldings(NamedTuple):
    """What one pipeline rank holds: how many layers of each kind, and which ends."""

    kinds: tuple[int, ...]
    embeds: bool
    scores: bool


def holdings(kinds: Sequence[int], number: int, held: Sequence[Sequence[Stage]]) -> list[StageHoldings]:
    """For each pipeline rank. kinds: of each layer; number: how many kinds there are."""
    result = []
    for stages in held:
        counts = Counter(kind for stage in stages for kind in kinds[stage.first : stage.last])
        result.append(
            StageHoldings(
                tuple(counts[k] for k in range(number)), any(s.embeds for s in stages), any(s.scores for s in stages)
            )
        )
    return result

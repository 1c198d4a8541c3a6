"""Assign layers to pipeline stages and stages to pipeline ranks, for the engine and the planner alike."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from gristmill.training.config.layout import LayoutConfig, Schedule, StageSpec
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import ModelShape, block_macs_per_token, shape_of


def split_model(config: ModelConfig, vocab_size: int, layout: LayoutConfig) -> tuple[StageSpec, ...]:
    """The stages of a layout, in order, split where the layout says, else where the model's pattern does, else by
    cost."""
    if layout.pipeline == 1:
        return stages_at((), config.layers)
    if layout.split_points is not None:
        return stages_at(layout.split_points, config.layers)
    return stages_at(split_by_cost(shape_of(config, vocab_size), layout.num_stages), config.layers)


def stages_at(split_points: Sequence[int], num_layers: int) -> tuple[StageSpec, ...]:
    """split_points: the first layer of each stage but the first. [3, 6] of 8 layers -> layers 0-2, 3-5, 6-7."""
    bounds = [0, *split_points, num_layers]
    last = len(bounds) - 2
    return tuple(StageSpec(a, b, i == 0, i == last) for i, (a, b) in enumerate(pairwise(bounds)))


def rank_of_stage(stage: int, pipeline: int, schedule: Schedule) -> int:
    """Pipeline rank of a stage: 0 1 2 0 1 2 for interleaved, V-shaped (0 1 2 2 1 0) for zbv and dualpipev."""
    turn, position = divmod(stage, pipeline)
    return pipeline - 1 - position if schedule in ("zbv", "dualpipev") and turn % 2 else position


def stages_of_rank(layout: LayoutConfig, rank: int) -> list[int]:
    """Stage numbers of a pipeline rank. Two ranks, V-shaped: rank 0 has 0 and 3; interleaved: 0 and 2."""
    stages = range(layout.num_stages)
    return [stage for stage in stages if rank_of_stage(stage, layout.pipeline, layout.pipeline_schedule) == rank]


@lru_cache(maxsize=1024)
def split_by_cost(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Split points of the model's pattern, where it has so many stages; else those that minimize the most expensive
    stage, in multiply-adds of a forward pass with the head's."""
    splits = shape.model.pattern_splits
    if splits is not None and len(splits) + 1 == num_stages:
        return splits
    costs = [block_macs_per_token(block, shape.sequence_length) for block in shape.blocks]
    return balance_stages(costs, shape.width * shape.vocab, num_stages)


def balance_stages(costs: Sequence[int], head_cost: int, num_stages: int) -> tuple[int, ...]:
    """Split points that minimize the most expensive stage; every stage has a layer. Of equal splits, the latest points.

    costs: of each layer; head_cost: added to the last stage. [1, 1, 1, 1] with a head of 1 on 2 stages -> (3,)."""
    equal = len(set(costs)) == 1
    split_points: list[int] = []
    stop = len(costs)
    for count in range(num_stages, 1, -1):
        if equal and stop < len(costs):
            bound = -(-stop // count) * costs[0]
        else:
            bound = _min_bottleneck(costs[:stop], head_cost if stop == len(costs) else 0, count)
        stop = min(_layers_within(bound, costs, count - 1), stop - 1)
        split_points.append(stop)
    return tuple(split_points[::-1])


def balance_by_speed(costs: Sequence[float], head_cost: float, speeds: Sequence[float]) -> tuple[int, ...]:
    """Split points that minimize the slowest stage, for one stage per speed (Holmes, arXiv 2312.03549, section 3.3).

    costs: seconds of each layer on a machine of speed 1. Six layers of 1, no head, speeds 2 and 1 -> (4,).
    Stages are filled greedily up to a bound in seconds, and the bound is bisected."""
    low, high = 0.0, (sum(costs) + head_cost) / min(speeds)
    best = split_evenly(len(costs), len(speeds))
    for _ in range(40):
        bound = (low + high) / 2
        split_points = _fill(costs, head_cost, speeds, bound)
        if split_points is None:
            low = bound
        else:
            best, high = split_points, bound
    return best


@lru_cache(maxsize=4096)
def split_evenly(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Split points of equal stages. A remainder goes to the middle stages, since the ends embed and score.

    (10, 4) -> 2, 3, 3, 2 layers: split points (2, 5, 8)."""
    base, more = divmod(num_layers, num_stages)
    start = (num_stages - more) // 2 if more < num_stages - 1 else (num_stages - more) // 2 + (num_stages - more) % 2
    sizes = [base + (start <= i < start + more) for i in range(num_stages)]
    return tuple(sum(sizes[: i + 1]) for i in range(num_stages - 1))


def _min_bottleneck(costs: Sequence[int], head_cost: int, num_stages: int) -> int:
    """Cost of the most expensive stage under the best split, by bisection over whole numbers."""
    low, high = 0, sum(costs) + head_cost
    while high - low > 1:
        middle = (low + high) // 2
        if _fill(costs, head_cost, [1.0] * num_stages, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _layers_within(bound: int, costs: Sequence[int], num_stages: int) -> int:
    """Number of layers, from the first on, that fit on so many stages with at most `bound` cost each."""
    layer = 0
    for _ in range(num_stages):
        total = 0
        while layer < len(costs) and total + costs[layer] <= bound:
            total, layer = total + costs[layer], layer + 1
    return layer


def _fill(costs: Sequence[float], head_cost: float, speeds: Sequence[float], bound: float) -> tuple[int, ...] | None:
    """Split points with at most `bound` cost and at least one layer in each stage; None if there are none."""
    split_points, layer, num_stages = [], 0, len(speeds)
    for stage, speed in enumerate(speeds):
        first, total = layer, head_cost if stage == num_stages - 1 else 0.0
        while layer < len(costs) - (num_stages - 1 - stage) and (total + costs[layer]) / speed <= bound + 1e-12:
            total, layer = total + costs[layer], layer + 1
        if layer == first:
            return None
        split_points.append(layer)
    return tuple(split_points[:-1]) if layer == len(costs) else None

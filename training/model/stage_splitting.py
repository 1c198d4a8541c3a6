"""Which layers each pipeline stage holds, and which stages each rank."""

from collections.abc import Sequence

from gristmill.training.config import LayerConfig, LayoutConfig, ModelConfig
from gristmill.training.model.transformer import StageSpec


def stage_parts(config: ModelConfig, vocab_size: int, layout: LayoutConfig) -> list[StageSpec]:
    """One part a stage, in order. Cut where the dearest stage is cheapest, or where the layout says."""
    bounds = [0, *_cuts(config, vocab_size, layout), config.layers]
    last = layout.num_stages - 1
    return [StageSpec(bounds[i], bounds[i + 1], embeds=i == 0, scores=i == last) for i in range(last + 1)]


def stages_of_rank(layout: LayoutConfig, rank: int) -> list[int]:
    """The stages a pipeline rank holds. Two ranks, V-shaped: rank 0 has 0 and 3; in a loop: 0 and 2."""
    if layout.schedule in ("zbv", "dualpipev") and layout.pipeline > 1:
        return [rank, layout.num_stages - 1 - rank]
    return [rank + turn * layout.pipeline for turn in range(layout.stages_per_rank)]


def layer_cost(config: ModelConfig, layer: LayerConfig) -> float:
    """Multiply-adds of one token's forward pass through the layer; attention at the mean length a token looks back."""
    query, key = config.heads * config.head_dim, config.num_kv_heads * config.head_dim
    seen = min(layer.window or config.context, config.context)
    matrices = 2 if layer.channel == "gelu" else 3
    projections = 2 * config.width * (query + key)
    return projections + query * seen + matrices * config.width * config.hidden_width(layer.channel)


def balanced_cuts(costs: Sequence[float], first_extra: float, last_extra: float, parts: int) -> list[int]:
    """First layer of each part but the first, so that the dearest part is as cheap as can be; ties cut late.

    costs [1, 1, 1, 1], last_extra 1, 2 parts -> [3]... no part is left without a layer."""
    count = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def part_cost(start: int, stop: int) -> float:
        extra = (first_extra if start == 0 else 0.0) + (last_extra if stop == count else 0.0)
        return prefix[stop] - prefix[start] + extra

    best = [[float("inf")] * (count + 1) for _ in range(parts + 1)]
    came_from = [[0] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for used in range(1, parts + 1):
        for stop in range(used, count + 1):
            for start in range(used - 1, stop):
                worst = max(best[used - 1][start], part_cost(start, stop))
                if worst <= best[used][stop]:
                    best[used][stop], came_from[used][stop] = worst, start
    cuts, stop = [], count
    for used in range(parts, 1, -1):
        stop = came_from[used][stop]
        cuts.append(stop)
    return cuts[::-1]


def _cuts(config: ModelConfig, vocab_size: int, layout: LayoutConfig) -> list[int]:
    if layout.pipeline == 1:
        return []
    if layout.cuts is not None:
        return list(layout.cuts)
    costs = [layer_cost(config, layer) for layer in config.layer_list]
    return balanced_cuts(costs, 0.0, float(config.width * vocab_size), layout.num_stages)

"""The layers of each pipeline rank, counted by kind: what the cost of a rank depends on."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gristmill.training.costs.stage_splitting import StageSpec, rank_of_stage
from gristmill.training.planner.layout import Layout


class RankLayers(NamedTuple):
    """kinds: how many layers of each kind in `ModelShape.distinct`; embeds, scores: has the embedding, the head."""

    kinds: tuple[int, ...]
    embeds: bool
    scores: bool


def layers_by_rank(kinds: Sequence[int], stages: Sequence[StageSpec], layout: Layout) -> list[RankLayers]:
    """For each pipeline rank. kinds: of each layer of the model, as `ModelShape.kinds`."""
    stages_by_rank: list[list[StageSpec]] = [[] for _ in range(layout.pipeline)]
    for index, stage in enumerate(stages):
        stages_by_rank[rank_of_stage(index, layout.pipeline, layout.schedule)].append(stage)
    return [_count_layers(kinds, of_rank) for of_rank in stages_by_rank]


def _count_layers(kinds: Sequence[int], stages: Sequence[StageSpec]) -> RankLayers:
    counts = Counter(kind for stage in stages for kind in kinds[stage.first : stage.last])
    return RankLayers(
        tuple(counts[kind] for kind in range(max(kinds) + 1)),
        any(stage.embeds for stage in stages),
        any(stage.scores for stage in stages),
    )

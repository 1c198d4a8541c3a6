"""Stage splits by hand and by exhaustive search; planner and engine split alike."""

from itertools import combinations, pairwise
from random import Random

import pytest

from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.stage_splitting import (
    balance_by_speed,
    balance_stages,
    split_evenly,
    split_model,
    stages_at,
    stages_of_rank,
)
from gristmill.training.planner.engine_profile import GRISTMILL
from gristmill.training.planner.hardware import FITTED, Rates, load_hardware
from gristmill.training.planner.layout import from_config
from gristmill.training.planner.step_time import StepModel


def test_even_splits_give_the_middle_the_rest():
    assert split_evenly(8, 4) == (2, 4, 6)
    sizes = [stage.num_layers for stage in stages_at(split_evenly(10, 4), 10)]
    assert sorted(sizes) == [2, 2, 3, 3] and sizes[0] == sizes[-1] == 2


def test_balanced_stages_by_hand():
    assert balance_stages([1, 1, 1, 1], 0, 2) == (2,)
    assert balance_stages([1, 1, 1, 1], 1, 2) == (3,)  # 2 | 2 + 1 and 3 | 1 + 1 both have a maximum of 3
    assert balance_stages([1, 1, 1, 1], 2, 2) == (3,)  # the head costs as much as two layers
    assert balance_stages([4, 1, 1, 1, 1], 0, 2) == (1,)
    assert balance_by_speed([1] * 6, 0, speeds=(2, 1)) == (4,)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_stages_are_the_best_of_all_splits(seed):
    """Against a search of every split, for equal and unequal layers. Of equal splits, the last point is the latest."""
    random = Random(seed)
    for _ in range(10):
        num_layers = random.randint(2, 9)
        num_stages = random.randint(2, num_layers)
        costs = [random.randint(1, 5) for _ in range(num_layers)] if seed % 2 else [random.randint(1, 5)] * num_layers
        head = random.randint(0, 8)

        def bottleneck(points, costs=costs, head=head):
            bounds = [0, *points, len(costs)]
            return max(sum(costs[a:b]) + (head if b == len(costs) else 0) for a, b in pairwise(bounds))

        every = list(combinations(range(1, num_layers), num_stages - 1))
        best = min(map(bottleneck, every))
        found = balance_stages(costs, head, num_stages)
        assert bottleneck(found) == best
        assert found[-1] == max(points[-1] for points in every if bottleneck(points) == best)


@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("layers", [8, 12, 13])
@pytest.mark.parametrize("vocab", [100, 3000])
def test_the_planner_splits_the_model_as_the_engine(pipeline, layers, vocab):
    model = ModelConfig(
        layers=layers, width=64, heads=4, sequence_length=64, window=(16, None) if layers == 12 else None
    )
    planner = StepModel(shape_of(model, vocab), Rates(load_hardware("a100-80g"), FITTED), GRISTMILL)
    for axes in (
        {"pipeline_schedule": "1f1b"},
        {"pipeline_schedule": "interleaved", "virtual_stages": 2},
        {"pipeline_schedule": "zbv"},
    ):
        layout = LayoutConfig(pipeline=pipeline, **axes)
        stages = split_model(model, vocab, layout)
        planned = planner.rank_layers(from_config(layout, 1))
        for rank, counted in enumerate(planned):
            own = [stages[number] for number in stages_of_rank(layout, rank)]
            assert sum(stage.num_layers for stage in own) == sum(counted.kinds)
            assert (any(s.has_embedding for s in own), any(s.has_head for s in own)) == (
                counted.has_embedding,
                counted.has_head,
            )


def test_stages_of_a_rank():
    loop, vee = (LayoutConfig(pipeline=2, pipeline_schedule=schedule) for schedule in ("interleaved", "zbv"))
    assert [stages_of_rank(loop, rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [stages_of_rank(vee, rank) for rank in range(2)] == [[0, 3], [1, 2]]


def test_stages_at_split_points():
    stages = split_model(ModelConfig(layers=4, width=64, heads=4, sequence_length=64), 300, LayoutConfig(pipeline=2))
    assert [(stage.has_embedding, stage.has_head) for stage in stages] == [(True, False), (False, True)]
    assert stages[0].last == stages[1].first and stages[1].last == 4
    assert [(stage.first, stage.last) for stage in stages_at((3, 6), 8)] == [(0, 3), (3, 6), (6, 8)]

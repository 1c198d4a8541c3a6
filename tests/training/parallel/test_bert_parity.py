"""BERT with its two losses on every layout equals one process, in float64."""

from typing import Any

import pytest

from tests.support.parity import Case, differences

PP2 = {"pipeline": 2}
CUBE = {"data": 2, "tensor": 2, "pipeline": 2}
GRID = [
    {"data": 2},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    PP2,
    PP2 | {"pipeline_schedule": "zbv"},
    PP2 | {"pipeline_schedule": "dualpipev"},
    {"data": 2, "tensor": 2, "recompute": "operators"},
    {"tensor": 2, "recompute": "full"},
    {"tensor": 2, "recompute": "attention"} | PP2,
]
# further pairs of the same parts, by hand (-m slow)
RARE = [
    CUBE | {"recompute": "attention"},
    {"data": 4, "replicate": 2, "micro_batch": 1},
    {"tensor": 4},
    PP2 | {"pipeline_schedule": "gpipe"},
    PP2 | {"pipeline_schedule": "interleaved"},
    {"data": 2} | PP2,
]


def bert(layout: dict[str, Any], model: str = "bert") -> Case:
    return Case(layout, model, masked=True)


@pytest.mark.parametrize("layout", [*GRID, *(pytest.param(layout, marks=pytest.mark.slow) for layout in RARE)], ids=str)
def test_every_layout_of_bert_is_one_process(layout: dict[str, Any], pool: Any) -> None:
    deep = layout.get("pipeline_schedule") in ("interleaved", "zbv", "dualpipev")  # two stages a rank
    found = differences(bert(layout, "bert_deep" if deep else "bert"), pool)
    assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("layout", [{"tensor": 2}, PP2], ids=str)
def test_the_original_order_too(layout: dict[str, Any], pool: Any) -> None:
    found = differences(bert(layout, "bert_original"), pool)
    assert max(found.values()) < 1e-12, found


CONTROLS = [
    ("tied gradients not summed", PP2, "gradients"),
    ("valid tokens counted on this rank only", {"data": 2}, "parameters"),
    ("gradients of all tokens summed over the ranks", {"tensor": 2}, "gradients"),
    ("logits normalized by this rank's sum", {"tensor": 2}, "loss"),
]


@pytest.mark.parametrize(("mutation", "layout", "quantity"), CONTROLS, ids=[control[0] for control in CONTROLS])
def test_a_broken_engine_is_caught(mutation: str, layout: dict[str, Any], quantity: str, pool: Any) -> None:
    assert differences(bert(layout), pool, mutation)[quantity] > 1e-4

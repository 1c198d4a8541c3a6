import json

from gristmill.pipelines.report.blocks import Figure, Table
from gristmill.pipelines.report.evaluation_curve import curve_points, evaluation_blocks, table_chances

TABLE = """| task | shots | n | metric | score | ± s.e. | chance | verdict |
|---|--:|--:|---|--:|--:|--:|---|
| cloze | 0 | 400 | acc | 0.3425 | 0.0238 | 0.2500 | better than chance (+3.9 s.e.) |
| open | 0 | 400 | f1 | 0.1 |  |  |  |
"""
LINES = [
    {"step": 10, "tokens": 640_000, "scores": {"cloze": {"acc": 0.25, "acc_stderr": 0.1}, "open": {"f1": 0.1}}},
    {"step": 20, "tokens": 1_280_000, "scores": {"cloze": {"acc": 0.5, "acc_stderr": float("nan")}}},
]


def test_a_point_a_task_and_metric_with_its_error_and_chance():
    chances = table_chances(TABLE)
    assert chances == {("cloze", "acc"): 0.25}
    points = curve_points(LINES, chances)
    assert [(p["step"], p["task"], p["score"], p["error"], p["chance"]) for p in points] == [
        (10, "cloze", 0.25, 0.1, 0.25),
        (10, "open", 0.1, None, None),
        (20, "cloze", 0.5, None, 0.25),
    ]


def test_a_figure_and_the_numbers_behind_it_where_there_were_evaluations(tmp_path):
    (tmp_path / "table.md").write_text(TABLE)
    assert evaluation_blocks(tmp_path, tmp_path) == []
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    blocks = evaluation_blocks(tmp_path, tmp_path)
    assert blocks == evaluation_blocks(tmp_path, tmp_path)
    [figure] = [block for block in blocks if isinstance(block, Figure)]
    assert figure.svg.startswith(b"<?xml")
    table, noise = (block for block in blocks if isinstance(block, Table))
    assert table.rows[0] == ("10", "0.64", "cloze", "acc", "0.2500", "0.1000") and len(table.rows) == 3
    assert noise.columns[4:] == ("noise", "checkpoints", "detectable") and {row[0] for row in noise.rows} == {
        "cloze",
        "open",
    }

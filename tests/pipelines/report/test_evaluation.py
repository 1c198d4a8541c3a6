import json

from gristmill.evaluation.tasks.corpus_tasks import english_name
from gristmill.pipelines.report.evaluation import curve_points, evaluation_blocks, language_blocks, table_chances
from gristmill.pipelines.report.render import Figure, Table

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


# The section on languages: sorted scores, a figure of bars, one small plot for each language.


def results(**bits: float) -> dict:
    names = {f"bits_per_byte_{tag}": value for tag, value in bits.items()}
    return {
        "results": {
            "bits_per_byte": {"bits_per_byte,none": 9.0},
            "bits_per_byte_script_Latn": {"bits_per_byte,none": 9.0},
            **{name: {"bits_per_byte,none": v, "bits_per_byte_stderr,none": "nan"} for name, v in names.items()},
        },
        "configs": {name: {} for name in names},
        "verdicts": {name.replace("byte_", "byte ", 1): {"bits_per_byte": {"n": 3, "chance": 4.5}} for name in names},
    }


def test_languages_from_the_lowest_bits_per_byte_with_their_curves(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results(pt_BR_Latn=2.5, ar_Arab=1.25, xx_Zyyy=3.0)))
    (tmp_path / "table.md").write_text("")
    scores = {"bits_per_byte ar_Arab": {"bits_per_byte": 2.0, "bits_per_byte_stderr": 0.1}}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"step": 1, "tokens": 2_000_000, "scores": scores}))
    blocks = language_blocks(tmp_path, tmp_path)
    [table] = [block for block in blocks if isinstance(block, Table)]
    assert table.rows == (
        ("Arabic (ar_Arab)", "Arab", "3", "1.250", "", "4.500"),
        ("Portuguese (Brazil) (pt_BR_Latn)", "Latn", "3", "2.500", "", "4.500"),
        ("xx_Zyyy (xx_Zyyy)", "Zyyy", "3", "3.000", "", "4.500"),
    )
    assert [block.name for block in blocks if isinstance(block, Figure)] == ["languages", "languages_over_training"]
    assert blocks == language_blocks(tmp_path, tmp_path)
    assert evaluation_blocks(tmp_path, tmp_path) == []  # languages are not drawn twice


def test_no_section_without_languages(tmp_path):
    assert language_blocks(tmp_path, tmp_path) == []
    (tmp_path / "results.json").write_text(json.dumps(results()))
    assert language_blocks(tmp_path, tmp_path) == []


def test_names_of_languages():
    assert [english_name(tag) for tag in ("de_Latn", "zh_Hani", "zzz_Latn")] == ["German", "Chinese", "zzz_Latn"]

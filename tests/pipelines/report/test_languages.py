"""The section on languages: sorted scores, a figure of bars, one small plot for each language."""

import json

from gristmill.evaluation.tasks.language_names import english_name
from gristmill.pipelines.report.blocks import Figure, Table
from gristmill.pipelines.report.evaluation_curve import evaluation_blocks
from gristmill.pipelines.report.languages import language_blocks


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

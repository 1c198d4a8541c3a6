"""Files of labelled records: JSON lines, whole JSON, SQuAD's and GLUE's own files, folders."""

import json
from pathlib import Path

import pytest

from gristmill.foundation.errors import InputError
from gristmill.training.objectives.classification import MultipleChoice, MultipleChoiceOptions
from gristmill.training.objectives.objective_names import read_records, records_digest
from gristmill.training.objectives.span_extraction import SpanExtraction, SpanExtractionOptions

SQUAD_FILE = {
    "version": "v2.0",
    "data": [
        {
            "title": "Mills",
            "paragraphs": [
                {
                    "context": "Water turns the wheel.",
                    "qas": [
                        {"id": "1", "question": "What turns?", "answers": [{"text": "wheel", "answer_start": 16}]},
                        {"id": "2", "question": "Who?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}


def test_lines_and_tables_and_lists(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\ufeff{"a": 1}\n\n{"a": 2}\n', "utf-8")
    (tmp_path / "b.tsv").write_text('id\ta\r\n0\tsaid "no\r\n')
    (tmp_path / "c.json").write_text('[{"a": 3}]')
    found = [(record, where.removeprefix(f"{tmp_path}/")) for record, where in read_records(tmp_path)]
    assert found == [
        ({"a": 1}, "a.jsonl:1"),
        ({"a": 2}, "a.jsonl:3"),
        ({"id": "0", "a": 'said "no'}, "b.tsv:2"),
        ({"a": 3}, "c.json: record 0"),
    ]
    before = records_digest(tmp_path)
    (tmp_path / "c.json").write_text('[{"a": 4}]')
    assert records_digest(tmp_path) != before


def test_squads_own_file_and_its_rows_are_the_same_questions(tmp_path: Path) -> None:
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(SQUAD_FILE))
    rows = [
        {
            "context": "Water turns the wheel.",
            "question": "What turns?",
            "answers": {"text": ["wheel"], "answer_start": [16]},
        },
        {"context": "Water turns the wheel.", "question": "Who?", "answers": {"text": [], "answer_start": []}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = SpanExtractionOptions(train=tmp_path)
    whole, lines = (SpanExtraction.parsed_records(tmp_path / name, options) for name in ("dev-v2.0.json", "rows.jsonl"))
    assert whole == lines and [each.answer for each in whole] == [(3, 3), None]
    with pytest.raises(InputError, match=r"dev-v2\.0\.json: data\[0\]\.paragraphs\[0\]\.qas\[1\]: has no answer"):
        SpanExtraction.parsed_records(
            tmp_path / "dev-v2.0.json", SpanExtractionOptions(train=tmp_path, unanswerable=False)
        )


def test_races_own_files(tmp_path: Path) -> None:
    record = {
        "article": "a",
        "questions": ["b", "c"],
        "options": [["d", "e"], ["f", "g"]],
        "answers": ["B", "A"],
        "id": "1",
    }
    (tmp_path / "high").mkdir()
    (tmp_path / "high/1.txt").write_text(json.dumps(record))
    found = MultipleChoice.parsed_records(tmp_path, MultipleChoiceOptions(train=tmp_path, choices=2))
    assert found == [("a", ["b d", "b e"], 1), ("a", ["c f", "c g"], 0)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.tsv", "a\tb\n1\t2\n1\t2\t3\n", r"a\.tsv:3: 3 columns, the header has 2"),
        ("a.json", '{"data": [{"title": "x"}]}', r"a\.json: data\[0\]: has no list `paragraphs`"),
        ("a.json", '{"data": [{"paragraphs": [{"qas": ["q"]}]}]}', r"paragraphs\[0\]\.qas\[0\]: no JSON object"),
        ("a.json", "[1]", r"a\.json: record 0: no JSON object"),
        ("a.json", '{"a": 1}\n{"a": \n', r"a\.json:2: not JSON"),
        ("a.jsonl", "\n", "holds no record"),
    ],
)
def test_wrong_files_are_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        read_records(tmp_path / name)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes('{"a": "é"}'.encode("latin-1"))
    for name in ("gone.jsonl", "latin.jsonl"):
        with pytest.raises(InputError, match=rf"{name}: cannot be read"):
            read_records(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: holds no record"):
        read_records(tmp_path / "empty")

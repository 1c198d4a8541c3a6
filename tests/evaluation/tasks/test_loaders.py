"""Loading benchmark files in every format, and the errors of damaged ones."""

import gzip
import json

import pytest

from gristmill.evaluation.tasks.loaders import load
from gristmill.foundation.errors import InputError


def write(path, *records) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text)
    return text


def test_packed_and_plain_files_are_the_same_documents(tmp_path):
    text = write(tmp_path / "plain" / "set.jsonl", {"query": "é?", "gold": 1})
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "set.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    found = [load("set.jsonl", ["query", "gold"], data=str(tmp_path / name)) for name in ("plain", "packed")]
    assert found[0]["test"].to_list() == found[1]["test"].to_list() == [{"query": "é?", "gold": 1}]


def test_what_is_expected_where_is_said(tmp_path):
    with pytest.raises(InputError, match=r"reads benchmarks/a\.jsonl .* with query, gold; no data folder is named"):
        load("benchmarks/a.jsonl", ["query", "gold"])
    with pytest.raises(InputError, match=r"a\.jsonl: absent; this task reads benchmarks/a\.jsonl"):
        load("benchmarks/a.jsonl", ["query", "gold"], data=str(tmp_path))


def test_another_version_of_a_pinned_file_is_refused(tmp_path):
    write(tmp_path / "set.jsonl", {"query": "?"})
    with pytest.raises(InputError, match="not the file that the task pins"):
        load("set.jsonl", ["query"], sha256="0" * 64, data=str(tmp_path))


def test_bad_files_name_the_record_and_the_fix(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text("\n\n")
    with pytest.raises(InputError, match="has no record"):
        load("set.jsonl", ["query"], data=str(tmp_path))
    path.write_text('{"query": 1}\n{"query"\n')
    with pytest.raises(InputError, match=r"set\.jsonl:2: not JSON"):
        load("set.jsonl", ["query"], data=str(tmp_path))
    path.write_text("[1]\n")
    with pytest.raises(InputError, match=r"set\.jsonl:1: list where an object is expected"):
        load("set.jsonl", ["query"], data=str(tmp_path))
    write(path, {"query": 1}, {"question": 2})
    with pytest.raises(InputError, match=r"record 1 has no field 'query'; its fields are \['question'\]"):
        load("set.jsonl", ["query"], data=str(tmp_path))
    path.unlink()
    (tmp_path / "set.jsonl.gz").write_bytes(gzip.compress(b'{"query": 1}\n' * 1000)[:-10])
    with pytest.raises(InputError, match="fetch the file again"):
        load("set.jsonl", ["query"], data=str(tmp_path))


def test_the_two_other_forms(tmp_path):
    (tmp_path / "h.txt").write_text("A man\n2\nsits.\nflies.\nruns.\nsleeps.\n")
    (record,) = load("h.txt", ["context", "gold", "endings"], form="hellaswag", data=str(tmp_path))["test"]
    assert record == {"context": "A man", "gold": 2, "endings": ["sits.", "flies.", "runs.", "sleeps."]}
    (tmp_path / "h.txt").write_text("A man\n2\nsits.\n")
    with pytest.raises(InputError, match="no whole number of records of 6 lines"):
        load("h.txt", ["context"], form="hellaswag", data=str(tmp_path))
    with pytest.raises(InputError, match="the task's form 'hella' is unknown; known are jsonl, hellaswag"):
        load("h.txt", ["context"], form="hella", data=str(tmp_path))


def test_race_comes_in_three_forms(tmp_path):
    """An article with its questions, a question a line, and as EleutherAI/race has it: the same record."""
    options = [["a", "b", "c", "d"], ["e", "f", "g", "h"]]
    problems = [
        {"question": "What?", "answer": "C", "options": options[0]},
        {"question": "Why?", "answer": "A", "options": options[1]},
    ]
    forms = (
        [{"article": "Grain.", "questions": ["What?", "Why?"], "options": options, "answers": ["C", "A"]}],
        [{"article": "Grain.", **problem} for problem in problems],
        [{"article": "Grain.", "problems": repr(problems)}],
    )
    for number, records in enumerate(forms):
        write(tmp_path / f"{number}.jsonl", *records)
        found = load(f"{number}.jsonl", ["article", "problems"], form="race", data=str(tmp_path))["test"]
        assert found.to_list() == [{"article": "Grain.", "problems": repr(problems)}]


def test_anli_comes_as_its_authors_or_as_the_hub_has_it(tmp_path):
    write(tmp_path / "0.jsonl", {"context": "It rains.", "hypothesis": "It is dry.", "label": "c"})
    write(tmp_path / "1.jsonl", {"premise": "It rains.", "hypothesis": "It is dry.", "label": 2})
    first, second = (load(f"{n}.jsonl", ["premise"], form="anli", data=str(tmp_path))["test"] for n in (0, 1))
    assert first.to_list() == second.to_list()


def test_a_record_of_another_form_is_named(tmp_path):
    for form, record in {
        "race": {"article": "T", "questions": ["Q"], "options": [["a"]], "answers": ["E"]},
        "anli": {"context": "T", "hypothesis": "H", "label": "x"},
        "boolq": {"query": "no question", "choices": ["no", "yes"], "gold": 0},
        "arc": {"query": "Question: ?", "choices": ["a"], "gold": 7},
    }.items():
        write(tmp_path / "set.jsonl", record)
        with pytest.raises(InputError, match=f"a record is not in the format '{form}'"):
            load("set.jsonl", [], form=form, data=str(tmp_path))


def test_examples_come_from_a_file_of_their_own_if_it_is_there(tmp_path):
    write(tmp_path / "set.jsonl", {"query": "?"})
    assert len(load("set.jsonl", ["query"], fewshot_file="shown.jsonl", data=str(tmp_path))["train"]) == 0
    write(tmp_path / "shown.jsonl", {"query": "!"})
    found = load("set.jsonl", ["query"], fewshot_file="shown.jsonl", split="validation", data=str(tmp_path))
    assert found["train"].to_list() == [{"query": "!"}] and found["validation"].to_list() == [{"query": "?"}]
    with pytest.raises(InputError, match=r"a path below the data folder, without '\.\.'"):
        load("../set.jsonl", ["query"], data=str(tmp_path / "in"))

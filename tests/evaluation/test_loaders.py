import gzip
import json

import pytest

from gristmill.data_pipeline.errors import InputError
from gristmill.evaluation.tasks.loaders import load


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
    with pytest.raises(InputError, match="not the file this task is pinned to"):
        load("set.jsonl", ["query"], sha256="0" * 64, data=str(tmp_path))


def test_bad_files_name_the_record_and_the_mend(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text("\n\n")
    with pytest.raises(InputError, match="holds no record"):
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
    article = {"article": "T", "questions": ["Q1", "Q2"], "options": [["a", "b", "c", "d"]] * 2, "answers": ["B", "D"]}
    write(tmp_path / "r.jsonl", article)
    found = load("r.jsonl", ["article", "question", "options", "gold"], form="race", data=str(tmp_path))["test"]
    assert [(each["question"], each["gold"]) for each in found] == [("Q1", 1), ("Q2", 3)]


def test_race_and_anli_come_as_their_authors_or_as_the_hub_has_them(tmp_path):
    forms = {
        "race": (
            {"article": "Grain.", "questions": ["What?"], "options": [["a", "b", "c", "d"]], "answers": ["C"]},
            {"article": "Grain.", "question": "What?", "options": ["a", "b", "c", "d"], "answer": "C"},
        ),
        "anli": (
            {"context": "It rains.", "hypothesis": "It is dry.", "label": "c"},
            {"premise": "It rains.", "hypothesis": "It is dry.", "label": 2},
        ),
    }
    fields = {"race": ["article", "question", "options", "gold"], "anli": ["context", "hypothesis", "label"]}
    for form, records in forms.items():
        found = []
        for number, record in enumerate(records):
            (tmp_path / f"{form}{number}.jsonl").write_text(json.dumps(record) + "\n")
            found.append(load(f"{form}{number}.jsonl", fields[form], form=form, data=str(tmp_path))["test"][0])
        assert [found[0][name] for name in fields[form]] == [found[1][name] for name in fields[form]]

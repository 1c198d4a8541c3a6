"""The stage `curate` through the command line, with benchmarks, tasks and protected corpora."""

import json

import pytest

from gristmill.foundation.manifest import differences, read_manifest
from tests.support.corpora import prose, write_jsonl

QUESTION = "Which of the seven rivers that cross the old kingdom has never once frozen over in any recorded winter?"
RECIPE = """\
name: {name}
sources:
  - {{name: notes, format: jsonl, paths: ["{folder}/{name}*.jsonl"]}}
curate:
  splits: {{validation: 0.1, test: 0.1}}
  near_dedup: {{keep_signatures: true, protected: {protected}}}
  span_dedup: {{unit: line}}
  substring_dedup: {{}}
  decontaminate:
    benchmarks: [{{name: rivers, paths: ["{folder}/rivers.txt"], lines: [question, gold], fields: [question]}}]
    tasks: [{{name: anli_r1, fields: [hypothesis]}}]
    task_data: "{folder}"
"""


@pytest.fixture
def place(tmp_path):
    """Recipes one.yaml and two.yaml; two is deduplicated against one, ten of whose documents it holds again."""
    (tmp_path / "rivers.txt").write_text(f"{QUESTION}\n0\n")
    hypothesis = "The old mill by the weir has not turned its wheel once since the great flood."
    write_jsonl(tmp_path / "benchmarks/anli_r1_test.jsonl", [{"context": "c", "hypothesis": hypothesis, "label": "n"}])
    texts = [prose(k) for k in range(30)] + [f"{prose(40)} {QUESTION} {prose(41)}", f"{prose(42)} {hypothesis}"]
    write_jsonl(tmp_path / "one.jsonl", [{"text": text} for text in texts])
    write_jsonl(tmp_path / "two.jsonl", [{"text": f"{prose(k)} And so on."} for k in range(20, 60)])
    for name, protected in (("one", "[]"), ("two", '["work/one"]')):
        recipe = RECIPE.format(name=name, folder=tmp_path, protected=protected)
        (tmp_path / f"{name}.yaml").write_text(recipe)
    return tmp_path


def test_from_the_recipe_to_the_evidence(call, place):
    assert call("curate", "one.yaml", "--workers", 1)[0] == 0
    corpus = place / "work/one/curate"
    manifest = read_manifest(corpus)
    assert differences(corpus, manifest) == []
    outputs = {output.path for output in manifest.outputs}
    assert {"decontamination/report.json", "decontamination/report.md", "signatures/store.json"} <= outputs
    report = json.loads((corpus / "decontamination/report.json").read_bytes())
    assert {name: numbers["found"] for name, numbers in report.items()} == {"rivers": 1, "anli_r1": 1}
    code, said = call("reproduce", corpus, "--workers", 1)
    assert code == 0 and f"identical: {len(outputs)} files" in said, said
    # another text of a benchmark is other work, another place of the same file is not
    assert "complete" in call("plan", "one.yaml")[1]
    (place / "rivers.txt").rename(place / "moved.txt")
    (place / "one.yaml").write_text((place / "one.yaml").read_text().replace("rivers.txt", "moved.txt"))
    assert "complete" in call("plan", "one.yaml")[1]
    (place / "moved.txt").write_text(f"{QUESTION} Why?\n0\n")
    assert "benchmarks" in call("plan", "one.yaml")[1]


def test_a_corpus_is_protected_merged_and_queried(call, place):
    assert call("curate", "one.yaml", "--workers", 1)[0] == 0
    assert call("curate", "two.yaml", "--workers", 1)[0] == 0
    removed = json.loads((place / "work/two/curate/counts.json").read_bytes())["sources"]["notes"]["removed"]
    assert removed["near_dedup"]["documents"] == 10
    code, said = call("signatures", "merge", "work/one", "work/two", "--output", "both")
    assert code == 0 and "both: " in said
    (place / "question.txt").write_text(prose(50))
    code, said = call("similar", "--corpus", "both", "--text", "question.txt", "--limit", 1)
    assert code == 0 and "0.97" in said and "notes" in said
    assert call("signatures", "merge", "work/one", "--output", "both")[0] == 1
    assert call("similar", "--corpus", place, "--text", "question.txt")[0] == 1
    assert call("similar", "--corpus", "both", "--text", "nowhere.txt")[0] == 1


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("lines: [question, gold]", "lines: [question, gold, x]", 1, "2 lines are no whole number of records of 3"),
        ("fields: [question]", "fields: [answer]", 2, "no line is called 'answer'; lines are ('question', 'gold')"),
        ("anli_r1, fields: [hypothesis]", "anli_r1, fields: [context]", 1, "record 0: no field 'context'"),
        ("name: anli_r1,", "name: anli_r9,", 2, "no task 'anli_r9'; the nearest is"),
        ("rivers.txt", "lakes.txt", 1, "lakes.txt: no such file"),
        ("protected: []", "protected: [nowhere]", 1, "nowhere: no such file"),
        ("keep_signatures: true", "threshold: 0.0", 2, "greater than 0"),
        ("unit: line", "unit: word", 2, "'paragraph' or 'line'"),
    ],
)
def test_what_is_wrong_is_said_before_work_starts(call, place, old, new, code, said):
    text = (place / "one.yaml").read_text()
    assert old in text
    (place / "one.yaml").write_text(text.replace(old, new))
    found = call("curate", "one.yaml", "--workers", 1)
    assert found[0] == code and said in found[1]
    assert not (place / "work/one/cache").exists()

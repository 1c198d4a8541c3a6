"""Rules and signals of the user's own file: in the ledger, on several workers, in the fingerprint; their errors."""

import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.document_history import why
from gristmill.foundation.manifest import read_manifest
from gristmill.pipelines.recipes.config import identity
from gristmill.pipelines.recipes.recipe_file import validate
from tests.support.corpora import prose, write_jsonl

RULES = '''"""Rules of mine."""

import pyarrow.compute as pc


def no_lorem(document):
    return "placeholder text" if "lorem ipsum" in document["text"].lower() else True


def from_mills(documents):
    return pc.starts_with(documents["url"], "https://mill.example/")


def num_of_topic(document):
    return document["metadata"].get("topic")
'''
RECIPE = """
name: own
sources:
  - {{name: books, format: jsonl, paths: [{raw}/*.jsonl]}}
curate:
  filters: [my_rules.py:no_lorem, my_rules.py:from_mills, {{my_rules.py:num_of_topic: {{min: 2, max: 8}}}}]
  language_id: null
  near_dedup: null
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe and its rules in a folder of their own; documents 0 to 9 of topic 0 to 9, one empty, one unreadable."""
    records = [{"text": prose(k), "url": "https://mill.example/", "topic": k} for k in range(10)]
    records[3]["text"] += "\nLorem ipsum dolor."
    records[4]["url"] = "https://other.example/"
    write_jsonl(tmp_path / "raw" / "a.jsonl", records[:5])
    write_jsonl(tmp_path / "raw" / "b.jsonl", [*records[5:], {"text": ""}, b"{"])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "my_rules.py").write_text(RULES)
    path = tmp_path / "recipes" / "own.yaml"
    path.write_text(RECIPE.format(raw=tmp_path / "raw"))
    return path


def test_rules_decide_and_the_ledger_names_them(recipe, call, tmp_path):
    assert call("curate", recipe, "--workdir", "work", "--workers", 2)[0] == 0
    rows = pq.read_table("work/curate/ledger").to_pylist()
    rules = {(row["rule"], row["value"], row["threshold"]) for row in rows if row["outcome"] == "removed"}
    assert rules == {
        ("text.min_chars", 0.0, 1.0),
        ("my_rules.no_lorem", 1.0, 0.0),
        ("my_rules.from_mills", 1.0, 0.0),
        ("my_rules.num_of_topic.min", 0.0, 2.0),
        ("my_rules.num_of_topic.min", 1.0, 2.0),
        ("my_rules.num_of_topic.max", 9.0, 8.0),
    }
    assert sum(row["outcome"] == "kept" for row in rows) == 5
    signals = pq.read_table("work/curate/signals").to_pylist()
    assert sorted(row["my_rules_num_of_topic"] for row in signals) == [2, 5, 6, 7, 8]
    (lorem,) = [row["doc_id"] for row in rows if row["rule"] == "my_rules.no_lorem"]
    event = next(event for event in why(lorem, tmp_path / "work") if event.step == "filters")
    assert event.lines == ("my_rules.no_lorem: 1, wanted <= 0",)

    code, said = call("try", recipe.parent / "my_rules.py", "--on", "work")
    assert code == 0 and "my_rules.no_lorem: would remove 0 of 5 documents (0.0%), 0.00 MB" in said
    (recipe.parent / "other.py").write_text("def no_wheels(document):\n    return 'wheel' not in document['text']")
    code, said = call("try", f"{recipe.parent}/other.py:no_wheels", "--on", "work", "--examples", 1)
    wheels = [row for row in pq.read_table("work/curate/documents").to_pylist() if "wheel" in row["text"]]
    assert f"would remove {len(wheels)} of 5 documents" in said and wheels[0]["doc_id"] in said


def test_a_changed_file_makes_the_stage_again_and_a_moved_one_does_not(recipe, call, tmp_path):
    run = ("curate", recipe, "--workdir", "work", "--workers", 1)
    assert call(*run)[0] == 0
    before = read_manifest(tmp_path / "work" / "curate")
    (tmp_path / "moved").mkdir()
    for path in (recipe, recipe.parent / "my_rules.py"):
        path.rename(tmp_path / "moved" / path.name)
    run = ("curate", tmp_path / "moved" / "own.yaml", *run[2:])
    assert "curate: complete, skipped" in call(*run)[1]
    with (tmp_path / "moved" / "my_rules.py").open("a") as file:
        file.write("# another digest\n")
    assert "sha256" in call("plan", run[1], "--workdir", "work")[1]
    assert call(*run)[0] == 0
    assert read_manifest(tmp_path / "work" / "curate").fingerprint != before.fingerprint


def test_a_recipe_with_its_code_needs_no_file(recipe):
    """As the manifest has it, for `gristmill reproduce`."""
    fields = {"preset": "r.f", "code": {"file": "gone/r.py", "function": "f", "sha256": "0" * 64, "source": "f = 1"}}
    read = validate(
        {"name": "x", "sources": [{"name": "d", "format": "jsonl", "paths": ["a"], "filters": [fields]}]}, ""
    )
    assert read.sources[0].filters[0].code.source == "f = 1"
    assert identity(read)["sources"][0]["filters"] == [
        {"preset": "r.f", "thresholds": {}, "code": {"function": "f", "sha256": "0" * 64}}
    ]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("def no_lorem(document)", "def no_lorem(text)", "my_rules.py:6: no_lorem(text) must have one parameter"),
        ("def no_lorem(document)", "def lorem(document)", "has no function 'no_lorem'; did you mean 'lorem'?"),
        ("def no_lorem(document):", "def no_lorem(document)", "my_rules.py:6: does not load: expected ':'"),
        ("import pyarrow.compute as pc", "import no_such_package", "my_rules.py:3: does not load: ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_before_any_work(recipe, call, before, after, message):
    path = recipe.parent / "my_rules.py"
    path.write_text(path.read_text().replace(before, after))
    code, said = call("curate", recipe, "--workdir", "work")
    assert code == 2 and "curate.filters" in said and message in said, said


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('.get("topic")', '["topics"]', "my_rules.py:15: num_of_topic fails on document "),
        ('.get("topic")', ".keys()", "my_rules.py:14: num_of_topic returned dict_keys("),
        ('"https://mill.example/")', '"https://mill.example/").slice(1)', "returned 9 values for 10 documents"),
        ('"placeholder text" if', "None if", "my_rules.py:6: no_lorem returned None; True to keep"),
    ],
)
def test_errors_during_the_work_name_file_and_line(recipe, call, before, after, message):
    path = recipe.parent / "my_rules.py"
    path.write_text(path.read_text().replace(before, after))
    code, said = call("curate", recipe, "--workdir", "work", "--workers", 1)
    assert code == 2 and message in said and "Traceback" not in said, said


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ("[gone.py:f]", "own.yaml:6: curate.filters: "),
        ("[gone.py:f]", "gone.py: No such file or directory; name a Python file"),
        ("[{my_rules.py:num_of_topic: {low: 1}}]", "my_rules.num_of_topic has no threshold 'low'"),
        ("[my_rules.py:no_lorem, my_rules.py:no_lorem]", "filter 'my_rules.no_lorem' is named twice"),
        ("[extra.rule]", "no 'extra.rule' in the entry points gristmill.rules"),
    ],
)
def test_a_wrong_name_is_said_with_its_line(recipe, call, filters, message):
    lines = recipe.read_text().splitlines()
    lines[5] = f"  filters: {filters}"
    recipe.write_text("\n".join(lines))
    code, said = call("check", recipe)
    assert code == 2 and message in said, said


def test_rules_of_an_installed_package(recipe, call, tmp_path, monkeypatch):
    """A package offers functions as entry points; its module's digest is in the fingerprint."""
    site = tmp_path / "site"
    (site / "mill_rules-1.0.dist-info").mkdir(parents=True)
    (site / "mill_rules.py").write_text(RULES)
    (site / "mill_rules-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mill-rules\nVersion: 1.0\n"
    )
    (site / "mill_rules-1.0.dist-info" / "entry_points.txt").write_text(
        "[gristmill.rules]\nno_lorem = mill_rules:no_lorem\n"
    )
    monkeypatch.syspath_prepend(str(site))
    recipe.write_text(recipe.read_text().replace("my_rules.py:no_lorem", "mill_rules.no_lorem"))
    code, said = call("curate", recipe, "--workdir", "work", "--workers", 1)
    assert code == 0, said
    assert "mill_rules.no_lorem" in pq.read_table("work/curate/ledger").column("rule").to_pylist()


def test_signals_are_those_of_the_edited_text(recipe, call):
    """Lines that other documents have are removed after the filters; what is left is measured again."""
    with (recipe.parent / "my_rules.py").open("a") as file:
        file.write("\n\ndef length(documents):\n    return pc.utf8_length(documents['text'])\n")
    shared = "This very line of the mill stands in each of the documents.\n"
    write_jsonl(recipe.parents[1] / "raw" / "a.jsonl", [{"text": shared * (k != 2) + prose(k)} for k in range(5)])
    write_jsonl(recipe.parents[1] / "raw" / "b.jsonl", [{"text": prose(k)} for k in range(5, 10)])
    lines = recipe.read_text().splitlines()
    lines[5] = "  filters: []\n  signals: [my_rules.py:length]\n  span_dedup: {unit: line}"
    recipe.write_text("\n".join(lines))
    code, said = call("curate", recipe, "--workdir", "work", "--workers", 1)
    assert code == 0, said
    texts = {row["doc_id"]: row["text"] for row in pq.read_table("work/curate/documents").to_pylist()}
    lengths = {row["doc_id"]: row["my_rules_length"] for row in pq.read_table("work/curate/signals").to_pylist()}
    assert sum(text.startswith(shared.strip()) for text in texts.values()) == 1
    assert lengths == {doc_id: len(text) for doc_id, text in texts.items()}

"""The example files of docs/extend.md, as they stand there, run in a recipe."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from lm_eval.models.dummy import DummyLM

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.tasks.harness import require_tasks, run_tasks
from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.stages.stage import task_identity
from tests.support.corpora import prose

PAGE = (Path(__file__).parents[1] / "docs" / "extend.md").read_text("utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path):
    """The files, and a recipe of the page's fields."""
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    recipe = {"name": "page"}
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        recipe |= yaml.safe_load(block)
    recipe["curate"] |= {"language_id": None, "near_dedup": None}
    recipe["curate"]["filters"].remove("gopher_quality")
    (tmp_path / "page.yaml").write_text(yaml.safe_dump(recipe))
    entries = [f"title {k}\n{prose(k)}" for k in range(8)]
    entries[1] += " Lorem ipsum."
    entries[2] = entries[2].replace("title", "old title")
    entries[3] = f"title 3\n{prose(3).upper()}"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("\n%%\n".join(entries))
    return tmp_path


def test_the_page_has_a_file_of_each_kind():
    assert FILES.keys() == {"my_rules.py", "my_reader.py", "my_tasks.py"}


def test_reader_rules_and_signals(folder, call):
    code, said = call("curate", folder / "page.yaml", "--workers", 1)
    assert code == 0, said
    rows = pq.read_table("work/page/curate/ledger").to_pylist()
    assert sorted(row["rule"] for row in rows if row["rule"]) == [
        "my_rules.capitals.max",
        "my_rules.no_lorem",
        "my_rules.not_from_archive",
    ]
    assert len(rows) == 8
    documents = pq.read_table("work/page/curate/documents").to_pylist()
    assert {row["metadata"] for row in documents} == {f'{{"title":"title {k}"}}' for k in (0, 4, 5, 6, 7)}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "def read(content, name)",
            "def read(content)",
            "my_reader.py:1: read(content) must be a function (content, name)",
        ),
        ("yield {", "return {", "must be a function (content, name) that yields documents"),
        ('"utf-8"', '"ascii"', "my_reader.py:2: fails on"),
        ('yield {"text"', 'yield 5, {"text"', "my_reader.py:1: yielded a tuple; yield texts, or dictionaries"),
    ],
)
def test_errors_of_readers_name_file_and_line(folder, call, before, after, message):
    path = folder / "my_reader.py"
    path.write_text(path.read_text().replace(before, after))
    (folder / "notes" / "a.txt").write_text("é\nbody")
    code, said = call("check", "page.yaml")
    assert code == 2 and message in said and "Traceback" not in said, said


def test_documents_without_text_go_to_the_quarantine(folder, call):
    path = folder / "my_reader.py"
    path.write_text(path.read_text().replace('"text": body', '"text": body if number else None'))
    code, said = call("curate", folder / "page.yaml", "--workers", 1)
    assert code == 0 and "1 quarantined" in said, said


def test_a_task_is_scored(folder, monkeypatch):
    monkeypatch.chdir(folder)
    results = run_tasks(DummyLM(), ["my_tasks.py:halves"], EvaluateConfig())
    samples = results.samples["halves"]
    assert [sample["arguments"][0][0] for sample in samples] == ["A quarter of eight is", "Half of ten is"]
    assert 0 <= results.summary["results"]["halves"]["acc,none"] <= 1


def test_the_digest_of_a_task_identifies_it(folder):
    names = [f"{folder}/my_tasks.py:halves", "piqa"]
    before = task_identity(names, EvaluateConfig())
    (folder / "my_tasks.py").write_text(FILES["my_tasks.py"] + "# changed\n")
    after = task_identity(names, EvaluateConfig())
    assert before[1] == after[1] == "piqa" and before[0]["function"] == "halves" and before[0] != after[0]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("def halves()", "def halfs()", "has no function 'halves'; did you mean 'halfs'?"),
        ("in PAIRS]", "in MORE]", "my_tasks.py:7: halves fails: NameError"),
        ('"documents"', '"questions"', "my_tasks.py:4: halves returned no task"),
    ],
)
def test_errors_of_tasks_name_file_and_line(folder, before, after, message):
    path = folder / "my_tasks.py"
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(RecipeError, match=re.escape(message)):
        require_tasks([f"{path}:halves"])

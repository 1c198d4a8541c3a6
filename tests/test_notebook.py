"""docs/notebooks/first_corpus.ipynb runs from its first cell to its last, and its links lead to files; progress in a
notebook is a line for each task, replaced in place."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from corpora import prose, write_jsonl

from gristmill.foundation import progress
from gristmill.foundation.progress import Reporter

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "first_corpus.ipynb"
CELLS = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]


def test_the_cells_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in CELLS:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}:{cell['id']}", "exec"), names)
    outcomes = dict(names["by_rule"])
    assert outcomes["kept"] > 100 and outcomes["gopher_quality.min_words"] > 100
    assert [step for step, *_ in names["history"]][:2] == [
        "read",
        "filters",
    ] and "gopher_quality" in capsys.readouterr().out
    assert names["removed"] > 10
    texts = [document["text"] for document in names["fewer"].documents()]
    assert texts and not any("self" in text for text in texts)


def test_its_links_lead_to_files():
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) == 3 and all((NOTEBOOK.parent / target).is_file() for target in targets)


def test_progress_is_one_line_that_is_replaced(monkeypatch, capsys):
    """With what IPython has of a kernel: `display` of a display_id gives a handle, whose text is replaced."""
    outputs: list[list[str]] = []

    def display(content, raw, display_id):
        assert raw and display_id
        history = [content["text/plain"]]
        outputs.append(history)
        return SimpleNamespace(update=lambda content, raw: history.append(content["text/plain"]))

    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1), display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_NOTEBOOK_UPDATES", 0)
    reporter = Reporter.to_terminal()
    with reporter.meter("reading", 4, "files") as meter:
        meter.advance(1)
        meter.advance(3)
    with reporter.meter("nothing to do", 0, "files") as meter:
        meter.advance(0)
    reporter.info("curate: done")
    (reading,) = outputs
    assert reading[0].startswith("reading: 25 % (1 file of 4 files)") and reading[1].startswith("reading: 100 %")
    assert re.fullmatch(r"reading: 4 files in [\d.]+ s", reading[2]) and len(reading) == 3
    assert capsys.readouterr() == ("curate: done\n", "")


def test_a_reader_of_a_notebook_sees_the_tasks_and_no_warnings(tmp_path):
    """In a real kernel: curate, train, and nothing on standard error, which Jupyter shows in red."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel", reason="a kernel to run the notebook: pip install ipykernel nbclient")
    write_jsonl(tmp_path / "web.jsonl", [{"text": prose(k)} for k in range(120)])
    fields = {
        "name": "small",
        "sources": [{"name": "web", "format": "jsonl", "paths": ["web.jsonl"]}],
        "tokenizer": {"vocab_size": 300},
        "model": {"layers": 1, "width": 16, "heads": 2, "sequence_length": 32},
        "train": {"tokens": 2048, "batch_tokens": 512, "precision": "fp32", "monitoring": {"trackers": []}},
    }
    source = f"import gristmill\ncorpus = gristmill.curate({fields})\nmodel = gristmill.train({fields})"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = notebook.cells[0].outputs
    lines = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert all(re.fullmatch(r".+: \S+ \w+ in [\d.]+ s.*", line) for line in lines), lines
    assert any(line.startswith("annotate: ") for line in lines) and lines[-1].startswith("train: 2.05k tokens in ")
    said = [output for output in outputs if output.output_type == "stream"]
    assert {output.name for output in said} == {"stdout"}, said
    assert "curate: 120 documents read" in "".join(output.text for output in said)

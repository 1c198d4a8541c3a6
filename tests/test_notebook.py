"""docs/notebooks/first_corpus.ipynb runs from its first cell to its last, and its links lead to files."""

import json
import re
from pathlib import Path

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

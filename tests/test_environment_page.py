"""docs/environment.md lists every variable that the source reads and every exit code; --log-json writes JSON alone."""

import json
import re
from pathlib import Path

from gristmill.pipelines.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "environment.md").read_text("utf-8")
FOLDERS = ("foundation", "data_pipeline", "tokenizers", "training", "evaluation", "pipelines", "gristmill")
NOT_VARIABLES = {"GRISTMILL_EAGER"}  # a constant of the planner


def test_every_variable_is_listed():
    listed = set(re.findall(r"^\| `(GRISTMILL_\w+)` \|", PAGE, re.MULTILINE))
    read = {
        name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"GRISTMILL_[A-Z_]+", path.read_text("utf-8"))
    }
    assert listed == read - NOT_VARIABLES


def test_every_exit_code_is_listed():
    """Those that the docstring of main says."""
    listed = set(map(int, re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)))
    assert listed == set(map(int, re.findall(r"\b(\d+) (?:success|failure|invalid|after)", main.main.__doc__)))


def test_logs_are_lines_of_json(call, tmp_path, capfd):
    (tmp_path / "a.txt").write_text("The mill stands by the river. " * 20)
    (tmp_path / "r.yaml").write_text(
        "name: x\nsources: [{name: d, format: text, paths: [a.txt]}]\n"
        "curate: {filters: [], near_dedup: null, language_id: null}\n"
    )
    messages = []
    for recipe, code in (("r.yaml", 0), ("gone.yaml", 2)):
        ended, said = call("curate", recipe, "--workers", 1, "--log-json")
        assert ended == code
        messages += [json.loads(line) for line in re.split(r"(?<=\}) (?=\{\"time)", said)]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", message["time"]) for message in messages)
    annotate = next(message for message in messages if message.get("task") == "annotate")
    assert annotate["unit"] == "B" and annotate["done"] == annotate["total"] == (tmp_path / "a.txt").stat().st_size
    assert messages[-1]["level"] == "error" and messages[-1]["message"] == "gone.yaml: no such recipe file"

"""The README's commands for a user's own text, typed on a terminal: from a folder to a scored model that answers."""

import re
from pathlib import Path

import pytest
from terminal import SilentProgram, Terminal
from user_folders import FOLDERS, notes

README = Path(__file__).parents[2] / "README.md"
SHORT_RUN = "--budget 1e10"  # floating-point operations: seconds, where the README has minutes


def readme_commands() -> list[str]:
    """The block under "Your own text, in three", without its comments."""
    block = README.read_text("utf-8").partition("## Your own text")[2].partition("```\n")[2].partition("```")[0]
    return [line.partition("#")[0].strip() for line in block.splitlines() if line.strip()]


def path_commands() -> list[str]:
    """What the path of a small model has beside the README's commands: `generate`, and its block of Python."""
    page = (README.parent / "docs" / "path_small_model.md").read_text("utf-8").replace("work/notes", "work/mine")
    generate = re.findall(r"^gristmill generate .*$", page, re.M)
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    return [*(f"{command} --tokens 8" for command in generate), f"python -c '{block}'"]


def run_all(folder: Path, terminal: Terminal) -> dict[str, str]:
    """What each command of the README shows for the files in folder/mine."""
    screens = {}
    for command in readme_commands():
        typed = re.sub(r"--minutes \d+", SHORT_RUN, command.replace("FOLDER", "mine"))
        if "chat" in typed:
            code, shown = terminal.type(f"{typed} --tokens 8", ["The mill", ""])
        else:
            code, shown = terminal.type(typed)
        assert code == 0, shown
        screens[typed.split()[1]] = shown
    return screens


def test_the_readme_is_followed_on_a_terminal(tmp_path):
    """init rehearses the run for real; no program is silent for longer than a person waits."""
    notes(tmp_path / "mine")
    terminal = Terminal(tmp_path, tmp_path / "screens.txt")
    screens = run_all(tmp_path, terminal)
    assert list(screens) == ["doctor", "init", "run", "chat"]
    assert "gristmill init FOLDER" in screens["doctor"]
    assert "now: gristmill run mine.yaml" in screens["init"] and "rehearsal: curating" in screens["init"]
    assert "bits_per_byte markdown" in screens["run"] and "report: work/mine/report/report.html" in screens["run"]
    assert "an empty line ends" in screens["chat"]
    assert all(
        command in (tmp_path / "screens.txt").read_text() for command in ("$ gristmill doctor", "$ gristmill chat")
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_each_folder_on_a_terminal(make, tmp_path):
    make(tmp_path / "mine")
    screens = run_all(tmp_path, Terminal(tmp_path, tmp_path / "screens.txt"))
    assert "bits_per_byte" in screens["run"]


def test_a_silent_program_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("terminal.MAX_SILENCE_SECONDS", 0.05)
    with pytest.raises(SilentProgram, match="nothing was shown for"):
        Terminal(tmp_path, tmp_path / "screens.txt").type("sleep 5")

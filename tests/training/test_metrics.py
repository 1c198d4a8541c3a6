"""Damaged metrics files: reported and restored when the run resumes."""

import json
import shutil
from pathlib import Path

import pytest

from gristmill.foundation.errors import InputError
from gristmill.training.metrics import read_metrics
from tests.support.recording_reporter import RecordingReporter
from tests.support.training_runs import digests, new_run


def scores_of(_: object) -> dict[str, dict[str, float]]:
    return {"a_task": {"acc": 0.5}}


LIVE = {"evaluate": scores_of, "evaluation": {"every": 2, "tasks": ["a_task"]}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    new_run(folder, **LIVE).train()
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved at step 6, killed after step 7 was written down."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    run = new_run(folder, **LIVE)
    step = run.trainer.step

    def killed(*arguments: object) -> object:
        if run.trainer.progress.step == 7:
            raise SystemExit
        return step(*arguments)

    run.trainer.step = killed
    with pytest.raises(SystemExit):
        run.train()
    return folder


@pytest.fixture
def run_folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


DAMAGES = {
    "a flipped digit": lambda content: content.replace(b'"tokens": 128', b'"tokens": 129'),
    "a line of zeros": lambda content: content.replace(content.splitlines()[2], bytes(40)),
    "no UTF-8": lambda content: content.replace(b'"step": 4', b"\xff\xfe"),
    "a line lost": lambda content: b"".join(content.splitlines(keepends=True)[1:]),
    "cut short": lambda content: content[:50],
    "a number for an object": lambda content: b"5\n" + content,
    "empty": lambda content: b"",
}


@pytest.mark.parametrize(
    ("name", "damage"), [*(("metrics.jsonl", each) for each in DAMAGES), ("evaluations.jsonl", "a flipped digit")]
)
def test_a_damaged_file_is_restored_from_the_checkpoint(
    undisturbed: Path, run_folder: Path, name: str, damage: str
) -> None:
    path = run_folder / name
    before = path.read_bytes()
    path.write_bytes(DAMAGES[damage](before))
    assert path.read_bytes() != before
    new_run(run_folder, reporter=(said := RecordingReporter()), **LIVE).train()
    assert [line for line in said.lines if str(path) in line and "restored from the copy in" in line]
    assert digests(run_folder) == digests(undisturbed)


def test_what_stands_after_the_last_checkpoint_may_be_anything(undisturbed: Path, run_folder: Path) -> None:
    with (run_folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "tok')
    new_run(run_folder, reporter=(said := RecordingReporter()), **LIVE).train()
    assert not [line for line in said.lines if "restored" in line]
    assert digests(run_folder) == digests(undisturbed)


def test_a_damaged_line_of_times_is_named_and_the_others_stay(run_folder: Path) -> None:
    path = run_folder / "logs" / "timing.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\x00\xff{\n", *lines[2:]]))
    new_run(run_folder, reporter=(said := RecordingReporter()), **LIVE).train()
    assert [line for line in said.lines if line.startswith(f"{path}: lines [2] are damaged")]
    steps = [line["step"] for line in read_metrics(path)]
    assert steps == [1, *range(3, 13)]


def test_a_damaged_file_of_a_finished_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\nnot JSON\n")
    with pytest.raises(InputError, match=r"metrics.jsonl: line 2 is no JSON object; remove the folder"):
        read_metrics(path)

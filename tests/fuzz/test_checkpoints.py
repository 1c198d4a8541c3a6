"""Mutated, deleted and swapped files of checkpoints: reported and skipped, never a traceback, never loaded."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import DigestCache
from gristmill.training.checkpoint.checkpoint import load_model, newest_complete, read_model_config, step_folder
from gristmill.training.parallel.mesh import single_process
from tests.support.mutations import mutate
from tests.support.recording_reporter import RecordingReporter
from tests.support.training_runs import BATCH, MODEL, digests, new_run

SEED = 20
IN_CI, SLOW = 250, 20_000
THREE_STEPS = {
    "tokens": 3 * BATCH * MODEL.sequence_length,
    "checkpoint": {"every": 1},
    "monitoring": {"trackers": []},
}


def bytes_mutated(files: list[Path], _: Path, rng: np.random.Generator) -> None:
    path = files[rng.integers(len(files))]
    path.write_bytes(mutate(path.read_bytes(), rng))


def last_byte_gone(files: list[Path], _: Path, rng: np.random.Generator) -> None:
    path = files[rng.integers(len(files))]
    path.write_bytes(path.read_bytes()[:-1])


def deleted(files: list[Path], _: Path, rng: np.random.Generator) -> None:
    files[rng.integers(len(files))].unlink()


def emptied(files: list[Path], _: Path, rng: np.random.Generator) -> None:
    files[rng.integers(len(files))].write_bytes(b"")


def made_a_folder(files: list[Path], _: Path, rng: np.random.Generator) -> None:
    path = files[rng.integers(len(files))]
    path.unlink()
    path.mkdir()


def two_swapped(files: list[Path], _: Path, rng: np.random.Generator) -> None:
    one, other = (files[index] for index in rng.choice(len(files), 2, replace=False))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def from_another_checkpoint(files: list[Path], other: Path, rng: np.random.Generator) -> None:
    """model.json is the same in all of a run's checkpoints, so it is left out."""
    path = [file for file in files if file.name != "model.json"][rng.integers(len(files) - 1)]
    shutil.copy(other / path.name, path)


def all_from_another_checkpoint(files: list[Path], other: Path, _: np.random.Generator) -> None:
    for path in files:
        shutil.copy(other / path.name, path)


def one_too_many(files: list[Path], _: Path, rng: np.random.Generator) -> None:
    (files[0].parent / "extra.distcp").write_bytes(rng.bytes(10))


DAMAGES: tuple[Callable[[list[Path], Path, np.random.Generator], None], ...] = (
    *(bytes_mutated,) * 4,
    last_byte_gone,
    deleted,
    emptied,
    made_a_folder,
    two_swapped,
    from_another_checkpoint,
    all_from_another_checkpoint,
    one_too_many,
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps: checkpoints of the steps 2 and 3."""
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    new_run(folder, **THREE_STEPS).train()
    return folder


def check_damages(folder: Path, numbers: range) -> int:
    """Applies each damage to the last checkpoint and undoes it; how many changed a byte."""
    root, card = folder / "checkpoints", read_model_config(folder)
    last, before = step_folder(root, 3), step_folder(root, 2)
    contents = {path: path.read_bytes() for path in sorted(last.iterdir())}
    damaged = 0
    for number in numbers:
        rng = np.random.default_rng([SEED, number])
        damage = DAMAGES[rng.integers(len(DAMAGES))]
        damage(list(contents), before, rng)
        where = f"seed {SEED}, number {number}: {damage.__name__}"
        now = {path: path.read_bytes() if path.is_file() else None for path in last.iterdir()}
        found = newest_complete(root, card, said := RecordingReporter(), single_process(), DigestCache())
        assert found is not None, where
        if now == contents:
            assert found[0] == last and said.lines == [], where
        else:
            damaged += 1
            assert found[0] == before, where
            assert len(said.lines) == 1 and str(last) in said.lines[0], where
            if damage is not all_from_another_checkpoint:  # a whole checkpoint, only not of this step
                with pytest.raises(InputError):
                    load_model(last)
        shutil.rmtree(last)
        last.mkdir()
        for path, content in contents.items():
            path.write_bytes(content)
    return damaged


def test_damaged_checkpoints_are_named_and_stepped_over(run_folder: Path) -> None:
    assert check_damages(run_folder, range(IN_CI)) > 0.9 * IN_CI


@pytest.mark.slow
def test_many_more_damages(run_folder: Path) -> None:
    assert check_damages(run_folder, range(IN_CI, IN_CI + SLOW)) > 0.9 * SLOW


@pytest.mark.parametrize("damage", list(dict.fromkeys(DAMAGES)), ids=lambda damage: damage.__name__)
def test_the_run_goes_on_from_the_one_before_to_the_same_bytes(run_folder: Path, tmp_path: Path, damage) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    files = sorted(step_folder(root, 3).iterdir())
    damage(files, step_folder(root, 2), np.random.default_rng(SEED))
    new_run(tmp_path / "run", **THREE_STEPS).train()
    assert digests(tmp_path / "run") == digests(run_folder)

"""Training killed or stopped at random moments: the bytes of an undisturbed run in the end."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.kills import Launcher, files_of, kill_group_at, number_of_kills, seed_of, write_corpus

CALM = "train.checkpoint.every=2"  # saves at half of the 16 steps, so that kills meet saves and prunes


class Training:
    """A work folder whose index is whole, and what `gristmill train` makes of it when nobody disturbs it."""

    def __init__(self, folder: Path, launcher: Launcher):
        self.folder, self.launcher = folder, launcher
        self.recipe = write_corpus(folder / "corpus")
        work = folder / "indexed"
        self.launcher.run("run", self.recipe, "--workdir", work, "--to", "index", "--workers", "1", cwd=folder)
        self._expected: dict[tuple[str, ...], dict[str, str]] = {}
        self.seconds = 0.0  # of the whole run that was made last
        self.expected()

    def fresh(self, name: str) -> Path:
        return Path(shutil.copytree(self.folder / "indexed", self.folder / name))

    def expected(self, *more: str) -> dict[str, str]:
        """Digests of what an undisturbed run with these options makes."""
        if more not in self._expected:
            work = self.fresh(f"whole-{len(self._expected)}")
            _, self.seconds = self.launcher.run(*self.arguments(work, *more), cwd=self.folder)
            self._expected[more] = files_of(work / "train")
        return self._expected[more]

    def arguments(self, work: Path, *more: str) -> list[object]:
        return ["train", self.recipe, "--workdir", work, "--set", CALM, *more]


@pytest.fixture(scope="module")
def training(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("training"), launcher)


def kill_until_whole(training: Training, kills: int, *more: str) -> int:
    """Kills so many runs, each at a moment drawn from the length of a whole one; a folder that became whole is checked
    and a fresh one taken. The number of kills that met a living run."""
    rng, expected = random.Random(seed_of(12)), training.expected(*more)
    met = work_number = 0
    work = training.fresh(f"killed-{more}-{work_number}")
    for _ in range(kills):
        run = training.launcher.start(*training.arguments(work, *more), cwd=training.folder)
        if kill_group_at(run, rng.uniform(0, training.seconds)):
            met += 1
            continue
        assert files_of(work / "train") == expected
        work_number += 1
        work = training.fresh(f"killed-{more}-{work_number}")
    training.launcher.run(*training.arguments(work, *more), cwd=training.folder)
    assert files_of(work / "train") == expected
    said, _ = training.launcher.run("verify", work / "train", cwd=training.folder)
    assert "identical" in said
    return met


def test_killed_at_random_moments(training: Training) -> None:
    assert kill_until_whole(training, number_of_kills(8)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_killed_at_many_moments(training: Training, asynchronous: str) -> None:
    assert kill_until_whole(training, number_of_kills(100), "--set", f"train.checkpoint.asynchronous={asynchronous}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_says_what_is_kept_and_the_run_goes_on(
    training: Training, number: signal.Signals, code: int
) -> None:
    work = training.fresh(f"stopped-{number}")
    run = training.launcher.start(*training.arguments(work), cwd=training.folder)
    while run.running() and not any(path.stat().st_size for path in work.glob(".train-*/metrics.jsonl")):
        time.sleep(0.002)
    os.kill(run.pid, number)
    assert run.finish() == code, run.output()
    said = " ".join(run.output().split())
    assert "Traceback" not in said
    assert "as requested, and saved; run the same command to go on. Kept:" in said and "checkpoints/step-000000" in said
    training.launcher.run(*training.arguments(work), cwd=training.folder)
    assert files_of(work / "train") == training.expected()

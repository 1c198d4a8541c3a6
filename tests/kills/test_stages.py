"""Random SIGKILLs in all stages: repeating the command gives the bytes of an undisturbed run."""

import random
import shutil
from pathlib import Path

import pytest
from kills import (
    Launcher,
    files_of,
    kill_group_at,
    kill_worker_at,
    number_of_kills,
    seed_of,
    write_corpus,
)

GROUP_KILLS, WORKER_KILLS = 26, 6  # in every run of the suite
SLOW_KILLS = 500


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    launcher = Launcher(tmp_path_factory.mktemp("logs"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def clean(launcher, tmp_path_factory) -> tuple[Path, Path, dict[str, str], float]:
    """(recipe, work folder, its files, seconds of an undisturbed run with compiled kernels)."""
    folder = tmp_path_factory.mktemp("clean")
    recipe = write_corpus(folder / "raw")
    launcher.whole("run", recipe, "--workdir", folder / "first", "--workers", 2, cwd=folder)  # compiles the kernels
    _, seconds = launcher.whole("run", recipe, "--workdir", folder / "work", "--workers", 2, cwd=folder)
    return recipe, folder / "work", files_of(folder / "work"), seconds


def kill_groups(launcher, clean, folder: Path, kills: int, seed: int) -> int:
    """Runs the recipe in `folder` with kills at random moments, to the end, and from the start again until there were
    `kills` of them; each time the work folder must hold the clean run's files and no others."""
    recipe, _, expected, seconds = clean
    rng = random.Random(seed)
    killed = 0
    while killed < kills:
        for _ in range(rng.randrange(2, 9)):
            command = ("run", recipe, "--workdir", folder, "--workers", rng.choice([1, 1, 2]))
            if not kill_group_at(launcher.start(*command, cwd=folder.parent), rng.uniform(0.0, seconds)):
                break
            killed += 1
        launcher.whole("run", recipe, "--workdir", folder, cwd=folder.parent)
        assert files_of(folder) == expected, f"seed {seed}, after {killed} kills"
        shutil.rmtree(folder)
    return killed


def kill_workers(launcher, clean, folder: Path, kills: int, seed: int) -> int:
    """The same for single workers, of which only `curate` has any on so few texts."""
    recipe, _, expected, seconds = clean
    rng = random.Random(seed)
    wanted = {name: digest for name, digest in expected.items() if name.startswith("curate/")}
    killed = 0
    while killed < kills:
        for _ in range(rng.randrange(2, 9)):
            run = launcher.start("curate", recipe, "--workdir", folder, "--workers", 2, cwd=folder.parent)
            if not kill_worker_at(run, rng.uniform(0.0, seconds * 0.25), rng):
                break
            killed += 1
        launcher.whole("curate", recipe, "--workdir", folder, "--workers", 1, cwd=folder.parent)
        assert {n: d for n, d in files_of(folder).items() if n.startswith("curate/")} == wanted, f"seed {seed}"
        assert not [name for name in files_of(folder) if name.endswith(".tmp")]
        shutil.rmtree(folder)
    return killed


def test_killed_groups_leave_the_bytes_of_a_clean_run(launcher, clean, tmp_path):
    kills = number_of_kills(GROUP_KILLS)
    assert kill_groups(launcher, clean, tmp_path / "work", kills, seed_of(1)) >= kills


def test_killed_workers_leave_the_bytes_of_a_clean_run(launcher, clean, tmp_path):
    kills = number_of_kills(WORKER_KILLS)
    assert kill_workers(launcher, clean, tmp_path / "work", kills, seed_of(2)) >= kills


@pytest.mark.slow
def test_five_hundred_kills(launcher, clean, tmp_path):
    seed, kills = seed_of(3), number_of_kills(SLOW_KILLS)
    killed = kill_groups(launcher, clean, tmp_path / "groups", kills * 3 // 4, seed)
    killed += kill_workers(launcher, clean, tmp_path / "workers", kills // 4, seed)
    assert killed >= kills // 4 * 4

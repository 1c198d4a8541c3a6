"""Random SIGKILLs and Ctrl-C in all stages: repeating the command gives the bytes of an undisturbed run."""

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from kills import (
    files_of,
    kill_group_at,
    kill_worker_at,
    number_of_kills,
    seed_of,
    write_corpus,
    write_small_sources,
)

GROUP_KILLS, WORKER_KILLS, SMALL_KILLS = 4, 2, 2  # in every run of the suite
SLOW_KILLS = 500


@pytest.fixture(scope="module")
def clean(launcher, tmp_path_factory) -> tuple[Path, Path, dict[str, str], float]:
    """(recipe, work folder, its files, seconds of an undisturbed run with compiled kernels)."""
    folder = tmp_path_factory.mktemp("clean")
    recipe = write_corpus(folder / "raw")
    launcher.run("run", recipe, "--workdir", folder / "first", "--to", "index", cwd=folder)  # compiles the kernels
    _, seconds = launcher.run("run", recipe, "--workdir", folder / "work", "--workers", 2, cwd=folder)
    return recipe, folder / "work", files_of(folder / "work"), seconds


def kill_groups(launcher, clean, folder: Path, kills: int, seed: int) -> int:
    """Runs the recipe in `folder`, killed again and again until a run comes through, and from the start again until
    there were `kills` of them; each time the work folder must hold the clean run's files and no others.

    Moments are drawn from a tenth, a third or all of a clean run's time: most kills come soon after the one before, and
    each is at another place, because finished work is kept."""
    recipe, _, expected, seconds = clean
    rng = random.Random(seed)
    killed = 0
    while killed < kills:
        command = ("run", recipe, "--workdir", folder, "--workers")
        while kill_group_at(
            launcher.start(*command, rng.choice([1, 1, 1, 2]), cwd=folder.parent),
            rng.uniform(0.0, seconds * rng.choice([0.1, 0.1, 0.33, 1.0])),
        ):
            killed += 1
        launcher.run(*command, 1, cwd=folder.parent)
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
        launcher.run("curate", recipe, "--workdir", folder, "--workers", 1, cwd=folder.parent)
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


@pytest.fixture(scope="module")
def small(launcher, tmp_path_factory) -> tuple[Path, Path, dict[str, str], float]:
    """As `clean`, of the curation of twenty small sources, which are one batch."""
    folder = tmp_path_factory.mktemp("small")
    recipe = write_small_sources(folder / "raw")
    _, seconds = launcher.run("curate", recipe, "--workdir", folder / "work", "--workers", 2, cwd=folder)
    assert list((folder / "work/cache/annotated").glob("+*.parquet"))
    return recipe, folder / "work", files_of(folder / "work"), seconds


def kill_curation(launcher, small, folder: Path, kills: int, seed: int) -> int:
    """Kills of the group and of single workers in turn."""
    recipe, _, expected, seconds = small
    rng = random.Random(seed)
    command = ("curate", recipe, "--workdir", folder, "--workers")
    killed = 0
    while killed < kills:
        moment = rng.uniform(0.0, seconds * rng.choice([0.2, 0.5, 1.0]))
        run = launcher.start(*command, 2, cwd=folder.parent)
        if kill_worker_at(run, moment, rng) if rng.random() < 0.3 else kill_group_at(run, moment):
            killed += 1
            if killed < kills and rng.random() < 0.5:  # the next run is killed too
                continue
        launcher.run(*command, rng.choice([1, 2]), cwd=folder.parent)
        assert files_of(folder) == expected, f"seed {seed}, after {killed} kills"
        shutil.rmtree(folder)
    return killed


def test_killed_curation_of_small_sources_leaves_the_bytes_of_a_clean_run(launcher, small, tmp_path):
    kills = number_of_kills(SMALL_KILLS)
    assert kill_curation(launcher, small, tmp_path / "work", kills, seed_of(8)) >= kills


@pytest.mark.slow
def test_many_kills_of_curation_of_small_sources(launcher, small, tmp_path):
    kills = number_of_kills(SLOW_KILLS // 5)
    assert kill_curation(launcher, small, tmp_path / "work", kills, seed_of(9)) >= kills


STAGES = ("curate", "tokenizer", "index", "train", "evaluate", "report")


def interrupt_each_stage(launcher, clean, folder: Path, seed: int, latest: float = 1.0) -> list[str]:
    """Ctrl-C at a random moment of each stage, each time with the same command; the stages that it met, which are none
    if a run ended before its moment. A Ctrl-C before the last stage is published must end the run. latest: of those
    moments, as a share of the stage's time in the clean run."""
    recipe, work, expected, _ = clean
    rng = random.Random(seed)
    times = [json.loads(line) for line in (work / "logs/times.jsonl").read_text().splitlines()]
    seconds = {time["stage"]: time["seconds"] for time in times}
    met = []
    for stage in STAGES:
        command = ("run", recipe, "--workdir", folder, "--workers", rng.choice([1, 2]))
        run = launcher.start(*command, cwd=folder.parent)
        while run.running() and not (folder / stage).exists() and not list(folder.glob(f".{stage}-*")):
            time.sleep(0.002)
        launcher.answered(rng.uniform(0.0, latest * seconds[stage]))
        unfinished = run.running() and not (folder / STAGES[-1]).exists()
        if unfinished:
            run.send(signal.SIGINT)
        code, said = run.finish(), " ".join(run.output().split())
        if unfinished:
            assert code == 130 and "kept" in said.lower() and "the same command" in said, (
                f"seed {seed}, {stage}: {said}"
            )
            met.append(stage)
    launcher.run("run", recipe, "--workdir", folder, cwd=folder.parent)
    assert files_of(folder) == expected, f"seed {seed}"
    shutil.rmtree(folder)
    return met


def test_ctrl_c_in_each_stage_says_what_is_kept_and_the_next_run_completes(launcher, clean, tmp_path):
    """Earlier in each attempt, since the clean run may have been on busier cores."""
    seed = seed_of(5)
    attempts = (interrupt_each_stage(launcher, clean, tmp_path / "work", seed + k, 0.6**k) for k in range(10))
    assert any(attempts)


@pytest.mark.slow
def test_ctrl_c_at_many_moments(launcher, clean, tmp_path):
    seed = seed_of(6)
    met = [
        stage for number in range(10) for stage in interrupt_each_stage(launcher, clean, tmp_path / "w", seed + number)
    ]
    assert set(met) == set(STAGES)


@pytest.mark.slow
def test_five_hundred_kills(launcher, clean, tmp_path):
    seed, kills = seed_of(3), number_of_kills(SLOW_KILLS)
    killed = kill_groups(launcher, clean, tmp_path / "groups", kills * 3 // 4, seed)
    killed += kill_workers(launcher, clean, tmp_path / "workers", kills // 4, seed)
    assert killed >= kills // 4 * 4

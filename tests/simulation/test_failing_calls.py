"""Every file-system call of a stage fails once: one message, an exit code, and the same command goes on to the same
bytes."""

import os
import subprocess
import sys

import pytest

from tests.simulation.failing_calls import STAGES, EveryCall, FailingStages, compile_library, tried
from tests.simulation.power_cuts import Journal, PowerCuts, drop_data, drop_names, states_of
from tests.support.kills import write_corpus, write_small_sources

SAMPLED, MANY = 1, 40  # calls of a stage that fail


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = compile_library(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("no gcc, which compiles the library that makes calls fail")
    return library


def check(folder, library, stage: str, count: int, kind=FailingStages, corpus=write_corpus) -> None:
    stages = kind(folder, library, stage, corpus)
    try:
        failures = list(tried(stages, stage, count, seed=1))
    finally:
        stages.close()
    assert len(failures) == count and all(failure.errno or kind is PowerCuts for failure, _ in failures)
    assert [(failure, problems) for failure, problems in failures if problems] == []


def test_a_few_failed_calls_of_curation(tmp_path, library):
    check(tmp_path, library, "curate", SAMPLED)


def test_a_failed_call_of_curation_of_small_sources(tmp_path, library):
    """Which stand in one annotated file and are written by one task."""
    check(tmp_path, library, "curate", SAMPLED, corpus=write_small_sources)


@pytest.mark.slow
def test_failed_calls_of_curation_of_small_sources(tmp_path, library):
    check(tmp_path, library, "curate", MANY, corpus=write_small_sources)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a copy of the work folder in its place")
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "train"])
def test_every_call_of_a_stage(tmp_path, library, stage):
    """Curation is that of small sources. Training has threads, whose calls fail in no fork."""
    stages = FailingStages(tmp_path, library, stage, write_small_sources if stage == "curate" else write_corpus)
    every = EveryCall(stages, stage)
    try:
        tried = list(every.tried_by_kind())
    finally:
        every.close()
        stages.close()
    assert len(tried) == every.calls and every.elsewhere == 0
    assert [(failure, problems) for failure, problems in tried if problems] == []


@pytest.mark.slow
def test_power_cuts_in_curation_of_small_sources(tmp_path, library):
    check(tmp_path, library, "curate", MANY, PowerCuts, write_small_sources)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_failed_calls_of_every_stage(tmp_path, library, stage):
    check(tmp_path, library, stage, MANY)


WRITES = """
import ctypes, os, sys
work, journal, backups = sys.argv[1:]
library = ctypes.CDLL(None)
assert library.arm(work.encode(), (journal + ".counter").encode(), 0, 0) == 0
assert library.journal(journal.encode(), backups.encode()) == 0
def write(name, text, is_synced):
    with open(f"{work}/{name}", "w") as file:
        file.write(text)
        file.flush()
        is_synced and os.fsync(file.fileno())
def sync_folder(name=""):
    descriptor = os.open(f"{work}/{name}", os.O_RDONLY)
    os.fsync(descriptor)
os.mkdir(f"{work}/kept"); write("kept/synced", "all", True); write("kept/unsynced", "all", False); sync_folder("kept")
os.unlink(f"{work}/old"); sync_folder()
os.mkdir(f"{work}/gone"); write("gone/synced", "all", True); sync_folder("gone")
write("replaced.tmp", "new", True); os.rename(f"{work}/replaced.tmp", f"{work}/replaced")
write("appended", "begin", True); write("appended", "begin and end", False); os.unlink(f"{work}/removed")
"""


def test_what_a_power_cut_leaves(tmp_path, library):
    """Worked by hand: names since the sync of their folder, and data since that of their file, are lost."""
    work, backups = tmp_path / "work", tmp_path / "backups"
    work.mkdir()
    backups.mkdir()
    for name in ("old", "replaced", "removed", "appended"):
        (work / name).write_text("old")
    before = states_of(work)
    program = [sys.executable, "-c", WRITES, work, tmp_path / "journal", backups]
    subprocess.run(program, check=True, env=os.environ | {"LD_PRELOAD": str(library)})
    journal = Journal(tmp_path / "journal", backups)
    drop_names(work, journal)
    drop_data(work, journal, before)
    left = {path.relative_to(work).as_posix(): path.read_bytes() for path in work.rglob("*") if path.is_file()}
    lost = left.pop("kept/unsynced")
    assert left == {"kept/synced": b"all", "replaced": b"old", "removed": b"old", "appended": b"begin"}
    assert lost in (b"", bytes(3))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_power_cuts_in_every_stage(tmp_path, library, stage):
    check(tmp_path, library, stage, MANY, PowerCuts)

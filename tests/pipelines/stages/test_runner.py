"""The runner on three small stages that count letters: complete stages are skipped, incomplete ones resumed."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.lock import Lock, LockedSource, RawFile
from gristmill.foundation.manifest import read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.provenance.verify import reproduce
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages import runner as runner_module
from gristmill.pipelines.stages.runner import RunContext, Runner
from gristmill.pipelines.stages.stage import Stage
from gristmill.pipelines.workdir.remote import lease
from gristmill.training.config.train import STEPS_WITHOUT_REPLICAS
from tests.support.recording_reporter import RecordingReporter

RECIPE = Recipe.model_validate(
    {
        "name": "letters",
        "sources": [{"name": "s", "format": "text", "paths": ["x"]}],
        "model": {"layers": 1, "width": 8, "heads": 2, "sequence_length": 8},
        "train": {"tokens": 64, "batch_tokens": 16},
    }
)
LOCK = Lock(sources=(LockedSource(name="s", request={}, files=(RawFile(name="x", bytes=1, sha256="0" * 64),)),))


class Mill:
    """Stages a -> b -> c that write one file each, and a record of which of them ran."""

    def __init__(self, workdir):
        self.workdir = workdir
        self.ran: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.version = {"a": 1, "b": 1, "c": 1}
        self.seed = 1
        self.leaves = ""
        self.overwrite = False
        self.reporter = RecordingReporter()

    def stage(self, name, inputs, reads_raw=False):
        def work(context):
            self.ran.append(name)
            write_atomic(context.folder / "first", name.encode())
            if self.leaves:
                (context.folder / self.leaves).touch()
                (context.cache / "filters").mkdir(parents=True, exist_ok=True)
                (context.cache / "filters" / self.leaves).touch()
            if name in self.fail:
                raise self.fail[name]
            before = b"".join((folder / "second").read_bytes() for folder in context.inputs.values())
            write_atomic(context.folder / "second", before + name.encode())
            return {"letters": len(before) + 1}

        config = lambda recipe: {"seed": self.seed if name == "b" else 0}  # noqa: E731
        return Stage(name, self.version[name], inputs, config, work, reads_raw=reads_raw)

    def runner(self, lock=LOCK):
        stages = [self.stage("a", (), reads_raw=True), self.stage("b", ("a",)), self.stage("c", ("b",))]
        return Runner(RECIPE, self.workdir, stages, lock, self.reporter, RunContext(overwrite=self.overwrite))

    def run(self, **options):
        self.ran.clear()
        self.runner(**({"lock": options.pop("lock")} if "lock" in options else {})).run(**options)
        return "".join(self.ran)


@pytest.fixture
def mill(tmp_path):
    return Mill(tmp_path / "work")


def test_all_stages_run_once_and_are_then_skipped(mill):
    assert mill.run() == "abc"
    assert (mill.workdir / "c/second").read_bytes() == b"abc"
    assert read_manifest(mill.workdir / "c").metadata == {"letters": 3}
    assert mill.run() == ""


def test_a_changed_field_rebuilds_from_there_and_is_named(mill):
    mill.run()
    mill.seed = 2
    plans = {plan.stage.name: plan for plan in mill.runner().plan()}
    assert [plans[name].action for name in "abc"] == ["skip", "rebuild", "rebuild"]
    assert plans["b"].reasons == ("seed: 1 -> 2",)
    assert plans["c"].reasons == ("input b",)
    assert mill.run() == "bc"


def test_a_changed_code_version_rebuilds(mill):
    mill.run()
    mill.version["c"] = 2
    assert mill.run() == "c"


def test_changed_raw_files_rebuild_all(mill):
    mill.run()
    file = RawFile(name="x", bytes=1, sha256="1" * 64)
    assert mill.run(lock=Lock(sources=(LockedSource(name="s", request={}, files=(file,)),))) == "abc"


def test_run_up_to_a_stage_and_one_alone(mill):
    assert mill.run(to="b") == "ab"
    assert mill.run(only="c") == "c"


def test_one_alone_without_its_inputs(mill):
    with pytest.raises(InputError, match=r"a: no manifest\.json"):
        mill.run(only="b")


def test_after_a_failure_the_stage_is_incomplete_and_the_next_run_resumes_it(mill):
    mill.fail["b"] = InputError("b is broken")
    with pytest.raises(InputError, match="b is broken"):
        mill.run()
    assert not (mill.workdir / "b").exists()
    assert [plan.action for plan in mill.runner().plan()] == ["skip", "resume", "run"]
    mill.fail.clear()
    assert mill.run() == "bc"


def test_a_resumed_stage_finds_the_files_that_it_had_finished(mill):
    """What only the interrupted run wrote is in the complete stage, under the same inode: it was not made again."""
    mill.fail["b"], mill.leaves = InputError("b is broken"), "finished"
    with pytest.raises(InputError, match="b is broken"):
        mill.run()
    (incomplete,) = mill.workdir.glob(".b-*")
    before = (incomplete / "finished").stat().st_ino
    mill.fail.clear()
    mill.leaves = ""
    mill.run()
    assert (mill.workdir / "b" / "finished").stat().st_ino == before


def test_a_full_disk_is_reported_and_leaves_the_stage_incomplete(mill):
    mill.fail["b"] = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(InputError, match=r"b: .*/work: the disk is full; free some space"):
        mill.run()
    assert not (mill.workdir / "b").exists()


def test_a_read_only_disk_is_reported(mill):
    mill.fail["b"] = OSError(errno.EROFS, "Read-only file system", "somewhere/x")
    with pytest.raises(InputError, match="b: somewhere/x: the disk is read-only"):
        mill.run()


def test_ctrl_c_reports_what_is_kept(mill, capfd):
    mill.fail["b"] = KeyboardInterrupt()
    runner = mill.runner()
    runner.reporter = Reporter.to_terminal()
    with pytest.raises(KeyboardInterrupt):
        runner.run()
    said = " ".join(capfd.readouterr().err.split())
    assert "b: interrupted; kept: complete stages (a) and the finished files of b" in said
    mill.fail.clear()
    assert mill.run() == "bc"


def test_temporary_files_of_killed_writers_are_removed_and_those_of_running_ones_kept(mill):
    mill.run()
    dead = [mill.workdir / name for name in ("a/.first.4321.tmp", "cache/annotated/.x.1.tmp", ".lock.json.2.tmp")]
    for path in dead:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(mill.workdir / "cache/running")], stdout=subprocess.PIPE
    )
    assert writer.stdout.readline() == b"writes\n"
    mill.run()
    assert not any(path.exists() for path in dead)
    running = list((mill.workdir / "cache").glob(".running.*.tmp"))
    assert len(running) == 1
    writer.kill()
    writer.wait()
    mill.run()
    assert not running[0].exists()


WRITER = """
import sys, time
from pathlib import Path
from gristmill.foundation.files import atomic_path
with atomic_path(Path(sys.argv[1])) as temporary:
    temporary.write_bytes(b"half")
    print("writes", flush=True)
    time.sleep(60)
"""


def test_what_lost_workers_left_in_a_stage_is_removed_before_it_is_complete(mill):
    """A worker is killed in the middle of a file, and the driver gives its task to another one."""
    mill.leaves = ".second.0123456789abcdef.tmp"
    mill.runner().run(to="a")
    assert sorted(path.name for path in (mill.workdir / "a").iterdir()) == ["first", "manifest.json", "second"]
    assert not list((mill.workdir / "cache" / "filters").iterdir())


def test_a_work_folder_stays_complete_when_moved_copied_or_linked(mill, tmp_path):
    mill.run()
    mill.workdir.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copied")
    (tmp_path / "linked").symlink_to(tmp_path / "copied")
    for name in ("moved", "copied", "linked"):
        mill.workdir = tmp_path / name
        assert mill.run() == ""


def test_an_input_removed_between_two_stages_is_rebuilt_or_named(mill):
    mill.run(to="a")
    (mill.workdir / "a/second").unlink()
    with pytest.raises(InputError, match="a/second: missing"):
        mill.run(only="b")
    shutil.rmtree(mill.workdir / "a")
    assert mill.run() == "abc"


def test_what_another_recipe_made_is_set_aside_and_comes_back(mill):
    """Of a -> b -> c the seed is b's: with another seed b and c are made again, and with the first they come back."""
    mill.run()
    before = (mill.workdir / "b" / "manifest.json").read_bytes()
    mill.seed = 2
    assert mill.run() == "bc"
    kept = sorted(path.name.partition("-")[0] for path in mill.workdir.glob("*.superseded-*"))
    assert kept == ["b.superseded", "c.superseded"]
    assert any("what the other recipe made is kept in" in line for line in mill.reporter.lines)
    mill.seed = 1
    assert [plan.action for plan in mill.runner().plan()] == ["skip", "restore", "restore"]
    assert mill.run() == ""
    assert (mill.workdir / "b" / "manifest.json").read_bytes() == before
    assert len(list(mill.workdir.glob("*.superseded-*"))) == 2


def test_overwrite_deletes_what_another_recipe_made(mill):
    mill.run()
    mill.seed = 2
    mill.overwrite = True
    assert mill.run() == "bc"
    assert not list(mill.workdir.glob("*.superseded-*"))


@pytest.mark.parametrize("moment", range(3))
def test_a_kill_while_stages_are_exchanged_loses_neither(mill, monkeypatch, moment):
    """At each of the renames: folder -> old, made -> folder, old -> aside."""
    mill.run()
    mill.seed = 2
    renames = iter(range(100))
    rename = type(mill.workdir).rename

    def stops(path, target):
        if path.name.startswith((".b-", "b")) and next(renames) == moment:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(mill.workdir), "rename", stops)
        mill.run()
    mill.run()
    assert (mill.workdir / "b/second").read_bytes() == b"ab"
    mill.seed = 1
    assert mill.run() == ""  # both are still there
    assert not (mill.workdir / ".b-old").exists()


def test_an_incomplete_run_of_another_recipe_is_removed(mill):
    mill.fail["b"] = InputError("stop")
    with pytest.raises(InputError):
        mill.run()
    incomplete = next(mill.workdir.glob(".b-*"))
    mill.fail.clear()
    mill.seed = 2
    mill.run()
    assert not incomplete.exists()


def test_a_kill_while_an_incomplete_run_is_removed_leaves_nothing_to_resume(mill, monkeypatch):
    mill.fail["b"] = InputError("b is broken")
    with pytest.raises(InputError):
        mill.run()
    mill.seed = 2
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        mill.run()
    mill.seed = 1
    mill.fail.clear()
    assert [plan.action for plan in mill.runner().plan()] == ["skip", "run", "run"]
    assert mill.run() == "bc"
    assert not list(mill.workdir.rglob("*.removed"))


def test_a_kill_between_the_two_renames_loses_nothing(mill):
    mill.run()
    (mill.workdir / "b").rename(mill.workdir / ".b-old")
    assert mill.run() == ""
    assert (mill.workdir / "b/second").read_bytes() == b"ab"


def test_a_second_writer_is_refused_with_the_process_id_of_the_first(mill):
    with lease(mill.workdir):
        script = (
            "import sys; from pathlib import Path; from gristmill.pipelines.workdir.remote import lease\n"
            "try:\n    with lease(Path(sys.argv[1])): pass\nexcept Exception as error: print(error)"
        )
        said = subprocess.run(
            [sys.executable, "-c", script, str(mill.workdir)], capture_output=True, text=True, check=True
        ).stdout
    assert f"process {os.getpid()}" in said
    assert "another --workdir" in said


def test_a_file_that_does_not_match_its_manifest_is_named(mill):
    mill.run()
    (mill.workdir / "b/second").write_bytes(b"abX")
    with pytest.raises(InputError, match=r"b/second: 3 bytes, its manifest says 2 bytes"):
        mill.run()


def test_a_folder_without_a_manifest_is_never_overwritten(mill):
    (mill.workdir / "a").mkdir(parents=True)
    (mill.workdir / "a/precious").write_text("mine")
    with pytest.raises(InputError, match="without a manifest"):
        mill.run()
    assert (mill.workdir / "a/precious").read_text() == "mine"


def test_times_are_logged_outside_the_manifests(mill):
    mill.run()
    lines = (mill.workdir / "logs/times.jsonl").read_text().splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["a", "b", "c"]


@pytest.mark.parametrize("folder", ["a", "b", "c"])
def test_two_runs_in_different_places_give_the_same_manifest(tmp_path, folder):
    for place in ("here", "there"):
        Mill(tmp_path / place).run()
    assert (tmp_path / "here" / folder / "manifest.json").read_bytes() == (
        tmp_path / "there" / folder / "manifest.json"
    ).read_bytes()


def test_reproduce_takes_the_lease_before_it_writes_the_lock(mill, tmp_path):
    mill.run()
    target = tmp_path / "again"
    with lease(target):
        with pytest.raises(InputError, match="another gristmill"):
            reproduce(mill.workdir / "a", target, mill.runner().stages, LocalEngine(1, Reporter.silent()))
        assert not (target / "lock.json").exists()


def test_reproduce_refuses_a_training_that_lost_replicas(mill, tmp_path):
    stage = dataclasses.replace(mill.stage("a", (), reads_raw=True), run=lambda context: {STEPS_WITHOUT_REPLICAS: 2})
    Runner(RECIPE, mill.workdir, [stage], LOCK, mill.reporter).run()
    with pytest.raises(InputError, match="replicas were lost in 2 steps of this run; their samples were left out"):
        reproduce(mill.workdir / "a", tmp_path / "again", [stage], LocalEngine(1, Reporter.silent()))


# A rank other than 0, while rank 0 works in another process.


class Rank0(Exception):
    """In place of a pause: what rank 0 does meanwhile; the test ends if nothing is left to wait for."""


def worker_rank(mill, parallel=("b",)):
    stages = [
        dataclasses.replace(stage, parallel=stage.name in parallel)
        for stage in (mill.stage("a", (), reads_raw=True), mill.stage("b", ("a",)), mill.stage("c", ("b",)))
    ]
    return Runner(RECIPE, mill.workdir, stages, LOCK, mill.reporter, RunContext(rank=1))


def while_waiting(monkeypatch, *steps):
    """Each pause of the rank is one step of rank 0."""
    left = list(steps)

    def pause(seconds):
        if not left:
            raise Rank0("the rank waits for something that rank 0 has done already")
        left.pop(0)()

    monkeypatch.setattr(runner_module.time, "sleep", pause)
    return left


def test_a_rank_waits_for_each_stage_and_takes_part_in_parallel_ones(mill, monkeypatch):
    other = Mill(mill.workdir)
    rank = worker_rank(mill)
    plan_b = rank.plan()[1]
    incomplete = rank.incomplete_folder(plan_b.stage, plan_b.fingerprint)
    left = while_waiting(
        monkeypatch,
        lambda: other.run(only="a"),
        lambda: incomplete.mkdir(),
        lambda: other.run(only="b"),
        lambda: other.run(only="c"),
    )
    rank.run()
    assert mill.ran == ["b"] and not left
    assert (mill.workdir / "c/second").read_bytes() == b"abc"


@pytest.mark.parametrize(("options", "expected"), [({"to": "b"}, ["b"]), ({"only": "b"}, ["b"]), ({"to": "a"}, [])])
def test_a_rank_stops_where_rank_0_stops(mill, monkeypatch, options, expected):
    other = Mill(mill.workdir)
    other.run(to="a")
    rank = worker_rank(mill)
    plan_b = rank.plan()[1]
    incomplete = rank.incomplete_folder(plan_b.stage, plan_b.fingerprint)
    steps = [incomplete.mkdir, lambda: other.run(only="b")] if expected else []
    left = while_waiting(monkeypatch, *steps)
    rank.run(**options)
    assert mill.ran == expected and not left
    assert not (mill.workdir / "c").exists()


def test_a_rank_has_nothing_to_do_where_all_is_complete(mill, monkeypatch):
    mill.run()
    mill.ran.clear()
    while_waiting(monkeypatch)
    worker_rank(mill).run()
    assert mill.ran == []


def test_a_rank_waits_for_the_stage_of_its_own_recipe(mill, monkeypatch):
    mill.run()
    changed = Mill(mill.workdir)
    changed.seed = 2
    mill.seed = 2
    mill.ran.clear()
    rank = worker_rank(mill, parallel=())
    left = while_waiting(monkeypatch, lambda: changed.run(only="b"), lambda: changed.run(only="c"))
    rank.run()
    assert not left and mill.ran == []


def test_only_rank_0_reads_the_inputs_again(mill, monkeypatch):
    mill.run(to="a")
    checked = []
    monkeypatch.setattr(runner_module, "check_against", lambda folder, manifest, wanted: checked.append(folder.name))
    runner = mill.runner()
    runner._input_folders(runner.plan()[1])
    assert checked == ["a"]
    rank = worker_rank(mill)
    rank._input_folders(rank.plan()[1])
    assert checked == ["a"], "the other ranks read them again"

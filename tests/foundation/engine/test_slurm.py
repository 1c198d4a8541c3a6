"""The Slurm engine: array elements as plain processes of this machine, and a Slurm of one node where there is one."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.engine.node import Place, versions_here
from gristmill.foundation.engine.slurm import SlurmEngine
from gristmill.foundation.engine.task_folder import TaskFolder
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from tests.support import fake_slurm
from tests.support.corpora import curate_with, prose, tree_digests, write_jsonl


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """The folder of a Slurm whose elements are processes of this machine."""
    folder = tmp_path / "slurm"
    monkeypatch.setenv("PATH", f"{fake_slurm.install(folder)}{os.pathsep}{os.environ['PATH']}")
    return folder


def engine(folder: Path, workers: int = 2) -> SlurmEngine:
    return SlurmEngine(workers, Reporter.silent(), folder / "work", poll_seconds=0.05)


def square(number):
    return number * number


def refused(path):
    raise InputError(f"{path}: refused")


def dies_once(path):
    """Its process dies the first time."""
    if not path.exists():
        path.touch()
        os._exit(9)
    return path.name


def dies(label):
    print(f"bad {label}", flush=True)
    os._exit(9)


def here() -> Place:
    return Place(os.getcwd(), versions_here())


def test_elements_share_the_tasks_and_leave_out_those_with_an_answer(tmp_path):
    folder = TaskFolder(tmp_path)
    folder.write(square, [5, 4, 3, 2, 1], here(), elements=2)
    folder.run(0)
    assert [folder.has_answer(number) for number in range(5)] == [True, False, True, False, True]
    before = (tmp_path / "answer-0000002.task").stat().st_mtime_ns
    folder.run(0)
    assert (tmp_path / "answer-0000002.task").stat().st_mtime_ns == before
    program = Path(sys.executable).with_name("gristmill")
    subprocess.run([program, "work", tmp_path, "1"], check=True, cwd=tmp_path)
    assert [folder.answer(number) for number in range(5)] == [(True, n * n) for n in (5, 4, 3, 2, 1)]


def test_a_folder_without_tasks_and_an_element_too_many(tmp_path):
    with pytest.raises(InputError, match=r"no folder of tasks .*--engine slurm"):
        TaskFolder(tmp_path / "none").run(0)
    TaskFolder(tmp_path).write(square, [1], here(), elements=1)
    with pytest.raises(RecipeError, match=r"element 1: the tasks of .* have the elements 0 to 0"):
        TaskFolder(tmp_path).run(1)


def test_a_node_with_other_versions_says_so(tmp_path):
    folder = TaskFolder(tmp_path)
    folder.write(square, [1], Place(os.getcwd(), {**versions_here(), "numpy": "1.0"}), elements=1)
    folder.run(0)
    is_right, (error, _) = folder.answer(0)
    assert not is_right and "numpy" in str(error) and "install the same versions on every node" in str(error)


def test_results_come_in_the_order_of_the_tasks(slurm, tmp_path):
    one = engine(tmp_path)
    assert one.map(square, [3, 1, 2], "squares", sizes=[1.0, 9.0, 4.0]) == [9, 1, 4]
    assert one.map(square, [], "none") == []
    assert list((tmp_path / "work").iterdir()) == []


def test_an_error_of_a_task_ends_the_map(slurm, tmp_path):
    with pytest.raises(InputError, match=r"raw\.jsonl: refused"):
        engine(tmp_path).map(refused, [Path("raw.jsonl")], "reading")
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_a_lost_task_runs_again(slurm, tmp_path):
    assert engine(tmp_path).map(dies_once, [tmp_path / "mark"], "marking") == ["mark"]


@pytest.mark.slow
def test_a_task_that_is_always_lost_ends_with_its_name_and_last_words(slurm, tmp_path):
    with pytest.raises(
        InputError, match=r"task 1 of 1, big\.parquet was lost 4 times; last it said: bad big\.parquet;"
    ):
        engine(tmp_path).map(dies, ["big.parquet"], "reading")


@pytest.mark.slow
def test_curation_gives_the_local_bytes(slurm, tmp_path):
    raw = write_jsonl(tmp_path / "a.jsonl", [{"text": prose(k % 7)} for k in range(40)])
    source = SourceConfig(name="books", format="jsonl", paths=(str(raw),))
    there = curate_with(engine(tmp_path), [source], tmp_path / "there")
    assert there == curate_with(LocalEngine(1, Reporter.silent()), [source], tmp_path / "here")
    assert tree_digests(tmp_path / "there/curate") == tree_digests(tmp_path / "here/curate")


def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeError, match="--engine slurm: the program sbatch is not here; run the command on a login"):
        engine(tmp_path)


SLURM_CONF = """\
ClusterName=gristmill
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
SlurmctldPort=17817
SlurmdPort=17818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def real_slurm(tmp_path, monkeypatch):
    """A controller and one node on this machine."""
    if shutil.which("slurmctld") is None or shutil.which("slurmd") is None or os.geteuid() != 0:
        pytest.skip("Slurm is not installed (apt install slurmctld slurmd slurm-client), or this is not root")
    host = socket.gethostname().split(".")[0]
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(SLURM_CONF.format(host=host, folder=folder))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    with (folder / "log").open("wb") as log:
        daemons = [subprocess.Popen([name, "-D"], stdout=log, stderr=log) for name in ("slurmctld", "slurmd")]
    try:
        for _ in range(100):
            said = subprocess.run(["sinfo", "--noheader", "--format=%t"], capture_output=True, text=True, check=False)
            if said.stdout.strip() == "idle":
                break
            time.sleep(0.2)
        else:
            raise TimeoutError((folder / "log").read_text()[-3000:])
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


@pytest.mark.slow
def test_a_slurm_of_one_node(real_slurm, tmp_path):
    one = engine(tmp_path)
    assert one.map(square, [3, 1, 2], "squares") == [9, 1, 4]
    with pytest.raises(InputError, match=r"raw\.jsonl: refused"):
        one.map(refused, [Path("raw.jsonl")], "reading")
    assert one.map(dies_once, [tmp_path / "mark"], "marking") == ["mark"]
    assert list((tmp_path / "work").iterdir()) == []

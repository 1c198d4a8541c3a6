"""The Slurm engine: array elements as plain processes of this machine, and a Slurm of one node where there is one."""

import json
import os
import pickle
import subprocess
import sys
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from gristmill.data_pipeline import run_curation
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation import files
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import atomic_path, file_digest, scratch_folder, stubs_below
from gristmill.foundation.manifest import read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.store.store import Store
from gristmill.foundation.runtime.tasks import engine as base_engine
from gristmill.foundation.runtime.tasks import slurm as slurm_engine
from gristmill.foundation.runtime.tasks import transport
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.node import NodeRequirements, versions_here
from gristmill.foundation.runtime.tasks.slurm import KEY_VARIABLE, SharedFiles, SlurmEngine, StoredFiles, TaskFolder
from gristmill.foundation.runtime.tasks.task_files import Listing, TaskObjects, TransferError
from gristmill.foundation.runtime.tasks.transport import DriverFiles, ThroughStore, packed, run_in_view, unpacked
from gristmill.pipelines.workdir.remote import local_mirror
from tests.support import fake_slurm
from tests.support.corpora import curate_with, prose, tree_digests, write_jsonl
from tests.support.kills import write_corpus
from tests.support.one_node_slurm import one_node_slurm
from tests.support.s3_server import s3_server


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


def orders(numbers, folder):
    return [packed((square, number), folder) for number in numbers]


def here() -> NodeRequirements:
    return NodeRequirements(os.getcwd(), versions_here())


def test_elements_share_the_tasks_and_leave_out_those_with_an_answer(tmp_path):
    folder = TaskFolder(SharedFiles(tmp_path))
    folder.write(orders([5, 4, 3, 2, 1], tmp_path), here(), 2, tmp_path)
    folder.run(0)
    assert folder.answered() == {0, 2, 4}
    before = (tmp_path / "answers/0000002.task").stat().st_mtime_ns
    folder.run(0)
    assert (tmp_path / "answers/0000002.task").stat().st_mtime_ns == before
    program = Path(sys.executable).with_name("gristmill")
    subprocess.run([program, "work", tmp_path, "1"], check=True, cwd=tmp_path)
    assert [unpacked(folder.answer(number)) for number in range(5)] == [(True, n * n) for n in (5, 4, 3, 2, 1)]


def test_a_folder_without_tasks_and_an_element_too_many(tmp_path):
    with pytest.raises(InputError, match=r"no folder of tasks .*--engine slurm"):
        TaskFolder.at(str(tmp_path / "none")).run(0)
    folder = TaskFolder(SharedFiles(tmp_path))
    folder.write(orders([1], tmp_path), here(), 1, tmp_path)
    with pytest.raises(RecipeError, match=r"element 1: the tasks of .* have the elements 0 to 0"):
        folder.run(1)


def test_a_node_with_other_versions_says_so(tmp_path):
    folder = TaskFolder(SharedFiles(tmp_path))
    folder.write(orders([1], tmp_path), NodeRequirements(os.getcwd(), {**versions_here(), "numpy": "1.0"}), 1, tmp_path)
    folder.run(0)
    is_right, (error, _) = unpacked(folder.answer(0))
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


def stands_still_once(path):
    """Stands still the first time, as on a node that is cut off; else writes the file."""
    mark = path.with_suffix(".begun")
    if path.stem == "2" and not mark.exists():
        mark.touch()
        time.sleep(600)
        path.with_suffix(".late").touch()
    path.write_text(path.stem)
    return path.stem


def test_a_task_that_stands_still_runs_a_second_time_and_the_first_answer_wins(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(base_engine, "STRAGGLER_SECONDS", 0.5)
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    assert engine(tmp_path, workers=4).map(stands_still_once, paths, "writing") == ["0", "1", "2"]
    assert [path.read_text() for path in paths] == ["0", "1", "2"]
    assert (tmp_path / "2.begun").exists() and not (tmp_path / "2.late").exists()
    assert not any(fake_slurm.runs(pid) for job in slurm.glob("job-*") for pid in map(int, job.read_text().split()))


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


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="slurm")
        yield client


@pytest.fixture
def store(server, slurm, tmp_path, monkeypatch):
    """The address of a work folder in an S3 server. Elements run on two nodes, with disks of their own."""
    monkeypatch.setenv(fake_slurm.NODES, str(tmp_path / "nodes"))
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "driver"))
    monkeypatch.setattr(slurm_engine, "NODE_OUTPUT", str(tmp_path / "element-%A-%a.log"))
    return f"s3://slurm/{tmp_path.name}"


def doubled(task):
    """Writes the file twice into another, in the node's own folder; returns that and the node's scratch folder."""
    path, out = task
    with atomic_path(out) as temporary:
        temporary.write_text(2 * path.read_text())
    return out, os.environ["GRISTMILL_SCRATCH"], np.arange(100_000)


def test_an_element_that_shares_nothing_but_a_store(tmp_path, monkeypatch):
    """In this process, with fsspec's store in memory."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("text ")
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "node"))
    monkeypatch.chdir(tmp_path)
    driver = DriverFiles(work, f"memory://{uuid.uuid4().hex}")
    files = StoredFiles.below(driver.objects)
    monkeypatch.setenv(KEY_VARIABLE, files.key.hex())
    carrier = ThroughStore(driver, tmp_path, doubled, tasks := [(work / "a.txt", work / f"{n}.txt") for n in range(3)])
    TaskFolder(files).write(map(carrier.order, tasks), here(), 2, carrier.scratch)
    node = TaskFolder.at(str(files))
    for element, answered in ((1, {1}), (0, {0, 1, 2})):
        node.run(element)
        assert node.answered() == answered
    assert {path.name for path in work.iterdir()} == {"a.txt"}  # nothing is written there by a node
    assert [carrier.answer(node.answer(n))[1][0] for n in range(3)] == [work / f"{n}.txt" for n in range(3)]
    carrier.finish()
    assert (work / "2.txt").read_text() == "text text "


@pytest.mark.slow
def test_files_of_tasks_travel_through_a_store(store, tmp_path):
    work = tmp_path / "driver/work"
    work.mkdir(parents=True)
    for number in range(2):
        (work / f"{number}.txt").write_text(f"text {number} ")
    one = SlurmEngine(2, Reporter.silent(), work, 0.05, store)
    found = one.map(doubled, [(work / f"{n}.txt", work / f"new/{n}.txt") for n in range(2)], "doubling")
    for number, (out, scratch, array) in enumerate(found):
        assert out == work / f"new/{number}.txt" and out.read_text() == 2 * f"text {number} "
        assert scratch == f"{tmp_path}/nodes/{number}" and array.sum() == 4_999_950_000
    objects = Store(store)
    assert objects.list("tasks") and KEY_VARIABLE not in os.environ
    one.close()
    assert not objects.list("tasks")
    assert {path.name for path in work.iterdir()} == {"0.txt", "1.txt", "new"}
    while list(tmp_path.glob("element-100-*.log")):  # which an element that ends well removes
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_in_a_store_gives_the_local_bytes(store, tmp_path, call, monkeypatch):
    sent: dict[str, int] = {}  # by the driver: the nodes are other processes
    put, copied = Store.put, []
    monkeypatch.setattr(
        Store, "put", lambda self, name, path: (sent.update({name: path.stat().st_size}), put(self, name, path))[1]
    )
    copy = Store.copy
    monkeypatch.setattr(Store, "copy", lambda self, name, target: (copied.append(target), copy(self, name, target))[1])
    raw = write_jsonl(tmp_path / "a.jsonl", [{"text": prose(k % 25)} for k in range(60)])
    (tmp_path / "recipe.yaml").write_text(
        f"name: small\nsources: [{{name: lines, paths: ['{raw}'], format: jsonl}}]\n"
        "curate: {filters: [], near_dedup: {}, shard_bytes: 20000}\ntokenizer: {vocab_size: 300}\n"
    )
    for options in (("--workdir", store, "--engine", "slurm"), ("--workdir", "local")):
        code, said = call("run", "recipe.yaml", "--to", "index", *options)
        assert code == 0, said
    for stage in ("curate", "tokenizer", "index"):
        there, here = (read_manifest(folder / stage).outputs for folder in (local_mirror(store), tmp_path / "local"))
        assert there == here and len(here) > 1
    assert not [name for name in sent if name.startswith("curate/") and "/train/" in name]
    assert len([name for name in copied if "documents/train/" in name]) >= 2
    print(json.dumps({"sent": sum(sent.values()), "copied": len(copied), "text": raw.stat().st_size}))
    assert {path.name for path in (tmp_path / "nodes").iterdir()} == {"0", "1"}
    stubs = {
        path.relative_to(local_mirror(store)).as_posix(): stub.object for path, stub in stubs_below(local_mirror(store))
    }
    assert {name.partition("/")[0] for name in stubs} == {"curate", "cache"}
    assert set(Store(store).list("tasks")) == {name for name in stubs.values() if name.startswith("tasks/")}
    assert all(stubs[path].startswith("curate/") for path in stubs if path.startswith("curate/"))
    code, said = call("run", "recipe.yaml", "--to", "index", "--workdir", store)  # this machine downloads them
    assert code == 0 and not list(stubs_below(local_mirror(store))), said
    for output in read_manifest(local_mirror(store) / "curate").outputs:
        assert file_digest(local_mirror(store) / "curate" / output.path) == output.sha256


class NodesOfThisProcess(Engine):
    """As `SlurmEngine`, but each task runs here, in a view of its own."""

    workers = 2

    def __init__(self, _, reporter, folder, store):
        self.reporter, self.folder, self.files = reporter, folder.absolute(), DriverFiles(folder, store)

    def _results(self, function, tasks, weights, description):
        with scratch_folder(self.folder) as scratch:
            carrier = ThroughStore(self.files, scratch, function, tasks)
            for number, task in enumerate(tasks):
                ok, value = carrier.answer(run_in_view(carrier.order(task), carrier.scratch))
                assert ok, (description, value)
                yield number, value
            carrier.finish()

    def close(self):
        self.files.clear()


@pytest.mark.slow
def test_no_step_of_the_driver_takes_a_stub_for_content(store, tmp_path, call, monkeypatch):
    """All files of more than 512 bytes are stubs, as those of many documents are. A run that is stopped in the middle
    goes on from its stubs, and what the driver runs itself for few documents downloads what it reads."""
    for module in (files, transport):
        monkeypatch.setattr(module, "STUB_BYTES", 512)
    monkeypatch.setattr(slurm_engine, "SlurmEngine", NodesOfThisProcess)
    recipe = write_corpus(tmp_path / "raw")
    with (tmp_path / "raw/plain0.jsonl").open("a") as file:
        file.write("no JSON\n")  # is quarantined
    with monkeypatch.context() as patch:
        patch.setattr(run_curation, "_write", lambda *_: sys.exit("stopped"))
        code, said = call("run", recipe, "--workdir", store, "--engine", "slurm")
        assert code == "stopped" and list(stubs_below(local_mirror(store))), said
    for options in (("--workdir", store, "--engine", "slurm"), ("--workdir", "local")):
        code, said = call("run", recipe, "--to", "index", *options)
        assert code == 0, said
    for stage in ("curate", "tokenizer", "index"):
        there, here = (read_manifest(folder / stage).outputs for folder in (local_mirror(store), tmp_path / "local"))
        assert there == here and len(here) > 1
    assert len(list(stubs_below(local_mirror(store)))) > 20


@pytest.mark.slow
def test_every_step_in_a_store_gives_the_local_bytes(store, tmp_path, call, monkeypatch):
    """With quality, edits of texts and kept signatures; training, evaluation and the report read what nodes wrote. All
    files of more than 512 bytes are stubs, as those of many documents are."""
    for module in (files, transport):
        monkeypatch.setattr(module, "STUB_BYTES", 512)
    recipe = write_corpus(tmp_path / "raw")
    with (tmp_path / "raw/plain0.jsonl").open("a") as file:
        file.write("no JSON\n")  # is quarantined
    for options in (("--workdir", store, "--engine", "slurm"), ("--workdir", "local")):
        code, said = call("run", recipe, "--to", "report", *options)
        assert code == 0, said
    for stage in ("curate", "tokenizer", "index", "train", "evaluate", "report"):
        there, here = (read_manifest(folder / stage).outputs for folder in (local_mirror(store), tmp_path / "local"))
        assert there == here and len(here) > 1


def fails_twice(path):
    """The store takes nothing the first two times."""
    if len(list(path.parent.glob(f"{path.name}.*"))) < 2:
        (path.parent / f"{path.name}.{uuid.uuid4().hex}").touch()
        raise TransferError("s3://corpus/run: no answer")
    return path.name


def never(path):
    raise TransferError("s3://corpus/run: no answer")


@pytest.mark.slow
def test_a_transfer_that_fails_is_tried_again(slurm, tmp_path):
    assert engine(tmp_path).map(fails_twice, [tmp_path / "mark"], "marking") == ["mark"]
    with pytest.raises(TransferError, match="no answer"):
        engine(tmp_path).map(never, [tmp_path / "mark"], "marking")


@pytest.fixture
def stored(monkeypatch) -> TaskFolder:
    """Two tasks in a store in memory, on the node that has the key."""
    objects = TaskObjects(f"memory://{uuid.uuid4().hex}")
    files = StoredFiles.below(objects)
    folder = TaskFolder(files)
    folder.write(orders([3, 4], Path("/")), here(), 2, Listing.write(objects, [], Path("/work")))
    monkeypatch.setenv(KEY_VARIABLE, files.key.hex())
    return folder


def test_a_node_reads_only_what_the_driver_of_this_run_wrote(stored, monkeypatch):
    """Orders are pickles: one that somebody else wrote, or put in another's place, is never read."""
    address = stored.files.address
    store = Store(address)
    right, other = (store.read(f"orders/000000{number}.task") for number in range(2))
    for content in (b"", pickle.dumps("mine"), right[:-1] + b"!", other):
        store.put_bytes("orders/0000000.task", content)
        with pytest.raises(InputError, match=r"orders/0000000\.task: not written by this run"):
            TaskFolder.at(address).run(0)
    monkeypatch.setenv(KEY_VARIABLE, "00" * 32)
    with pytest.raises(InputError, match=r"no folder of tasks .*not written by this run, or GRISTMILL_TASKS_KEY"):
        TaskFolder.at(address).run(1)
    for key in ("", "no key"):
        monkeypatch.setenv(KEY_VARIABLE, key)
        with pytest.raises((RecipeError, InputError), match=KEY_VARIABLE):
            TaskFolder.at(address).run(1)
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(RecipeError, match=f"{KEY_VARIABLE} is not set to the key of this folder"):
        TaskFolder.at(address).run(1)


def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeError, match="--engine slurm: the program sbatch is not here; run the command on a login"):
        engine(tmp_path)


@pytest.fixture
def real_slurm(tmp_path, monkeypatch):
    with one_node_slurm(tmp_path / "slurm", monkeypatch):
        yield


@pytest.mark.slow
def test_a_slurm_of_one_node(real_slurm, tmp_path):
    one = engine(tmp_path)
    assert one.map(square, [3, 1, 2], "squares") == [9, 1, 4]
    with pytest.raises(InputError, match=r"raw\.jsonl: refused"):
        one.map(refused, [Path("raw.jsonl")], "reading")
    assert one.map(dies_once, [tmp_path / "mark"], "marking") == ["mark"]
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.slow
def test_a_slurm_of_one_node_through_a_store(real_slurm, server, tmp_path, monkeypatch):
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "node"))
    monkeypatch.setattr(slurm_engine, "NODE_OUTPUT", str(tmp_path / "element-%A-%a.log"))
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("text ")
    one = SlurmEngine(2, Reporter.silent(), work, 0.05, f"s3://slurm/{tmp_path.name}")
    [(out, scratch, array)] = one.map(doubled, [(work / "a.txt", work / "new/a.txt")], "doubling")
    assert out.read_text() == "text text " and scratch == str(tmp_path / "node") and len(array) == 100_000
    one.close()
    while list(tmp_path.glob("element-*.log")):  # which an element that ends well removes
        time.sleep(0.05)

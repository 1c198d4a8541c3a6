"""The Ray engine on a cluster of this machine: a head without processors and a node with two."""

import errno
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gristmill.data_pipeline.filters.presets import FilterChoice
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks import engine as base_engine
from gristmill.foundation.runtime.tasks import node
from gristmill.foundation.runtime.tasks import ray as connection
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.ray import RayEngine, checked_place
from gristmill.foundation.user_code import UserCode
from tests.support.corpora import curate_with, prose, tree_digests, write_jsonl
from tests.support.ray_cluster import add_node, ray_cluster
from tests.support.recording_reporter import RecordingReporter

pytest.importorskip("ray", reason="the extra `cluster` is not installed")


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(nodes=1, num_cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def connected(cluster, tmp_path_factory):
    """One connection for all tests: each takes seconds."""
    return RayEngine(cluster.address, RecordingReporter(), tmp_path_factory.mktemp("work"))


@pytest.fixture
def engine(connected):
    yield connected
    assert list(connected.work_folder.iterdir()) == []  # nothing is left of a map


def square(number):
    return number * number


def test_workers_import_while_the_driver_prepares(engine):
    engine.start(["colorsys", "no.such.module"])
    assert engine.map(square, [2, 3], "squares") == [4, 9]


def summed(task):
    name, values = task
    values += 1  # arrays of a task can be written to, as on the local engine
    return name, int(values.sum()), values


def test_results_come_in_the_order_of_the_tasks(engine):
    assert engine.map(square, [3, 1, 2], "squares", sizes=[1.0, 9.0, 4.0]) == [9, 1, 4]
    assert engine.map(square, [], "none") == []
    assert engine.reporter.lines == ["engine: ray, 1 nodes on 1 machines, 2 tasks at once"]


def test_arrays_of_tasks_and_results_are_whole(engine):
    arrays = [np.arange(n) for n in (5, 50_000, 70_000)]
    found = engine.map(summed, [(str(len(one)), one) for one in arrays], "sums")
    assert [(name, total) for name, total, _ in found] == [(str(n), n * (n + 1) // 2) for n in (5, 50_000, 70_000)]
    assert all((values == one + 1).all() for (_, _, values), one in zip(found, arrays, strict=True))


def refuse_three(task):
    folder, number = task
    if number == 3:
        raise InputError("record 3 is broken")
    time.sleep(0.2)
    (folder / f"{number}.txt").touch()


def test_the_first_error_of_a_task_is_raised_and_the_rest_is_dropped(engine, tmp_path):
    with pytest.raises(InputError, match=r"^record 3 is broken$"):
        engine.map(refuse_three, [(tmp_path, n) for n in range(3, 200)], "refusing")
    done = len(list(tmp_path.glob("*.txt")))
    time.sleep(0.5)
    assert len(list(tmp_path.glob("*.txt"))) == done < 50


def fail_with(number):
    raise OSError(number, "said the disk", "out.parquet")


def test_the_number_of_an_operating_system_error_survives(engine):
    with pytest.raises(OSError) as caught:
        engine.map(fail_with, [errno.ENOSPC], "writing")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "out.parquet")


def stands_still_once(path):
    """Stands still the first time, as on a node that is cut off; else writes the file."""
    mark = path.with_suffix(".begun")
    if path.stem == "2" and not mark.exists():
        mark.touch()
        time.sleep(600)
        path.with_suffix(".late").touch()
    path.write_text(path.stem)
    return path.stem


def test_a_task_that_stands_still_runs_a_second_time_and_the_first_answer_wins(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(base_engine, "STRAGGLER_SECONDS", 0.5)
    monkeypatch.setattr(connection, "POLL_SECONDS", 0.2)
    paths = [tmp_path / f"{number}.txt" for number in range(3)]
    assert engine.map(stands_still_once, paths, "writing") == ["0", "1", "2"]
    assert [path.read_text() for path in paths] == ["0", "1", "2"]
    assert (tmp_path / "2.begun").exists() and not (tmp_path / "2.late").exists()
    assert engine.map(square, [5, 6, 7], "squares") == [25, 36, 49]  # the first copy holds no processor any more


def stale_once(path):
    if not path.exists():
        path.touch()
        raise OSError(errno.ESTALE, "Stale file handle", str(path))
    return "read"


def test_a_passing_error_of_a_network_file_system_is_tried_again(engine, tmp_path):
    assert engine.map(stale_once, [tmp_path / "a", tmp_path / "b"], "reading") == ["read", "read"]


class Repeated:
    """Gives each task to the cluster `times` times and waits for the last."""

    def __init__(self, submitter, times):
        self.submitter, self.times = submitter, times

    def remote(self, *arguments):
        return [self.submitter.remote(*arguments) for _ in range(self.times)][-1]


@pytest.mark.parametrize("twins", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_curation_gives_the_bytes_of_the_local_engine(engine, tmp_path, monkeypatch, twins):
    """With twins every task runs twice, often at the same time, as on a node that was cut off from the cluster."""
    plain = engine.submitter
    monkeypatch.setattr(engine, "submitter", lambda: Repeated(plain(), twins))
    texts = [prose(k) for k in range(30)] + [prose(4), prose(7) + "\nAnd a last line of its own."]
    for k in range(3):
        write_jsonl(tmp_path / "raw" / f"{k}.jsonl", [{"text": text} for text in texts[k::3]])
    source = SourceConfig(name="books", format="jsonl", paths=(str(tmp_path / "raw"),))
    source_code = "def no_fives(document):\n    return len(document['text']) % 5 > 0\n"
    code = UserCode(file="gone.py", function="no_fives", sha256="0" * 64, source=source_code)  # no node has the file
    rule = FilterChoice(preset=code.label, code=code)
    steps = {"span_dedup": {"unit": "line"}, "shard_bytes": 8_000, "filters": ("gopher_quality", rule)}
    there = curate_with(engine, [source], tmp_path / "ray", **steps)
    here = curate_with(LocalEngine(1, Reporter.silent()), [source], tmp_path / "local", **steps)
    assert there == here
    languages = there["sources"]["books"]["languages"].values()
    assert sum(language["removed"].get("gone.no_fives", 0) for language in languages) > 0
    assert tree_digests(tmp_path / "ray" / "curate") == tree_digests(tmp_path / "local" / "curate")


@pytest.mark.parametrize("outcome", [None, ConnectionError("Could not find any running Ray instance.")])
def test_no_cluster_on_this_machine(monkeypatch, outcome):
    """Ray returns None or raises."""

    def canonicalize(address):
        if outcome is not None:
            raise outcome

    services = SimpleNamespace(canonicalize_bootstrap_address=canonicalize)
    monkeypatch.setattr(connection, "ray_services", services)
    with pytest.raises(InputError, match=r"^--address auto: no Ray cluster runs on this machine; start a cluster"):
        connection._found_address("auto")


def die_until(task):
    """Exits without a word in its first runs; each leaves a file."""
    path, deaths = task
    runs = len(list(path.parent.glob(f"{path.name}.*")))
    path.with_name(f"{path.name}.{runs}").touch()
    if runs < deaths:
        os._exit(1)
    return runs


def test_a_task_whose_process_dies_is_run_again(engine, tmp_path):
    tasks = [(tmp_path / "steady", 0), (tmp_path / "once", 1)]
    assert engine.map(die_until, tasks, "dying") == [0, 1]


def test_a_task_that_never_ends_well_is_named(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "attempts", 2)
    with pytest.raises(InputError, match=r"^dying: task 1 of 1, .*/poison was lost 2 times, last because its process"):
        engine.map(die_until, [(tmp_path / "poison", 99)], "dying")
    assert len(list(tmp_path.glob("poison.*"))) == 2


def test_a_node_with_other_versions_is_refused_by_name(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "versions_here", lambda: node.versions_here() | {"numpy": "0.9"})
    with pytest.raises(InputError) as caught:
        checked_place("auto", tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2 and all("the driver has 0.9; install the same versions" in line for line in lines[1:])
    assert list(tmp_path.iterdir()) == []


def die_in_the_first_handshake(place):
    marker = Path(place.probe[0]).parent / "asked"
    if not marker.exists():
        marker.touch()
        os._exit(1)
    return node.report(place)


def test_a_node_whose_answer_is_lost_is_asked_again(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "report", die_in_the_first_handshake)
    assert checked_place("auto", tmp_path).versions == node.versions_here()
    assert [path.name for path in tmp_path.iterdir()] == ["asked"]


def test_a_node_that_joins_with_other_versions_is_refused_by_its_first_task(engine, monkeypatch):
    other = node.NodeRequirements(os.getcwd(), node.versions_here() | {"gristmill": "another"})
    monkeypatch.setattr(engine, "_place", other)
    with pytest.raises(InputError, match=r"^node .*: gristmill [0-9a-f]{16}, the driver has another"):
        engine.map(square, [1, 2], "squares")


def test_a_work_folder_that_nodes_do_not_share_is_refused(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(connection.Path, "write_text", lambda *_: None)  # as if it went to another machine's disk
    with pytest.raises(InputError, match=f"the work folder {tmp_path} is not the driver's; it must"):
        checked_place("auto", tmp_path)


def test_a_clock_that_is_wrong_is_refused(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(connection.time, "time", lambda: time.monotonic())
    with pytest.raises(InputError, match=r"its clock differs from the driver's by \d+ s; set it"):
        checked_place("auto", None)


def nap(number):
    time.sleep(0.1)
    return number


def test_a_node_lost_in_the_middle_of_a_map_costs_its_tasks_only(cluster, engine, capfd):
    """The last test of this cluster: for ten seconds it still gives tasks to the lost node."""
    lost = add_node(cluster)
    killer = threading.Timer(1.0, lambda: cluster.remove_node(lost, allow_graceful=False))
    killer.start()
    assert engine.map(nap, range(40), "naps") == list(range(40))
    killer.join()
    said = capfd.readouterr()
    assert said.out + said.err == ""  # no logs of Ray on the user's screen


@pytest.fixture
def unconnected(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "head", "head:", "head:x", ":6379", "head:70000"])
def test_an_address_of_another_kind_is_a_wrong_call(unconnected, address, tmp_path):
    with pytest.raises(RecipeError, match=address):
        RayEngine(address, Reporter.silent(), tmp_path)


def test_an_address_without_a_cluster_is_one_sentence(unconnected, tmp_path):
    with pytest.raises(InputError, match=r"^--address 127.0.0.1:1: no answer \(Connection refused\); start a cluster"):
        RayEngine("127.0.0.1:1", Reporter.silent(), tmp_path)


def test_what_answers_there_may_be_no_cluster(unconnected, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(InputError, match="is not a Ray cluster"):
        RayEngine(f"127.0.0.1:{server.getsockname()[1]}", Reporter.silent(), tmp_path)


def test_without_the_extra_the_command_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RecipeError, match=r"pip install 'gristmill\[cluster\]'"):
        RayEngine("auto", Reporter.silent(), tmp_path)

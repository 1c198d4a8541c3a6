import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter, Terminated, amount
from gristmill.foundation.runtime.tasks.engine import LazySequence, Stragglers, joined, task_batches
from gristmill.foundation.runtime.tasks.local import LocalEngine, may_fork
from gristmill.foundation.startup import are_huge_pages_allowed

ROOT = Path(__file__).parents[4]


def square(number):
    return number * number


def refuse_three(number):
    if number == 3:
        raise InputError("record 3 is broken")
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(workers):
    assert LocalEngine(workers, Reporter.silent()).map(square, [3, 1, 2], "squares") == [9, 1, 4]


def process_of(task):
    return os.getpid()


def test_a_single_task_goes_to_workers_that_are_there():
    """They stay when the last result of a map was taken, and nothing more was asked for."""
    engine = LocalEngine(2, Reporter.silent())
    assert engine.map(process_of, [0], "one") == [os.getpid()]
    tasks = LazySequence(abs, range(-4, 0))
    workers = [worker for _, worker in zip(range(4), engine.imap(process_of, tasks, "four"), strict=False)]
    assert engine.map(process_of, [0], "one")[0] in workers and os.getpid() not in workers


def test_values_of_a_lazy_sequence_are_built_when_they_are_asked_for():
    built: list[int] = []
    values = LazySequence(lambda number: built.append(number) or 10 * number, [3, 1, 2])
    assert len(values) == 3 and values[1:][0] == 10 and built == [1]
    assert list(joined([values, (), [5]])) == [30, 10, 20, 5] and built == [1, 3, 1, 2]
    assert pickle.loads(pickle.dumps(values)) == (30, 10, 20)


def test_small_tasks_travel_together_and_large_ones_alone():
    """129 tasks of weight 1 and one of 999: a batch weighs at most a 32nd of 1,128."""
    weights = [1.0] * 129 + [999.0]
    assert [len(batch) for batch in task_batches(weights, 2)] == [35, 35, 35, 24, 1]
    assert [len(batch) for batch in task_batches(weights, 1)] == [len(batch) for batch in task_batches([1] * 130, 3)]
    expected = [number * number for number in range(130)]
    engine = LocalEngine(2, Reporter.silent())
    assert engine.map(square, range(130), "squares", weights) == expected
    with pytest.raises(InputError, match="record 3 is broken"):
        engine.map(refuse_three, range(130), "refusing", weights)


def test_a_killed_worker_with_a_batch_of_tasks_is_one_sentence_that_names_them():
    message = "at task 1 of 33, tasks 1 to 4 of 130 together, from 1.txt to 4.txt; what is finished is kept"
    with pytest.raises(InputError, match=message):
        LocalEngine(2, Reporter.silent()).map(die_at_path, [Path(f"{n}.txt") for n in range(1, 131)], "dying")


def test_a_straggler_is_a_task_that_takes_three_times_its_share():
    """Weights 1, 1, 1, 4, mean 1.75: the last is expected to take 5.75 / 2.75 times as long as the others, 100 s."""
    now = [0.0]
    stragglers = Stragglers([1.0, 1.0, 1.0, 4.0], lambda: now[0])
    for task in range(4):
        stragglers.begin(task)
    now[0] = 1000.0
    assert stragglers.overdue() == []  # no task ended yet
    now[0] = 100.0
    stragglers.end(0)
    stragglers.end(1)
    now[0] = 299.0
    assert stragglers.overdue() == []
    now[0] = 301.0
    assert stragglers.overdue() == [2] and stragglers.overdue() == []
    now[0] = 3 * 100 * 5.75 / 2.75 + 1
    assert stragglers.overdue() == [3]


def huge_pages_allowed(_):
    return are_huge_pages_allowed()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has transparent huge pages")
@pytest.mark.parametrize("workers", [1, 2])
def test_tasks_run_without_huge_pages_and_the_driver_gets_them_back(workers):
    before = are_huge_pages_allowed()
    assert LocalEngine(workers, Reporter.silent()).map(huge_pages_allowed, [1, 2], "asking") == [False, False]
    assert are_huge_pages_allowed() == before


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_a_task_is_raised_here(workers):
    with pytest.raises(InputError, match="record 3 is broken"):
        LocalEngine(workers, Reporter.silent()).map(refuse_three, [1, 2, 3, 4], "refusing")


def die_at_three(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def large(seconds):
    """64 MB, a thousand times what a pipe holds: handing it over takes a while."""
    time.sleep(seconds)
    return bytes(64_000_000)


@pytest.fixture(autouse=True, scope="module")
def children_before():
    """Processes that other tests' fixtures have started."""
    BEFORE.update(child.pid for child in psutil.Process().children())


BEFORE: set[int] = set()


def workers_of(pid):
    """Worker processes that live, the oldest first."""
    children = [p for p in psutil.Process(pid).children() if p.status() != psutil.STATUS_ZOMBIE]
    workers = [p for p in children if p.pid not in BEFORE and "resource_tracker" not in " ".join(p.cmdline())]
    return sorted(workers, key=lambda p: p.pid)


def test_a_killed_worker_is_one_sentence_that_names_the_task():
    with pytest.raises(
        InputError, match=r"^dying: a worker process was killed; most often .*memory.*, at task 3 of 4, "
    ):
        LocalEngine(2, Reporter.silent()).map(die_at_path, [Path(f"{n}.txt") for n in (1, 2, 3, 4)], "dying")


def die_at_path(path):
    return die_at_three(int(path.stem))


def test_the_engine_goes_on_after_a_worker_was_killed():
    engine = LocalEngine(2, Reporter.silent())
    with pytest.raises(InputError, match="fewer --workers than 2"):
        engine.map(die_at_three, [3, 4], "dying")
    assert workers_of(os.getpid()) == []
    assert engine.map(square, [3, 1, 2], "squares") == [9, 1, 4]


def stop_at_three(number):
    if number == 3:
        raise Terminated("saved")
    return number


def test_a_worker_that_was_asked_to_stop_ends_without_a_traceback(capfd):
    """As a training run does in an ablation: it saves, and raises what ends a program."""
    with pytest.raises(InputError):
        LocalEngine(2, Reporter.silent()).map(stop_at_three, [3, 4], "stopping")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("moment", "is_early"), [(0.0, False), (0.1, True), (0.12, False), (0.14, True), (0.16, False), (0.2, True)]
)
def test_a_worker_killed_while_it_hands_over_a_result_never_hangs_the_driver(moment, is_early):
    """All through one pipe, the driver would wait for the rest of that result for ever."""
    engine = LocalEngine(2, Reporter.silent())
    if is_early:
        engine.start([])
    engine.map(square, [1, 2], "workers start")
    victim = workers_of(os.getpid())[-1]
    killer = threading.Timer(moment, victim.kill)
    killer.start()
    try:
        results = engine.map(large, [0.1] * 4, "large results")
        assert [len(result) for result in results] == [64_000_000] * 4
    except InputError as error:
        assert "killed" in str(error)
    killer.join()
    engine.close()


def test_a_stopped_worker_goes_on():
    engine = LocalEngine(2, Reporter.silent())
    engine.map(square, [1, 2], "workers start")
    stopped = workers_of(os.getpid())[-1]
    stopped.suspend()
    threading.Timer(0.3, stopped.resume).start()
    assert engine.map(square, range(20), "squares") == [n * n for n in range(20)]
    engine.close()


def imported_and_process(name):
    time.sleep(0.3)  # so that both workers get a task
    return name in sys.modules, os.getpid()


def test_workers_that_are_started_early_import_their_modules_and_run_the_tasks():
    engine = LocalEngine(2, Reporter.silent())
    engine.start(["absent_module_of_nobody", "nturl2path"])
    started = {worker.pid for worker in workers_of(os.getpid())}
    results = engine.map(imported_and_process, ["nturl2path"] * 4, "modules")
    engine.close()
    assert {process for _, process in results} == started and len(started) == 2
    assert all(imported for imported, _ in results)


def sockets_of(process):
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    return {link for link in links if link.startswith("socket:")}


def open_sockets(seconds):
    time.sleep(seconds)  # so that each worker gets a task
    return os.getpid(), sockets_of(os.getpid())


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux alone")
def test_a_worker_that_is_a_fork_holds_no_pipe_of_another():
    """Else the others would not notice that the driver died."""
    before = sockets_of(os.getpid())
    engines = [LocalEngine(2, Reporter.silent()) for _ in range(2)]
    for engine in engines:
        engine.start([])
    sockets = {process: found for e in engines for process, found in e.map(open_sockets, [0.3] * 2, "pipes")}
    for engine in engines:
        engine.close()
    own = [found - before for found in sockets.values()]
    assert len(own) == 4 and all(len(one) == 1 for one in own) and len(set.union(*own)) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux alone")
def test_early_workers_have_what_the_driver_imported():
    """In a process of its own: this one has threads, so its workers are no forks."""
    script = (
        "import sys\n"
        "from gristmill.foundation.runtime.tasks.local import LocalEngine\n"
        "from gristmill.foundation.progress import Reporter\n"
        "from tests.foundation.runtime.tasks.test_local import imported_and_process\n"
        "engine = LocalEngine(2, Reporter.silent())\n"
        "sys.modules['made_up_by_this_test'] = sys\n"
        "engine.start([])\n"
        "del sys.modules['made_up_by_this_test']\n"
        "results = engine.map(imported_and_process, ['made_up_by_this_test'] * 2, 'modules')\n"
        "engine.close()\n"
        "print([found for found, _ in results])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[True, True]\n", done.stderr


def test_a_process_with_threads_is_not_forked():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert not may_fork()
    end.set()
    thread.join()


def return_a_function(number):
    return lambda: number


def test_a_result_that_cannot_be_handed_over_is_an_error():
    with pytest.raises(TypeError, match="cannot be pickled"):
        LocalEngine(2, Reporter.silent()).map(return_a_function, [1, 2], "functions")


def full_disk(number):
    raise OSError(errno.ENOSPC, "No space left on device", f"{number}.parquet")


def test_the_number_of_an_operating_system_error_survives():
    with pytest.raises(OSError) as caught:
        LocalEngine(2, Reporter.silent()).map(full_disk, [1, 2], "writing")
    assert (caught.value.errno, caught.value.filename) in {(errno.ENOSPC, f"{n}.parquet") for n in (1, 2)}


@pytest.mark.parametrize("start", ["", "engine.start([])"])
def test_ctrl_c_leaves_no_worker_behind_and_no_tracebacks_of_theirs(tmp_path, start):
    path = tmp_path / "parent.py"
    path.write_text(SCRIPT.format(start=start))
    parent = subprocess.Popen(
        [sys.executable, str(path)], env=os.environ | {"PYTHONPATH": ""}, stderr=subprocess.PIPE, start_new_session=True
    )
    workers = wait_for(lambda: len(found := workers_of(parent.pid)) == 2 and found)
    time.sleep(0.5)  # they have begun to work, or are about to: either is right
    os.killpg(parent.pid, signal.SIGINT)
    said = parent.communicate(timeout=60)[1].decode()
    assert parent.returncode != 0
    assert not any(worker.is_running() for worker in workers)
    assert said.count("Traceback") == 1  # the driver's own KeyboardInterrupt


SCRIPT = """
import sys, time
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.progress import Reporter, amount
if __name__ == "__main__":
    engine = LocalEngine(2, Reporter.silent())
    {start}
    engine.map(time.sleep, [60, 60], "sleeping")
"""


MASKS = """
import signal
from multiprocessing import util
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.progress import Reporter
spawn, blocked = util.spawnv_passfds, []
def recording(path, args, descriptors):
    blocked.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    return spawn(path, args, descriptors)
util.spawnv_passfds = recording
if __name__ == "__main__":
    LocalEngine(2, Reporter.silent()).map(abs, [-1, -2], "numbers")
    print(blocked, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_every_worker_begins_with_ctrl_c_blocked(tmp_path):
    """One that imports would print a traceback. The first process is the tracker of multiprocessing."""
    path = tmp_path / "parent.py"
    path.write_text(MASKS)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True, True] False\n"


@pytest.mark.parametrize("start", ["", "engine.start([])"])
def test_workers_end_when_their_parent_is_killed(tmp_path, start):
    path = tmp_path / "parent.py"
    path.write_text(SCRIPT.format(start=start))
    parent = subprocess.Popen([sys.executable, str(path)], env=os.environ | {"PYTHONPATH": ""})
    workers = wait_for(lambda: workers_of(parent.pid))
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(worker.is_running() for worker in workers))


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def test_amounts_read_as_words():
    made = [amount(62_100_000, "B"), amount(512, "B"), amount(1, "tasks"), amount(1, "batches"), amount(2, "batches")]
    assert made == ["62.1 MB", "512 B", "1 task", "1 batch", "2 batches"]
    assert amount(12_345, "tokens") == "12.3k tokens" and amount(0.5, "documents") == "0.5 documents"


def test_a_step_without_work_says_nothing(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file, Reporter(Console(file=file)).meter("ranges", 0, "B"):
        pass
    assert path.read_text() == ""


def test_a_log_that_is_no_terminal_gets_plain_lines(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file, Reporter(Console(file=file)).meter("reading", 2, "documents") as meter:
        meter.advance(2, "note")
    assert path.read_text().startswith("reading: 2 documents in")
    assert "\x1b" not in path.read_text()


CALLBACK = """
import ctypes, os, signal, sys, time
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Terminated
from gristmill.foundation.progress import Reporter, amount

def work(number):
    if number:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    callback = ctypes.CFUNCTYPE(None)(lambda: time.sleep(60))
    ctypes.CFUNCTYPE(None)(ctypes.cast(callback, ctypes.c_void_p).value)()
    time.sleep(60)

if __name__ == "__main__":
    try:
        LocalEngine(2, Reporter.silent()).map(work, [0, 1], "working")
    except InputError:
        sys.exit(7)
"""


def test_a_worker_that_is_ended_in_a_callback_of_a_library_prints_no_traceback(tmp_path):
    path = tmp_path / "parent.py"
    path.write_text(CALLBACK)
    done = subprocess.run(
        [sys.executable, str(path)], env=os.environ | {"PYTHONPATH": ""}, capture_output=True, timeout=90
    )
    assert (done.returncode, done.stderr.decode()) == (7, "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks workers")
def test_the_program_can_fork_its_workers_however_many_cores_it_has():
    script = (
        "import contextlib, importlib\n"
        "from gristmill.pipelines.cli import main as cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(None):\n"
        "    cli.main(['--help'])\n"
        "from gristmill.pipelines.cli.commands import Commands\n"
        "assert all(Commands().values())  # imports each command\n"
        "importlib.import_module('gristmill.data_pipeline.run_curation')\n"
        "from gristmill.foundation.runtime.tasks.local import may_fork\n"
        "print(may_fork())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    """With threads, so that workers are started anew, which would import the script."""
    script = tmp_path / "script.py"
    script.write_text(
        "import math, threading\n"
        "from gristmill.foundation.progress import Reporter\n"
        "from gristmill.foundation.runtime.tasks.local import LocalEngine\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "print(LocalEngine(2, Reporter.silent()).map(math.sqrt, [4, 9, 16], 'roots'))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[2.0, 3.0, 4.0]\n", 0), done.stderr

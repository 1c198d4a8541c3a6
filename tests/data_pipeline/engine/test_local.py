import os
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.data_pipeline.errors import InputError


def square(number):
    return number * number


def refuse_three(number):
    if number == 3:
        raise InputError("record 3 is broken")
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(workers):
    assert LocalEngine(workers, Reporter.silent()).map(square, [3, 1, 2], "squares") == [9, 1, 4]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_a_task_is_raised_here(workers):
    with pytest.raises(InputError, match="record 3 is broken"):
        LocalEngine(workers, Reporter.silent()).map(refuse_three, [1, 2, 3, 4], "refusing")


SCRIPT = """
import sys, time
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.engine.progress import Reporter
if __name__ == "__main__":
    LocalEngine(2, Reporter.silent()).map(time.sleep, [60, 60], "sleeping")
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    path = tmp_path / "parent.py"
    path.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(path)], env=os.environ | {"PYTHONPATH": ""})
    workers = wait_for(
        lambda: [p for p in psutil.Process(parent.pid).children() if "spawn_main" in " ".join(p.cmdline())]
    )
    parent.kill()
    parent.wait()
    wait_for(lambda: not any(worker.is_running() for worker in workers))


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
    return found


def test_a_log_that_is_no_terminal_gets_plain_lines(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as file, Reporter(Console(file=file)).meter("reading", 2, "documents") as meter:
        meter.advance(2, "note")
    assert path.read_text().startswith("reading: 2 documents in")
    assert "\x1b" not in path.read_text()

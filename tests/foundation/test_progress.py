"""Rates and times are of this run alone; Ctrl-C is acted upon even where Python drops its exception."""

import io
import json
import os
import signal

import pytest

from gristmill.foundation import progress
from gristmill.foundation.progress import (
    JsonLog,
    Reporter,
    plain_console,
    raise_lost_interrupt,
    remember_interrupts,
)


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGINT)
    remember_interrupts()
    yield
    signal.signal(signal.SIGINT, before)
    remember_interrupts()


class InterruptedWhenDeleted:
    """Python reports exceptions of a destructor on standard error, and goes on."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_lost_in_a_destructor_is_raised_at_the_next_progress_report():
    with Reporter.silent().meter("counting", 2) as meter:
        meter.advance()
        InterruptedWhenDeleted()
        with pytest.raises(KeyboardInterrupt):
            meter.advance()
        meter.advance()


def test_an_interrupt_is_raised_where_it_arrives():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remember_interrupts()
    signal.raise_signal(signal.SIGINT)
    raise_lost_interrupt()


@pytest.fixture
def seconds(monkeypatch):
    """The clock, which the test sets."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def resumed_at_400_of_1000(console, seconds) -> None:
    """Ten seconds with 200 tokens more, then ten with 400."""
    with Reporter(console).meter("train", 1000, "tokens") as meter:
        meter.resume(400)
        for count in (200, 400):
            seconds[0] += 10
            meter.advance(count)


def test_what_an_earlier_run_finished_has_no_part_in_the_rate_and_the_time_left(seconds):
    log = io.StringIO()
    resumed_at_400_of_1000(plain_console(log), seconds)
    assert log.getvalue().splitlines() == [
        "train: 60 % (600 tokens of 1k tokens), 20 tokens/s, 20 s left",
        "train: 100 % (1k tokens of 1k tokens), 30 tokens/s, 0 s left",
        "train: 600 tokens in 20.0 s (400 tokens were done before)",
    ]


def test_a_log_of_json_has_what_was_finished_before(seconds):
    log = io.StringIO()
    resumed_at_400_of_1000(JsonLog(log), seconds)
    last = json.loads(log.getvalue().splitlines()[-1])
    assert [last[name] for name in ("done", "done_before", "seconds")] == [1000, 400, 20]


def test_without_anything_done_there_is_no_rate(seconds):
    log = io.StringIO()
    with Reporter(plain_console(log)).meter("train", 1000, "tokens") as meter:
        seconds[0] += 10
        meter.advance(0)
        seconds[0] += 10
        meter.advance(500)
    assert log.getvalue().splitlines() == [
        "train: 0 % (0 tokens of 1k tokens)",
        "train: 50 % (500 tokens of 1k tokens), 25 tokens/s, 20 s left",
        "train: 500 tokens in 20.0 s",
    ]

"""Ctrl-C is acted upon even where Python drops its exception."""

import os
import signal

import pytest

from gristmill.foundation.progress import Reporter, raise_lost_interrupt, remember_interrupts


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

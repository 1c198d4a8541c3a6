"""The program ends with the right exit code and all that it printed, although it does not free its objects."""

import subprocess
import sys

import pytest

from gristmill.foundation.progress import Terminated
from gristmill.pipelines.cli import main as main_module

PROGRAM = """
import atexit, sys, threading, time
from gristmill.pipelines.cli import main as cli

def end():
    time.sleep(0.2)
    print("a thread ended", flush=True)

def command():
    atexit.register(print, "at exit")
    threading.Thread(target=end).start()
    print("printed")
    {last}

cli.main = command
cli.console_script()
"""


@pytest.mark.parametrize(
    "last, code, said", [("sys.exit(0)", 0, ""), ("", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('why')", 1, "why\n")]
)
def test_threads_end_handlers_run_and_output_is_whole(last, code, said):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(last=last)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "printed\na thread ended\nat exit\n", said)


def test_an_error_of_the_program_shows_its_traceback():
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(last="1 / 0")], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("message", "code"), [("error return without exception set", 1), ("an error of Python itself", None)]
)
def test_a_compiled_function_that_fails_without_a_reason_is_one_sentence(monkeypatch, capsys, message, code):
    def fails(args=None):
        raise SystemError(message)

    monkeypatch.setattr(main_module.application, "app", fails, raising=False)
    with pytest.raises(SystemError if code is None else SystemExit) as caught:
        main_module.main(["curate"])
    assert code is None or (caught.value.code == 1 and "as where memory is refused" in capsys.readouterr().err)


def test_a_closed_standard_output_is_no_success_in_silence():
    command = [sys.executable, "-c", PROGRAM.format(last="print('x' * 100000)")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert "BrokenPipe" in process.stderr.read().decode()


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_ctrl_c_while_the_commands_are_imported_is_no_traceback(call, monkeypatch, interrupt, code):
    class Importing:
        @property
        def app(self):
            raise interrupt

    monkeypatch.setattr(main_module, "application", Importing())
    ended, said = call("doctor")
    assert ended == code and "interrupted; finished work is kept" in said and "Traceback" not in said

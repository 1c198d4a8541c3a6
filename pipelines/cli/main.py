"""The command line: runs a command of cli/commands.py and turns its errors into exit codes and messages."""

import atexit
import errno
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from gristmill.foundation.errors import InputError, RecipeError, explain_disk_error
from gristmill.foundation.progress import Terminated, print_error, remember_interrupts
from gristmill.foundation.startup import DeferredModule, delay_collections, set_thread_variables

# Worker processes import this file with the command's script, and run no command.
application = DeferredModule("gristmill.pipelines.cli.commands")

NO_ROOM_FOR_LIBRARIES = (
    "out of memory while a library was loaded; raise the limit (`ulimit -v` shows it in kB) or free memory: curation "
    "needs about 600 MB of addresses, training 3 GB"
)
FEWER_WORKERS = "finished work is kept: run the same command with fewer --workers"
OPENBLAS_THREADS = "OPENBLAS_NUM_THREADS"
INTERRUPTED = "interrupted; finished work is kept, run the same command to resume"


def console_script() -> None:
    """The program `gristmill`: main, then the end of the process without freeing every object, which takes 0.2 s."""
    delay_collections()
    try:
        main()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            raise
        _leave(error.code or 0)
        raise
    _leave(0)


def _leave(code: int) -> None:
    """Does what Python does before it frees its objects, and ends the process. Returns where the end is left to Python:
    for torch, which ends its own threads and processes, and where standard output is closed."""
    if "torch" in sys.modules:
        return
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    with suppress(OSError, ValueError):
        atexit._run_exitfuncs()  # type: ignore[attr-defined] # as multiprocessing does in its children
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit codes: 0 success, 1 failure, 2 invalid command or recipe, 75 after a hang of training, 130 after Ctrl-C,
    143 after SIGTERM. User errors show no traceback."""
    remember_interrupts()
    threading.excepthook = _thread_failed
    # pydantic looks for plugins in every installed package, 0.05 s a process; gristmill uses none.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # pyarrow's allocator returns freed memory after 10 ms, which a task gets back soon: a twentieth of curation's time.
    # A second, in ms; after each step all of it is returned (runtime/startup.py).
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
    set_thread_variables()
    _import_numpy_without_threads()
    try:
        application.app(args=arguments)
    except RecipeError as error:
        _exit(error, 2)
    except InputError as error:
        _exit(error, 1)
    except ImportError as error:
        if not _is_out_of_memory(error):
            raise
        _exit(NO_ROOM_FOR_LIBRARIES, 1)
    except OSError as error:
        if (message := explain_disk_error(error)) is not None:
            _exit(message, 1)
        if not _is_out_of_memory(error):
            raise
        _exit(NO_ROOM_FOR_LIBRARIES, 1)
    except MemoryError:
        _exit(f"out of memory; {FEWER_WORKERS}", 1)
    except SystemError as error:
        if "without exception set" not in str(error):
            raise
        _exit(f"a compiled function failed without a reason ({error}), as where memory is refused; {FEWER_WORKERS}", 1)
    except SystemExit as error:
        if (interrupt := _keyboard_interrupt(error)) is None:
            raise
        _exit(str(interrupt) or INTERRUPTED, 143 if isinstance(interrupt, Terminated) else 130)
    except Terminated:
        _exit(INTERRUPTED, 143)
    except KeyboardInterrupt:  # while the commands themselves are imported; later it comes as SystemExit
        _exit(INTERRUPTED, 130)
    except Exception as error:
        if "KeyboardInterrupt" not in str(error):  # which pydantic makes of a Ctrl-C while it builds a schema
            raise
        _exit(INTERRUPTED, 130)


def _import_numpy_without_threads() -> None:
    """NumPy's OpenBLAS starts a thread for every further core when it is imported. A process with threads does not fork
    its workers (tasks/local.py), and workers that are started anew take 0.7 s. The variable is for this import alone:
    torch may use OpenBLAS too."""
    if OPENBLAS_THREADS in os.environ:
        return
    os.environ[OPENBLAS_THREADS] = "1"
    try:
        importlib.import_module("numpy")
    finally:
        del os.environ[OPENBLAS_THREADS]


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a library could not be loaded for want of memory, which the loader says in words alone."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if any(
            words in str(error) for words in ("failed to map segment", "cannot allocate memory", "cannot create shared")
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _thread_failed(failure: threading.ExceptHookArgs) -> None:
    """Prints nothing for a full disk in a library's thread, such as TensorBoard's: whoever writes next is told."""
    if not isinstance(failure.exc_value, OSError) or explain_disk_error(failure.exc_value) is None:
        threading.__excepthook__(failure)


def _keyboard_interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt behind typer's SystemExit, if any; training's has a message about what was saved."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _exit(error: object, code: int) -> None:
    print_error(error, as_json="--log-json" in sys.argv)
    sys.exit(code)


if __name__ == "__main__":
    console_script()

"""Runs gristmill's command line in forks of one process that has imported everything, to save start-up time.

Reads one JSON line a run from standard input, {"arguments": [...], "cwd": ..., "log": ...}; answers with one line that
names the run's process, the leader of a process group of its own, and with one line that gives its wait status. "arm",
"journal", "explore" and "enter", where they are given, are the arguments of these functions of the preloaded
tests/simulation/failing_calls.c; "memory" is the bytes of addresses that the run and each of its workers may take
beyond those of this process. Arguments of the program: the modules to import, by default those of all stages."""

import ctypes
import importlib
import json
import os
import resource
import sys
import traceback
from multiprocessing import resource_tracker, util
from pathlib import Path

from gristmill.pipelines.cli.main import main as gristmill


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.chdir(order["cwd"])
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
                os.dup2(target, stream)
            if "arm" in order:
                folder, counter, *numbers = order["arm"]
                assert ctypes.CDLL(None).arm(os.fsencode(folder), os.fsencode(counter), *numbers) == 0
            if "journal" in order:
                assert ctypes.CDLL(None).journal(*map(os.fsencode, order["journal"])) == 0
            if "explore" in order:
                assert ctypes.CDLL(None).explore(*map(os.fsencode, order["explore"])) == 0
            if "enter" in order:
                assert ctypes.CDLL(None).enter(*map(os.fsencode, order["enter"])) == 0
            if "memory" in order:
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                most = pages * resource.getpagesize() + order["memory"]
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            sys.argv = ["gristmill", *order["arguments"]]
            leave(gristmill)
        print(json.dumps({"pid": child}), flush=True)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": status}), flush=True)


def leave(command) -> None:
    """Ends this process with the command's exit code, as an interpreter of its own would."""
    code = 0
    try:
        command()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        util._exit_function()  # joins or ends this process's children; os._exit would leave them
        resource_tracker._resource_tracker._stop()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


LOADED = (  # before the first fork: what the stages load when they run
    "lm_eval.tasks",
    "matplotlib.figure",
    "sklearn.linear_model",
    "torch.distributed.checkpoint",
    "gristmill.evaluation.run",
    "gristmill.pipelines.cli.checkpoint",
    "gristmill.pipelines.cli.stages",
    "gristmill.pipelines.cli.data",
    "gristmill.pipelines.cli.stages",
    "gristmill.training.run",
)

if __name__ == "__main__":
    for module in sys.argv[1:] or LOADED:
        importlib.import_module(module)
    main()
    os._exit(0)  # freeing all modules takes 1.5 s

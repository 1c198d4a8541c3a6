"""Shared fixtures: files outside the repository, and a small real corpus from the Python installation."""

import ast
import gc
import json
import os
import signal
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from file_seconds import RECORDED, longest_first
from hypothesis import settings

if TYPE_CHECKING:
    from tests.support.forked_pool import ForkedPool

ROOT = Path(__file__).parent.parent
POOL: pytest.StashKey["ForkedPool"] = pytest.StashKey()

# No test asserts a time: a first call that compiles a kernel is slow.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

# Until all tests are collected nearly everything that is made stays: a search for garbage finds none.
gc.disable()

# A shell without job control starts background commands with Ctrl-C ignored, and every process under them inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules are compiled once, not by each of the some hundred programs that tests start, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# One compute thread, set before torch is imported: small models are slower with two, and tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRISTMILL_TASK_PACKAGES", "tests test_slurm test_ray test_node test_parcel test_carriers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers of pytest-xdist take the files in this order, with --no-loadscope-reorder."""
    if hasattr(config, "workerinput"):
        items[:] = longest_first(
            items,
            file_of=lambda item: item.nodeid.partition("::")[0],
            is_parallel=lambda item: "pool" in getattr(item, "fixturenames", ()),
            seconds=json.loads(RECORDED.read_text("utf-8")),
        )


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is loaded by now stays to the end, and is not searched for garbage again: each search took half a second.

    One pool of forked processes for all tests that ask for it: made after their modules are loaded, and before torch
    computes anything in this process."""
    gc.enable()
    gc.freeze()
    wanted = any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly:
        from tests.support.forked_pool import ForkedPool

        session.config.stash[POOL] = ForkedPool(8)


def pytest_unconfigure(config: pytest.Config) -> None:
    if POOL in config.stash:
        config.stash[POOL].close()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> "ForkedPool":
    return pytestconfig.stash[POOL]


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """Path of a file of the shared data folder; skips the calling test, with the reason, if it is not there."""

    def find(relative: str) -> Path:
        root = Path(os.environ.get("GRISTMILL_SHARED_DATA") or ROOT / "../shared/data")
        path = root / relative
        if not path.exists():
            pytest.skip(f"{path} is absent; set GRISTMILL_SHARED_DATA to the shared data folder")
        return path

    return find


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """Runs the command line in this process: (exit code, what it said). A traceback would be an exception here."""
    from gristmill.pipelines.cli.main import main  # loaded here: most tests do without it

    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gristmill", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
        captured = capfd.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    return run


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    """A kills.Launcher, which loads the modules of all stages: five seconds, once for the files that use it."""
    from kills import Launcher  # loaded here: most tests do without it

    launcher = Launcher(tmp_path_factory.mktemp("launcher"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory) -> Path:
    """A folder of text files: the docstrings of the standard library's modules, one file a module, about 1 MB."""
    folder = tmp_path_factory.mktemp("small_corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in sorted(sys.stdlib_module_names):
        path = library / f"{name}.py"
        if path.is_file():
            (folder / f"{name}.txt").write_text(docstrings(path), "utf-8")
    return folder


def docstrings(path: Path) -> str:
    tree = ast.parse(path.read_text("utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n\n".join(text for text in found if text)

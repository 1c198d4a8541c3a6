"""pyarrow does without pandas until somebody asks for it."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from gristmill.foundation.startup import block_imports

PROGRAM = """
import sys
import pyarrow
from gristmill.foundation.startup import block_pandas_import

block_pandas_import()
table = pyarrow.table({"a": pyarrow.array([1, 2])})
print("pandas" in sys.modules, table.to_pandas()["a"].sum(), "pandas" in sys.modules)
"""


def test_pandas_is_imported_only_for_to_pandas():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "3", "True"]


# A process of its own: in one that has run other tests, the arrays would fill memory that is already held.
SCRIPT = """
import json, numpy, psutil, pyarrow
from gristmill.foundation.startup import release_unused_memory

def resident():
    return psutil.Process().memory_info().rss

before = resident()
held = [pyarrow.array(numpy.full(4096, number)).cast(pyarrow.string()) for number in range(2000)]
used = resident()
last = held[-1]
del held
release_unused_memory()
print(json.dumps({"before": before, "used": used, "after": resident(), "last": last[0].as_py()}))
"""


def test_what_was_freed_goes_back_to_the_system():
    memory = json.loads(subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True).stdout)
    assert memory["used"] > memory["before"] + 50_000_000
    assert memory["after"] < memory["used"] - 50_000_000
    assert memory["last"] == "1999"


# Hidden modules cannot be imported inside the block, and can afterwards.


@pytest.fixture
def module_on_disk(tmp_path, monkeypatch):
    (tmp_path / "hidden_example.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "hidden_example"
    sys.modules.pop("hidden_example", None)


def test_a_hidden_module_is_not_found_until_the_block_ends(module_on_disk):
    with block_imports(module_on_disk), pytest.raises(ModuleNotFoundError, match="hidden_example"):
        importlib.import_module(module_on_disk)
    assert importlib.import_module(module_on_disk).VALUE == 3


def test_an_imported_module_stays(module_on_disk):
    loaded = importlib.import_module(module_on_disk)
    with block_imports(module_on_disk):
        assert importlib.import_module(module_on_disk) is loaded


# OpenBLAS under a limit of memory.

LIMITED_IMPORT = """
import resource
from gristmill.foundation import startup
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + {more}
resource.setrlimit(resource.RLIMIT_AS, (most, most))
try:
    startup.check_room_for_scipy()
except MemoryError as error:
    print("refused")
else:
    import scipy.special
    print("loaded")
"""


@pytest.mark.parametrize(("more", "outcome"), [(20_000_000, "refused"), (3_000_000_000, "loaded")])
def test_scipy_is_not_imported_where_openblas_would_wait_for_memory_for_ever(more, outcome):
    script = LIMITED_IMPORT.format(more=more)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == outcome


BY_PYTHON = "import gristmill; gristmill.train"
BY_COMMAND = """
import contextlib
from gristmill.pipelines.cli.main import main
with contextlib.suppress(SystemExit):
    main(["--version"])
"""


@pytest.mark.parametrize(
    ("start", "asked", "policy"),
    [(BY_PYTHON, None, "PASSIVE"), (BY_COMMAND, None, "PASSIVE"), (BY_COMMAND, "active", "ACTIVE")],
)
def test_waiting_threads_of_torch_sleep_unless_the_environment_says_otherwise(start, asked, policy):
    """As its OpenMP library prints when it is loaded."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": asked} if asked else {})
    command = [sys.executable, "-c", f"{start}\nimport torch"]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    assert f"OMP_WAIT_POLICY = '{policy}'" in printed

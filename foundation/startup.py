"""Settings of a whole process: blocked and deferred imports, garbage collection, memory pages, torchrun's variables,
free memory. Modules that a library asks for and does without are not imported."""

import ctypes
import gc
import importlib
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.foundation.errors import RecipeError


class HidingFinder:
    """First in sys.meta_path: raises ImportError for the hidden names, as if they were not installed."""

    def __init__(self, names: Sequence[str]):
        self._names = frozenset(names)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}: hidden by block_imports", name=name)


@contextmanager
def block_imports(*names: str) -> Iterator[None]:
    """Inside the block, importing one of the names raises ImportError, unless it is imported already.

    After the block all names can be imported again."""
    finder = HidingFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


# When Python looks for unreachable cycles of objects: not while modules are imported, where there are none.

# New objects between two collections. mypy, a program that also starts often, sets 200,000.
NUM_NEW_OBJECTS = 100_000
_USUAL = gc.get_threshold()


def delay_collections() -> None:
    """Until `freeze_loaded_modules`, Python collects rarely: a tenth of the start-up time of a command."""
    gc.set_threshold(NUM_NEW_OBJECTS, *_USUAL[1:])


def freeze_loaded_modules() -> None:
    """Python collects as usual again, and leaves the objects that exist now out of it: modules and their contents,
    which live until the process ends. The processes that are forked from this one share their memory."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# Transparent huge pages of Linux, which data tasks run without.
#
# Allocators (mimalloc of pyarrow, numpy) ask for them, and the kernel then clears 2 MB where a task writes a few kB:
# a twelfth of the CPU time of curation.

PR_SET_THP_DISABLE, PR_GET_THP_DISABLE = 41, 42  # linux/prctl.h


def set_huge_pages(allowed: bool) -> None:
    """For all memory that this process, and those that it starts, get from now on. Does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, int(not allowed), 0, 0, 0)


def are_huge_pages_allowed() -> bool:
    """Whether this process may get them; what the kernel's own setting says is not looked at."""
    return sys.platform != "linux" or ctypes.CDLL(None).prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) != 1


@contextmanager
def without_huge_pages() -> Iterator[None]:
    were_allowed = are_huge_pages_allowed()
    set_huge_pages(False)
    try:
        yield
    finally:
        set_huge_pages(were_allowed)


# Rank and world size from the environment variables that torchrun sets.


# scipy's OpenBLAS asks for a buffer for each thread when it is loaded, and asks for ever where it is refused.
BLAS_BYTES, BLAS_THREAD_BYTES = 100_000_000, 35_000_000


def check_room_for_scipy() -> None:
    """Call before scipy or scikit-learn is imported. Raises MemoryError where a limit of addresses refuses OpenBLAS its
    buffers: the import would never end."""
    if "scipy.special" in sys.modules:
        return
    num_bytes = BLAS_BYTES + (os.cpu_count() or 1) * BLAS_THREAD_BYTES
    try:
        mmap.mmap(-1, num_bytes).close()
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes:,} bytes of OpenBLAS") from error


def set_thread_variables() -> None:
    """Torch computes with as many threads as this process has cores, and those that wait for each other sleep instead
    of spinning, unless OMP_NUM_THREADS and OMP_WAIT_POLICY are set. Called before torch is imported, when its OpenMP
    library reads them.

    A thread that spins keeps its core while the one it waits for has none: beside other programs that took both of two
    cores, `demo` trained 15 to 25 times as many tokens a second with this; alone it takes 5 to 20 % longer."""
    if (cores := usable_cores()) < _allowed_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def torchrun_variable(name: str, default: int) -> int:
    """The variable's value. Raises RecipeError if it is not a whole number from 0."""
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RecipeError(f"{name}={text!r} in the environment is no number of processes; torchrun sets it: unset it")
    return int(text)


def rank_and_world_size() -> tuple[int, int]:
    """(this process's rank, the number of processes); (0, 1) without torchrun.

    Raises RecipeError if the variables contradict each other."""
    rank, world_size = torchrun_variable("RANK", 0), torchrun_variable("WORLD_SIZE", 1)
    if rank >= world_size:
        raise RecipeError(f"RANK={rank} in the environment, but WORLD_SIZE={world_size}; unset both")
    return rank, world_size


# Gives memory that is free inside this process back to the system, so that a step does not hold what the one before
# it needed.


def release_unused_memory() -> None:
    """pyarrow's allocator and the C library's keep freed memory for later: curation of 190 MB of JSON lines (240,000
    records, one worker) has a peak of 484 MB with this call after every step, 555 MB without. Takes a millisecond or
    two."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None:
        pyarrow.default_memory_pool().release_unused()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(0)


# Keeps pandas out of processes that use pyarrow alone.


def block_pandas_import() -> None:
    """After the call pyarrow does not import pandas by itself, which takes 0.3 s and 50 MB a process.

    pyarrow (26) looks once, when it builds its first array, whether pandas is installed; it looks while pandas is
    hidden. A later call of to_pandas, or an import of pandas, works as before. Does nothing where pyarrow is not
    imported."""
    pyarrow = sys.modules.get("pyarrow")
    if pyarrow is not None and "pandas" not in sys.modules:
        with block_imports("pandas"):
            pyarrow.array([0])


# What this process may take of the machine: in a container, or a job of Slurm, less than there is.

MEMORY_INFO = Path("/proc/meminfo")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
# Of the kernel's second version of control groups, and of its first.
MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
QUOTA_FILES = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def host_bytes() -> int:
    """The memory of this machine, or the limit of this process's control group where that is less."""
    limits = [limit for limit, _ in _memory_limits()]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


def available_bytes() -> int:
    """Bytes that can be taken without swapping (Linux's MemAvailable), or fewer where the limit of this process's
    control group leaves fewer; elsewhere half of the machine's memory."""
    if not MEMORY_INFO.is_file():
        return host_bytes() // 2
    lines = MEMORY_INFO.read_text().splitlines()
    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
    return min([available, *(max(0, limit - used) for limit, used in _memory_limits())])


def usable_cores() -> int:
    """Cores that this process may run on, or fewer where its control group has time on fewer, rounded up: a container
    with `--cpus 1.5` on a machine of 96 cores -> 2."""
    cores = _allowed_cores()
    for texts in _texts_of_groups("cpu", QUOTA_FILES):
        quota, period = " ".join(texts).split()  # "150000 100000": microseconds in each of so many
        if quota.isdigit():  # else "max" or "-1"
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _memory_limits() -> list[tuple[int, int]]:
    """(limit, use) in bytes of each control group with a limit ("max" is none). As Kubernetes counts use: without what
    the kernel keeps of files that nobody has read again, and gives up first."""
    files = [(*names, "memory.stat") for names in MEMORY_FILES]
    limits = []
    for limit, used, statistics in _texts_of_groups("memory", files):
        if limit.strip().isdigit():
            counts = dict(line.split(" ", 1) for line in statistics.splitlines())
            limits.append((int(limit), int(used) - int(counts.get("inactive_file", 0))))
    return limits


def _texts_of_groups(controller: str, files: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """The texts of one version's files, in each control group around this process that has all of them. A container
    sees its own group as the outermost one."""
    folders = [CONTROL_GROUPS, CONTROL_GROUPS / controller]
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.is_file() else []:
        _, controllers, path = line.split(":", 2)  # "4:memory:/slurm/job_7", or "0::/user.slice" of the second version
        if not controllers or controller in controllers.split(","):
            folder = CONTROL_GROUPS / controller if controllers else CONTROL_GROUPS
            folders += [folder := folder / name for name in path.split("/") if name]
    for folder in folders:
        for names in files:
            with suppress(OSError):
                yield [(folder / name).read_text() for name in names]


def _allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Modules that are imported when they are first used: for large libraries that most runs of a command do not need.


class DeferredModule:
    """Stands for a module of that name and imports it at the first access to an attribute.

    trafilatura = DeferredModule("trafilatura") at the top of a file, then trafilatura.extract(page) as usual. An import
    error is raised at that access."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loaded(), attribute)

    def __repr__(self) -> str:
        return f"<deferred module {self._name!r}>"

    def _loaded(self) -> ModuleType:
        return importlib.import_module(self._name)

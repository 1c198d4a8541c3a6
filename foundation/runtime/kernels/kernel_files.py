"""The folder that keeps compiled kernels: one for each user of a machine, which all clones, workers and tests share.

The files hold machine code and pickles. So the folder must belong to the user and nobody else may write to it;
otherwise nothing is read from it. Their machine code is linked and called without numba."""

import builtins
import ctypes
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import pickle
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numpy as np

VARIABLE = "GRISTMILL_KERNEL_CACHE"


@cache
def kernel_folder() -> Path | None:
    """$GRISTMILL_KERNEL_CACHE, or gristmill/kernels below $XDG_CACHE_HOME or ~/.cache; made with mode 0700 if absent.

    If that cannot be used, a folder of this user in the folder for temporary files; if that cannot either, None, and
    every process compiles its kernels in memory. Either is reported in one line."""
    chosen = _chosen_folder()
    reason = refusal(chosen)
    if reason is None:
        return chosen
    fallback = Path(tempfile.gettempdir()) / f"gristmill-kernels-{os.geteuid()}"
    usable = refusal(fallback) is None
    report(
        f"kernel cache: {chosen} {reason}; "
        + (f"using {fallback}" if usable else "every process compiles its kernels again")
        + f" (set {VARIABLE} to a folder that only you can write to)"
    )
    return fallback if usable else None


def refusal(folder: Path) -> str | None:
    """Why compiled kernels are not read from this folder; None if it may be used. Makes it if it is absent."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
    except OSError as error:
        return f"cannot be created ({error.strerror})"
    if not stat.S_ISDIR(state.st_mode):
        return "is not a folder"
    if not is_private(state):
        return f"belongs to another user or can be written by others (mode {stat.S_IMODE(state.st_mode):04o})"
    return None if os.access(folder, os.W_OK | os.X_OK) else "is read-only"


def is_private(state: os.stat_result) -> bool:
    """Whether the file or folder belongs to this user and nobody else may write to it."""
    return state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@cache
def report(line: str) -> None:
    """The line on standard error, once; workers print nothing, since their driver has the same folder."""
    if multiprocessing.parent_process() is None:
        print(line, file=sys.stderr)


def _chosen_folder() -> Path:
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return root.expanduser().absolute() / "gristmill" / "kernels"
    except RuntimeError:  # no home folder is known
        return Path("/nonexistent") / "gristmill" / "kernels"


# Digest of a module's source and of every module of the same package that it imports, directly or not.
#
# Imports are found in the text, so nothing is imported: `from package.folder.file import name`, `import
# package.folder.file` and `DeferredModule("package.folder.file")`, at the top of a file or inside a function.
# Relative imports are not followed; there are none.

_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n]*)|import[ \t]+([\w., \t]+))", re.M
)
_DEFERRED = re.compile(r"\bDeferredModule\(\s*\"([\w.]+)\"")
_NAME, _WORD = re.compile(r"[\w.]+"), re.compile(r"\w+")


def source_files(module: str, path: Path) -> dict[str, Path]:
    """Name -> file of the module and of all modules of its package that it reaches, sorted by name.

    module: its full name, such as gristmill.foundation.files; path: its file."""
    parts = module.split(".")
    root = path.parents[len(parts) - 2] if len(parts) > 1 else path.parent
    sources = {module: path}
    waiting = [module]
    while waiting:
        for name, file in _imported(sources[waiting.pop()], parts[0], root).items():
            if name not in sources:
                sources[name] = file
                waiting.append(name)
    return dict(sorted(sources.items()))


@cache
def source_digest(module: str, path: Path) -> str:
    """SHA-256 of the bytes of all source_files: any edit changes it."""
    lines = "".join(f"{name} {_file_digest(file)}\n" for name, file in source_files(module, path).items())
    return hashlib.sha256(lines.encode()).hexdigest()


@cache
def _imported(path: Path, package: str, root: Path) -> dict[str, Path]:
    imported: dict[str, Path] = {}
    text = path.read_text("utf-8")
    statements = [*_IMPORT.findall(text), *(("", "", name) for name in _DEFERRED.findall(text))]
    for origin, names, plain in statements:
        members = [f"{origin}.{member}" for member in _WORD.findall(names)]
        for name in _NAME.findall(plain) or [origin, *members]:
            first, *rest = name.split(".")
            file = root.joinpath(*rest).with_suffix(".py") if rest else root / f"{first}.py"
            if first == package and file.is_file():
                imported[name] = file
    return imported


@cache
def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Files of compiled kernels: read only if they are whole and private, replaced in one step, and locked while a process
# compiles.
#
# A file is named by the digest of everything that determines its machine code: the kernel's sources, the types of its
# arguments, the CPU, and the versions of Python, numba, llvmlite and numpy. So it is never stale, and two clones with
# equal sources share it.

MAGIC = b"gristmill kernel 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_WAIT_SECONDS = 300.0  # for another process that compiles the kernel; the slowest one takes 20 s on a free core
POLL_SECONDS = 0.02
UNUSED_SECONDS = 30 * 86400.0  # files that were not read for so long are removed
TOUCH_SECONDS = 86400.0
# Suffixes: what numba needs to call a kernel from Python and from others that it compiles, and what Python needs to
# call it without numba.
KERNEL, CALLED, ENTRY = "kernel", "called", "entry"


def kernel_path(function: Callable[..., Any], argument_types: Any, processor: Any, suffix: str) -> Path | None:
    """The file of a kernel for these types of arguments and this processor; None if nothing can be kept."""
    folder = kernel_folder()
    if folder is None:
        return None
    key = repr((_identity(function), versions(), argument_types, processor))
    return folder / f"{function.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:40]}.{suffix}"


@cache
def _identity(function: Callable[..., Any]) -> tuple[Any, ...]:
    code = hashlib.sha256(function.__code__.co_code + _closure(function)).hexdigest()
    line = function.__code__.co_firstlineno
    return (function.__module__, function.__qualname__, line, code, sources_of_function(function))


def sources_of_function(function: Callable[..., Any]) -> str:
    """Digest of the function's file and of all files of its package that it imports."""
    path = sys.modules[function.__module__].__file__
    assert path is not None
    return source_digest(function.__module__, Path(path))


def _closure(function: Callable[..., Any]) -> bytes:
    if not function.__closure__:
        return b""
    from numba.core.serialize import dumps  # 0.4 s; few kernels have variables of an enclosing function

    return dumps(tuple(cell.cell_contents for cell in function.__closure__))


@cache
def versions() -> tuple[Any, ...]:
    """Versions and settings that also determine machine code, such as NUMBA_BOUNDSCHECK or NUMBA_OPT."""
    settings = sorted((name, os.environ[name]) for name in os.environ if name.startswith("NUMBA_"))
    return (sys.version, importlib.metadata.version("numba"), llvmlite.__version__, np.__version__, settings)


def read_kernel(path: Path) -> bytes | None:
    """The payload of a kept file; None if there is none, or one that is damaged or that others can write to."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        state = os.fstat(file.fileno())
        if not is_private(state):
            report(f"kernel cache: {path} can be written by others; it is made again")
            return None
        content = file.read()
        if time.time() - state.st_mtime > TOUCH_SECONDS:
            os.utime(file.fileno())
    head, payload = content[: len(MAGIC) + DIGEST_BYTES], content[len(MAGIC) + DIGEST_BYTES :]
    if head != MAGIC + hashlib.sha256(payload).digest():
        report(f"kernel cache: {path} is damaged; it is made again")
        return None
    return payload


def write_kernel(path: Path, payload: bytes) -> None:
    """Replace the file in one step. A full disk is reported, and the kernel stays in memory."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
        try:
            with open(descriptor, "wb") as file:
                file.write(MAGIC + hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        _remove_unused(path.parent)
    except OSError as error:
        report(f"kernel cache: {path} cannot be written ({error.strerror}); it is made again in every process")


@cache
def _remove_unused(folder: Path) -> None:
    """Once a process: remove what no process has read for UNUSED_SECONDS."""
    oldest = time.time() - UNUSED_SECONDS
    for path in folder.glob("*.*"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:
            continue  # another process removed it


def acquire(path: Path) -> bool:
    """Wait until this process may compile the kernel of that file; whether another process may have compiled it
    meanwhile. The lock is one byte of the file `locks`: the system releases it when its owner dies."""
    deadline = time.monotonic() + MAX_WAIT_SECONDS
    waited = False
    while not _try_lock(path):
        if path.exists() or time.monotonic() > deadline:
            return True
        waited = True
        time.sleep(POLL_SECONDS)
    return waited or path.exists()


def release(path: Path) -> None:
    descriptor = _locks(path.parent, os.getpid())
    if descriptor is not None:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, _place(path))


def _try_lock(path: Path) -> bool:
    """Whether this process has the lock now. Without a file of locks it needs none."""
    descriptor = _locks(path.parent, os.getpid())
    if descriptor is None:
        return True
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(path))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks
    return True


@cache
def _locks(folder: Path, process: int) -> int | None:
    try:
        return os.open(folder / "locks", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _place(path: Path) -> int:
    """The byte of the file `locks` that stands for this kernel."""
    return int(hashlib.sha256(path.name.encode()).hexdigest()[:10], 16)


# Values that the code alone determines and that are slow to compute, kept beside the user's compiled kernels.
#
# A file is named by the digest of the sources that compute the value, the version of Python and what the value is
# computed from, so it is never stale.


def cached_array(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Decorator: the function's array, for each value of its arguments, which are strings or numbers; computed once per
    machine and read once per process."""

    @cache
    @wraps(compute)
    def read_or_compute(*arguments: Any) -> np.ndarray:
        path = _path(compute, repr(arguments), "array")
        payload = None if path is None else read_kernel(path)
        if payload is not None:
            return np.load(io.BytesIO(payload), allow_pickle=False)
        value, content = compute(*arguments), io.BytesIO()
        if path is not None:
            np.save(content, value, allow_pickle=False)
            write_kernel(path, content.getvalue())
        return value

    return read_or_compute


def kept_json(compute: Callable[[], Any], origin: Callable[..., Any], digest: str) -> Any:
    """JSON values of compute(), from the disk if they were computed before. origin: the function whose
    sources compute them; digest: of what they are computed from."""
    path = _path(origin, digest, "json")
    payload = None if path is None else read_kernel(path)
    if payload is not None:
        return json.loads(payload)
    value = compute()
    if path is not None:
        write_kernel(path, json.dumps(value).encode())
    return value


def _path(function: Callable[..., Any], digest: str, suffix: str) -> Path | None:
    folder = kernel_folder()
    if folder is None:
        return None
    module = sys.modules[function.__module__].__file__
    assert module is not None
    sources = source_digest(function.__module__, Path(module))
    key = repr((function.__module__, function.__qualname__, sources, sys.version, np.__version__, digest))
    return folder / f"{function.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:40]}.{suffix}"


# Machine code of kernels, called without numba: importing numba and its reading of cached code take 0.7 s a process.
#
# numba compiles for every kernel a function that takes the arguments as Python gives them, checks and unpacks them. Its
# object code is linked here by llvmlite, as numba does, with the same functions of numba's C extensions: these are
# loaded by their files, under their own names, so that a later `import numba` uses them too. Source: numba 0.68,
# core/base.py (_load_global_helpers), core/runtime/nrt.py (_Runtime.initialize), core/cpu.py (get_executable).

MATH = ("ceil", "copysign", "cos", "exp", "floor", "log", "log10", "pow", "sin", "sqrt", "tan")
_numbers = itertools.count()


class Entry(NamedTuple):
    """object_code: of a kernel and all that it calls. symbol: of the function that takes Python's arguments. imported:
    what it needs of numba's functions. constants: symbol of an environment -> (module, Python objects that the code
    refers to); its own first, then those of kernels that it calls."""

    object_code: bytes
    symbol: str
    imported: Sequence[str]
    constants: Mapping[str, tuple[str, Sequence[Any]]]


def linked(entry: Entry, function: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as a built-in function. Raises LookupError or RuntimeError if the code refers to
    something that is not there."""
    dynamic = _extension("_dynfunc")
    builder = llvm.JITLibraryBuilder().add_object_img(entry.object_code).add_current_process()
    for name in entry.imported:
        builder.import_symbol(name, _symbols()[name])
    for name in (entry.symbol, *entry.constants):
        builder.export_symbol(name)
    library = builder.link(_linker(), f"{function.__qualname__}-{next(_numbers)}")
    environments = {}
    for name, (of_constants, constants) in entry.constants.items():
        environments[name] = environment = dynamic.Environment(vars(importlib.import_module(of_constants)))
        environment.consts.extend(constants)
        ctypes.c_void_p.from_address(library[name]).value = id(environment)
    module = sys.modules[function.__module__]
    own = next(iter(environments.values()))
    keep = (library, environments)
    return dynamic.make_function(module, function.__name__, "", library[entry.symbol], own, keep)


@ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
def _unpickle(address: int, num_bytes: int, _: int) -> Any:
    """In the place of numba's function, which imports numba: the type of a result, or an exception and its arguments.
    The bytes are in the object code."""
    return pickle.loads(ctypes.string_at(address, num_bytes))


@cache
def processor() -> tuple[str, str, str]:
    """Target of the machine code: the triple, the CPU's name and its features."""
    return (llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())


def imported_names(object_code: bytes) -> tuple[str, ...]:
    """The names of numba's functions that occur in the code's table of symbols."""
    return tuple(name for name in _symbols() if name.encode() + b"\0" in object_code)


@cache
def _linker() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler()


@cache
def _symbols() -> dict[str, int]:
    """Name -> address of everything that kernels refer to, but for the symbols of this process."""
    helpers = _extension("_helperlib").c_helpers
    symbols = {"_Py_NoneStruct": id(None)} | {name: helpers[name] for name in MATH if name in helpers}
    symbols |= {f"numba_{name}": address for name, address in helpers.items()}
    symbols |= {f"numba_{name}": address for name, address in _extension("_dynfunc").c_helpers.items()}
    for name, address in _extension("core.runtime._nrt_python").c_helpers.items():
        symbols[name if name.startswith("_") else f"NRT_{name}"] = address
    symbols["numba_unpickle"] = ctypes.cast(_unpickle, ctypes.c_void_p).value or 0
    errors = (kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException))
    return symbols | {f"PyExc_{error.__name__}": id(error) for error in errors}


@cache
def _extension(name: str) -> ModuleType:
    """A C extension of numba, without `import numba`."""
    full = f"numba.{name}"
    if full in sys.modules:
        return sys.modules[full]
    package = importlib.util.find_spec("numba")
    assert package is not None and package.submodule_search_locations is not None
    *folders, stem = name.split(".")
    folder = Path(package.submodule_search_locations[0]).joinpath(*folders)
    path = next(path for suffix in EXTENSION_SUFFIXES if (path := folder / f"{stem}{suffix}").exists())
    spec = importlib.util.spec_from_file_location(full, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return sys.modules.setdefault(full, module)

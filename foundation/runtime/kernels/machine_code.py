"""Machine code of kernels, called without numba: importing numba and its reading of cached code take 0.7 s a process.

numba compiles for every kernel a function that takes the arguments as Python gives them, checks and unpacks them. Its
object code is linked here by llvmlite, as numba does, with the same functions of numba's C extensions: these are loaded
by their files, under their own names, so that a later `import numba` uses them too. Source: numba 0.68,
core/base.py (_load_global_helpers), core/runtime/nrt.py (_Runtime.initialize), core/cpu.py (get_executable)."""

import builtins
import ctypes
import importlib
import importlib.util
import itertools
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import llvmlite.binding as llvm

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

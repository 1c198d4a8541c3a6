"""numba's cache of one kernel on disk (kernel_files.py), for all clones and processes of a user.

A process that needs a kernel which another one is compiling waits for it. What is compiled for Python to call and what
is compiled for other kernels to call are kept apart: the latter is never optimized alone (CalledLibrary)."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import numba
from numba.core.caching import _Cache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult, compile_result
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.core.types import unliteral
from numba.core.typing.typeof import Purpose, typeof
from numba.extending import intrinsic

from gristmill.foundation.runtime.kernels.kernel_files import (
    CALLED,
    KERNEL,
    Entry,
    acquire,
    imported_names,
    kernel_folder,
    kernel_path,
    read_kernel,
    release,
    write_kernel,
)
from gristmill.foundation.startup import block_imports, without_garbage_collection


class CalledLibrary(JITCodeLibrary):
    """LLVM's intermediate code of a kernel that other kernels call: optimized and translated to machine code as a part
    of theirs only. numba also does both for every kernel alone, so where a calls b and b calls c, three times for c."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """There is none: the dispatcher is not called from Python."""
        return 0

    @property
    def codegen(self) -> Any:
        """Without machine code there is no place for the addresses of constants, which numba sets; `set_constants`."""
        return SimpleNamespace(set_env=lambda name, environment: None)

    def serialize_using_object_code(self) -> tuple[str, bytes]:
        return self.name, self._get_module_for_linking().as_bitcode()


class CalledCompiler(Compiler):
    """numba's compiler, with a CalledLibrary."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.state.library = CalledLibrary(self.state.targetctx.codegen(), "called")


class KernelCache(_Cache):
    """The cache of one kernel, in the interface that numba's dispatcher calls while it holds its compiler lock."""

    def __init__(self, function: Callable[..., Any], suffix: str):
        self._function, self._suffix = function, suffix
        self._enabled = True
        self._owned: set[Path] = set()

    @property
    def cache_path(self) -> str | None:
        folder = kernel_folder()
        return None if folder is None else str(folder)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled kernel, or None; then this process has the lock of its file until `release`."""
        path = self.path(signature, target_context.codegen())
        payload = None if path is None else self._stored(path)
        if payload is None:
            return None
        # Of numba's set-up machine code needs this alone; declarations of functions, 0.1 s, are for compiling.
        rtsys.initialize(target_context)
        rebuild = _rebuild_called if self._suffix == CALLED else CompileResult._rebuild
        return rebuild(target_context, *pickle.loads(payload))

    def _stored(self, path: Path) -> bytes | None:
        payload = read_kernel(path)
        if payload is None:
            self._owned.add(path)
            payload = read_kernel(path) if acquire(path) else None
        return payload

    def save_overload(self, signature: Any, compiled: Any) -> None:
        path = self.path(signature, compiled.codegen)
        if path is not None and not compiled.lifted and not compiled.library.has_dynamic_globals:
            write_kernel(path, dumps(compiled._reduce()))

    def release(self) -> None:
        """Let other processes compile what this one has compiled, whether that was saved or not."""
        while self._owned:
            release(self._owned.pop())

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def flush(self) -> None:
        """Nothing is stale: a file's name is the digest of its sources."""

    def path(self, signature: Any, codegen: Any) -> Path | None:
        return kernel_path(self._function, signature, codegen.magic_tuple(), self._suffix) if self._enabled else None


def _rebuild_called(
    target_context: Any, kept: tuple[str, bytes], description: Any, environment: Any, signature: Any, *others: Any
) -> CompileResult:
    """CompileResult._rebuild of a kernel that other kernels call."""
    name, code = kept
    called = CalledLibrary(target_context.codegen(), name)
    called._final_module = llvm.parse_bitcode(code)
    called._finalized = True
    return compile_result(
        target_context=target_context,
        typing_context=target_context.typing_context,
        library=called,
        environment=environment,
        entry_point=target_context.get_executable(called, description, environment),
        fndesc=description,
        signature=signature,
        objectmode=False,
        reload_init=(),
        referenced_envs=others[-1],  # which are to stay: machine code has their addresses
    )


# A kernel compiled by numba (LINKED_VERSIONS of cached_njit.py), with the cache above. Importing this file imports
# numba.


def dispatcher_of(function: Callable[..., Any], options: Mapping[str, Any], suffix: str = KERNEL) -> Any:
    """numba's dispatcher of the kernel, which keeps what it compiles on disk. suffix: KERNEL for one that Python calls,
    CALLED for one that numba finds in other kernels."""
    chosen = {"no_cfunc_wrapper": True, **options}  # a C wrapper is for kernels that are passed as values
    if suffix == CALLED:
        chosen |= {"no_cpython_wrapper": True, "pipeline_class": CalledCompiler}
    dispatcher: Any = numba.njit(**chosen)(function)
    cache = KernelCache(function, suffix)
    compile_or_load, call_template = dispatcher.compile, dispatcher.get_call_template

    def compile_once(signature: Any) -> Any:
        # Compiling makes millions of objects that live until its end: collections take a tenth of its time. And
        # numba asks for scipy's BLAS, which takes 0.15 s to import, and no kernel here calls numpy.dot.
        with global_compiler_lock, block_imports("scipy.linalg"), without_garbage_collection():
            try:
                entry_point = compile_or_load(signature)
                if suffix == KERNEL:
                    set_constants(dispatcher.overloads[tuple(signature)].library)
                return entry_point
            finally:
                cache.release()

    def one_template_for_all_literals(args: Any, kws: Any) -> Any:
        """Without this, f(x, 0) and f(x, 1) in a kernel compile f twice."""
        return call_template(tuple(map(unliteral, args)), {name: unliteral(value) for name, value in kws.items()})

    dispatcher._cache = cache
    dispatcher.compile = compile_once
    dispatcher.get_call_template = one_template_for_all_literals
    return dispatcher


def set_constants(library: JITCodeLibrary) -> None:
    """Lets the machine code of a kernel find the constants of all kernels that it calls."""
    for variable in library._final_module.global_variables:
        environment = lookup_environment(variable.name)
        if environment is not None:
            library.codegen.set_env(variable.name, environment)


def compiled_entry(dispatcher: Any, arguments: Sequence[Any]) -> Entry | None:
    """Compiles the kernel for these arguments, or reads it from the cache; returns what calls it without numba, or
    None if the cache does not hold it."""
    signature = tuple(typeof(argument, Purpose.argument) for argument in arguments)
    dispatcher.compile(signature)
    path = dispatcher._cache.path(signature, dispatcher.targetctx.codegen())
    payload = None if path is None else read_kernel(path)
    if payload is None:
        return None
    library, description, environment, *_, referenced = pickle.loads(payload)
    constants = {environment.env_name: (environment.globals["__name__"], list(environment.consts))}
    constants |= {
        linked.env_name: (linked.globals["__name__"], list(linked.consts)) for linked in referenced if linked.consts
    }
    code = library[2][0]
    return Entry(code, description.llvm_cpython_wrapper_name, imported_names(code), constants)


def intrinsic_type(define: Callable[..., Any]) -> Any:
    """numba's type of an intrinsic, by which it finds its code."""
    typing_context = cpu_target.typing_context
    intrinsic_function = intrinsic(define)
    typing_context.refresh()
    return typing_context.resolve_value_type(intrinsic_function)

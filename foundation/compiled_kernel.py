"""A kernel compiled by numba (0.68), with the cache of kernel_cache.py. Importing this file imports numba."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.types import unliteral
from numba.core.typing.typeof import Purpose, typeof
from numba.extending import intrinsic

from gristmill.foundation.garbage_collection import without_garbage_collection
from gristmill.foundation.hidden_modules import hidden_modules
from gristmill.foundation.kernel_cache import KernelCache
from gristmill.foundation.kernel_entry import Entry, imported_names
from gristmill.foundation.kernel_files import read_kernel


def dispatcher_of(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """numba's dispatcher of the kernel, which keeps what it compiles on disk."""
    # A C wrapper is for kernels that are passed as values.
    dispatcher: Any = numba.njit(**({"no_cfunc_wrapper": True} | dict(options)))(function)
    cache = KernelCache(function)
    compile_or_load, call_template = dispatcher.compile, dispatcher.get_call_template

    def compile_once(signature: Any) -> Any:
        # Compiling makes millions of objects that live until its end: collections take a tenth of its time. And
        # numba asks for scipy's BLAS, which takes 0.15 s to import, and no kernel here calls numpy.dot.
        with global_compiler_lock, hidden_modules("scipy.linalg"), without_garbage_collection():
            try:
                return compile_or_load(signature)
            finally:
                cache.release()

    def one_template_for_all_literals(args: Any, kws: Any) -> Any:
        """Without this, f(x, 0) and f(x, 1) in a kernel compile f twice."""
        return call_template(tuple(map(unliteral, args)), {name: unliteral(value) for name, value in kws.items()})

    dispatcher._cache = cache
    dispatcher.compile = compile_once
    dispatcher.get_call_template = one_template_for_all_literals
    return dispatcher


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
    constants |= {one.env_name: (one.globals["__name__"], list(one.consts)) for one in referenced if one.consts}
    code = library[2][0]
    return Entry(code, description.llvm_cpython_wrapper_name, imported_names(code), constants)


def intrinsic_type(define: Callable[..., Any]) -> Any:
    """numba's type of an intrinsic, by which it finds its code."""
    typing_context = cpu_target.typing_context
    found = intrinsic(define)
    typing_context.refresh()
    return typing_context.resolve_value_type(found)

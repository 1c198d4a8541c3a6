"""numba kernels that are cached on disk (kernel_cache.py) and compiled again when a source they can call has changed.

numba's own cache (0.68) keeps a compiled kernel as long as the text of the kernel's own file is the same, although the
machine code also holds the functions and constants of other files. Here a cached kernel is valid for the digest of the
file and of all files of its package that it imports. It is read or compiled at its first call, not at import."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock
from numba.core.types import unliteral

from gristmill.foundation.hidden_modules import hidden_modules
from gristmill.foundation.kernel_cache import KernelCache


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: `numba.njit(cache=True, **options)` whose cache is invalid after an edit of any file it can call.

    Small functions that other kernels call take forceinline=True: LLVM inlines them. numba's inline="always" inlines in
    Python, which takes longer to equally fast code (all kernels of text and WARC curation, x86-64, November 2026: 82
    against 61 CPU s).

    Kernels must not use numpy.dot, numpy.linalg or the operator @, since they are compiled without scipy's BLAS. They
    cannot be passed to other kernels as values."""

    def compiled(function: Callable[..., Any]) -> Any:
        # A C wrapper is for kernels that are passed as values.
        settings: dict[str, Any] = {"no_cfunc_wrapper": True} | options
        dispatcher: Any = numba.njit(**settings)(function)
        cache = KernelCache(function)
        compile_or_load, call_template = dispatcher.compile, dispatcher.get_call_template

        def compile_once(signature: Any) -> Any:
            # numba asks for scipy's BLAS, which takes 0.15 s to import, and no kernel here calls numpy.dot.
            with global_compiler_lock, hidden_modules("scipy.linalg"), without_garbage_collection():
                try:
                    return compile_or_load(signature)
                finally:
                    cache.release()

        def one_template_for_all_literals(args: Any, kws: Any) -> Any:
            """Without this, f(x, 0) and f(x, 1) in a kernel compile f twice."""
            return call_template(
                tuple(map(unliteral, args)), {name: unliteral(argument) for name, argument in kws.items()}
            )

        dispatcher._cache = cache
        dispatcher.compile = compile_once
        dispatcher.get_call_template = one_template_for_all_literals
        return dispatcher

    return compiled


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Compiling makes millions of objects that live until its end: collections take a tenth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

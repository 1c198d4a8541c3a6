"""Values that the code alone determines and that are slow to compute, kept beside the user's compiled kernels.

A file is named by the digest of the sources that compute the value, the version of Python and what the value is
computed from, so it is never stale."""

import hashlib
import io
import json
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.foundation.kernel_files import read_kernel, write_kernel
from gristmill.foundation.kernel_folder import kernel_folder
from gristmill.foundation.source_digest import source_digest


def kept_array(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
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
    """What compute() returns, JSON values, from the disk if they were computed before. origin: the function whose
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

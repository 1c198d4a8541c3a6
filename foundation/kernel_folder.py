"""The folder that keeps compiled kernels: one for each user of a machine, which all clones, workers and tests share.

The files hold machine code and pickles. So the folder must belong to the user and nobody else may write to it;
otherwise nothing is read from it."""

import multiprocessing
import os
import stat
import sys
import tempfile
from functools import cache
from pathlib import Path

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

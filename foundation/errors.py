"""The two exceptions for user errors. Any other exception is a bug and shows a traceback."""

import difflib
import errno
from collections.abc import Iterable


class RecipeError(Exception):
    """The command or the recipe is wrong; no work was started. The command line exits with 2."""


class InputError(Exception):
    """The work failed on its input or environment: a file, a record, a disk. The command line exits with 1."""


# Messages for operating system errors of files and disks.

KEPT = "what is finished is kept: run the same command again"
MEANING = {
    errno.ENOSPC: f"the disk is full; free some space; {KEPT}",
    errno.EDQUOT: f"the disk quota is used up; free some space; {KEPT}",
    errno.EFBIG: f"the file is larger than the disk or a limit (`ulimit -f`) allows; raise it; {KEPT}",
    errno.EROFS: "the disk is read-only; mount it for writing, or name another --workdir",
    errno.EACCES: "permission denied; change the permissions, or name another --workdir",
    errno.EPERM: "the operation is not permitted; change the permissions, or name another --workdir",
    errno.EIO: f"the disk failed to read or write; check the disk; {KEPT}",
    errno.ESTALE: f"the network disk lost the file; {KEPT}",
    errno.ENOENT: f"no such file: it, or a folder above it, was removed during the run; {KEPT}",
    errno.EEXIST: "a file, or a link to nowhere, exists where a folder is needed; move it away",
    errno.ELOOP: "a loop of symbolic links; remove it, or name another path",
    errno.ENOTDIR: "a file exists where a folder is needed; move it away",
    errno.EISDIR: "a folder exists where a file is needed; move it away",
    errno.EXDEV: "it cannot be renamed across disks; name a --workdir on one disk",
    errno.EMFILE: f"too many open files; raise the limit (`ulimit -n`); {KEPT}",
    errno.ENFILE: f"too many open files on this machine; {KEPT}",
    errno.ENAMETOOLONG: "the name is too long for the disk; name a shorter --workdir",
    errno.ENOMEM: "memory ran out; run the same command with fewer --workers",
    errno.EBUSY: f"the file or folder is in use elsewhere; {KEPT}",
    errno.ENOTEMPTY: f"another process writes into the folder; stop it; {KEPT}",
}


def explain_disk_error(error: OSError, where: str = "") -> str | None:
    """[Errno 28] on work/a.bin -> 'work/a.bin: the disk is full; ...'. None for other errors.

    where: used if the error has no file name."""
    meaning = MEANING.get(error.errno or 0)
    if meaning is None:
        return None
    place = error.filename if error.filename is not None else where
    return f"{place}: {meaning}" if place else meaning


# The known names that are most similar to a misspelt one, for error messages.

MAX_COMPARED_CHARS = 200  # the comparison takes time quadratic in the length


def nearest_names(name: str, known: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """Up to `limit` known names whose similarity ratio (difflib, 0 to 1) reaches the cutoff, most similar first."""
    return difflib.get_close_matches(name[:MAX_COMPARED_CHARS], list(known), n=limit, cutoff=cutoff)


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar known name; None if none reaches the cutoff.

    "min_word" among ["min_words", "max_words"] -> "min_words"."""
    return next(iter(nearest_names(name, known, limit=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The question "did you mean 'min_words'?" if a known name is similar to the given one, else `otherwise`."""
    near = nearest_name(name, known)
    return f"did you mean {near!r}?" if near else otherwise

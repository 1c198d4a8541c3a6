"""Messages for operating system errors of files and disks."""

import errno

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


def disk_trouble(error: OSError, where: str = "") -> str | None:
    """[Errno 28] on work/a.bin -> 'work/a.bin: the disk is full; ...'. None for other errors.

    where: used if the error has no file name."""
    meaning = MEANING.get(error.errno or 0)
    if meaning is None:
        return None
    place = error.filename if error.filename is not None else where
    return f"{place}: {meaning}" if place else meaning

"""Raw files that are verified against the lock while they are read: a file that changes during the run stops it.

A file read from start to end is hashed as it is read and compared at its end (HashedFile). A file read by ranges, by
several workers, is first read once: its SHA-256 is compared with the lock, and each block of 1 MiB gets an XXH3 digest,
which is compared before the block is used (VerifiedFile). The XXH3 digests are a small part of the cost of SHA-256."""

import hashlib
import io
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from gristmill.data_pipeline.readers.files import shown_path
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import RawFile

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class BlockDigests:
    """digests: uint64[ceil(num_bytes / BLOCK_BYTES)], XXH3 of each block of the file."""

    num_bytes: int
    digests: np.ndarray


class HashedFile(io.RawIOBase):
    """A file read from start to end; `finish` reads the rest and compares the digest with the lock.

    A seek to the start first finishes and compares the pass so far, then starts another."""

    def __init__(self, raw: BinaryIO, file: RawFile, location: str):
        super().__init__()
        self._raw, self._file, self._location = raw, file, location
        self._hasher = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            block = self._raw.read(size)
        except OSError as error:
            raise unreadable(self._location, error) from error
        self._hasher.update(block)
        return block

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("a file that is hashed must be read from its start")
        self.finish()
        self._hasher = hashlib.sha256()
        return self._raw.seek(0)

    def finish(self) -> None:
        """Raises InputError if the file is not the one in the lock."""
        while self.read(BLOCK_BYTES):
            pass
        check_digest(self._hasher.hexdigest(), self._file, self._location)


class VerifiedFile(io.RawIOBase):
    """A file with random access. Raises InputError instead of returning a byte that differs from the locked file.

    error: the InputError raised, since libraries that read through this object may raise another in its place."""

    def __init__(self, raw: BinaryIO, blocks: BlockDigests, location: str):
        super().__init__()
        self._raw, self._blocks, self._location = raw, blocks, location
        self._at = 0
        self._index, self._block = -1, b""
        self.error: InputError | None = None

    def read(self, size: int = -1) -> bytes:
        end = self._blocks.num_bytes if size < 0 else min(self._at + size, self._blocks.num_bytes)
        pieces = []
        while self._at < end:
            index, start = divmod(self._at, BLOCK_BYTES)
            pieces.append(self._verified(index)[start : start + end - self._at])
            self._at += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blocks.num_bytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def finish(self) -> None:
        """Raise the InputError that a library may have caught."""
        if self.error is not None:
            raise self.error

    def _verified(self, index: int) -> bytes:
        if index == self._index:
            return self._block
        try:
            self._raw.seek(index * BLOCK_BYTES)
            block = self._raw.read(BLOCK_BYTES)
        except OSError as error:
            self.error = unreadable(self._location, error)
            raise self.error from error
        if xxhash.xxh3_64_intdigest(block) != self._blocks.digests[index]:
            self.error = changed(self._location)
            raise self.error
        self._index, self._block = index, block
        return block


def digest_blocks(raw: BinaryIO, file: RawFile, location: str) -> BlockDigests:
    """The digests of the file's blocks. Raises InputError if the file is not the one in the lock."""
    whole, digests, num_bytes = HashedFile(raw, file, location), [], 0
    while block := _full_block(whole):
        digests.append(xxhash.xxh3_64_intdigest(block))
        num_bytes += len(block)
    whole.finish()
    return BlockDigests(num_bytes, np.array(digests, np.uint64))


def _full_block(file: HashedFile) -> bytes:
    """BLOCK_BYTES bytes, fewer at the end: one read of a remote file may return fewer."""
    block = file.read(BLOCK_BYTES)
    while 0 < len(block) < BLOCK_BYTES and (more := file.read(BLOCK_BYTES - len(block))):
        block += more
    return block


def check_digest(found: str, file: RawFile, location: str) -> None:
    if found != file.sha256:
        raise changed(location, f": its SHA-256 is {found[:16]}... and the lock says {file.sha256[:16]}...")


def changed(location: str, detail: str = "") -> InputError:
    return InputError(
        f"{shown_path(location)}: the file changed during the run{detail}; nothing read from it is used. Restore it, "
        "or run again with --update-lock to use its new content"
    )


def unreadable(location: str, error: OSError) -> InputError:
    reason = error.strerror or str(error) or type(error).__name__
    return InputError(f"{shown_path(location)}: cannot be read ({reason}); check the disk or the connection")

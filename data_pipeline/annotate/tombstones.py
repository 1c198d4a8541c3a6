"""Tombstones: documents that curation leaves out for good, known by keyed digests and without their text.

`tombstones.json` in a work folder lists requests. Each holds two sets of digests: of document ids, which find a
document in the raw file that it stood in, and of text keys (`folding.py`), which find the same text under any other id,
in a new dump too. A digest is SipHash-2-4-128 with the file's random key, so no table made beforehand can be looked up;
who has the file can test a text that they have. Each request has the digest of the one before it: none can be taken out
unnoticed.

A document with a tombstone is dropped from the annotated files, before any rule: all that follows is what a build from
raw files without it would write."""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from gristmill.data_pipeline.annotate.annotate import (
    CHECKED_NAME,
    AnnotateTask,
    annotate_all,
    dropped_file,
    open_annotated,
)
from gristmill.data_pipeline.dedup.folding import KnownValues, bytes_of_words, document_keys, remove_keys, write_keys
from gristmill.data_pipeline.ledger.document_file import packed_ids
from gristmill.foundation.checksums import checksummed_path, content_digest, read_cached, read_kept, write_kept
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json, digested_json, read_digested_json
from gristmill.foundation.lock import LockedSource, RawFile
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.tasks.engine import Engine

TOMBSTONES_NAME = "tombstones.json"
LOCKED_NAME = "tombstones"  # among the sources of a lock
DIGEST_BYTES = 16
HEX = r"^[0-9a-f]{32}$"
DIGITS = Field(pattern=HEX)


class ForgetRequest(Config):
    """ids, texts: keyed digests, sorted. previous: digest of the request before it, "" for the first. digest: SHA-256
    of all of this."""

    number: int
    selector: str
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    previous: str
    digest: str

    @classmethod
    def of(cls, number: int, selector: str, ids: Iterable[str], texts: Iterable[str], previous: str) -> Self:
        content = {
            "number": number,
            "selector": selector,
            "ids": sorted(set(ids)),
            "texts": sorted(set(texts)),
            "previous": previous,
        }
        return cls(**content, digest=hashlib.sha256(canonical_json(content)).hexdigest())

    def check(self, previous: str) -> None:
        """Raises ValueError if its content, or the request before it, was changed."""
        expected = ForgetRequest.of(self.number, self.selector, self.ids, self.texts, previous)
        if expected != self:
            raise ValueError(f"request {self.number} was changed after it was written, or one before it is gone")


class Tombstones(Config):
    """key: 32 hex digits."""

    version: int = 1
    key: str = DIGITS
    requests: tuple[ForgetRequest, ...] = ()

    @classmethod
    def empty(cls) -> Self:
        return cls(key=secrets.token_hex(DIGEST_BYTES))

    @cached_property
    def digests(self) -> frozenset[bytes]:
        """Digests of ids and texts of all requests."""
        return frozenset(
            bytes.fromhex(digest) for request in self.requests for digest in (*request.ids, *request.texts)
        )

    @property
    def head(self) -> str:
        """Digest of the last request, which stands for all of them."""
        return self.requests[-1].digest if self.requests else ""

    def id_digests(self, ids: np.ndarray) -> np.ndarray:
        """uint8[N, 16] of document ids uint8[N, 16]."""
        return keyed_digests(ids, self._key(b"document id"))

    def text_digests(self, text_keys: np.ndarray) -> np.ndarray:
        """uint8[N, 16] of text keys uint8[N, 16]."""
        return keyed_digests(text_keys, self._key(b"text"))

    def _key(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(bytes.fromhex(self.key), digest_size=DIGEST_BYTES, person=purpose).digest()

    def with_request(self, selector: str, doc_ids: Iterable[str], text_keys: Iterable[bytes]) -> "Tombstones":
        """Tombstones with one more request, which leaves out what earlier requests name."""
        known = {digest.hex() for digest in self.digests}
        ids = _hex_digits(self.id_digests(bytes_of([bytes.fromhex(doc_id) for doc_id in doc_ids]))) - known
        texts = _hex_digits(self.text_digests(bytes_of(list(text_keys)))) - known
        if not ids and not texts:
            return self
        request = ForgetRequest.of(len(self.requests) + 1, selector, ids, texts, self.head)
        return Tombstones(key=self.key, requests=(*self.requests, request))

    def matches(self, ids: np.ndarray, text_keys: np.ndarray | None = None) -> tuple[np.ndarray, list[str]]:
        """(rows int64[] that have a tombstone, digests that they match). ids, text_keys: uint8[N, 16]; a key of zeros
        stands for no text."""
        of_ids = self.id_digests(ids)
        rows = self._known.among(_words(of_ids))
        matched = _hex_digits(of_ids[rows])
        if text_keys is not None:
            of_texts = self.text_digests(text_keys)
            by_text = self._known.among(_words(of_texts))
            by_text = np.setdiff1d(by_text[text_keys[by_text].any(axis=1)], rows)
            matched |= _hex_digits(of_texts[by_text])
            rows = np.union1d(rows, by_text)
        return rows, sorted(matched)

    @cached_property
    def _known(self) -> KnownValues:
        return KnownValues.of(_words(bytes_of(sorted(self.digests))))


def bytes_of(values: Sequence[bytes]) -> np.ndarray:
    """uint8[N, 16] of values of 16 bytes."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, DIGEST_BYTES)


def _words(digests: np.ndarray) -> np.ndarray:
    """uint64[N, 2] of digests uint8[N, 16]."""
    return np.ascontiguousarray(digests).view("<u8").astype(np.uint64, copy=False).reshape(-1, 2)


def id_bytes(doc_ids: pa.Array | pa.ChunkedArray, path: Path) -> np.ndarray:
    """uint8[N, 16] of a column of document ids."""
    return bytes_of_words(packed_ids(doc_ids, path))


def _hex_digits(digests: np.ndarray) -> set[str]:
    return {row.tobytes().hex() for row in digests}


def read_tombstones(folder: Path) -> Tombstones | None:
    """The tombstones in the folder; None if it has none. Raises InputError if the file was changed."""
    path = folder / TOMBSTONES_NAME
    if not path.is_file():
        return None
    try:
        tombstones = Tombstones.model_validate(read_digested_json(path.read_bytes()))
        previous = ""
        for request in tombstones.requests:
            request.check(previous)
            previous = request.digest
    except ValueError as error:
        raise InputError(
            f"{path}: not a list of tombstones ({error}); restore it from {folder / 'curate'} or a copy, since without "
            "it documents that were taken out come back"
        ) from error
    return tombstones


def request_of(doc_id: str, folder: Path) -> int | None:
    """Number of the request in the folder's tombstones that names the document; None if there is none."""
    tombstones = read_tombstones(folder)
    if tombstones is None:
        return None
    digest = tombstones.id_digests(bytes_of([bytes.fromhex(doc_id)])).tobytes().hex()
    return next((request.number for request in tombstones.requests if digest in request.ids), None)


def write_tombstones(folder: Path, tombstones: Tombstones) -> None:
    write_atomic(folder / TOMBSTONES_NAME, digested_json(tombstones.model_dump(mode="json")))


def lock_tombstones(folder: Path) -> tuple[LockedSource, ...]:
    """Pins the tombstones of a work folder as a source of the lock, so that they are a part of curate's fingerprint."""
    path = folder / TOMBSTONES_NAME
    if not path.is_file():
        return ()
    content = path.read_bytes()
    file = RawFile(name=TOMBSTONES_NAME, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    return (LockedSource(name=LOCKED_NAME, request={"format": "tombstones", "sha256": file.sha256}, files=(file,)),)


# Dropping of documents with a tombstone from annotated files.


def drop_documents(tasks: Sequence[AnnotateTask], tombstones: Tombstones | None, engine: Engine) -> None:
    """Drops the rows that have a tombstone from all annotated files; each file is checked once for every request.

    Files that lack rows whose tombstone is gone are annotated again. All are of one folder."""
    digests = frozenset() if tombstones is None else tombstones.digests
    stale = [task for task in tasks if not _dropped(task.path) <= digests]
    for task in stale:
        task.path.unlink(missing_ok=True)
    annotate_all(stale, engine)
    if tombstones is None:
        return
    if not tasks:
        return
    checked_file = tasks[0].path.parent / CHECKED_NAME
    checked = read_kept(checked_file)
    known = checked["files"] if checked.get("head") == tombstones.head else {}
    todo = [(task.path, tombstones) for task in tasks if known.get(task.path.name) != content_digest(task.path)]
    if todo:
        engine.map(_drop_rows, todo, "tombstones", [float(path.stat().st_size) for path, _ in todo], "B")
        files = {task.path.name: content_digest(task.path) for task in tasks}
        write_kept(checked_file, {"head": tombstones.head, "files": files})


def _dropped(path: Path) -> frozenset[bytes]:
    """Digests of the rows that the file lacks."""
    digests = read_cached(dropped_file(path))
    return frozenset(map(bytes.fromhex, digests)) if isinstance(digests, list) else frozenset()


def _drop_rows(task: tuple[Path, Tombstones]) -> None:
    """Writes the digests first: a file that lacks rows always says which."""
    path, tombstones = task
    keys = document_keys(path)
    text_keys = bytes_of_words(keys["key"]) * keys["readable"][:, None].astype(np.uint8)
    rows, digests = tombstones.matches(bytes_of_words(keys["id"]), text_keys)
    if len(rows):
        dropped = sorted({*(digest.hex() for digest in _dropped(path)), *digests})
        write_atomic(dropped_file(path), orjson.dumps(dropped))
        kept = np.ones(len(keys), bool)
        kept[rows] = False
        left = keys[kept]
        remove_keys(path)
        _rewrite(path, kept)
        write_keys(path, left)


def _rewrite(path: Path, kept: np.ndarray) -> None:
    start = 0
    with (
        pq.ParquetFile(path) as file,
        checksummed_path(path) as temporary,
        open_annotated(temporary, file.schema_arrow) as writer,
    ):
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            mask = kept[start : start + len(table)]
            start += len(table)
            if mask.any():
                writer.write_table(table if mask.all() else table.filter(pa.array(mask)))


# SipHash-2-4 with 128 bits of output, of many values of 16 bytes at a time (Aumasson and Bernstein 2012).
#
# A keyed pseudorandom function: without the key nothing can be looked up in a table of digests.


VALUE_BYTES = 16
LENGTH_WORD = np.uint64(VALUE_BYTES << 56)  # the last word of a message of 16 bytes
INITIAL = np.array([0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573], np.uint64)
LAST_OF_MESSAGE, LAST_OF_OUTPUT = np.uint64(0xEE), np.uint64(0xDD)


def keyed_digests(values: np.ndarray, key: bytes) -> np.ndarray:
    """uint8[N, 16]: the digest of each row of uint8[N, 16] with a key of 16 bytes."""
    words = np.ascontiguousarray(values, np.uint8).view("<u8").astype(np.uint64).reshape(-1, 2)
    low, high = (np.uint64(int.from_bytes(key[start : start + 8], "little")) for start in (0, 8))
    digests = np.empty((len(words), 2), np.uint64)
    _siphash(words, INITIAL ^ np.array([low, high ^ LAST_OF_MESSAGE, low, high]), digests)
    return digests.astype("<u8", copy=False).view(np.uint8).reshape(-1, VALUE_BYTES)


@cached_njit(nogil=True)
def _siphash(words, initial, digests):
    """words, digests: uint64[N, 2]; initial: uint64[4]."""
    state = np.empty(4, np.uint64)
    for row in range(len(words)):
        state[:] = initial
        for word in (words[row, 0], words[row, 1], LENGTH_WORD):
            state[3] ^= word
            _rounds(state, 2)
            state[0] ^= word
        state[2] ^= LAST_OF_MESSAGE
        _rounds(state, 4)
        digests[row, 0] = state[0] ^ state[1] ^ state[2] ^ state[3]
        state[1] ^= LAST_OF_OUTPUT
        _rounds(state, 4)
        digests[row, 1] = state[0] ^ state[1] ^ state[2] ^ state[3]


@cached_njit(nogil=True, forceinline=True)
def _rounds(state, count):
    v0, v1, v2, v3 = state[0], state[1], state[2], state[3]
    for _ in range(count):
        v0 += v1
        v1 = _rotated(v1, 13) ^ v0
        v0 = _rotated(v0, 32)
        v2 += v3
        v3 = _rotated(v3, 16) ^ v2
        v0 += v3
        v3 = _rotated(v3, 21) ^ v0
        v2 += v1
        v1 = _rotated(v1, 17) ^ v2
        v2 = _rotated(v2, 32)
    state[0], state[1], state[2], state[3] = v0, v1, v2, v3


@cached_njit(nogil=True, forceinline=True)
def _rotated(value, bits):
    return value << np.uint64(bits) | value >> np.uint64(64 - bits)

"""Tombstones: documents that curation leaves out for good, known by keyed digests and without their text.

`tombstones.json` in a work folder lists requests. Each holds two sets of digests: of document ids, which find a
document in the raw file that it stood in, and of text keys (`folding.py`), which find the same text under any other id,
in a new dump too. A digest is BLAKE2b-128 with the file's random key, so no table made beforehand can be looked up; who
has the file can test a text that they have. Each request has the digest of the one before it: none can be taken out
unnoticed.

A document with a tombstone is dropped from the annotated files, before any rule: all that follows is what a build from
raw files without it would write."""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from gristmill.data_pipeline.annotate.annotate import AnnotateTask, annotate_all, dropped_file, open_annotated
from gristmill.data_pipeline.dedup.folding import TEXT_KEY
from gristmill.foundation.checksums import read_cached, sealed_path
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json, digested_json, read_digested_json
from gristmill.foundation.lock import LockedSource, RawFile
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

    def id_digest(self, doc_id: str) -> bytes:
        return self._digest(doc_id.encode(), b"document id")

    def text_digest(self, text_key: bytes) -> bytes:
        return self._digest(text_key, b"text")

    def _digest(self, value: bytes, purpose: bytes) -> bytes:
        return hashlib.blake2b(value, key=bytes.fromhex(self.key), digest_size=DIGEST_BYTES, person=purpose).digest()

    def with_request(self, selector: str, doc_ids: Iterable[str], text_keys: Iterable[bytes]) -> "Tombstones":
        """Tombstones with one more request, which leaves out what earlier requests name."""
        ids = {self.id_digest(doc_id) for doc_id in doc_ids} - self.digests
        texts = {self.text_digest(key) for key in text_keys} - self.digests
        if not ids and not texts:
            return self
        request = ForgetRequest.of(
            len(self.requests) + 1, selector, (d.hex() for d in ids), (d.hex() for d in texts), self.head
        )
        return Tombstones(key=self.key, requests=(*self.requests, request))

    def matches(self, doc_ids: Sequence[str], text_keys: Sequence[bytes | None]) -> list[tuple[int, bytes]]:
        """(row, digest that it matches) of each document that has a tombstone."""
        digests, matches = self.digests, []
        for row, (doc_id, text_key) in enumerate(zip(doc_ids, text_keys, strict=True)):
            digest = self.id_digest(doc_id)
            if digest not in digests and text_key is not None:
                digest = self.text_digest(text_key)
            if digest in digests:
                matches.append((row, digest))
        return matches


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

    Files that lack rows whose tombstone is gone are annotated again."""
    digests = frozenset() if tombstones is None else tombstones.digests
    stale = [task for task in tasks if not _dropped(task.path) <= digests]
    for task in stale:
        task.path.unlink(missing_ok=True)
    annotate_all(stale, engine)
    if tombstones is None:
        return
    todo = [(task.path, tombstones) for task in tasks if _state(task.path).get("head") != tombstones.head]
    engine.map(_drop_rows, todo, "tombstones", [float(path.stat().st_size) for path, _ in todo], "B")


def _state(path: Path) -> dict[str, Any]:
    state = read_cached(dropped_file(path))
    return state if isinstance(state, dict) else {}


def _dropped(path: Path) -> frozenset[bytes]:
    return frozenset(bytes.fromhex(digest) for digest in _state(path).get("dropped", ()))


def _drop_rows(task: tuple[Path, Tombstones]) -> None:
    """Writes the digests first: a file that lacks rows always says which."""
    path, tombstones = task
    with pq.ParquetFile(path) as file:
        table = file.read(["doc_id", TEXT_KEY, "unreadable"])
    readable = table.column("unreadable").is_null()
    keys = pc.if_else(readable, table.column(TEXT_KEY), None).to_pylist()
    matches = tombstones.matches(table.column("doc_id").to_pylist(), keys)
    dropped = sorted({*(digest.hex() for digest in _dropped(path)), *(digest.hex() for _, digest in matches)})
    if matches:
        _write_state(path, {"head": "", "dropped": dropped})
        kept = np.ones(len(table), bool)
        kept[[row for row, _ in matches]] = False
        _rewrite(path, kept)
    _write_state(path, {"head": tombstones.head, "dropped": dropped})


def _write_state(path: Path, state: dict[str, Any]) -> None:
    write_atomic(dropped_file(path), orjson.dumps(state))


def _rewrite(path: Path, kept: np.ndarray) -> None:
    start = 0
    with (
        pq.ParquetFile(path) as file,
        sealed_path(path) as temporary,
        open_annotated(temporary, file.schema_arrow) as writer,
    ):
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, use_threads=False)
            mask = kept[start : start + len(table)]
            start += len(table)
            if mask.any():
                writer.write_table(table if mask.all() else table.filter(pa.array(mask)))

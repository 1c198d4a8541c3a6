"""The table that best-fit packing needs (`packing.first_windows`), kept beside the index: opening is one small read.

cache/best_fit/KEY holds the SHA-256 of the rest, 32 bytes, then int64 little-endian, 8 bytes for 4096 documents. KEY
names everything the table follows from, so a table of another file, sequence_length or version is never found."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.indexed.packing import GROUP_DOCUMENTS, first_windows, num_groups
from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.file_state_cache import one_at_a_time, write_cached_bytes
from gristmill.foundation.manifest import CACHE_FOLDER

VERSION = 1  # raised when packing changes
DIGEST_BYTES = 32
SAID_FROM_DOCUMENTS = 2_000_000  # about two seconds of packing


def kept_first_windows(
    folder: Path, reader: IndexedReader, identity: Any, sequence_length: int, say: Callable[[str], None]
) -> np.ndarray:
    """first_windows(reader, sequence_length), read if it was kept, else computed by one process and kept.

    identity: equal as long as the .idx holds the same bytes (verify.CheckedSource)."""
    path = table_path(folder, identity, sequence_length)
    groups = num_groups(reader.num_documents)
    table = read_table(path, groups)
    if table is not None:
        return table
    with one_at_a_time(folder):
        table = read_table(path, groups)  # another rank may have packed meanwhile
        if table is None:
            if reader.num_documents >= SAID_FROM_DOCUMENTS:
                say(f"{reader.prefix}: packing {reader.num_documents:,} documents, once; the table is kept")
            table = first_windows(reader, sequence_length)
            write_table(path, table)
    return table


def table_path(folder: Path, identity: Any, sequence_length: int) -> Path:
    key = fingerprint({"idx": identity, "context": sequence_length, "group": GROUP_DOCUMENTS, "version": VERSION})
    return folder / CACHE_FOLDER / "best_fit" / key


def write_table(path: Path, table: np.ndarray) -> None:
    """In a folder that cannot be written nothing happens."""
    body = table.astype("<i8").tobytes()
    write_cached_bytes(path, _digest(path.name, body) + body)


def read_table(path: Path, groups: int) -> np.ndarray | None:
    """None if there is no table, or it is damaged in any way."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content[DIGEST_BYTES:]
    if len(body) != 8 * (groups + 1) or content[:DIGEST_BYTES] != _digest(path.name, body):
        return None
    return np.frombuffer(body, "<i8")


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()

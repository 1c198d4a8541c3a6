"""Exact substrings: spans of at least min_bytes bytes that occur more than once, found with a suffix array.

The method of Lee et al. 2022, "Deduplicating Training Data Makes Language Models Better", section 4.1, on bytes
instead of tokens (50 tokens are about 200 bytes of English). Unlike theirs, the first place in keep-order stays.
The suffix array is libdivsufsort's (package pydivsufsort). It holds a group of documents of at most
`group_bytes`; repeats across groups are not found, so that memory is bounded: in each worker 14 bytes for each byte of
a group. On disk the groups' texts stand once more, 128 groups at a time."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from gristmill.data_pipeline.dedup.arrays import document_file_identity, open_workspace
from gristmill.data_pipeline.ledger.document_file import DocumentFile, keep_order, packed_ids, unpacked_ids, utf8_of
from gristmill.foundation.cached_njit import cached_njit
from gristmill.foundation.checksum_files import sealed_path
from gristmill.foundation.config import Config
from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.errors import InputError

pydivsufsort = DeferredModule("pydivsufsort")

# start, stop: bytes of the document's UTF-8, on character bounds. kept_in: the document of the first place.
REPEATS = pa.schema([("doc_id", pa.string()), ("start", pa.int64()), ("stop", pa.int64()), ("kept_in", pa.string())])
# Byte between documents: never part of UTF-8, so no repeat runs across two documents.
BETWEEN = 0xFF
TEXTS = pa.schema([("doc_id", pa.string()), ("text", pa.large_string()), ("priority", pa.int64())])
OPEN_GROUPS = 128  # files written in one pass over the corpus; more groups take more passes
MAX_GROUP_BYTES = 2_000_000_000  # suffixes are numbered in 32 bits


class SubstringDedupConfig(Config):
    """min_bytes: of a repeat; 200 is about 50 tokens of English (Lee et al. 2022, section 4.1). group_bytes: text
    searched at a time, 14 bytes of memory each. policy: `remove` cuts the span, `drop` removes a document of which
    more than drop_share is repeated, `annotate` only records."""

    min_bytes: int = Field(default=200, ge=8)
    group_bytes: int = Field(default=64_000_000, ge=1024, le=MAX_GROUP_BYTES)
    policy: Literal["remove", "drop", "annotate"] = "remove"
    drop_share: float = Field(default=0.5, gt=0.0, le=1.0)


@dataclass(frozen=True)
class Group:
    """Documents in keep-order, in one buffer with BETWEEN after each. firsts: where each begins, and the end."""

    ids: np.ndarray
    data: np.ndarray
    firsts: np.ndarray


def repeated_substrings(
    document_files: Sequence[DocumentFile], config: SubstringDedupConfig, engine: Engine, folder: Path
) -> pa.Table:
    """Every span of at least min_bytes bytes that occurred before, in keep-order, in its group of documents.

    Columns doc_id, start, stop (bytes of UTF-8), kept_in; ordered by doc_id, start; spans of a document are disjoint.
    Groups are filled in the order of doc_id, so the result does not depend on files, their order, or workers. In a
    group, keep-order is (source priority, longer first, doc_id).
    `folder` takes intermediate files; called again after a kill, it goes on from them."""
    open_workspace(
        folder,
        {
            "config": config.model_dump(),
            "document_files": [document_file_identity(document_file) for document_file in document_files],
        },
    )
    group_of = _groups(document_files, config.group_bytes)
    num_groups = max((int(groups.max(initial=-1)) for groups in group_of), default=-1) + 1
    tasks = [(_texts_file(folder, n), config.min_bytes, folder / f"repeats-{n:05d}.parquet") for n in range(num_groups)]
    missing = [number for number, task in enumerate(tasks) if not task[-1].exists()]
    for start in range(0, len(missing), OPEN_GROUPS):
        numbers = missing[start : start + OPEN_GROUPS]
        _gather(document_files, group_of, numbers, folder, engine)
        engine.map(_search_group, [tasks[n] for n in numbers], "repeated substrings", unit="groups")
        for number in numbers:
            tasks[number][0].unlink()
    tables = [pq.read_table(path, schema=REPEATS) for path in sorted(folder.glob("repeats-*.parquet"))]
    return pa.concat_tables([REPEATS.empty_table(), *tables]).sort_by([("doc_id", "ascending"), ("start", "ascending")])


def repeats_of(group: Group, min_bytes: int) -> list[tuple[int, int, int, int]]:
    """(document, start, stop, document of the first place) of the group's repeats, bytes within the document."""
    if len(group.data) < min_bytes:
        return []
    suffixes = pydivsufsort.divsufsort(group.data.copy())
    covered = np.full(len(group.data), -1, np.int32)
    _mark(group.data, suffixes.astype(np.int32, copy=False), min_bytes, covered)
    return _spans(covered, group, min_bytes)


@cached_njit(nogil=True)
def _mark(data, suffixes, min_bytes, covered):
    """covered[i]: the first place (a position) of the repeated span that begins at position i, -1 for none.

    Neighbours in the suffix array that share `min_bytes` bytes form a run; all but the lowest position are repeats."""
    start = 0
    for at in range(1, len(suffixes) + 1):
        if at < len(suffixes) and _shared(data, suffixes[at - 1], suffixes[at], min_bytes):
            continue
        if at - start > 1:
            first = suffixes[start]
            for i in range(start, at):
                first = min(first, suffixes[i])
            for i in range(start, at):
                if suffixes[i] != first:
                    covered[suffixes[i]] = first
        start = at


@cached_njit(nogil=True)
def _shared(data, left, right, min_bytes):
    """Whether `min_bytes` equal bytes, none of them BETWEEN, begin at both positions."""
    if max(left, right) + min_bytes > len(data):
        return False
    for i in range(min_bytes):  # noqa: SIM110 (numba compiles no generator expressions)
        if data[left + i] != data[right + i] or data[left + i] == BETWEEN:
            return False
    return True


def _spans(covered: np.ndarray, group: Group, min_bytes: int) -> list[tuple[int, int, int, int]]:
    """Joins the repeats' beginnings to spans: windows that overlap or touch are one."""
    begins = np.flatnonzero(covered >= 0)
    if not len(begins):
        return []
    new = np.ones(len(begins), bool)
    new[1:] = begins[1:] > begins[:-1] + min_bytes
    starts = begins[new]
    stops = begins[np.append(np.flatnonzero(new)[1:] - 1, len(begins) - 1)] + min_bytes
    owners = np.searchsorted(group.firsts, starts, side="right") - 1
    keepers = np.searchsorted(group.firsts, covered[starts], side="right") - 1
    found = []
    for start, stop, owner, keeper in zip(starts, stops, owners, keepers, strict=True):
        start, stop = _on_characters(group.data, int(start), int(stop))
        first = int(group.firsts[owner])
        found.append((int(owner), start - first, stop - first, int(keeper)))
    return found


def _on_characters(data: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The span narrowed to whole characters."""
    while start < stop and data[start] & 0xC0 == 0x80:
        start += 1
    while stop > start and data[stop] & 0xC0 == 0x80 and data[stop] != BETWEEN:
        stop -= 1
    return start, stop


def _groups(document_files: Sequence[DocumentFile], group_bytes: int) -> list[np.ndarray]:
    """Of each document file, int32[rows]: the group of each kept document, -1 for the others. Groups are filled in the
    order of doc_id, each with as many documents as fit."""
    ids, lengths, owners, rows = _all_documents(document_files)
    too_long = np.flatnonzero(lengths >= group_bytes)
    if len(too_long):
        doc_id = unpacked_ids(ids[too_long[:1]])[0]
        raise InputError(
            f"document {doc_id} has {lengths[too_long[0]]} bytes; group_bytes={group_bytes} must be more than that"
        )
    order = np.lexsort((ids[:, 1], ids[:, 0]))
    number, filled, group_of = 0, 0, np.empty(len(order), np.int32)
    for place in order.tolist():
        filled += int(lengths[place]) + 1
        if filled > group_bytes:
            number, filled = number + 1, int(lengths[place]) + 1
        group_of[place] = number
    found = []
    for index, document_file in enumerate(document_files):
        groups = np.full(len(document_file.kept_mask()), -1, np.int32)
        mine = owners == index
        groups[rows[mine]] = group_of[mine]
        found.append(groups)
    return found


def _all_documents(document_files: Sequence[DocumentFile]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(packed ids, lengths in bytes, number of the document file, row) of all kept documents."""
    ids, lengths, owners, rows = [np.empty((0, 2), np.uint64)], [], [], []
    for number, document_file in enumerate(document_files):
        for row, doc_ids, texts in document_file.batches():
            ids.append(packed_ids(doc_ids, document_file.path))
            lengths.append(np.diff(utf8_of(texts)[1]))
            owners.append(np.full(len(row), number))
            rows.append(row)
    length, owner, place = (np.concatenate([np.empty(0, np.int64), *column]) for column in (lengths, owners, rows))
    return np.concatenate(ids), length, owner, place


def _texts_file(folder: Path, group: int) -> Path:
    return folder / f"texts-{group:05d}.arrow"


def _gather(
    document_files: Sequence[DocumentFile],
    group_of: Sequence[np.ndarray],
    numbers: Sequence[int],
    folder: Path,
    engine: Engine,
) -> None:
    """The documents of each of these groups in a file of its own, in one pass over the document_files."""
    with (
        ExitStack() as files,
        engine.reporter.meter("groups of documents", sum(p.bytes for p in document_files), "B") as meter,
    ):
        writers = {}
        for number in numbers:
            path = files.enter_context(sealed_path(_texts_file(folder, number)))
            writers[number] = files.enter_context(pa.ipc.new_stream(path, TEXTS))
        for document_file, groups in zip(document_files, group_of, strict=True):
            for rows, doc_ids, texts in document_file.batches(np.isin(groups, numbers)):
                priorities = pa.array(np.full(len(rows), document_file.priority))
                batch = pa.record_batch(
                    [doc_ids.cast(pa.string()), texts.cast(pa.large_string()), priorities], schema=TEXTS
                )
                for number in np.unique(groups[rows]).tolist():
                    writers[number].write_batch(batch.filter(pa.array(groups[rows] == number)))
            meter.advance(document_file.bytes)


def _search_group(task: tuple[Path, int, Path]) -> None:
    """Writes the group's repeats."""
    texts, min_bytes, path = task
    group = _read_group(texts)
    found = repeats_of(group, min_bytes)
    ids = unpacked_ids(group.ids)
    rows = [(ids[owner], start, stop, ids[keeper]) for owner, start, stop, keeper in found]
    columns = list(zip(*rows, strict=True)) or [()] * len(REPEATS)
    table = pa.table([pa.array(c, f.type) for c, f in zip(columns, REPEATS, strict=True)], schema=REPEATS)
    with sealed_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _read_group(path: Path) -> Group:
    with pa.ipc.open_stream(path) as stream:
        table = stream.read_all()
    packed = packed_ids(table.column("doc_id"), path)
    texts = [text.encode() for text in table.column("text").to_pylist()]
    lengths = np.array([len(text) for text in texts])
    order = keep_order(table.column("priority").to_numpy(), lengths, packed)
    data = np.frombuffer(b"".join(texts[i] + bytes([BETWEEN]) for i in order), np.uint8)
    return Group(packed[order], data, np.append(0, np.cumsum(lengths[order] + 1)))

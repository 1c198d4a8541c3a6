"""Exact substrings: spans of at least min_bytes bytes that occur more than once, found with a suffix array.

The method of Lee et al. 2022, "Deduplicating Training Data Makes Language Models Better", section 4.1, on bytes
instead of tokens (50 tokens are about 200 bytes of English). Unlike theirs, the first place in keep-order stays.
The suffix array is libdivsufsort's (package pydivsufsort). It holds a group of documents of at most
`group_bytes`; repeats across groups are not found, so that memory is bounded: in each worker 14 bytes for each byte of
a group. On disk the texts stand once more."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    document_file_identity,
    keep_order,
    load_array,
    num_rows_of,
    open_workspace,
    packed_ids,
    save_array,
    sortable_ids,
    unpacked_ids,
    utf8_of,
)
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, range_of_keys, ranges_for
from gristmill.foundation.startup import DeferredModule

pydivsufsort = DeferredModule("pydivsufsort")

# Byte between documents: never part of UTF-8, so no repeat runs across two documents.
BETWEEN = 0xFF
TEXTS = pa.schema([("doc_id", pa.string()), ("text", pa.large_string())])
LENGTH = np.dtype([("id", "<u8", 2), ("length", "<i8")])
# A span to remove. start, stop: bytes of the document's UTF-8, on character bounds. kept_in: the document of the first
# place.
REPEAT = np.dtype([("file", "<i4"), ("id", "<u8", 2), ("start", "<i8"), ("stop", "<i8"), ("kept_in", "<u8", 2)])
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


def find_repeated_substrings(
    document_files: Sequence[DocumentFile], config: SubstringDedupConfig, engine: Engine, folder: Path
) -> PartitionedFiles:
    """Every span of at least min_bytes bytes that occurred before, in keep-order, in its group of documents: records of
    REPEAT, a range a document file. Spans of a document are disjoint.

    Groups are filled in the order of doc_id, each with as many documents as fit. So neither files nor their order nor
    the number of workers decide anything. Memory of a task: the texts of a document file, or 14 bytes a byte of a
    group; this process holds nothing of a document. `folder` takes intermediate files; called again with the same
    arguments after a kill, it goes on from them. Raises InputError for a document that no group can hold."""
    identities = [document_file_identity(document_file) for document_file in document_files]
    open_workspace(folder, {"config": config.model_dump(), "document_files": identities})
    firsts = _write_groups(document_files, config.group_bytes, engine, folder)
    num_groups = len(load_array(firsts))
    spans = PartitionedFiles(folder / "repeats", REPEAT, num_groups, len(document_files))
    missing = [number for number in range(num_groups) if not spans.has(number)]
    if not missing:
        return spans
    texts = PartitionedFiles(folder / "texts", np.dtype("u1"), len(document_files), num_groups)
    ungathered = [number for number in range(len(document_files)) if not texts.has(number)]
    gathers = LazySequence(lambda number: (document_files[number], firsts, texts, number), ungathered)
    sizes = [document_files[number].bytes for number in ungathered]
    engine.map(_gather, gathers, "repeated substrings: gather documents", sizes, "B")
    searches = [(texts, config.min_bytes, spans, number) for number in missing]
    engine.map(_search_group, searches, "repeated substrings: search", unit="groups")
    for path in texts.paths():
        path.unlink()
    return spans


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
    spans = []
    for start, stop, owner, keeper in zip(starts, stops, owners, keepers, strict=True):
        start, stop = _on_characters(group.data, int(start), int(stop))
        first = int(group.firsts[owner])
        spans.append((int(owner), start - first, stop - first, int(keeper)))
    return spans


def _on_characters(data: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """The span narrowed to whole characters."""
    while start < stop and data[start] & 0xC0 == 0x80:
        start += 1
    while stop > start and data[stop] & 0xC0 == 0x80 and data[stop] != BETWEEN:
        stop -= 1
    return start, stop


def _write_groups(document_files: Sequence[DocumentFile], group_bytes: int, engine: Engine, folder: Path) -> Path:
    """uint64[groups, 2] on disk: the packed id of the first document of each group."""
    path = folder / "groups.npy"
    if not path.exists():
        num_rows = sum(num_rows_of(document_file) for document_file in document_files)
        lengths = PartitionedFiles(folder / "lengths", LENGTH, len(document_files), ranges_for(num_rows))
        missing = [number for number in range(len(document_files)) if not lengths.has(number)]
        tasks = LazySequence(lambda number: (document_files[number], group_bytes, lengths, number), missing)
        sizes = [document_files[number].bytes for number in missing]
        engine.map(_write_lengths, tasks, "repeated substrings: lengths", sizes, "B")
        sized = engine if lengths.ranges > 1 else LocalEngine(1, engine.reporter)
        sized.map(_fill_groups, [(lengths, group_bytes, path)], "repeated substrings: groups")
    return path


def _write_lengths(task: tuple[DocumentFile, int, PartitionedFiles, int]) -> None:
    document_file, group_bytes, lengths, number = task
    batches = [np.empty(0, LENGTH)]
    for _, doc_ids, texts in document_file.batches():
        records = np.empty(len(doc_ids), LENGTH)
        records["id"] = packed_ids(doc_ids, document_file.path)
        records["length"] = np.diff(utf8_of(texts)[1])
        batches.append(records)
        too_long = records[records["length"] >= group_bytes]
        if len(too_long):
            raise InputError(
                f"document {unpacked_ids(too_long['id'][:1])[0]} has {too_long['length'][0]} bytes; "
                f"group_bytes={group_bytes} must be more than that"
            )
    records = np.concatenate(batches)
    lengths.write_unsorted(number, records, range_of_keys(records["id"][:, 0], lengths.ranges))


def _fill_groups(task: tuple[PartitionedFiles, int, Path]) -> None:
    """Memory: 60 bytes for each document of a range of the ids."""
    lengths, group_bytes, path = task
    firsts, filled = [np.empty((0, 2), np.uint64)], group_bytes
    for number in range(lengths.ranges):
        records = lengths.read(number)
        records = records[np.lexsort((records["id"][:, 1], records["id"][:, 0]))]
        ends = np.cumsum(records["length"] + 1)
        starts, filled = group_starts(ends, filled, group_bytes)
        firsts.append(records["id"][starts])
    save_array(path, np.concatenate(firsts))


def group_starts(ends: np.ndarray, filled: int, group_bytes: int) -> tuple[list[int], int]:
    """(which documents begin a new group, bytes of the last group). ends: int64[documents], bytes up to the end of
    each. filled: bytes of the group before them.

    Lengths 3, 3, 4, 2 after 5 bytes of 8 -> the second begins a group, and the fourth: ([1, 3], 2)."""
    starts: list[int] = []
    before, last = -filled, len(ends)
    while (first := int(np.searchsorted(ends, before + group_bytes, side="right"))) < last:
        starts.append(first)
        before = int(ends[first - 1]) if first else 0
    return starts, int(ends[-1]) - before if last else filled


def _gather(task: tuple[DocumentFile, Path, PartitionedFiles, int]) -> None:
    """The file's texts by group: of each group an Arrow stream."""
    document_file, firsts, texts, number = task
    starts = sortable_ids(load_array(firsts))
    tables, groups = [], []
    for _, doc_ids, batch_texts in document_file.batches():
        tables.append(pa.table([doc_ids.cast(pa.string()), batch_texts.cast(pa.large_string())], schema=TEXTS))
        ids = sortable_ids(packed_ids(doc_ids, document_file.path))
        groups.append(np.searchsorted(starts, ids, side="right") - 1)
    group = np.concatenate([np.empty(0, np.int64), *groups])
    table = pa.concat_tables([TEXTS.empty_table(), *tables]).append_column(
        "priority", pa.array(np.full(len(group), document_file.priority))
    )
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(texts.ranges + 1))
    content, ends = io.BytesIO(), [0]
    for first, last in pairwise(bounds.tolist()):
        if last > first:
            group_table = table.take(pa.array(order[first:last]))
            with pa.ipc.new_stream(content, group_table.schema) as stream:
                stream.write_table(group_table)
        ends.append(content.tell())
    texts.write(number, np.frombuffer(content.getbuffer(), np.uint8), np.array(ends))


def _search_group(task: tuple[PartitionedFiles, int, PartitionedFiles, int]) -> None:
    """Writes the group's repeats."""
    texts, min_bytes, spans, number = task
    group, files = _read_group(texts, number)
    repeats = np.array(repeats_of(group, min_bytes), np.int64).reshape(-1, 4)
    owner, keeper = repeats[:, 0], repeats[:, 3]
    records = np.empty(len(repeats), REPEAT)
    records["file"], records["id"], records["kept_in"] = files[owner], group.ids[owner], group.ids[keeper]
    records["start"], records["stop"] = repeats[:, 1], repeats[:, 2]
    records = records[np.lexsort((records["start"], records["id"][:, 1], records["id"][:, 0], records["file"]))]
    spans.write_sorted(number, records, records["file"])


def _read_group(texts: PartitionedFiles, number: int) -> tuple[Group, np.ndarray]:
    """(the group, int32[documents]: the file of each)."""
    tables, files = [], [np.empty(0, np.int32)]
    for part, content in texts.segments(number):
        with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
            tables.append(stream.read_all())
        files.append(np.full(len(tables[-1]), part, np.int32))
    table = pa.concat_tables(tables)
    packed = packed_ids(table.column("doc_id"), texts.prefix)
    encoded = [text.encode() for text in table.column("text").to_pylist()]
    lengths = np.array([len(text) for text in encoded])
    order = keep_order(table.column("priority").to_numpy(), lengths, packed)
    data = np.frombuffer(b"".join(encoded[i] + bytes([BETWEEN]) for i in order), np.uint8)
    group = Group(packed[order], data, np.append(0, np.cumsum(lengths[order] + 1)))
    return group, np.concatenate(files)[order]

"""Index of a corpus by document id: where each document's rows stand, found by reading a few blocks of one file.

`ids/00000.ids` and so on hold the records of ID_RECORD, sorted; file number n has the ids of the n-th of equal ranges
of the ids' first 64 bits. `ids/index.json` lists the tables that records point to, and the records of each file. Ids
are hashes, so an id's place is known to within a few blocks before anything is read."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.minhash import key_order
from gristmill.data_pipeline.ledger.document_file import packed_ids
from gristmill.foundation.checksums import (
    checksummed_path,
    content_digest,
    link_with_checksum,
    matches_checksum,
    read_cached,
    write_with_checksum,
)
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import refuse_stub, remove_tree, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, fetch, range_of_keys

IDS_FOLDER, IDS_FILE, IDS_SUFFIX = "ids", "index.json", ".ids"
INDEX_VERSION = 1
# A row of a table by id. table: its number in index.json, with DUPLICATE set where the id is that of the document which
# was kept instead of the row's. A piece of a split document points to the ledger's row of the whole one.
ID_RECORD = np.dtype([("id", "<u8", 2), ("table", "<u4"), ("row", "<u4")])
DUPLICATE = np.uint32(1 << 31)
BLOCK_RECORDS = 512
ID_BLOCK = 16_384  # whose ids are in the processor's cache
MAX_MATCHES = 10_000  # rows of one id that are listed: a document with more duplicates than these
LARGEST_CLUSTERS = 1_000


@dataclass(frozen=True)
class IndexTask:
    """records: of the tables that are read, by ranges of ids. known: the file of an earlier index with this number, of
    whose table n the number is renumbered[n] now, -1 if it is gone. Writes file `number` of the index."""

    records: PartitionedFiles
    number: int
    folder: Path
    known: Path | None = None
    renumbered: np.ndarray | None = None

    @property
    def path(self) -> Path:
        return self.folder / IDS_FOLDER / ids_name(self.number)


def ids_name(number: int) -> str:
    return f"{number:05d}{IDS_SUFFIX}"


def id_blocks(path: Path) -> Iterator[np.ndarray]:
    """uint64[N, 2]: the ids of a file of the index in their order, each once in a block of ID_BLOCK records."""
    refuse_stub(path)
    records = np.memmap(path, ID_RECORD, "r") if path.stat().st_size else np.empty(0, ID_RECORD)
    for start in range(0, len(records), ID_BLOCK):
        ids = np.ascontiguousarray(records["id"][start : start + ID_BLOCK])
        yield ids[is_new_id(ids)]


def is_new_id(ids: np.ndarray) -> np.ndarray:
    """bool[N]: False where the id before is the same."""
    is_new = np.ones(len(ids), bool)
    is_new[1:] = (ids[1:, 0] != ids[:-1, 0]) | (ids[1:, 1] != ids[:-1, 1])
    return is_new


DOCUMENT_COLUMNS, LEDGER_COLUMNS = ("doc_id",), ("doc_id", "duplicate_of", "pieces")  # that have ids


def records_of_tables(tables: Sequence[pa.Table], numbers: Sequence[int], path: Path, is_ledger: bool) -> np.ndarray:
    """ID_RECORD[], unsorted, of tables with these numbers: DOCUMENT_COLUMNS of documents or LEDGER_COLUMNS of ledger
    rows. path: of the first, for messages."""
    sizes = [len(table) for table in tables]
    table_of = np.repeat(np.array(numbers, np.uint32), sizes)
    row_of = np.concatenate([np.arange(size) for size in sizes])
    columns = pa.concat_tables(tables).combine_chunks()
    ids = packed_ids(columns.column("doc_id"), path)
    parts = [_records(ids, row_of, table_of)]
    if is_ledger:
        kept = columns.column("duplicate_of").combine_chunks()
        rows = np.flatnonzero(kept.is_valid().to_numpy(zero_copy_only=False))
        parts.append(_records(packed_ids(kept.drop_null(), path), row_of[rows], table_of[rows] | DUPLICATE))
        pieces = columns.column("pieces").combine_chunks()
        rows = np.repeat(np.arange(len(ids)), pieces.value_lengths().fill_null(0).to_numpy(zero_copy_only=False))
        parts.append(_records(packed_ids(pieces.flatten(), path), row_of[rows], table_of[rows]))
    return np.concatenate(parts)


def _records(ids: np.ndarray, rows: np.ndarray, tables: np.ndarray) -> np.ndarray:
    records = np.empty(len(ids), ID_RECORD)
    records["id"], records["table"], records["row"] = ids, tables, rows
    return records


def shuffle_records(records: np.ndarray, shuffle: PartitionedFiles, part: int) -> None:
    """Writes the records of one table as a part of the shuffle."""
    shuffle.write_unsorted(part, records, range_of_keys(np.ascontiguousarray(records["id"][:, 0]), shuffle.ranges))


def write_ids(task: IndexTask) -> tuple[int, list[tuple[str, int]], list[int]]:
    """Writes one file of the index. Returns (its records, the kept documents with the most duplicates and how many,
    int[k]: kept documents with 2**k to 2**(k + 1) - 1 duplicates)."""
    records = sorted_records(task.records.read(task.number))
    if task.known is not None and task.renumbered is not None:
        records = merged_records(np.fromfile(fetch(task.known), ID_RECORD), records, task.renumbered)
    if not matches_checksum(task.path):
        with checksummed_path(task.path) as temporary:
            records.tofile(temporary)
    ids = records["id"][(records["table"] & DUPLICATE) != 0]
    starts = np.flatnonzero(is_new_id(ids))
    kept, counts = ids[starts], np.diff(starts, append=len(ids))
    order = np.lexsort((kept[:, 1], kept[:, 0], -counts))[:LARGEST_CLUSTERS]
    largest = [(f"{int(kept[n, 0]):016x}{int(kept[n, 1]):016x}", int(counts[n])) for n in order.tolist()]
    sizes = np.bincount(np.log2(counts).astype(np.int64)).tolist() if len(counts) else []
    return len(records), largest, sizes


def sorted_records(records: np.ndarray) -> np.ndarray:
    """By id, table and row. Ids are hashes, so by their first halves alone, unless those of different ids agree."""
    order = np.argsort(records["table"].astype(np.uint64) << np.uint64(32) | records["row"], kind="stable")
    order = order[key_order(records["id"][order, 0])]
    ids = records["id"][order]
    is_alike = ids[1:, 0] == ids[:-1, 0]
    if (ids[1:, 1][is_alike] != ids[:-1, 1][is_alike]).any():
        order = np.lexsort((records["row"], records["table"], records["id"][:, 1], records["id"][:, 0]))
    return records[order]


def merged_records(known: np.ndarray, new: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Both, sorted, as each of them is. numbers: the table n of the known ones is numbers[n] now, -1 if it is gone; the
    numbers ascend."""
    words = np.empty((len(known) + len(new), RECORD_WORDS), np.uint64)
    count = _merge(_words(known), _words(new), np.asarray(numbers, np.int64), words)
    return words[:count].reshape(-1).view(ID_RECORD)


RECORD_WORDS = 3  # id, and the row in the upper half of a word, the table in the lower


def _words(records: np.ndarray) -> np.ndarray:
    """uint64[N, RECORD_WORDS]"""
    return np.ascontiguousarray(records).view("<u8").reshape(-1, RECORD_WORDS)


@cached_njit(nogil=True)
def _merge(known, new, numbers, merged):
    """The number of records."""
    duplicate, upper, half = np.uint64(1 << 31), np.uint64(0xFFFFFFFF << 32), np.uint64(32)
    count = place = 0
    for row in range(len(known)):
        word = known[row, 2]
        number = numbers[(word & ~upper) & ~duplicate]
        if number < 0:
            continue
        word = (word & (upper | duplicate)) | np.uint64(number)
        order = word << half | word >> half  # by table, then row
        while place < len(new):
            other = new[place, 2]
            if new[place, 0] != known[row, 0]:
                if new[place, 0] > known[row, 0]:
                    break
            elif new[place, 1] != known[row, 1]:
                if new[place, 1] > known[row, 1]:
                    break
            elif (other << half | other >> half) > order:
                break
            _copy_row(merged, count, new, place)
            count += 1
            place += 1
        merged[count, 0], merged[count, 1], merged[count, 2] = known[row, 0], known[row, 1], word
        count += 1
    while place < len(new):
        _copy_row(merged, count, new, place)
        count += 1
        place += 1
    return count


@cached_njit(forceinline=True)
def _copy_row(target, row, source, place):
    """By numbers: numba compiles for 3 s what it would say of an assignment of rows of other sizes."""
    target[row, 0], target[row, 1], target[row, 2] = source[place, 0], source[place, 1], source[place, 2]


# The index of the run before, kept with what its tables were made from.


@dataclass(frozen=True)
class KeptIndex:
    """folder: in a cache; holds links to the files of the index, and their description."""

    folder: Path

    def keep(self, corpus: Path, tables: Sequence[str], ranges: int) -> None:
        """tables: digest of each table's content. The description is written last and names the files' digests."""
        paths = [corpus / IDS_FOLDER / ids_name(number) for number in range(ranges)]
        try:
            for number, path in enumerate(paths):
                link_with_checksum(path, self.path(number), may_copy=False)
        except OSError:  # no hard links here
            remove_tree(self.folder)
            return
        content = {"version": INDEX_VERSION, "tables": list(tables), "files": [content_digest(path) for path in paths]}
        write_with_checksum(self.folder / IDS_FILE, canonical_json(content))

    def path(self, number: int) -> Path:
        return self.folder / ids_name(number)

    def renumbered(self, tables: Sequence[str], ranges: int) -> np.ndarray | None:
        """int64[tables of the kept index]: their numbers among these tables, -1 for those that are gone. None if there
        is no index of so many files, or tables are in another order now."""
        described = read_cached(self.folder / IDS_FILE) if matches_checksum(self.folder / IDS_FILE) else None
        if not isinstance(described, dict) or described["version"] != INDEX_VERSION:
            return None
        paths = [self.path(number) for number in range(ranges)]
        if len(described["files"]) != ranges or not all(map(matches_checksum, paths)):
            return None
        if [content_digest(path) for path in paths] != described["files"]:
            return None
        numbers_of: dict[str, list[int]] = {}
        for number in reversed(range(len(tables))):
            numbers_of.setdefault(tables[number], []).append(number)
        numbers = np.array(
            [numbers_of[digest].pop() if numbers_of.get(digest) else -1 for digest in described["tables"]]
        )
        return numbers if (np.diff(numbers[numbers >= 0]) > 0).all() else None


def write_index_file(folder: Path, tables: Sequence[str], records: Sequence[int]) -> None:
    """Describes the index: its tables by number, and the records of each of its files."""
    content = {"version": INDEX_VERSION, "tables": list(tables), "records": list(records)}
    write_atomic(folder / IDS_FOLDER / IDS_FILE, canonical_json(content) + b"\n")


@dataclass(frozen=True)
class RowPlace:
    """A row of a table of the corpus, by the table's path in it. is_duplicate: the row's document was removed as a
    duplicate of the id that was looked up."""

    table: str
    row: int
    is_duplicate: bool = False

    @property
    def is_ledger(self) -> bool:
        return self.table.startswith("ledger/")


@dataclass(frozen=True)
class IdIndex:
    """An open index. read: (path in the corpus, first byte, last + 1) -> the bytes."""

    tables: list[str]
    records: list[int]
    read: Callable[[str, int, int], bytes]

    @classmethod
    def open(cls, content: bytes, read: Callable[[str, int, int], bytes]) -> Self:
        """content: of index.json. Raises InputError if it describes no index of this version."""
        try:
            described: dict[str, Any] = orjson.loads(content)
            if described["version"] != INDEX_VERSION:
                raise ValueError(f"version {described['version']}")
            return cls([str(name) for name in described["tables"]], [int(n) for n in described["records"]], read)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{IDS_FOLDER}/{IDS_FILE}: no index of version {INDEX_VERSION} ({error}); run `gristmill curate` again"
            ) from error

    @classmethod
    def of_folder(cls, folder: Path) -> Self | None:
        """The index of a corpus on this machine; None if it has none."""
        path = folder / IDS_FOLDER / IDS_FILE
        return (
            cls.open(path.read_bytes(), lambda name, start, stop: _read(folder / name, start, stop))
            if (path.is_file())
            else None
        )

    def places(self, doc_id: str, limit: int = MAX_MATCHES) -> list[RowPlace]:
        """The rows of a document, of its ledger row and of its duplicates, at most `limit`."""
        key = int(doc_id[:16], 16), int(doc_id[16:], 16)
        number = key[0] * len(self.records) >> 64
        matches: list[RowPlace] = []
        row = self._first(number, key)
        while len(matches) < limit:
            block = self._block(number, row, row + BLOCK_RECORDS)
            same = int(((block["id"][:, 0] == key[0]) & (block["id"][:, 1] == key[1])).sum())
            matches += [self._place(record) for record in islice(block, same)]
            if same < BLOCK_RECORDS:
                break
            row += BLOCK_RECORDS
        return matches[:limit]

    def records_of(self, ids: np.ndarray) -> np.ndarray:
        """ID_RECORD[]: all rows of many documents, uint64[N, 2] packed ids. A file that may have one is read whole."""
        records_of_files = [np.empty(0, ID_RECORD)]
        number_of = range_of_keys(np.ascontiguousarray(ids[:, 0]), len(self.records))
        for number in np.unique(number_of).tolist():
            records = self._block(number, 0, self.records[number])
            wanted = np.unique(ids[number_of == number], axis=0)
            firsts = np.ascontiguousarray(records["id"][:, 0])
            starts, stops = (np.searchsorted(firsts, wanted[:, 0], side=side) for side in ("left", "right"))
            sizes = stops - starts
            rows = np.repeat(starts, sizes) + np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            is_same = records["id"][rows, 1] == np.repeat(wanted[:, 1], sizes)
            records_of_files.append(records[rows[is_same]])
        return np.concatenate(records_of_files)

    def rows_by_table(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """Table, by its path in the corpus -> rows int64[], ascending, of these records."""
        table_of, rows = records["table"] & ~DUPLICATE, records["row"].astype(np.int64)
        return {self.tables[number]: np.unique(rows[table_of == number]) for number in np.unique(table_of).tolist()}

    def _place(self, record: np.void) -> RowPlace:
        is_duplicate = bool(record["table"] & DUPLICATE)
        return RowPlace(self.tables[int(record["table"] & ~DUPLICATE)], int(record["row"]), is_duplicate)

    def _first(self, number: int, key: tuple[int, int]) -> int:
        """The first record of the file that is not below the key: first guessed from the key, then bracketed."""
        size = self.records[number]
        within = (key[0] * len(self.records) - (number << 64)) / 2**64
        guess, step = int(within * size), BLOCK_RECORDS + 4 * math.isqrt(size)
        low, high = max(guess - step, 0), min(guess + step, size)
        while low > 0 and not self._is_below(number, low, key):
            low, step = max(low - 2 * step, 0), 2 * step
        while high < size and self._is_below(number, high, key):
            high, step = min(high + 2 * step, size), 2 * step
        while high - low > BLOCK_RECORDS:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_below(number, middle, key) else (low, middle)
        ids = self._block(number, low, high + 1)["id"]
        below = (ids[:, 0] < key[0]) | ((ids[:, 0] == key[0]) & (ids[:, 1] < key[1]))
        return low + int(below.sum())

    def _is_below(self, number: int, row: int, key: tuple[int, int]) -> bool:
        block = self._block(number, row, row + 1)
        return bool(len(block)) and (int(block["id"][0, 0]), int(block["id"][0, 1])) < key

    def _block(self, number: int, start: int, stop: int) -> np.ndarray:
        """The records start..stop - 1 that the file has."""
        stop, size = min(stop, self.records[number]), ID_RECORD.itemsize
        if stop <= start:
            return np.empty(0, ID_RECORD)
        content = self.read(f"{IDS_FOLDER}/{ids_name(number)}", start * size, stop * size)
        if len(content) != (stop - start) * size:
            raise InputError(f"{IDS_FOLDER}/{ids_name(number)}: shorter than {IDS_FILE} says; run `gristmill curate`")
        return np.frombuffer(content, ID_RECORD)


def _read(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def read_row(file: pq.ParquetFile, row: int, columns: Sequence[str] | None = None) -> dict[str, Any]:
    """One row of a Parquet file, of which its row group is read. Raises InputError if the file has fewer rows."""
    return read_row_group_of(file, row, columns).to_pylist()[0]


def read_row_group_of(file: pq.ParquetFile, row: int, columns: Sequence[str] | None = None) -> pa.Table:
    """A table of one row. Raises InputError if the file has fewer rows."""
    first = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row < first + rows:
            names = None if columns is None else list(columns)
            return file.read_row_group(group, columns=names, use_threads=False).slice(row - first, 1)
        first += rows
    raise InputError(f"the index points to row {row} of a file of {first}; run `gristmill verify` on the corpus")

"""The shuffle: fixed-width binary records that tasks write part by part and other tasks read range by range.

A part is one file: a header, then its records, range after range. So no task knows all records, and the driver knows
none: a `Shuffle` has the same few bytes for any number of documents, and so has each order for a task.
A reader needs the memory of its range in all parts: choose ranges by `ranges_for`.

File: 8 bytes MAGIC, uint64 bytes of a record, uint64 ranges, uint64[ranges + 1] first record of each range, records."""

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.foundation.checksums import write_sealed
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.task_files import fetch, read_range

MAGIC = b"gmshuf01"
HEAD_BYTES = 24
SMALL_BYTES = 1 << 16  # a file up to this is read whole, in a quarter of the time that mapping it takes
MIN_RANGED_BYTES = 16_000_000  # of a file on another machine; a smaller one is fetched whole
# Records of a range: a reader of records of 12 bytes needs 50 MB for them, and as much again to sort them.
RANGE_RECORDS = 1 << 22


@dataclass(frozen=True)
class Shuffle:
    """prefix: of the parts' paths. dtype: of a record. parts, ranges: how many there are."""

    prefix: Path
    dtype: np.dtype
    parts: int
    ranges: int

    def path(self, part: int) -> Path:
        return Path(f"{self.prefix}-{part:05d}.rec")

    def paths(self) -> list[Path]:
        return [self.path(part) for part in range(self.parts)]

    def has(self, part: int) -> bool:
        return fetch(self.path(part)).exists()

    def write(self, part: int, records: np.ndarray, bounds: np.ndarray) -> None:
        """One part, whole or not at all. records: ordered by range; bounds int64[ranges + 1]: where each begins."""
        if records.dtype != self.dtype or len(bounds) != self.ranges + 1 or bounds[-1] != len(records):
            raise ValueError(f"{self.path(part)}: {records.dtype}, {len(bounds)} bounds up to {bounds[-1]}")
        head = MAGIC + np.array([self.dtype.itemsize, self.ranges, *bounds], "<u8").tobytes()
        write_sealed(self.path(part), head, np.ascontiguousarray(records).view(np.uint8).data)

    def write_sorted(self, part: int, records: np.ndarray, range_of: np.ndarray) -> None:
        """One part of records that are ordered by their range, range_of int64[records]."""
        self.write(part, records, np.searchsorted(range_of, np.arange(self.ranges + 1)))

    def write_unsorted(self, part: int, records: np.ndarray, range_of: np.ndarray) -> None:
        """As `write_sorted`; records of one range keep their order."""
        order = np.argsort(range_of, kind="stable")
        self.write_sorted(part, records[order], range_of[order])

    def part(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        """(bounds int64[ranges + 1], records, mapped from disk unless the file is small). Raises InputError if the file
        is damaged."""
        path, start = fetch(self.path(part)), HEAD_BYTES + 8 * (self.ranges + 1)
        try:
            with path.open("rb", buffering=0) as file:
                content, num_bytes = file.read(max(start, SMALL_BYTES)), os.fstat(file.fileno()).st_size
                # np.memmap opens the file again and resolves its path: a task maps a part for every range that it reads
                mapped = None if num_bytes <= len(content) else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            head = np.frombuffer(content[:start], "<u8")
            if head[:1].tobytes() != MAGIC or head[1] != self.dtype.itemsize or head[2] != self.ranges:
                raise ValueError("another header than expected")
            bounds = head[3:].astype(np.int64)
            if num_bytes != start + int(bounds[-1]) * self.dtype.itemsize:
                raise ValueError("its size is not what the header says")
            if mapped is None:
                return bounds, np.frombuffer(content, self.dtype, offset=start)
            return bounds, np.frombuffer(mapped, self.dtype, offset=start)
        except (OSError, ValueError, IndexError) as error:
            raise InputError(f"{path}: no readable records ({error}); delete its folder and run again") from error

    def pieces(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """(part, its records of the range), mapped from disk, for all parts that have any."""
        for part in range(self.parts):
            records = self.piece(part, number)
            if len(records):
                yield part, records

    def piece(self, part: int, number: int) -> np.ndarray:
        """The records of a range in one part. Of a large file on another machine nothing else is read."""
        path, start = self.path(part), HEAD_BYTES + 8 * number
        if (head := read_range(path, start, start + 16, MIN_RANGED_BYTES)) is not None:
            first, last = np.frombuffer(head, "<i8").tolist()
            start, size = HEAD_BYTES + 8 * (self.ranges + 1), self.dtype.itemsize
            if (content := read_range(path, start + first * size, start + last * size)) is not None:
                return np.frombuffer(content, self.dtype)
        bounds, records = self.part(part)
        return records[bounds[number] : bounds[number + 1]]

    def read(self, number: int) -> np.ndarray:
        """The records of a range, part after part."""
        return np.concatenate([np.empty(0, self.dtype), *(piece for _, piece in self.pieces(number))])

    def read_all(self) -> np.ndarray:
        """All records, part after part."""
        return np.concatenate([np.empty(0, self.dtype), *(self.part(part)[1] for part in range(self.parts))])

    def num_records(self) -> int:
        return sum(int(self.part(part)[0][-1]) for part in range(self.parts))


def ranges_for(records: int, range_records: int = RANGE_RECORDS) -> int:
    """How many ranges so many records need."""
    return max(-(-records // range_records), 1)


def range_of_keys(keys: np.ndarray, ranges: int) -> np.ndarray:
    """int64[]: the range of each 64-bit hash; ranges follow each other as the hashes do.

    [0, 2**63, 2**64 - 1], 2 -> [0, 1, 1]."""
    return ((keys >> np.uint64(32)) * np.uint64(ranges) >> np.uint64(32)).astype(np.int64)

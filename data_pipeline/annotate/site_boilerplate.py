"""First pass by site: finds the blocks that repeat over the pages of one host, with exact counts in bounded memory.

Every task writes the (block, host, page) rows of its pages, sorted. The rows of all tasks are then counted by ranges of
block keys. Counts are of sets, so they depend on no order of files and no number of workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from gristmill.data_pipeline.extraction.blocks_config import SiteBoilerplateConfig, block_keys, host_key
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, main_blocks
from gristmill.data_pipeline.extraction.weights import weights_digest
from gristmill.data_pipeline.readers.document import Record, split_url
from gristmill.data_pipeline.readers.read import FileRange, read_pages
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.checksums import checksum_path, checksummed_path, matches_checksum
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine

SITE_VERSION = 1  # raised whenever the code changes what the files of this pass hold
# Rows that a task holds before it writes them, and that a range of block keys has on average: 24 MB, some 100 MB while
# they are sorted. All pages of a host with one block are in one range.
MAX_ROWS = 1_000_000
# Rows of uint64[3, N]. A page is the hash of its main text; rows of block 0 list the pages of the hosts.
BLOCK, HOST, PAGE = range(3)


@dataclass(frozen=True)
class PagesTask:
    """path: int64[1], the number of files of rows beside it; written last."""

    path: Path
    source: SourceConfig
    ranges: tuple[FileRange, ...]

    @property
    def label(self) -> str:
        return f"source {self.source.name}, {self.ranges[0].file.name}"

    def row_file(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.stem}-{number:06d}.npy")

    @property
    def row_files(self) -> list[Path]:
        return [self.row_file(number) for number in range(int(_mapped(self.path)[0]))]

    @property
    def is_complete(self) -> bool:
        return matches_checksum(self.path) and all(map(matches_checksum, self.row_files))


@dataclass(frozen=True)
class BlockCountTask:
    """The rows whose block is in [first, last]. pages: uint64[2, H], hosts of min_pages pages or more, in order, and
    their numbers of pages."""

    row_files: tuple[Path, ...]
    first: int
    last: int
    pages: np.ndarray
    config: SiteBoilerplateConfig


def find_site_boilerplate(
    source: SourceConfig, groups: Sequence[Sequence[FileRange]], folder: Path, engine: Engine
) -> Path:
    """Write the table of the source's boilerplate (uint64[2, K], see extraction/blocks_config.py); returns its path.

    groups: the ranges of each task. What is complete in `folder` is used again, and other files there are deleted."""
    config = source.blocks.site_boilerplate
    assert config is not None
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [PagesTask(folder / f"{_identity(source, group)}.npy", source, tuple(group)) for group in groups]
    made_from = [[task.path.name for task in tasks], config.model_dump(mode="json")]
    table = folder / f"boilerplate-{fingerprint(made_from)}.npy"
    if not matches_checksum(table):
        missing = [task for task in tasks if not task.is_complete]
        sizes = [float(sum(file_range.file.bytes for file_range in task.ranges)) for task in missing]
        engine.map(write_rows, missing, "site boilerplate: read blocks", sizes, "B")
        save_array(table, boilerplate([path for task in tasks for path in task.row_files], config, engine))
    complete = [task for task in tasks if task.is_complete]
    current = {table, *(path for task in complete for path in (task.path, *task.row_files))}
    current |= {checksum_path(path) for path in current}
    for path in folder.iterdir():
        if path not in current:
            path.unlink()
    return table


def _identity(source: SourceConfig, ranges: Sequence[FileRange]) -> str:
    ignored = {"paths": True, "weight": True, "priority": True, "filters": True}
    return fingerprint(
        {
            "version": SITE_VERSION,
            "source": source.model_dump(
                mode="json", exclude={**ignored, "blocks": {"weights", "site_boilerplate", "metadata"}}
            ),
            "weights": weights_digest(source.blocks.weights),
            "ranges": [[r.file.name, r.file.sha256, r.file.copy_index, r.first_record, r.start, r.end] for r in ranges],
        }
    )


def write_rows(task: PagesTask) -> None:
    """Write the rows of the task's pages, sorted and each once, in files of about MAX_ROWS."""
    arrays: list[np.ndarray] = []
    num_rows = num_files = 0
    for rows in _rows(task):
        arrays.append(rows)
        num_rows += rows.shape[1]
        if num_rows >= MAX_ROWS:
            save_array(task.row_file(num_files), unique_rows(arrays))
            arrays, num_rows, num_files = [], 0, num_files + 1
    save_array(task.row_file(num_files), unique_rows(arrays))
    save_array(task.path, np.array([num_files + 1]))


def _rows(task: PagesTask) -> Iterator[np.ndarray]:
    """uint64[3, N] of every page that has an address and main text."""
    for file_range in task.ranges:
        for record in read_pages(file_range, task.source):
            if isinstance(record, Record) and record.html is not None and (host := split_url(record.url)[0]):
                yield page_rows(host, _blocks(record.html, record.charset, task.source))


def _blocks(html: bytes, charset: str | None, source: SourceConfig) -> list[bytes]:
    try:
        return main_blocks(html, charset, source.blocks)
    except NotExtracted:
        return []


def page_rows(host: str, texts: Sequence[bytes]) -> np.ndarray:
    """uint64[3, N] of one page; none of a page without text. texts: of its main blocks, in UTF-8."""
    if not texts:
        return np.empty((3, 0), np.uint64)
    rows = np.empty((3, len(texts) + 1), np.uint64)
    rows[BLOCK, 0], rows[BLOCK, 1:] = 0, block_keys(host, texts)
    rows[HOST] = host_key(host)
    rows[PAGE] = xxhash.xxh3_64_intdigest(b"\n".join(texts))
    return rows


def unique_rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The distinct columns of uint64[3, N] arrays, ordered by block, host and page."""
    rows = np.concatenate([np.empty((3, 0), np.uint64), *arrays], axis=1)
    rows = rows[:, np.lexsort(rows[::-1])]
    new = np.ones(rows.shape[1], np.bool_)
    new[1:] = (rows[:, 1:] != rows[:, :-1]).any(axis=0)
    return rows[:, new]


def save_array(path: Path, array: np.ndarray) -> None:
    with checksummed_path(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)


def boilerplate(row_files: Sequence[Path], config: SiteBoilerplateConfig, engine: Engine) -> np.ndarray:
    """uint64[2, K]: hosts and keys of the boilerplate blocks, ordered by key, then host."""
    pages = _pages_of_hosts([_slice(_mapped(path), BLOCK, 0, 0) for path in row_files], config.min_pages)
    bounds = _bounds(sum(_mapped(path).shape[1] for path in row_files))
    tasks = [
        BlockCountTask(tuple(row_files), max(first, 1), last - 1, pages, config) for first, last in pairwise(bounds)
    ]
    return np.concatenate(engine.map(count_blocks, tasks, "site boilerplate: count blocks"), axis=1)


def _bounds(num_rows: int) -> list[int]:
    """Bounds of ranges of 64-bit hashes that hold about MAX_ROWS of the rows each."""
    num_ranges = num_rows // MAX_ROWS + 1
    return [k * 2**64 // num_ranges for k in range(num_ranges + 1)]


def _pages_of_hosts(files: Sequence[np.ndarray], min_pages: int) -> np.ndarray:
    """uint64[2, H]: the hosts of min_pages pages or more, in order, and their numbers of pages. files: rows of block
    0."""
    pairs = [np.empty((2, 0), np.uint64)]
    for first, last in pairwise(_bounds(sum(rows.shape[1] for rows in files))):
        rows = unique_rows([_slice(rows, HOST, first, last - 1) for rows in files])
        hosts, counts = np.unique(rows[HOST], return_counts=True)
        pairs.append(np.stack([hosts, counts.astype(np.uint64)])[:, counts >= min_pages])
    return np.concatenate(pairs, axis=1)


def _mapped(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _slice(rows: np.ndarray, column: int, first: int, last: int) -> np.ndarray:
    """The rows from first to last of a column in order, without reading the others."""
    start = np.searchsorted(rows[column], np.uint64(first), "left")
    return rows[:, start : np.searchsorted(rows[column], np.uint64(last), "right")]


def count_blocks(task: BlockCountTask) -> np.ndarray:
    """uint64[2, K]: hosts and keys of the range's boilerplate blocks, ordered by key, then host."""
    hosts, totals = task.pages
    counted = []
    for path in task.row_files:
        rows = _slice(_mapped(path), BLOCK, task.first, task.last)
        counted.append(rows[:, np.isin(rows[HOST], hosts)])
    rows = unique_rows(counted)
    new = np.ones(rows.shape[1], np.bool_)
    new[1:] = (rows[:PAGE, 1:] != rows[:PAGE, :-1]).any(axis=0)
    firsts = np.flatnonzero(new)
    counts = np.diff(np.append(firsts, rows.shape[1]))
    of_host = totals[np.searchsorted(hosts, rows[HOST, firsts])]
    # a division, not min_share * of_host: 0.1 * 30 is above 3
    is_boilerplate = (counts >= task.config.min_pages) & (counts / of_host >= task.config.min_share)
    return rows[:, firsts[is_boilerplate]][[HOST, BLOCK]]

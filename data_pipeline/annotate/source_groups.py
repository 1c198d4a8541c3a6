"""Small sources with the same settings as one: their documents stand in one annotated file, source after source.

A file and a task cost 2 to 5 ms each whatever they hold, and curation has a dozen steps. So no step of it has a file or
a task for each of many small sources. What it writes for people (shards, ledger, counts) is by source, and has the same
bytes as without batches."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig, text_bytes
from gristmill.data_pipeline.filters.apply import SOURCE, source_runs
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.checksums import LockedSource
from gristmill.foundation.fingerprint import fingerprint

# Text of a source that is batched: above, its own steps take longer than its files and tasks.
MAX_SMALL_BYTES = 1_000_000
MIN_BATCHED_SOURCES = 16  # with the same settings; fewer are no batch
MAX_BATCH_SOURCES, MAX_BATCH_BYTES = 256, 8_000_000
BATCH_PREFIX = "+"  # of a batch's name, which no source's name can have


@dataclass(frozen=True)
class SourceGroup:
    """One source, or a batch of small ones in the order of the recipe."""

    sources: tuple[SourceConfig, ...]
    locked: tuple[LockedSource, ...]
    config: AnnotateConfig

    @property
    def is_batch(self) -> bool:
        return len(self.sources) > 1

    @cached_property
    def source(self) -> SourceConfig:
        """The source; of a batch the first one, whose settings are those of all, with a name for the batch."""
        if not self.is_batch:
            return self.sources[0]
        name = BATCH_PREFIX + fingerprint([source.name for source in self.sources])[:16]
        return self.sources[0].model_copy(update={"name": name})  # a name that the recipe may not give

    @property
    def members(self) -> list[tuple[SourceConfig, LockedSource]]:
        return list(zip(self.sources, self.locked, strict=True))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)


def source_in_name(path: Path) -> str:
    """Name of the source or batch that an annotated file is of."""
    return path.stem.rpartition("-")[0]


def is_batch_file(path: Path) -> bool:
    return path.name.startswith(BATCH_PREFIX)


def rows_by_source(path: Path) -> list[tuple[str, int, int]]:
    """(source, first row, last + 1) of each source that an annotated file has documents of."""
    with pq.ParquetFile(path) as file:
        if not is_batch_file(path):
            return [(source_in_name(path), 0, file.metadata.num_rows)]
        return source_runs(file.read([SOURCE], use_threads=False).column(0))


def group_sources(
    sources: Sequence[SourceConfig],
    locked: Sequence[LockedSource],
    configs: Sequence[AnnotateConfig],
    settings: Sequence[str],
    may_batch: bool,
) -> list[SourceGroup]:
    """Every source in a group, groups in the order of their first sources. settings: of each source, text that is
    equal where a step may treat two sources alike."""
    small: dict[str, list[int]] = {}
    for number, (source, files) in enumerate(zip(sources, locked, strict=True)):
        if may_batch and _is_small(source, files):
            small.setdefault(settings[number], []).append(number)
    members = [
        [(_digest(sources[number].name), number, _text_bytes(locked[number])) for number in numbers]
        for numbers in small.values()
        if len(numbers) >= MIN_BATCHED_SOURCES
    ]
    batches = [batch for of_settings in members for batch in _batches(of_settings)]
    batched = {number for batch in batches for number in batch}
    alone = [[number] for number in range(len(sources)) if number not in batched]
    return [
        SourceGroup(tuple(sources[n] for n in group), tuple(locked[n] for n in group), configs[group[0]])
        for group in sorted([*alone, *batches])
    ]


def _is_small(source: SourceConfig, locked: LockedSource) -> bool:
    has_table = source.extracted_by_blocks and source.blocks.site_boilerplate is not None
    is_readable = bool(locked.files) and not has_table and source.format != "datasets"
    return is_readable and _text_bytes(locked) <= MAX_SMALL_BYTES


def _text_bytes(locked: LockedSource) -> int:
    return sum(text_bytes(file.name, file.bytes) for file in locked.files)


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _batches(members: Sequence[tuple[int, int, int]], bit: int = 63) -> Iterator[list[int]]:
    """members: (digest of the name, number, bytes) of each source. Divides them by the bits of their digests until a
    batch is small enough, so a source that comes or goes changes its own batch alone."""
    is_small = len(members) <= MAX_BATCH_SOURCES and sum(num_bytes for *_, num_bytes in members) <= MAX_BATCH_BYTES
    if is_small or bit < 0:
        if members:
            yield sorted(number for _, number, _ in members)
        return
    for wanted in (0, 1):
        yield from _batches([member for member in members if member[0] >> bit & 1 == wanted], bit - 1)

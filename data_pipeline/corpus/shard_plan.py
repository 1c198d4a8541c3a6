"""Which kept documents of a source stand in which shard, found file by file: nothing is held of a document."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.filters.apply import KEPT
from gristmill.data_pipeline.ledger.parquet_rows import WeightRuns
from gristmill.data_pipeline.ledger.source_state import SourceState

# A source of 16 MB and more has several shards, so that several workers can write them.
TARGET_SHARDS, MIN_SHARD_BYTES = 8, 16_000_000


@dataclass(frozen=True)
class ShardPlan:
    """starts: of each training shard the first of the source's kept documents that its task reads, and the end.
    kept: by file, how many documents are kept. held_out: (shard, split) -> documents of that split among those.
    held_out_runs: by split but training, (start, stop) of each shard's documents among those of the split."""

    starts: list[int]
    kept: list[int]
    held_out: Counter[tuple[int, int]]
    held_out_runs: Mapping[int, list[tuple[int, int]]]

    @property
    def shards(self) -> range:
        return range(len(self.starts) - 1)


def plan_shards(state: SourceState, shard_bytes: int) -> ShardPlan:
    """A shard's task reads from its first training document up to that of the next shard; of a shard all are written
    but those of other splits."""
    runs = [WeightRuns(limit) for limit in _limits(state, shard_bytes)]
    starts, kept_by_file, held_out = [0], [], Counter[tuple[int, int]]()
    kept = trained = 0
    for splits, sizes in kept_documents(state):
        training = np.flatnonzero(splits == 0)
        for split, of_split in enumerate(runs):
            of_split.add(sizes[training if split == 0 else splits == split])
        inside = [start - trained for start in runs[0].starts[len(starts) :] if start < trained + len(training)]
        starts.extend((kept + training[inside]).tolist())
        others = np.flatnonzero(splits)
        shard_of = np.searchsorted(starts, kept + others, side="right") - 1
        held_out.update(zip(shard_of.tolist(), splits[others].tolist(), strict=True))
        kept_by_file.append(len(splits))
        kept, trained = kept + len(splits), trained + len(training)
    bounds = {split: of_split.bounds() for split, of_split in enumerate(runs) if split}
    return ShardPlan([*starts, kept], kept_by_file, held_out, bounds)


def _limits(state: SourceState, shard_bytes: int) -> list[int]:
    """By split, the bytes of a shard: as many workers as there are shards can write them."""
    totals = [0] * len(SPLITS)
    for splits, sizes in kept_documents(state):
        for split in range(len(SPLITS)):
            totals[split] += int(sizes[splits == split].sum(dtype=np.int64))
    return [min(shard_bytes, max(total // TARGET_SHARDS, MIN_SHARD_BYTES)) for total in totals]


def kept_documents(state: SourceState) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """By file, (split codes int8, bytes uint32) of the kept rows."""
    for results in state.filter_results:
        loaded = results.load()
        mask = loaded.failed_rule == KEPT
        yield loaded.splits[mask], loaded.bytes[mask]

"""Which kept documents of a source stand in which shard, found file by file: nothing is held of a document."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.ledger.parquet_rows import WeightRuns, split_by_weight
from gristmill.data_pipeline.ledger.source_state import SourceState

# A source of 16 MB and more has several shards, so that several workers can write them.
TARGET_SHARDS, MIN_SHARD_BYTES = 8, 16_000_000


@dataclass(frozen=True)
class ShardPlan:
    """starts: of each training shard the first of the source's kept documents that its task reads, and the end.
    kept: by file, how many documents are kept. held_out: (shard, split) -> documents of that split among those."""

    starts: list[int]
    kept: list[int]
    held_out: Counter[tuple[int, int]]

    @property
    def shards(self) -> range:
        return range(len(self.starts) - 1)


def plan_training_shards(state: SourceState, shard_bytes: int) -> ShardPlan:
    """A shard's task reads from its first training document up to that of the next shard; of a shard all are written
    but those of other splits."""
    runs = WeightRuns(_limit(state, 0, shard_bytes))
    plan = ShardPlan([0], [], Counter())
    kept = trained = 0
    for splits, sizes in kept_documents(state):
        training = np.flatnonzero(splits == 0)
        runs.add(sizes[training])
        inside = [start - trained for start in runs.starts[len(plan.starts) :] if start < trained + len(training)]
        plan.starts.extend((kept + training[inside]).tolist())
        others = np.flatnonzero(splits)
        shard_of = np.searchsorted(plan.starts, kept + others, side="right") - 1
        plan.held_out.update(zip(shard_of.tolist(), splits[others].tolist(), strict=True))
        plan.kept.append(len(splits))
        kept, trained = kept + len(splits), trained + len(training)
    plan.starts.append(kept)
    return plan


def plan_held_out_shards(state: SourceState, split: int, shard_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of each shard's documents among those of the split."""
    weights = (sizes[splits == split] for splits, sizes in kept_documents(state))
    return split_by_weight(weights, _limit(state, split, shard_bytes))


def _limit(state: SourceState, split: int, shard_bytes: int) -> int:
    """Bytes of a shard of the split: as many workers as there are shards can write them."""
    total = sum(int(sizes[splits == split].sum(dtype=np.int64)) for splits, sizes in kept_documents(state))
    return min(shard_bytes, max(total // TARGET_SHARDS, MIN_SHARD_BYTES))


def kept_documents(state: SourceState) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """By file, (split codes int8, bytes uint32) of the kept rows."""
    for results, mask in zip(state.filter_results, state.kept_masks(), strict=True):
        loaded = results.load()
        yield loaded.splits[mask], loaded.bytes[mask]

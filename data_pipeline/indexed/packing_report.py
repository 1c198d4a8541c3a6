"""The cost of each packing of a dataset: truncated documents and padding."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.dataset import read_dataset, source_prefix
from gristmill.data_pipeline.indexed.packing import cut, document_lengths, first_windows
from gristmill.data_pipeline.indexed.reader import IndexedReader

# Documents looked at in one go.
CHUNK = 1 << 20


@dataclass(frozen=True)
class PackingCost:
    """cut: documents that are in more than one window. padding: tokens of the windows that are no target."""

    source: str
    packing: str
    documents: int
    cut: int
    windows: int
    padding: int
    window_tokens: int

    @property
    def padding_share(self) -> float:
        return self.padding / max(1, self.windows * self.window_tokens)


def packing_report(folder: Path, split: str, sequence_length: int) -> list[PackingCost]:
    """Both packings of every source of an `index` folder that has documents in the split."""
    dataset = read_dataset(folder)
    found: list[PackingCost] = []
    for source in dataset.sources:
        if source.splits[split].documents:
            reader = IndexedReader(source_prefix(folder, split, source.name))
            found += [
                concat_cost(reader, source.name, sequence_length),
                best_fit_cost(reader, source.name, sequence_length),
            ]
    return found


def concat_cost(reader: IndexedReader, source: str, sequence_length: int) -> PackingCost:
    """Documents whose inputs lie in two windows or more. Lengths 3, 2, 4 and sequence_length 3: the third is cut."""
    cuts = start = 0
    for first in range(0, len(reader), CHUNK):
        ends = start + np.cumsum(document_lengths(reader, first, min(first + CHUNK, len(reader))))
        starts = np.concatenate([[start], ends[:-1]])
        cuts += int((starts // sequence_length != (ends - 1) // sequence_length).sum())
        start = int(ends[-1])
    windows = max(0, (reader.num_tokens - 1) // sequence_length)
    return PackingCost(source, "concat", len(reader), cuts, windows, 0, sequence_length + 1)


def best_fit_cost(reader: IndexedReader, source: str, sequence_length: int) -> PackingCost:
    """Documents longer than a window, and what the packed windows lack."""
    cuts = packed = 0
    for first in range(0, len(reader), CHUNK):
        pieces = cut(document_lengths(reader, first, min(first + CHUNK, len(reader))), sequence_length)
        cuts += int((np.bincount(pieces[:, 0]) > 1).sum())
        packed += int(pieces[:, 2].sum())
    windows = int(first_windows(reader, sequence_length)[-1])
    padding = windows * (sequence_length + 1) - packed
    return PackingCost(source, "best_fit", len(reader), cuts, windows, padding, sequence_length + 1)


def rows(costs: list[PackingCost]) -> list[list[str]]:
    """A table: a header and a row a source and packing."""
    header = ["source", "packing", "documents", "cut", "windows", "padding tokens", "padding"]
    return [header] + [
        [
            cost.source,
            cost.packing,
            f"{cost.documents:,}",
            f"{cost.cut:,} ({cost.cut / max(1, cost.documents):.1%})",
            f"{cost.windows:,}",
            f"{cost.padding:,}",
            f"{cost.padding_share:.2%}",
        ]
        for cost in costs
    ]

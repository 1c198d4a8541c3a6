"""What each way of packing costs a dataset, told before a run: documents cut, and padding."""

from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.dataset import read_dataset, source_prefix
from gristmill.data_pipeline.indexed.packing import cut, document_lengths, first_windows
from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.foundation.config import Config

# Documents looked at in one go.
CHUNK = 1 << 20


class PackingCost(Config):
    """cut: documents that stand in more than one window. padding: tokens that nothing learns from."""

    source: str
    packing: str
    documents: int
    cut: int
    windows: int
    padding: int
    padding_share: float


def packing_report(folder: Path, split: str, context: int) -> list[PackingCost]:
    """Both packings of every source of an `index` folder that has documents in the split."""
    dataset = read_dataset(folder)
    found: list[PackingCost] = []
    for source in dataset.sources:
        if source.splits[split].documents:
            reader = IndexedReader(source_prefix(folder, split, source.name))
            found += [concat_cost(reader, source.name, context), best_fit_cost(reader, source.name, context)]
    return found


def concat_cost(reader: IndexedReader, source: str, context: int) -> PackingCost:
    """Documents whose inputs lie in two windows or more. Lengths 3, 2, 4 and context 3: the third is cut."""
    cuts = start = 0
    for first in range(0, len(reader), CHUNK):
        ends = start + np.cumsum(document_lengths(reader, first, min(first + CHUNK, len(reader))))
        starts = np.concatenate([[start], ends[:-1]])
        cuts += int((starts // context != (ends - 1) // context).sum())
        start = int(ends[-1])
    windows = max(0, (reader.num_tokens - 1) // context)
    return _cost(source, "concat", reader, cuts, windows, 0, context)


def best_fit_cost(reader: IndexedReader, source: str, context: int) -> PackingCost:
    """Documents longer than a window, and what the packed windows lack."""
    cuts = packed = 0
    for first in range(0, len(reader), CHUNK):
        pieces = cut(document_lengths(reader, first, min(first + CHUNK, len(reader))), context)
        cuts += int((np.bincount(pieces[:, 0]) > 1).sum())
        packed += int(pieces[:, 2].sum())
    windows = int(first_windows(reader, context)[-1])
    return _cost(source, "best_fit", reader, cuts, windows, windows * (context + 1) - packed, context)


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


def _cost(
    source: str, packing: str, reader: IndexedReader, cuts: int, windows: int, padding: int, context: int
) -> PackingCost:
    return PackingCost(
        source=source,
        packing=packing,
        documents=len(reader),
        cut=cuts,
        windows=windows,
        padding=padding,
        padding_share=padding / max(1, windows * (context + 1)),
    )

"""Summary of an indexed file for people: counts, a histogram of lengths, the first documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.dataset import DATASET_NAME, read_dataset, source_prefix
from gristmill.data_pipeline.indexed.format import IndexedReader, bin_path, idx_path
from gristmill.data_pipeline.indexed.packing import cut, document_lengths, first_windows
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError

# Documents whose lengths are looked at in one go, so that any number of them takes the same memory.
CHUNK = 1 << 20


class LengthBin(Config):
    """Documents of `first` to `last` tokens, both included."""

    first: int
    last: int
    documents: int
    tokens: int


class Inspection(Config):
    """first_documents: their first tokens as text, or as ids where no decoder was handed in."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    shortest: int
    mean: float
    longest: int
    lengths: tuple[LengthBin, ...]
    first_documents: tuple[str, ...]


def inspect(
    prefix: Path,
    decode: Callable[[Sequence[int]], str] | None = None,
    num_documents: int = 3,
    num_tokens: int = 64,
    vocab_size: int | None = None,
) -> Inspection:
    """Reads the whole .idx, the first documents, and with a vocab_size (or a dataset.json above) every token id.

    Raises InputError if the files are damaged, or a token id lies outside the vocabulary."""
    reader = IndexedReader(prefix)
    vocab_size = vocab_size or _vocab_size_of(prefix)
    if vocab_size is not None:
        reader.check_ids(vocab_size, prefix.name)
    shortest, longest, bins = _histogram(reader)
    firsts = [reader.document(number)[:num_tokens].tolist() for number in range(min(num_documents, len(reader)))]
    return Inspection(
        prefix=str(prefix),
        dtype=str(reader.dtype),
        documents=len(reader),
        sequences=reader.num_sequences,
        tokens=reader.num_tokens,
        bin_bytes=bin_path(prefix).stat().st_size,
        idx_bytes=idx_path(prefix).stat().st_size,
        shortest=shortest,
        mean=reader.num_tokens / max(1, len(reader)),
        longest=longest,
        lengths=tuple(bins),
        first_documents=tuple(decode(ids) if decode else " ".join(map(str, ids)) for ids in firsts),
    )


def lines(inspection: Inspection) -> list[str]:
    """The inspection as it is printed; the bars are proportional to the tokens."""
    most = max((bucket.tokens for bucket in inspection.lengths), default=1)
    return [
        f"{inspection.prefix}: {inspection.documents:,} documents, {inspection.sequences:,} sequences, "
        f"{inspection.tokens:,} tokens",
        f"  dtype {inspection.dtype}, {inspection.bin_bytes:,} bytes of tokens, "
        f"{inspection.idx_bytes:,} bytes of index",
        f"  tokens a document: {inspection.shortest:,} to {inspection.longest:,}, mean {inspection.mean:,.1f}",
        f"  {'length':>21}  {'documents':>12}  {'tokens':>15}",
        *(
            f"  {f'{bucket.first:,}-{bucket.last:,}':>21}  {bucket.documents:>12,}  {bucket.tokens:>15,}  "
            + "#" * round(40 * bucket.tokens / most)
            for bucket in inspection.lengths
        ),
        *(f"  document {number}: {text!r}" for number, text in enumerate(inspection.first_documents)),
    ]


def _vocab_size_of(prefix: Path) -> int | None:
    """That of the index folder the file lies in (FOLDER/train/books), None if it lies in none."""
    folder = prefix.absolute().parent.parent
    return read_dataset(folder).vocab_size if (folder / DATASET_NAME).is_file() else None


def _histogram(reader: IndexedReader) -> tuple[int, int, list[LengthBin]]:
    """Bins are powers of two: 1, 2-3, 4-7, 8-15 and on; empty ones are left out."""
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    shortest, longest = np.iinfo(np.int64).max, 0
    before = np.concatenate([[0], np.cumsum(reader.lengths, dtype=np.int64)])
    for start in range(0, len(reader), CHUNK):
        lengths = np.diff(before[reader.bounds[start : start + CHUNK + 1]])
        power = np.frexp(np.maximum(lengths, 1).astype(np.float64))[1] - 1
        documents += np.bincount(power, minlength=64)
        tokens += np.bincount(power, weights=lengths, minlength=64).astype(np.int64)
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    bins = [
        LengthBin(first=2**power, last=2 ** (power + 1) - 1, documents=int(documents[power]), tokens=int(tokens[power]))
        for power in np.flatnonzero(documents).tolist()
    ]
    return (shortest if len(reader) else 0), longest, bins


# The cost of each packing of a dataset: truncated documents and padding.

# Documents looked at in one go.


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
    """Both packings of every source of an `index` folder that has documents in the split. Raises InputError for
    another split."""
    dataset = read_dataset(folder)
    costs: list[PackingCost] = []
    if split not in (names := sorted({name for source in dataset.sources for name in source.splits})):
        raise InputError(f"{folder} has no split {split}; it has {', '.join(names)}")
    for source in dataset.sources:
        if source.splits[split].documents:
            reader = IndexedReader(source_prefix(folder, split, source.name))
            costs += [
                concat_cost(reader, source.name, sequence_length),
                best_fit_cost(reader, source.name, sequence_length),
            ]
    return costs


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

"""Cells of documents by quality, topic and copies, and how often a run reads each.

With index.mix every cell of a source is indexed as a source of its own, SOURCE.qBUCKET[.TOPIC][.cCLASS]; held-out text
keeps the source's name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.splits import Repeats, read_repeats
from gristmill.data_pipeline.indexed.config import MixConfig
from gristmill.data_pipeline.indexed.dataset import Dataset
from gristmill.data_pipeline.indexed.draws import blend_weights
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.data_pipeline.indexed.language_shares import RunLength, language_tag
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import atomic_path
from gristmill.foundation.runtime.tasks.task_files import fetch

CELLS_FOLDER = "cells"  # of an index folder: the cell of every training document, a file a source
CELL = re.compile(r"q(?P<bucket>\d+)(\.t-(?P<topic>[a-z0-9_-]+))?(\.c(?P<copies>\d+))?")
NOT_OF_LABELS = re.compile(r"[^a-z0-9_]+")
NO_TOPIC = "none"
ROUNDING = 1e-9


@dataclass(frozen=True)
class Cell:
    """Documents of a source that are read equally often. copies: class of the cluster size, 0 below the first size in
    mix.copies. bucket None: the whole source, which is not cut."""

    source: str
    bucket: int | None = None
    topic: str | None = None
    copies: int = 0

    @property
    def name(self) -> str:
        if self.bucket is None:
            return self.source
        topic = "" if self.topic is None else f".t-{self.topic}"
        return f"{self.source}.q{self.bucket:02d}{topic}{f'.c{self.copies}' if self.copies else ''}"


def cell_of(name: str) -> Cell:
    """ "web.q07.t-law" -> Cell("web", 7, "law")."""
    source, _, rest = name.partition(".")
    match = CELL.fullmatch(rest)
    if match is None:
        return Cell(source)
    return Cell(source, int(match["bucket"]), match["topic"], int(match["copies"] or 0))


def bucket_ranks(scores: np.ndarray, tokens: np.ndarray, groups: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """float64[N], 0 to 1: the share of the group's tokens that score less, up to the middle of the document.

    scores: NaN stands before all others. Equal scores are ordered by ids.
    Scores 1 2 3 of 10, 10 and 20 tokens -> 0.125 0.375 0.75."""
    order = np.lexsort((ids, np.where(np.isnan(scores), -np.inf, scores), groups))
    sizes = tokens[order].astype(np.float64)
    before = np.cumsum(sizes) - sizes
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order][:1] - 1))
    totals = np.add.reduceat(sizes, starts)
    counts = np.diff([*starts, len(order)])
    ranks = np.empty(len(order))
    ranks[order] = (before - np.repeat(before[starts], counts) + sizes / 2) / np.repeat(totals, counts)
    return ranks


def document_cells(
    documents: pa.Table, tokens: np.ndarray, signals: pa.Table, sizes: np.ndarray, source: str, mix: MixConfig
) -> pa.Table:
    """doc_id, score, rank and cell of each document of a source.

    documents, signals: doc_id, language; the columns that the mix names, row for row. sizes: int64, class of copies.
    Raises InputError where the scores are all equal."""
    scores = np.asarray(signals[mix.score].cast(pa.float64()).to_numpy(), np.float64)
    if len(scores) > 1 and not np.nanmax(scores, initial=-np.inf) > np.nanmin(scores, initial=np.inf):
        raise InputError(
            f"source {source}: all {len(scores):,} documents have the same {mix.score}; buckets would be drawn by "
            "chance: take another score in index.mix.score, or leave the source out of index.mix.sources"
        )
    languages = documents["language"].combine_chunks().cast(pa.string()).dictionary_encode(null_encoding="encode")
    ids = documents["doc_id"].combine_chunks().cast(pa.string())
    id_ranks = np.argsort(np.argsort(ids.to_numpy(zero_copy_only=False)))
    ranks = bucket_ranks(scores, tokens, languages.indices.to_numpy(), id_ranks)
    buckets = np.minimum((ranks * mix.buckets).astype(np.int64), mix.buckets - 1)
    topics = [None] * len(scores) if mix.topic is None else [topic_name(t) for t in signals[mix.topic].to_pylist()]
    names = [Cell(source, *row).name for row in zip(buckets.tolist(), topics, sizes.tolist(), strict=True)]
    return pa.table({"doc_id": ids, "score": scores, "rank": ranks, "cell": pa.array(names).dictionary_encode()})


def topic_name(label: object) -> str:
    """The label as part of a file name: "Science & Tech." -> "science-tech"."""
    return NOT_OF_LABELS.sub("-", str(label).lower()).strip("-")[:60] or NO_TOPIC if label else NO_TOPIC


def source_cells(corpus: Path, source: str, documents: pa.Table, sizes: np.ndarray, mix: MixConfig) -> pa.Table:
    """document_cells of documents of a curated source: all of them, or some in their order. sizes: tokens, or bytes.

    Raises InputError for a signal that the corpus lacks, and as document_cells."""
    paths = sorted((corpus / "signals" / "train").glob(f"{source}-[0-9][0-9][0-9][0-9][0-9].parquet"))
    columns = [name for name in (mix.score, mix.topic) if name is not None]
    for path in paths[:1]:
        present = pq.read_schema(fetch(path)).names
        if missing := [name for name in columns if name not in present]:
            raise InputError(
                f"{path}: no signal {missing[0]!r}, which index.mix names; source {source} has {', '.join(present)}: "
                "name one of these, or the sources that have it in index.mix.sources"
            )
    signals = pa.concat_tables([pq.read_table(fetch(path), columns=["doc_id", *columns]) for path in paths])
    if len(signals) > len(documents):
        signals = signals.filter(pc.is_in(signals["doc_id"], value_set=documents["doc_id"].combine_chunks()))
    if signals["doc_id"].to_pylist() != documents["doc_id"].to_pylist():
        raise InputError(f"{paths[0].parent}: source {source}: not the rows of its documents; curate again")
    classes = {size: place + 2 for place, size in enumerate(sorted(mix.copies))}
    copies = (
        read_repeats(corpus, classes).counts_of(documents["doc_id"]) - 1 if classes else np.zeros(len(sizes), np.int64)
    )
    return document_cells(documents, sizes, signals, copies, source, mix)


def write_cells(folder: Path, source: str, cells: pa.Table) -> Path:
    """Writes FOLDER/cells/SOURCE.parquet."""
    path = folder / CELLS_FOLDER / f"{source}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        pq.write_table(cells, temporary)
    return path


def cell_names(path: Path) -> list[str]:
    """Names of the cells in a file of write_cells, sorted."""
    return sorted(pc.unique(pq.read_table(path, columns=["cell"])["cell"].cast(pa.string())).to_pylist())


# How often a run reads each cell.


@dataclass(frozen=True)
class CellRepeats:
    """tokens: of one epoch. times: how often the run reads the cell."""

    cell: Cell
    tokens: int
    times: float

    @property
    def line(self) -> str:
        """ "source web, bucket 18: 2,100,000 tokens, 3.20 times"."""
        cell = self.cell
        parts = [f"source {cell.source}"]
        parts += [f"topic {cell.topic}"] * (cell.topic is not None)
        parts += [f"bucket {cell.bucket}"] * (cell.bucket is not None)
        parts += [f"copies class {cell.copies}"] * (cell.copies > 0)
        return f"{', '.join(parts)}: {self.tokens:,} tokens, {self.times:.2f} times"


def factors(cells: Mapping[Cell, int], mix: MixConfig) -> dict[Cell, float]:
    """How often each cell is read beside the others, 1 on average over the tokens of each source; of an uncut source 1.

    cells: tokens of each. Raises RecipeError for a pattern, topic or source that no cell has."""
    _check_names(cells, mix)
    raw = {cell: _factor(cell, mix) for cell in cells}
    means: dict[str, float] = {}
    for source in {cell.source for cell in cells}:
        tokens = {cell: count for cell, count in cells.items() if cell.source == source}
        means[source] = sum(raw[cell] * count for cell, count in tokens.items()) / max(1, sum(tokens.values()))
        if not means[source]:
            raise RecipeError(f"index.mix: no cell of source {source} is read; raise a factor, or drop the source")
    return {cell: raw[cell] / means[cell.source] for cell in cells}


def _factor(cell: Cell, mix: MixConfig) -> float:
    if mix.repeats:
        matches = [factor for pattern, factor in mix.repeats.items() if fnmatchcase(cell.name, pattern)]
        return matches[-1] if matches else 0.0
    if cell.bucket is None:
        return 1.0
    rank = (cell.bucket + 0.5) / mix.buckets - mix.drop
    curve = rank**mix.power if rank > 0 else 0.0
    sizes = [1.0, *(mix.copies[size] for size in sorted(mix.copies))]
    topics = {topic_name(label): factor for label, factor in mix.topics.items()}
    return curve * sizes[cell.copies] * topics.get(cell.topic or "", 1.0)


def _check_names(cells: Mapping[Cell, int], mix: MixConfig) -> None:
    names = [cell.name for cell in cells]
    for pattern in mix.repeats:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(f"index.mix.repeats: {pattern!r} is no cell; cells are {', '.join(names[:8])} ...")
    topics = {cell.topic for cell in cells if cell.topic is not None}
    for label in mix.topics:
        if topics and topic_name(label) not in topics:
            raise RecipeError(f"index.mix.topics: no document has {label!r}; labels are {', '.join(sorted(topics))}")


def repeats_in_budget(
    tokens: Sequence[float], weights: Sequence[float], budget: float, max_epochs: float
) -> list[float]:
    """Times in proportion to the weights with sum(tokens * times) = budget, none above max_epochs: those above are set
    to it and the others are scaled. Tokens 10 10, weights 3 1, 60 tokens, 4 times at most -> 4.0 2.0.

    Raises ValueError if the cells with a weight do not have enough tokens."""
    size, weight = np.asarray(tokens, float), np.asarray(weights, float)
    is_read = (weight > 0) & (size > 0)
    if max_epochs * size[is_read].sum() < budget * (1 - ROUNDING):
        raise ValueError("too few tokens")
    times = np.zeros(len(size))
    capped = np.zeros(len(size), bool)
    while True:
        free = is_read & ~capped
        left = budget - max_epochs * size[capped].sum()
        if not free.any():
            break
        times[free] = weight[free] * left / (size * weight)[free].sum()
        above = free & (times > max_epochs * (1 + ROUNDING))
        if not above.any():
            break
        capped |= above
        times[above] = max_epochs
    return times.tolist()


def mix_repeats(
    cells: Mapping[Cell, int], sources: Mapping[str, float | None], mix: MixConfig, train_tokens: int | None
) -> list[CellRepeats]:
    """The table of a run. cells: tokens of each. sources: weights, all None in proportion to the tokens: then all cells
    share one budget. train_tokens None: factors alone.

    Raises RecipeError where max_epochs does not allow the budget, with the cell that reaches it first."""
    weights = factors(cells, mix)
    if train_tokens is None:
        return [CellRepeats(cell, cells[cell], weights[cell]) for cell in cells]
    names = {cell.source for cell in cells}
    if None in sources.values():
        pools, shares = [list(cells)], [1.0]
    else:
        drawn = {name: weight or 0.0 for name, weight in sources.items() if name in names}
        pools = [[cell for cell in cells if cell.source == name] for name in drawn]
        shares = [weight / sum(drawn.values()) for weight in drawn.values()]
    times: dict[Cell, float] = {}
    for pool, share in zip(pools, shares, strict=True):
        times |= _pool_times(pool, cells, weights, share * train_tokens, mix)
    return [CellRepeats(cell, cells[cell], times.get(cell, 0.0)) for cell in cells]


def _pool_times(
    pool: Sequence[Cell], cells: Mapping[Cell, int], weights: Mapping[Cell, float], budget: float, mix: MixConfig
) -> dict[Cell, float]:
    tokens, factor = [cells[cell] for cell in pool], [weights[cell] for cell in pool]
    try:
        return dict(zip(pool, repeats_in_budget(tokens, factor, budget, mix.max_epochs), strict=True))
    except ValueError:
        is_read = [cell for cell in pool if weights[cell] > 0 and cells[cell] > 0]
        available = sum(cells[cell] for cell in is_read)
        first = max(is_read, key=lambda cell: weights[cell], default=pool[0])
        sources = ", ".join(sorted({cell.source for cell in pool}))
        needed = f"{budget / available:.2f}" if available else "more"
        raise RecipeError(
            f"index.mix: {sources}: {budget:,.0f} tokens of the run, and {len(is_read)} cells with {available:,} "
            f"tokens read at most {mix.max_epochs:g} times give {mix.max_epochs * available:,.0f}; {first.name} "
            f"({cells[first]:,} tokens) reaches the cap first. Set index.mix.max_epochs to {needed} or more, lower "
            "index.mix.drop, train on fewer tokens, or add text"
        ) from None


def cells_of(dataset: Dataset, run: RunLength) -> dict[Cell, int]:
    """Cells with the tokens of whole samples of their train split."""
    counted = {source.name: source.splits["train"].tokens for source in dataset.sources}
    return {cell_of(name): run.usable(count) for name, count in counted.items() if count}


def mix_weights(
    dataset: Dataset, sources: Mapping[str, float | None], mix: MixConfig, run: RunLength
) -> dict[str, float]:
    """Weight of each indexed file in the blend: of the cells for training, of whole sources for held-out text."""
    table = mix_repeats(cells_of(dataset, run), sources, mix, run.train_tokens)
    cells = {row.cell.name: row.tokens * row.times for row in table}
    whole = dict.fromkeys(sources, 0)
    for row in table:
        whole[row.cell.source] += row.tokens
    indexed = {source.name for source in dataset.sources}
    held_out = blend_weights(sources, whole)
    return {name: weight for name, weight in held_out.items() if name in indexed} | cells


# Which encoded documents go into a file, and how often: by language, and by the number of their duplicates.
#
# Read from the tables that the encoding tasks write beside their chunks.


def documents_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".parquet")


def language_tokens(chunks: Sequence[Path]) -> dict[str, int]:
    """Language -> tokens of its documents, sorted by language."""
    totals: dict[str, int] = {}
    for chunk in chunks:
        languages = _languages(chunk)
        starts, ends = token_ranges_of(chunk)
        for language, tokens in zip(languages.to_pylist(), (ends - starts).tolist(), strict=True):
            totals[language] = totals.get(language, 0) + tokens
    return dict(sorted(totals.items()))


def documents_of(
    chunks: Sequence[Path],
    languages: frozenset[str] | None,
    repeats: Repeats | None,
    cell: tuple[Path, str] | None = None,
) -> tuple[np.ndarray, int]:
    """(int64: numbers of the documents in these languages, counted over all chunks, each as often as it is repeated;
    the bytes of their texts). languages, cell: None takes all; repeats: None takes each document once."""
    in_cell = None if cell is None else _in_cell(*cell)
    wanted = None if languages is None else pa.array(sorted(languages), pa.string())
    numbers, first, text_bytes = [np.empty(0, np.int64)], 0, 0
    for chunk in chunks:
        table = pq.read_table(fetch(documents_path(chunk)), columns=["doc_id", "bytes"])
        times = np.ones(len(table), np.int64) if repeats is None else repeats.counts_of(table["doc_id"])
        if wanted is not None:
            times *= np.asarray(pc.is_in(_languages(chunk), value_set=wanted))
        if in_cell is not None:
            times *= in_cell[first : first + len(table)]
        numbers.append(first + np.repeat(np.arange(len(table)), times))
        text_bytes += int((table["bytes"].to_numpy() * times).sum())
        first += len(table)
    return np.concatenate(numbers), text_bytes


def _in_cell(path: Path, name: str) -> np.ndarray:
    """bool[documents]: of all chunks of the source."""
    cells = pq.read_table(fetch(path), columns=["cell"])["cell"].cast(pa.string())
    return np.asarray(pc.equal(cells, name))


def _languages(chunk: Path) -> pa.Array:
    """The tag of each document; each distinct value is checked once."""
    column = pq.read_table(fetch(documents_path(chunk)), columns=["language"])["language"].combine_chunks()
    encoded = column.cast(pa.string()).dictionary_encode(null_encoding="encode")
    tags = pa.array([language_tag(value) for value in encoded.dictionary.to_pylist()], pa.string())
    return tags.take(encoded.indices)


def token_ranges_of(chunk: Path) -> tuple[np.ndarray, np.ndarray]:
    reader = IndexedReader(chunk)
    return reader.token_ranges(np.arange(len(reader)))

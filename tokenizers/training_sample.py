"""Samples the tokenizer's training text: a bounded, deterministic sample of the corpus in the recipe's blend."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.corpus.splits import DocumentRange, document_ranges, read
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.tokenizers.config import TokenizerConfig

# Maximum text per document, so that a few huge documents do not dominate the vocabulary.
MAX_DOCUMENT_CHARACTERS = 50_000
# Document ranges are read until they hold this many times the requested bytes; documents are then drawn from them.
CANDIDATE_FACTOR = 4
# Text from which on starting worker processes pays; a second's reading.
MIN_PARALLEL_BYTES = 200_000_000


@dataclass(frozen=True, eq=False)
class Candidates:
    """Documents of a source that may be sampled, in the order in which they are drawn.

    place, row: int64[N], the range of document i, as a place in the list of ranges, and its row in it. sizes: int64[N],
    its bytes, each document cut to MAX_DOCUMENT_CHARACTERS. groups: the source's name, or its languages; group:
    int64[N], places in groups."""

    place: np.ndarray
    row: np.ndarray
    sizes: np.ndarray
    groups: tuple[str, ...]
    group: np.ndarray

    def first(self, group: int, num_bytes: int) -> np.ndarray:
        """int64: the first documents of the group that have num_bytes together, or all of it."""
        numbers = np.flatnonzero(self.group == group)
        ends = np.cumsum(self.sizes[numbers])
        return numbers[: np.searchsorted(ends, num_bytes) + 1] if num_bytes > 0 else numbers[:0]


@dataclass(frozen=True)
class Selection:
    """Documents of the sample: rows of a range, in increasing order. bytes: of their texts."""

    documents: DocumentRange
    rows: tuple[int, ...]
    bytes: int


def training_texts(
    corpus: Path, sources: Sequence[str], config: TokenizerConfig, seed: int, engine: Engine
) -> tuple[list[str], dict[str, int]]:
    """(the texts of the sample, sampled bytes by group), in memory."""
    selections, sampled = training_sample(corpus, sources, config, seed, engine)
    return [text for selection in selections for text in selected_texts(selection)], sampled


def training_documents(
    corpus: Path, sources: Sequence[str], config: TokenizerConfig, seed: int, engine: Engine
) -> set[str]:
    """Ids of the documents whose texts `training_texts` returns."""
    selections, _ = training_sample(corpus, sources, config, seed, engine)
    ids: set[str] = set()
    for selection in selections:
        ids.update(read(selection.documents, "doc_id")["doc_id"].take(pa.array(selection.rows, pa.int64())).to_pylist())
    return ids


def selected_texts(selection: Selection) -> list[str]:
    """The texts, each cut to MAX_DOCUMENT_CHARACTERS."""
    texts = read(selection.documents, "text")["text"].take(pa.array(selection.rows, pa.int64()))
    return [text[:MAX_DOCUMENT_CHARACTERS] for text in texts.to_pylist()]


def texts_of_part(selections: Sequence[Selection], num_bytes: int) -> Iterator[str]:
    """Texts of about num_bytes in all, the same share of every range."""
    share = num_bytes / max(1, sum(selection.bytes for selection in selections))
    for selection in selections:
        size = 0
        for text in selected_texts(selection):
            if size >= share * selection.bytes:
                break
            size += len(text.encode(errors="replace"))
            yield text


def training_sample(
    corpus: Path, sources: Sequence[str], config: TokenizerConfig, seed: int, engine: Engine
) -> tuple[list[Selection], dict[str, int]]:
    """(documents of about config.sample_bytes in total, sampled bytes by group).

    Each group gets its share of the corpus's text, flattened by config.temperature; if a group has too little text, the
    others get the rest. The weights of the sources in training decide nothing, so that mixtures share a tokenizer. No
    text is sampled twice. Deterministic in the corpus, the settings and the seed. Raises InputError if a source has no
    training documents."""
    shares = {name: _text_bytes(corpus, name) for name in sources}
    chosen = [_chosen(corpus, source, config, seed) for source in sources]
    ranges = [documents for candidates in chosen for documents in candidates]
    tasks = [
        (documents, source, config)
        for source, candidates in zip(sources, chosen, strict=True)
        for documents in candidates
    ]
    tables = iter(enumerate(_measure_all(tasks, engine)))
    by_source = {
        source: _candidates(list(itertools.islice(tables, len(candidates))), seed, source)
        for source, candidates in zip(sources, chosen, strict=True)
    }
    available: dict[tuple[str, str], int] = {}
    mass: dict[tuple[str, str], float] = {}
    for source, candidates in by_source.items():
        share_of = shares[source] * candidates.sizes / candidates.sizes.sum()
        for place, group in enumerate(candidates.groups):
            inside = candidates.group == place
            available[source, group] = int(candidates.sizes[inside].sum())
            mass[source, group] = float(np.cumsum(share_of[inside])[-1])
    cells = sorted(available)
    quotas = allocate_sample_budget(
        _flattened(cells, mass, config.temperature), [available[cell] for cell in cells], config.sample_bytes
    )
    drawn: list[np.ndarray] = [np.empty((3, 0), np.int64)]
    sampled: dict[str, int] = {}
    for (source, group), quota in zip(cells, quotas, strict=True):
        candidates = by_source[source]
        numbers = candidates.first(candidates.groups.index(group), quota)
        drawn.append(np.stack([candidates.place[numbers], candidates.row[numbers], candidates.sizes[numbers]]))
        sampled[group] = sampled.get(group, 0) + int(candidates.sizes[numbers].sum())
    return _selections(ranges, np.concatenate(drawn, axis=1)), sampled


def _selections(ranges: Sequence[DocumentRange], drawn: np.ndarray) -> list[Selection]:
    """drawn: int64[3, documents]: places of ranges, rows in them, bytes."""
    place_N, row_N, size_N = drawn[:, np.lexsort((drawn[1], drawn[0]))]
    places, firsts = np.unique(place_N, return_index=True)
    bounds = itertools.pairwise([*firsts.tolist(), len(place_N)])
    return [
        Selection(ranges[place], tuple(row_N[first:last].tolist()), int(size_N[first:last].sum()))
        for place, (first, last) in zip(places.tolist(), bounds, strict=True)
    ]


def allocate_sample_budget(shares: Sequence[float], available: Sequence[int], total: int) -> list[int]:
    """Allocates `total` by shares, at most what is available each; the remainder is allocated again by shares.

    ([0.5, 0.5], [100, 20], 80) -> [60, 20]."""
    given = [0.0] * len(shares)
    open_ = [index for index in range(len(shares)) if shares[index] > 0]
    left = float(total)
    while open_ and left > 0.5:
        open_share = sum(shares[index] for index in open_)
        level = {index: given[index] + left * shares[index] / open_share for index in open_}
        full = [index for index in open_ if level[index] >= available[index]]
        for index in full or open_:
            before, given[index] = given[index], min(level[index], available[index])
            left -= given[index] - before
        open_ = [index for index in open_ if index not in full] if full else []
    return [int(amount) for amount in given]


def _flattened(
    names: Sequence[tuple[str, str]], mass: Mapping[tuple[str, str], float], temperature: float
) -> list[float]:
    """The share of each cell after each group's share p is changed to p**(1 / temperature)."""
    groups: dict[str, float] = {}
    for name in names:
        groups[name[1]] = groups.get(name[1], 0.0) + mass[name]
    total = sum(groups.values())
    flat = {group: (amount / total) ** (1.0 / temperature) for group, amount in groups.items()}
    return [flat[name[1]] / sum(flat.values()) * mass[name] / groups[name[1]] for name in names]


def _text_bytes(corpus: Path, source: str) -> float:
    return float(sum(documents.bytes for documents in document_ranges(corpus, "train", source)))


def _chosen(corpus: Path, source: str, config: TokenizerConfig, seed: int) -> list[DocumentRange]:
    """Ranges of the source's documents in seeded random order. Raises InputError if it has none."""
    ranges = document_ranges(corpus, "train", source)
    if not ranges:
        raise InputError(
            f"{corpus}: source {source!r} has no documents in the train split; look at what curate removed"
        )
    chosen: list[DocumentRange] = []
    num_bytes = 0
    for place in Permutation(len(ranges), key_of(seed, "tokenizer slices", source)).whole():
        chosen.append(ranges[place])
        num_bytes += ranges[place].bytes
        if num_bytes >= CANDIDATE_FACTOR * config.sample_bytes:
            break
    return chosen


def _measure_all(tasks: Sequence[tuple[DocumentRange, str, TokenizerConfig]], engine: Engine) -> list[pa.Table]:
    sizes = [documents.bytes for documents, _, _ in tasks]
    engine = engine if sum(sizes) >= MIN_PARALLEL_BYTES else LocalEngine(1, engine.reporter)
    return engine.map(_measure, tasks, "tokenizer: reading", sizes, "B")


def _candidates(tables: Sequence[tuple[int, pa.Table]], seed: int, source: str) -> Candidates:
    """The documents of the tables, (place, table), in seeded random order."""
    table = pa.concat_tables([part for _, part in tables])
    place_N = np.repeat([place for place, _ in tables], [len(part) for _, part in tables])
    groups = pc.unique(table["group"]).to_pylist()
    group_N = pc.index_in(table["group"], pa.array(groups, pa.string())).to_numpy().astype(np.int64)
    order_N = np.asarray(Permutation(len(table), key_of(seed, "tokenizer documents", source)).whole())
    row_N, size_N = table["row"].to_numpy(), table["size"].to_numpy()
    return Candidates(place_N[order_N], row_N[order_N], size_N[order_N], tuple(groups), group_N[order_N])


def _measure(task: tuple[DocumentRange, str, TokenizerConfig]) -> pa.Table:
    """Columns row, size (bytes of the text as it is cut, never 0) and group."""
    documents, source, config = task
    by_language = config.group_by == "language"
    table = read(documents, "text", *(["language"] if by_language else []))
    texts = pc.utf8_slice_codeunits(table["text"].cast(pa.large_string()), 0, MAX_DOCUMENT_CHARACTERS)
    groups = pc.if_else(pc.equal(table["language"], ""), None, table["language"]) if by_language else None
    column = pa.array([source] * len(table), pa.string()) if groups is None else pc.fill_null(groups, "unknown")
    sizes = pc.binary_length(texts).cast(pa.int64())
    rows = pa.array(np.arange(len(table)))
    return pa.table({"row": rows, "size": sizes, "group": column}).filter(pc.greater(sizes, 0))

"""Samples the tokenizer's training text: a bounded, deterministic sample of the corpus in the recipe's blend."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.indexed.documents import DocumentRange, document_ranges, read
from gristmill.data_pipeline.indexed.permutation import Permutation, key_of
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

    values: texts, each cut to MAX_DOCUMENT_CHARACTERS, or ids; row order[i] is document i. sizes: int64[N], bytes of
    document i. groups: the source's name, or its languages; group: int64[N], places in groups."""

    values: pa.ChunkedArray
    order: np.ndarray
    sizes: np.ndarray
    groups: tuple[str, ...]
    group: np.ndarray

    def first(self, group: int, num_bytes: int) -> tuple[list[str], int]:
        """(values of the first documents of the group that have num_bytes together, or all of it; their bytes)."""
        rows = np.flatnonzero(self.group == group)
        ends = np.cumsum(self.sizes[rows])
        count = min(len(rows), int(np.searchsorted(ends, num_bytes)) + 1) if num_bytes > 0 else 0
        if not count:
            return [], 0
        return self.values.take(pa.array(self.order[rows[:count]])).to_pylist(), int(ends[count - 1])


def training_texts(
    corpus: Path, sources: Sequence[str], config: TokenizerConfig, seed: int, engine: Engine
) -> tuple[list[str], dict[str, int]]:
    """(texts of about config.sample_bytes in total, sampled bytes by group).

    Each group gets its share of the corpus's text, flattened by config.temperature; if a group has too little text, the
    others get the rest. The weights of the sources in training decide nothing, so that mixtures share a tokenizer. No
    text is sampled twice. Deterministic in the corpus, the settings and the seed. Raises InputError if a source has no
    training documents."""
    drawn, sampled = _drawn(corpus, sources, config, seed, engine, "text")
    return [text for texts in drawn for text in texts], sampled


def training_documents(
    corpus: Path, sources: Sequence[str], config: TokenizerConfig, seed: int, engine: Engine
) -> set[str]:
    """Ids of the documents whose texts `training_texts` returns."""
    drawn, _ = _drawn(corpus, sources, config, seed, engine, "doc_id")
    return {doc_id for ids in drawn for doc_id in ids}


def _drawn(
    corpus: Path, sources: Sequence[str], config: TokenizerConfig, seed: int, engine: Engine, column: str
) -> tuple[list[list[str]], dict[str, int]]:
    """(values of the column `text` or `doc_id` of the sampled documents by source and group, bytes of text by
    group)."""
    shares = {name: _text_bytes(corpus, name) for name in sources}
    chosen = [_chosen(corpus, source, config, seed) for source in sources]
    tasks = [
        (chosen_range, source, config, column)
        for source, candidates in zip(sources, chosen, strict=True)
        for chosen_range in candidates
    ]
    tables = iter(_read_all(tasks, engine))
    by_source = {
        source: _candidates(source, pa.concat_tables(itertools.islice(tables, len(candidates))), seed)
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
    quotas = allocate(
        _flattened(cells, mass, config.temperature), [available[cell] for cell in cells], config.sample_bytes
    )
    values: list[list[str]] = []
    sampled: dict[str, int] = {}
    for (source, group), quota in zip(cells, quotas, strict=True):
        drawn, num_bytes = by_source[source].first(by_source[source].groups.index(group), quota)
        values.append(drawn)
        sampled[group] = sampled.get(group, 0) + num_bytes
    return values, sampled


def allocate(shares: Sequence[float], available: Sequence[int], total: int) -> list[int]:
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


def _read_all(tasks: Sequence[tuple[DocumentRange, str, TokenizerConfig, str]], engine: Engine) -> list[pa.Table]:
    sizes = [documents.bytes for documents, *_ in tasks]
    engine = engine if sum(sizes) >= MIN_PARALLEL_BYTES else LocalEngine(1, engine.reporter)
    return engine.map(_read, tasks, "tokenizer: reading", sizes, "B")


def _candidates(source: str, table: pa.Table, seed: int) -> Candidates:
    """The documents of the table in seeded random order."""
    groups = pc.unique(table["group"]).to_pylist()
    group_N = pc.index_in(table["group"], pa.array(groups, pa.string())).to_numpy().astype(np.int64)
    order_N = np.asarray(Permutation(len(table), key_of(seed, "tokenizer documents", source)).whole())
    sizes_N = table["size"].to_numpy()
    return Candidates(table["value"], order_N, sizes_N[order_N], tuple(groups), group_N[order_N])


def _read(task: tuple[DocumentRange, str, TokenizerConfig, str]) -> pa.Table:
    """Columns text (cut) or doc_id, as `value`, size (of the text in bytes, never 0) and group."""
    documents, source, config, column_name = task
    by_language = config.group_by == "language"
    table = read(documents, *dict.fromkeys(["text", column_name, *(["language"] if by_language else [])]))
    # Offsets of 64 bits: the candidates together may have more than 2 GiB.
    texts = pc.utf8_slice_codeunits(table["text"].cast(pa.large_string()), 0, MAX_DOCUMENT_CHARACTERS)
    groups = pc.if_else(pc.equal(table["language"], ""), None, table["language"]) if by_language else None
    column = pa.array([source] * len(table)) if groups is None else pc.fill_null(groups, "unknown")
    values = texts if column_name == "text" else table[column_name]
    columns = {"value": values, "size": pc.binary_length(texts), "group": column}
    return pa.table(columns).filter(pc.greater(columns["size"], 0))

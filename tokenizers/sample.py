"""Samples the tokenizer's training text: a bounded, deterministic sample of the corpus in the recipe's blend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from gristmill.data_pipeline.indexed.documents import DocumentRange, document_ranges, read
from gristmill.data_pipeline.indexed.permutation import Permutation, key_of
from gristmill.foundation.errors import InputError
from gristmill.tokenizers.config import TokenizerConfig

# Maximum text per document, so that a few huge documents do not dominate the vocabulary.
MAX_DOCUMENT_CHARACTERS = 50_000
# Document ranges are read until they hold this many times the requested bytes; documents are then drawn from them.
CANDIDATE_FACTOR = 4


@dataclass(frozen=True)
class Candidate:
    """A document that may be sampled. cell: (source, group); the group is the source again, or the language."""

    cell: tuple[str, str]
    text: str
    bytes: int


def training_texts(
    corpus: Path, weights: Mapping[str, float | None], config: TokenizerConfig, seed: int
) -> tuple[list[str], dict[str, int]]:
    """(texts of about config.sample_bytes in total, sampled bytes by group).

    Each group gets its share of the blend, flattened by config.temperature; if a group has too little text, the others
    get the rest. No text is sampled twice. Deterministic in the corpus, the settings and the seed. Weight 0: none;
    weight None: in proportion to the source's text. Raises InputError if a source has no training documents."""
    shares = {name: _text_bytes(corpus, name) if weight is None else weight for name, weight in weights.items()}
    by_source = {source: _candidates(corpus, source, config, seed) for source in shares if weights[source] != 0}
    cells: dict[tuple[str, str], list[Candidate]] = {}
    mass: dict[tuple[str, str], float] = {}
    for source, candidates in by_source.items():
        total = sum(candidate.bytes for candidate in candidates)
        for candidate in candidates:
            cells.setdefault(candidate.cell, []).append(candidate)
            mass[candidate.cell] = mass.get(candidate.cell, 0.0) + shares[source] * candidate.bytes / total
    names = sorted(cells)
    available = [sum(candidate.bytes for candidate in cells[name]) for name in names]
    quotas = allocate(_flattened(names, mass, config.temperature), available, config.sample_bytes)
    texts: list[str] = []
    sampled: dict[str, int] = {}
    for name, quota in zip(names, quotas, strict=True):
        left = quota
        for candidate in cells[name]:
            if left <= 0:
                break
            texts.append(candidate.text)
            left -= candidate.bytes
        sampled[name[1]] = sampled.get(name[1], 0) + quota - left
    return texts, sampled


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
    return float(sum(part.bytes for part in document_ranges(corpus, "train", source)))


def _candidates(corpus: Path, source: str, config: TokenizerConfig, seed: int) -> list[Candidate]:
    """Documents of the source in seeded random order."""
    parts = document_ranges(corpus, "train", source)
    if not parts:
        raise InputError(
            f"{corpus}: source {source!r} has no documents in the train split; look at what curate removed"
        )
    chosen: list[DocumentRange] = []
    for place in Permutation(len(parts), key_of(seed, "tokenizer slices", source)).whole():
        chosen.append(parts[place])
        if sum(part.bytes for part in chosen) >= CANDIDATE_FACTOR * config.sample_bytes:
            break
    found: list[Candidate] = []
    for part in chosen:
        found += _read(part, source, config)
    order: np.ndarray = Permutation(len(found), key_of(seed, "tokenizer documents", source)).whole()
    return [found[place] for place in order]


def _read(part: DocumentRange, source: str, config: TokenizerConfig) -> list[Candidate]:
    by_language = config.group_by == "language"
    table = read(part, "text", *(["language"] if by_language else []))
    texts = pc.utf8_slice_codeunits(table["text"], 0, MAX_DOCUMENT_CHARACTERS)
    sizes = pc.binary_length(texts).to_pylist()
    groups = table["language"].to_pylist() if by_language else [source] * len(sizes)
    return [
        Candidate((source, name or "unknown"), text, size)
        for text, size, name in zip(texts.to_pylist(), sizes, groups, strict=True)
        if size
    ]

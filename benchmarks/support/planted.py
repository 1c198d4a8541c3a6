"""Seeded corpora with planted near duplicates, the same on every machine."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

# Share of English words of 1, 2, 3 ... letters in running text (Norvig, English Letter Frequency Counts, 2012).
WORD_LENGTHS = np.array([3.0, 17.7, 20.5, 14.8, 10.7, 8.4, 7.9, 5.9, 4.4, 3.1, 1.8, 1.0, 0.8])
LETTERS = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
LETTER_WEIGHTS = 1.0 / np.arange(3, 3 + len(LETTERS))


def vocabulary(generator: np.random.Generator, size: int = 30_000) -> np.ndarray:
    """Distinct words with the lengths of English text; documents draw from them by Zipf's law."""
    lengths = generator.choice(np.arange(1, 14), size=2 * size, p=WORD_LENGTHS / WORD_LENGTHS.sum())
    letters = generator.choice(LETTERS, size=lengths.sum(), p=LETTER_WEIGHTS / LETTER_WEIGHTS.sum())
    joined, ends = "".join(letters), np.cumsum(lengths)
    words = dict.fromkeys(joined[end - length : end] for end, length in zip(ends, lengths, strict=True))
    return np.array(list(words)[:size], dtype=object)


def word_lists(generator: np.random.Generator, count: int, fewest: int, most: int) -> Iterator[np.ndarray]:
    """`count` documents of fewest..most words each, drawn by Zipf's law."""
    words = vocabulary(generator)
    share = 1.0 / (np.arange(len(words)) + 2.7)
    cumulative = np.cumsum(share / share.sum())
    for _ in range(count):
        length = int(generator.integers(fewest, most + 1))
        yield words[np.minimum(np.searchsorted(cumulative, generator.random(length)), len(words) - 1)]


def edited(words: np.ndarray, generator: np.random.Generator, edits: int) -> np.ndarray:
    """The words with `edits` of them replaced by words that occur nowhere else."""
    changed = words.copy()
    for place in generator.choice(len(words), size=min(edits, len(words)), replace=False):
        changed[place] = f"w{generator.integers(1 << 48):x}"
    return changed


def edits_for(similarity: float, num_words: int, ngram: int = 5) -> int:
    """Number of word edits that brings the Jaccard similarity of the n-grams near the wanted one.

    Of N n-grams a share p survives k scattered edits, p = (1 - k / words)**ngram, and similarity = p / (2 - p)."""
    survives = 2 * similarity / (1 + similarity)
    return round(num_words * (1 - survives ** (1 / ngram)))


def as_text(words: np.ndarray) -> str:
    """Sentences of 14 words, with capitals and full stops."""
    sentences = [" ".join(words[i : i + 14]).capitalize() for i in range(0, len(words), 14)]
    return ". ".join(sentences) + "."


def corpus(seed: int, count: int, fewest: int = 300, most: int = 1500, copies: float = 0.15) -> Iterator[str]:
    """Texts of which a share `copies` are edited copies, of similarity 0.3 to 1.0, of the text before."""
    generator = np.random.default_rng(seed)
    before = None
    for words in word_lists(generator, count, fewest, most):
        if before is not None and generator.random() < copies:
            words = edited(before, generator, edits_for(generator.uniform(0.3, 1.0), len(before)))
        else:
            before = words
        yield as_text(words)


def write_parquet(folder: Path, texts: Iterator[str] | list[str], documents_a_file: int = 50_000) -> list[Path]:
    """Files of doc_id, id and text, both the 32 hex digits of the document's number."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    held: list[str] = []
    number = 0

    def write() -> None:
        nonlocal number
        ids = [f"{number + i:032x}" for i in range(len(held))]
        number += len(held)
        paths.append(folder / f"documents-{len(paths):05d}.parquet")
        pq.write_table(pa.table({"doc_id": ids, "id": ids, "text": held}), paths[-1], row_group_size=1000)
        held.clear()

    for text in texts:
        held.append(text)
        if len(held) == documents_a_file:
            write()
    if held:
        write()
    return paths

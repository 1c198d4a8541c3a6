"""Benchmark texts in another wording: with a few words substituted, inserted or deleted, and short questions with an
answer.

What counts is information, -ln of a word's share in text (words.py): "the" has little, a rare word much. A copy is a
text's words in their order in one place of a document, which have at least `min_share` of the information of the whole
text and at least `min_information` nats, less EDIT_COST for each word that is edited. In documents of
independent words, exp(-34) is one false copy in 10^14 places and texts; 5 million words and 17,000 texts are 10^11."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.decontamination.config import BenchmarkExample, DecontaminateConfig
from gristmill.data_pipeline.decontamination.index import (
    NgramIndex,
    Words,
    bit_filter,
    build_index,
    information,
    slot_table,
    words_of,
)
from gristmill.data_pipeline.decontamination.kernels import (
    SEED_WORDS,
    SLACK,
    SearchedTexts,
    SeedTable,
    align,
    edit_seeds,
    search_seeds,
    seed_hash,
    verify_seeds,
)
from gristmill.data_pipeline.ledger.document_file import load_array, save_array

EDIT_COST = 1.0  # nats
# A seed must have this much information, and is followed up by itself from SURE on. On the 29,008 clean documents of
# benchmarks/decontaminate.py: 18 and 22 lay 16,000 texts beside documents, 18 alone 113,000, 15 alone 456,000; of
# questions of 8 or 9 words with three words edited they lose 3 in 100.
MIN_SEED, SURE = 18.0, 22.0
MAX_TEXTS = 32  # a seed in more texts than this is a way of asking, not a question


@dataclass(frozen=True)
class EditIndex:
    """seeds: of the texts that are searched so. edited, short bool[texts]: which are searched for edits, and which as
    short questions with an answer."""

    seeds: SeedTable
    texts: SearchedTexts
    edited: np.ndarray
    short: np.ndarray


def build_edits(examples: Sequence[BenchmarkExample], words: Words, config: DecontaminateConfig) -> EditIndex:
    """The index of the examples, whose words are `words`.

    Searched for edits are texts of min_ngram words up to `max_edited_words`, longer ones keep an n-gram whole;
    of shorter ones, questions with enough information together with one of their record's answers, of which at least
    three words stand in a row."""
    counts, nats = words.counts, information(words)
    total = np.bincount(np.repeat(np.arange(len(counts)), counts), nats, minlength=len(counts))
    is_question = np.array([not example.is_answer for example in examples], bool)
    long_enough = is_question & (counts >= config.min_ngram) & (total >= config.min_information)
    edited = long_enough & (counts <= config.max_edited_words)
    answers, first = _answers(examples, counts, total, config)
    wanted = np.maximum(config.min_share * total, config.min_information)
    texts = SearchedTexts(words.hashes, words.ends, nats, wanted, answers, first)
    return EditIndex(_seed_table(texts, edited), texts, edited, np.diff(first) > 0)


def _answers(
    examples: Sequence[BenchmarkExample], counts: np.ndarray, total: np.ndarray, config: DecontaminateConfig
) -> tuple[np.ndarray, np.ndarray]:
    """(answers, answer_first) of SearchedTexts: of each short question, the texts of its record's later fields that
    have enough information together with it."""
    max_words = config.min_ngram - 1 if config.answer_window else 0
    short = {n for n, e in enumerate(examples) if 0 < counts[n] <= max_words and not e.is_answer}
    records: dict[tuple[str, str], list[int]] = {(examples[n].benchmark, examples[n].example): [] for n in short}
    for number, example in enumerate(examples):
        if (example.benchmark, example.example) in records and counts[number]:
            records[example.benchmark, example.example].append(number)
    answers_of: dict[int, list[int]] = {}
    for numbers in records.values():
        fields = list(dict.fromkeys(examples[number].field for number in numbers))
        for number in short.intersection(numbers):
            later = fields[fields.index(examples[number].field) + 1 :]
            answers_of[number] = [
                other
                for other in numbers
                if examples[other].field in later
                and counts[number] + counts[other] >= SEED_WORDS
                and total[number] + total[other] >= config.min_information
            ]
    sizes = np.zeros(len(examples), np.int64)
    for number, answers in answers_of.items():
        sizes[number] = len(answers)
    rows = [answer for number in sorted(answers_of) for answer in answers_of[number]]
    return np.array(rows, np.int64), np.concatenate([[0], np.cumsum(sizes)])


def _seed_table(texts: SearchedTexts, edited: np.ndarray) -> SeedTable:
    capacity = 3 * int(np.diff(texts.ends)[edited].sum()) + 1
    keys, nats = np.empty(capacity, np.uint64), np.empty(capacity)
    owners, places = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
    count = edit_seeds(texts.hashes, texts.ends, texts.nats, edited, MIN_SEED, keys, owners, places, nats)
    order = np.argsort(keys[:count], kind="stable")
    distinct, number, times = np.unique(keys[order], return_inverse=True, return_counts=True)
    order = order[times[number] <= MAX_TEXTS]
    short = _short_seeds(texts)
    keys = np.concatenate([keys[order], np.array([row[0] for row in short], np.uint64)])
    owners = np.concatenate([owners[order], np.array([row[1] for row in short], np.int32)])
    places = np.concatenate([places[order], np.zeros(len(short), np.int32)])
    nats = np.concatenate([nats[order], np.full(len(short), np.inf)])
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    first = np.append(first, len(keys)).astype(np.int64)
    rows = owners[order], places[order], nats[order]
    return SeedTable(bit_filter(distinct), slot_table(distinct), distinct, first, *rows)


def _short_seeds(texts: SearchedTexts) -> list[tuple[np.uint64, int]]:
    """(key, text) of the first three words of each short question, or of it and the answer right behind it."""
    seeds = []
    for text in np.flatnonzero(np.diff(texts.answer_first)).tolist():
        question = texts.hashes[texts.ends[text] : texts.ends[text + 1]]
        answers = texts.answers[texts.answer_first[text] : texts.answer_first[text + 1]]
        rows = (
            [question]
            if len(question) >= SEED_WORDS
            else [
                np.concatenate([question, texts.hashes[texts.ends[answer] : texts.ends[answer + 1]]])
                for answer in answers
            ]
        )
        seeds += [(seed_hash(*row[:SEED_WORDS]), text) for row in rows]
    return list(dict.fromkeys(seeds))


def search_edits(index: EditIndex, words: Words, window: int) -> np.ndarray:
    """int64[6, copies] in documents of these words: document, text, first word, last + 1, words found, which ones."""
    met = np.empty((3, len(words.hashes) // 4 + 4096), np.int64)  # seeds are met at one word in 30
    while (count := search_seeds(words.hashes, words.ends, index.seeds, met)) > met.shape[1]:
        met = np.empty((3, count), np.int64)
    copies = np.empty((6, count), np.int64)
    met = met[:, :count]
    if not count:
        return copies
    return copies[
        :, : verify_seeds(met, words.hashes, words.ends, index.seeds, index.texts, SURE, EDIT_COST, window, copies)
    ]


def copy_of(index: EditIndex, text: int, document: np.ndarray, word: int) -> tuple[int, int, int] | None:
    """(first word, last + 1, words found) of the text's best edited copy around `word` of the document, or None.

    For the few documents that hold an n-gram of a text which is too long to be searched for edits."""
    words = slice(*index.texts.ends[text : text + 2])
    hashes, nats = index.texts.hashes[words], index.texts.nats[words]
    low, high = max(word - len(hashes) - SLACK, 0), min(word + len(hashes) + SLACK, len(document))
    size = high - low + 1
    row = np.empty(size), np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.uint64)
    score, first, last, matched, _ = align(hashes, nats, document, low, high, EDIT_COST, *row)
    return (int(first), int(last), int(matched)) if score >= index.texts.wanted[text] else None


# The indexes of the benchmark texts: made once, saved, and loaded by every worker that searches documents.


@dataclass(frozen=True)
class Indexes:
    ngrams: NgramIndex
    edits: EditIndex

    @property
    def searched(self) -> np.ndarray:
        """bool[texts]: which texts are searched for in any way."""
        return (self.ngrams.ngrams_of > 0) | self.edits.edited | self.edits.short


def build_indexes(examples: Sequence[BenchmarkExample], config: DecontaminateConfig) -> Indexes:
    words = words_of([example.text for example in examples])
    return Indexes(build_index(words, config.ngram, config.min_ngram), build_edits(examples, words, config))


def save_indexes(indexes: Indexes, folder: Path) -> None:
    """One .npy file an array in the folder; those that stand there are kept."""
    for name, value in _arrays(indexes).items():
        path = folder / f"index-{name}.npy"
        if not path.exists():
            save_array(path, np.asarray(value))


def load_indexes(folder: Path) -> Indexes:
    ngrams: Any = {field.name: _loaded(folder, field.name) for field in fields(NgramIndex)}
    seeds: Any = [_loaded(folder, f"seeds-{name}") for name in SeedTable._fields]
    texts: Any = [_loaded(folder, f"texts-{name}") for name in SearchedTexts._fields]
    flags: Any = [_loaded(folder, f"edits-{name}") for name in ("edited", "short")]
    return Indexes(NgramIndex(**ngrams), EditIndex(SeedTable(*seeds), SearchedTexts(*texts), *flags))


def _arrays(indexes: Indexes) -> dict[str, Any]:
    edits = indexes.edits
    return {
        **{field.name: getattr(indexes.ngrams, field.name) for field in fields(NgramIndex)},
        **{f"seeds-{name}": value for name, value in edits.seeds._asdict().items()},
        **{f"texts-{name}": value for name, value in edits.texts._asdict().items()},
        "edits-edited": edits.edited,
        "edits-short": edits.short,
    }


def _loaded(folder: Path, name: str) -> Any:
    """The array; a number where it is one."""
    value = load_array(folder / f"index-{name}.npy")
    return value if value.ndim else int(value)

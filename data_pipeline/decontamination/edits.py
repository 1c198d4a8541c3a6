"""Benchmark texts in another wording: with a few words substituted, inserted or deleted, and short questions with an
answer.

What counts is information, -ln of a word's share in text (words.py): "the" has little, a rare word much. A copy is a
text's words in their order in one place of a document, which have at least `min_share` of the information of the whole
text and at least `min_information` nats, less EDIT_COST for each word that is edited. In documents of
independent words, exp(-34) is one false copy in 10^14 places and texts; 5 million words and 17,000 texts are 10^11."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.decontamination.config import BenchmarkExample, DecontaminateConfig
from gristmill.data_pipeline.decontamination.ngram_index import (
    NgramIndex,
    Words,
    bit_filter,
    build_index,
    information,
    slot_table,
    words_of,
)
from gristmill.data_pipeline.dedup.kernels import filter_bits
from gristmill.data_pipeline.ledger.document_file import load_array, save_array
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# The compiled search for edited and for short benchmark texts.
#
# A seed is three words of a text in their order, with at most one word left out between them. Where a document holds a
# seed, the text is laid beside it and scored (`align`), or, if it is short, compared word by word with its answers.
# They call one another and therefore stand in one file (see dedup/kernels.py).


# Second and third word of a seed, counted from its first: `abc`, `ab.d`, `a.cd`. One word may so have been
# substituted between them; and since all three are looked up in all three, one inserted or deleted.
SECOND, THIRD = (1, 1, 2), (2, 3, 3)
SEED_WORDS = 3
# Two seeds of one text at most so many words apart in a document may be of one copy of it.
APART = 40
# A document's words are laid beside a text with so many more on each side; what was inserted must fit in.
SLACK = 8
# Bits of the map of a window's words: the longest window of the default settings, of 75 words, sets 7 in 100 of them.
WORD_BITS = 1024
ROUNDING = 1e-6  # sums of nats in another order differ by less
EMPTY = np.int32(-1)
MULTIPLY = np.uint64(0x9E3779B97F4A7C15)  # the golden ratio
U6, U29, U32, U63 = (np.uint64(n) for n in (6, 29, 32, 63))
ONE, ZERO = np.uint64(1), np.uint64(0)


class SeedTable(NamedTuple):
    """Where seeds stand in benchmark texts. filter uint64[]: a bit map of the keys. slots int32[]: open addressing from
    key to its number k (keys[k]), whose places are first[k]..first[k + 1]: texts int32[], words from the text's
    beginning int32[], and the information of the seed's words in nats float64[]."""

    filter: np.ndarray
    slots: np.ndarray
    keys: np.ndarray
    first: np.ndarray
    texts: np.ndarray
    places: np.ndarray
    nats: np.ndarray


class SearchedTexts(NamedTuple):
    """hashes uint64[], ends int64[texts + 1], nats float64[]: the words of the texts and their information. wanted
    float64[texts]: the score an edited copy must reach. answers int64[]: the texts that answer text t are
    answers[answer_first[t]:answer_first[t + 1]]; one that has any is searched word for word, and with one of them."""

    hashes: np.ndarray
    ends: np.ndarray
    nats: np.ndarray
    wanted: np.ndarray
    answers: np.ndarray
    answer_first: np.ndarray


@cached_njit(nogil=True, forceinline=True)
def seed_hash(first, second, third):
    value = (first * MULTIPLY + second) * MULTIPLY + third
    value = (value ^ (value >> U32)) * MULTIPLY
    return value ^ (value >> U29)


@cached_njit(nogil=True)
def edit_seeds(hashes, ends, nats, wanted, min_nats, keys, texts, places, seed_nats):
    """All seeds of the wanted texts of at least `min_nats`; returns how many. places: words from the beginning."""
    count = 0
    for text in range(len(ends) - 1):
        if not wanted[text]:
            continue
        for word in range(ends[text], ends[text + 1] - SEED_WORDS + 1):
            for pattern in range(3):
                second, third = word + SECOND[pattern], word + THIRD[pattern]
                if third >= ends[text + 1]:
                    continue
                total = nats[word] + nats[second] + nats[third]
                if total >= min_nats:
                    keys[count] = seed_hash(hashes[word], hashes[second], hashes[third])
                    texts[count], places[count], seed_nats[count] = text, word - ends[text], total
                    count += 1
    return count


@cached_njit(nogil=True)
def align(text, nats, document, start, stop, gap, scores, starts, counts, places):
    """(score, first word, last word + 1, words found, hash of which) of the best local alignment of the text with
    document[start:stop]: the information of the words found, less `gap` for each word substituted, inserted or deleted
    between them (Smith and Waterman 1981, one row at a time). The arrays take one row: stop - start + 1 entries."""
    length = stop - start
    best, best_start, best_stop, best_count, best_places = 0.0, 0, 0, 0, ZERO
    for at in range(length + 1):
        scores[at], starts[at], counts[at], places[at] = 0.0, at, 0, ZERO
    for word in range(len(text)):
        score, first, count, place = 0.0, 0, 0, ZERO  # of the entry above and to the left
        for at in range(1, length + 1):
            above, above_start, above_count, above_place = scores[at], starts[at], counts[at], places[at]
            if text[word] == document[start + at - 1]:
                score += nats[word]
                count += 1
                place ^= (np.uint64(word) + ONE) * MULTIPLY
            else:
                score -= gap
            if above - gap > score:
                score, first, count, place = above - gap, above_start, above_count, above_place
            if scores[at - 1] - gap > score:
                score, first, count, place = scores[at - 1] - gap, starts[at - 1], counts[at - 1], places[at - 1]
            if score <= 0.0:
                score, first, count, place = 0.0, at, 0, ZERO
            scores[at], starts[at], counts[at], places[at] = score, first, count, place
            if score > best:
                best, best_start, best_stop, best_count, best_places = score, first, at, count, place
            score, first, count, place = above, above_start, above_count, above_place
    return best, start + best_start, start + best_stop, best_count, best_places


@cached_njit(nogil=True)
def max_score(text, nats, document, bits):
    """An upper bound of the score of `align`: the information of the text's words that stand anywhere in the document,
    and ROUNDING for the order of the additions. bits: a bit map of the document's words, of WORD_BITS bits."""
    mask = np.uint64(WORD_BITS - 1)
    bits[:] = ZERO
    for word in range(len(document)):
        bit = document[word] & mask
        bits[bit >> U6] |= ONE << (bit & U63)
    score = ROUNDING
    for word in range(len(text)):
        bit = text[word] & mask
        if (bits[bit >> U6] >> (bit & U63)) & ONE:
            score += nats[word]
    return score


@cached_njit(nogil=True)
def search_seeds(document, bounds, seeds, matches):
    """Fills matches[3, :] as far as there is room (number of the document, its word, which place of the seeds), in this
    order; returns how many there are. Document d is document[bounds[d]:bounds[d + 1]]."""
    bit_mask, slot_mask = np.uint64(64 * len(seeds.filter) - 1), np.uint64(len(seeds.slots) - 1)
    count = 0
    for number in range(len(bounds) - 1):
        for word in range(bounds[number], bounds[number + 1] - SEED_WORDS + 1):
            for pattern in range(3):
                second, third = word + SECOND[pattern], word + THIRD[pattern]
                if third >= bounds[number + 1]:
                    continue
                key = seed_hash(document[word], document[second], document[third])
                wanted = filter_bits(key)
                if seeds.filter[(key & bit_mask) >> U6] & wanted != wanted:
                    continue
                slot = (key >> U32) & slot_mask
                while seeds.slots[slot] != EMPTY and seeds.keys[seeds.slots[slot]] != key:
                    slot = (slot + ONE) & slot_mask
                if seeds.slots[slot] == EMPTY:
                    continue
                for place in range(seeds.first[seeds.slots[slot]], seeds.first[seeds.slots[slot] + 1]):
                    if count < matches.shape[1]:
                        matches[0, count], matches[1, count], matches[2, count] = number, word, place
                    count += 1
    return count


@cached_njit(nogil=True)
def verify_seeds(met, document, bounds, seeds, texts, sure, gap, window, copies):
    """Fills copies[:, :len]: document, benchmark text, first word and last + 1 there, words found, hash of which, for
    each copy of a text around the seeds that were met (`search_seeds`); returns how many there are.

    A seed of less than `sure` nats is followed up only if another of its text stands near it."""
    num_texts = len(texts.ends) - 1
    done, last, tried = np.full(num_texts, -1), np.full(num_texts, -1), np.full(num_texts, -1)
    longest = 0
    for text in range(num_texts):
        longest = max(longest, texts.ends[text + 1] - texts.ends[text])
    size = longest + 2 * SLACK + 1
    scores, starts, counts = np.empty(size), np.empty(size, np.int64), np.empty(size, np.int64)
    places, bits = np.empty(size, np.uint64), np.empty(WORD_BITS // 64, np.uint64)
    count = 0
    for row in range(met.shape[1]):
        number, word, place = met[0, row], met[1, row], met[2, row]
        text = seeds.texts[place]
        start, stop, begin = bounds[number], bounds[number + 1], word - seeds.places[place]
        text_hashes = texts.hashes[texts.ends[text] : texts.ends[text + 1]]
        if word < done[text]:
            continue
        if texts.answer_first[text] < texts.answer_first[text + 1]:
            final = _end_of_answer(text_hashes, document, begin, start, stop, texts, text, window)
            if final < 0:
                continue
            words, which = len(text_hashes), ZERO
        else:
            if tried[text] >= start and abs(begin - tried[text]) <= SLACK // 2:
                continue
            if seeds.nats[place] < sure and (last[text] < start or word - last[text] > APART):
                last[text] = word
                continue
            tried[text] = begin
            nats = texts.nats[texts.ends[text] : texts.ends[text + 1]]
            low, high = max(start, begin - SLACK), min(stop, begin + len(text_hashes) + SLACK)
            if max_score(text_hashes, nats, document[low:high], bits) < texts.wanted[text]:
                continue
            score, begin, final, words, which = align(
                text_hashes, nats, document, low, high, gap, scores, starts, counts, places
            )
            if score < texts.wanted[text]:
                continue
        done[text] = final
        copies[0, count], copies[1, count], copies[2, count], copies[3, count] = (
            number,
            text,
            begin - start,
            final - start,
        )
        copies[4, count], copies[5, count] = words, np.int64(which)
        count += 1
    return count


@cached_njit(nogil=True)
def _end_of_answer(question, document, begin, start, stop, texts, text, window):
    """Where an answer to the question ends that begins in the `window` words behind it; -1 if the question does not
    stand at `begin`, or no answer there."""
    if begin < start or not _stands(question, document, begin, stop):
        return -1
    behind = begin + len(question)
    for at in range(behind, min(behind + window, stop)):
        for number in range(texts.answer_first[text], texts.answer_first[text + 1]):
            other = texts.answers[number]
            answer = texts.hashes[texts.ends[other] : texts.ends[other + 1]]
            if _stands(answer, document, at, stop):
                return at + len(answer)
    return -1


@cached_njit(nogil=True)
def _stands(words, document, at, stop):
    """Whether the words stand in document[:stop] from `at` on."""
    if at + len(words) > stop:
        return False
    for word in range(len(words)):  # noqa: SIM110 (numba has no all)
        if words[word] != document[at + word]:
            return False
    return True


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

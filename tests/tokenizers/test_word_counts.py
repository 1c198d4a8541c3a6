"""Counted words: what a word is, equal counts however the work is cut, and unbiased thinning."""

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.splits import DocumentRange
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.tokenizers import word_counts
from gristmill.tokenizers.training_sample import MAX_DOCUMENT_CHARACTERS, Selection
from gristmill.tokenizers.word_counts import (
    SENTENCE_LENGTH,
    count_sample,
    count_texts,
    sentences,
    thinned,
    words_and_counts,
)

LINE_ENDS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\n\n\r"]


def counts_of(texts) -> dict[str, int]:
    return dict(words_and_counts(count_texts(texts)))


def test_a_word_has_the_spaces_before_it():
    assert counts_of(["a  b a\nc a", "a▁b"]) == {"a": 2, "  b": 1, " a\nc": 1, " a": 1, " b": 1}
    assert counts_of(["", "\n", " "]) == {" ": 1}
    assert counts_of([]) == {}


def test_words_of_bytes_keep_all_white_space():
    assert dict(words_and_counts(count_texts(["a  b\n c\n", "\n"], byte_level=True))) == {
        "a": 1,
        "  b\n c\n": 1,
        "\n": 1,
    }
    assert counts_of(["a  b\n c\n", "\n"]) == {"a": 1, "  b\n": 1, " c": 1}


def lines_together(text: str) -> list[str]:
    """Sentences as Python's own line ends give them."""
    parts, pending = [], ""
    lines = [
        line[at : at + SENTENCE_LENGTH]
        for line in text.splitlines(keepends=True)
        for at in range(0, len(line), SENTENCE_LENGTH)
    ]
    for line in lines:
        pending += line
        if len(pending) >= SENTENCE_LENGTH:
            parts.append(pending)
            pending = ""
    return [part.rstrip("\r\n") for part in [*parts, pending]]


def random_text(rng: random.Random) -> str:
    parts = ["a" * 700, "é" * 300, "漢" * 2500, "😀 ", "x", " ", "\x80", "\u2027", *LINE_ENDS]
    return "".join(rng.choices(parts, k=rng.randint(0, 40)))


@pytest.mark.parametrize("seed", range(20))
def test_sentences_are_lines_as_python_splits_them(seed):
    texts = [random_text(random.Random(100 * seed + number)) for number in range(20)]
    raw = [text.encode() for text in texts]
    buffer, ends = sentences(np.frombuffer(b"".join(raw), np.uint8), np.cumsum([len(text) for text in raw]))
    parts = [buffer[first:last].tobytes().decode() for first, last in zip([0, *ends[:-1]], ends, strict=True)]
    expected = [part for text in texts for part in lines_together(text)]
    assert [part for part in parts if part] == [part for part in expected if part]


def test_counts_are_those_of_a_counter(training_texts, monkeypatch):
    expected = Counter(
        word
        for text in training_texts
        for sentence in lines_together(text.replace("▁", " "))
        for word in word_counts_by_hand(sentence)
    )
    assert set(counts_of(training_texts).items()) ^ set(expected.items()) == set()
    monkeypatch.setattr(word_counts, "NUM_SLOTS", 1 << 13)  # the table is emptied many times
    monkeypatch.setattr(word_counts, "WINDOW_BYTES", 1 << 10)
    monkeypatch.setattr(word_counts, "MAX_ROWS", 5000)
    assert set(counts_of(training_texts).items()) ^ set(expected.items()) == set()


def word_counts_by_hand(sentence: str) -> list[str]:
    words = []
    for place, character in enumerate(sentence):
        if place == 0 or (character == " " and sentence[place - 1] != " "):
            words.append("")
        words[-1] += character
    return words


class TwoAtOnce(LocalEngine):
    """Reports two workers and runs the tasks backwards, as if the last one were the first to finish."""

    def _results(self, function, tasks, weights, description):
        for number in reversed(range(len(tasks))):
            yield number, function(tasks[number])


def test_a_sample_has_the_same_counts_on_any_number_of_workers(training_texts, tmp_path, monkeypatch):
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"text": training_texts}), path)
    documents = [DocumentRange(path, 0, first, 10, 0) for first in range(0, len(training_texts) - 10, 10)]
    selections = [Selection(part, tuple(range(0, 10, 2)), 40_000) for part in documents]
    whole = count_sample(selections, tmp_path, LocalEngine(1, Reporter.silent()))
    chosen = [
        training_texts[part.first + row][:MAX_DOCUMENT_CHARACTERS] for part in documents for row in range(0, 10, 2)
    ]
    assert whole.equals(count_texts(chosen))
    monkeypatch.setattr(word_counts, "TASK_BYTES", 100_000)
    monkeypatch.setattr(word_counts, "MIN_PARALLEL_BYTES", 1)
    assert count_sample(selections, tmp_path, TwoAtOnce(2, Reporter.silent())).equals(whole)
    monkeypatch.setattr(word_counts, "MAX_ROWS", 3000)
    monkeypatch.setattr(word_counts, "MAX_MERGED", 1500)
    thin = count_sample(selections, tmp_path, LocalEngine(1, Reporter.silent()))
    assert count_sample(selections, tmp_path, TwoAtOnce(2, Reporter.silent())).equals(thin)
    assert len(thin) < len(whole)
    monkeypatch.setattr(word_counts, "MAX_SHORT_BYTES", 20_000)  # more words than short offsets reach
    assert count_sample(selections, tmp_path, LocalEngine(1, Reporter.silent())).equals(thin)
    assert not (tmp_path / word_counts.FOLDER).exists()


def test_thinning_keeps_the_expected_counts():
    rng = np.random.default_rng(0)
    counts = np.sort(rng.zipf(1.5, 20_000).clip(1, 1000))
    words = pa.array([b"%05d" % number for number in range(20_000)], pa.large_binary())
    table = pa.table([words, pa.array(counts)], schema=word_counts.SCHEMA)
    thin = thinned(table, 5000)
    assert 4700 < len(thin) <= 5100
    assert thin["count"].to_numpy().sum() == pytest.approx(counts.sum(), rel=0.02)
    frequent = counts > 50  # words above the threshold stay as they are
    kept = dict(zip(thin["word"].to_pylist(), thin["count"].to_pylist(), strict=True))
    assert all(kept[b"%05d" % number] == counts[number] for number in np.flatnonzero(frequent))
    rare = sum(count for word, count in kept.items() if counts[int(word)] == 1)
    assert rare == pytest.approx(int((counts == 1).sum()), rel=0.1)
    assert thinned(table, 20_000) is table
    shuffled = table.take(rng.permutation(20_000))
    assert thinned(shuffled, 5000).sort_by("word") == thin.sort_by("word")

"""Counts the words of training text, so that a tokenizer is trained on distinct words instead of on the text.

Training looks at words and how often they occur: 10 GB of text are a few million distinct words. Words are counted by
the kernels that find segments (segments.py), a task's text at a time, and added up in the order of the tasks, so the
counts are the same on any number of workers. The table is bounded: beyond MAX_WORDS rare words are thinned by
threshold sampling (Duffield, Lund and Thorup 2007): with a threshold t a word that occurs c < t times stays with
probability c / t and then counts t times, so the expected count of every substring is unchanged."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.foundation.files import atomic_path, remove_tree
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import fetch
from gristmill.tokenizers.segments import ENTRY_COLUMNS, KEY, LOW_32, NO_ENTRY, PADDING, look_up, split_segments
from gristmill.tokenizers.segments import MASKS as SEGMENT_MASKS
from gristmill.tokenizers.training_sample import Selection, selected_texts
from gristmill.tokenizers.words import boundaries_before_spaces

# A sentence is some lines together, so that pieces may hold line ends (":\n", ".\n\n"): 0.270 tokens a byte on held-out
# Markdown (kubernetes_community, 8k pieces of 4 MB, 2026-11-20) against 0.286 line by line, where sentencepiece never
# sees what follows a line end.
SENTENCE_LENGTH = 2000  # characters
SPACE, SPACE_SIGN = 0x20, "▁"
FOLDER = "words"  # temporary folder of the counts of each task
TASK_BYTES = 64_000_000
# Text from which on starting worker processes pays.
MIN_PARALLEL_BYTES = 100_000_000
WINDOW_BYTES = 1 << 16
NUM_SLOTS = 1 << 21
MAX_WORDS = 4_000_000  # that a tokenizer is trained on: 1.5 GB in sentencepiece
# Rows of counts that are held before equal words are added up, and words that stay then.
MAX_ROWS, MAX_MERGED = 24_000_000, 12_000_000
MAX_SHORT_BYTES = 1 << 31  # of words and their offsets
SCHEMA = pa.schema({"word": pa.large_binary(), "count": pa.int64()})
SHORT_SCHEMA = pa.schema({"word": pa.binary(), "count": pa.int64()})


@dataclass(frozen=True)
class WordCountTask:
    """selections: documents. path: of the Parquet file of their words and counts."""

    selections: tuple[Selection, ...]
    path: Path
    byte_level: bool = False


def count_sample(selections: Sequence[Selection], folder: Path, engine: Engine, byte_level: bool = False) -> pa.Table:
    """Words of the selected documents and their counts: columns `word` and `count`, at most MAX_WORDS, by word.

    folder: for temporary files, which are removed. byte_level: as for `count_words`."""
    tasks = [
        WordCountTask(group, folder / FOLDER / f"{number:05d}.parquet", byte_level)
        for number, group in enumerate(_groups(selections))
    ]
    sizes = [sum(selection.bytes for selection in task.selections) for task in tasks]
    engine = engine if sum(sizes) >= MIN_PARALLEL_BYTES else LocalEngine(1, engine.reporter)
    engine.map(count_task, tasks, "tokenizer: counting words", sizes, "B")
    table = merged(pq.read_table(fetch(task.path)) for task in tasks)
    remove_tree(folder / FOLDER)
    return table


def count_task(task: WordCountTask) -> None:
    """Writes the words of the task's documents with their counts, unless the file is there."""
    if task.path.is_file():
        return
    table = merged(count_words(selected_texts(selection), task.byte_level) for selection in task.selections)
    with atomic_path(task.path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _groups(selections: Sequence[Selection]) -> Iterator[tuple[Selection, ...]]:
    """Consecutive selections of about TASK_BYTES together."""
    group: list[Selection] = []
    for selection in selections:
        if group and sum(member.bytes for member in group) + selection.bytes > TASK_BYTES:
            yield tuple(group)
            group = []
        group.append(selection)
    if group:
        yield tuple(group)


def count_texts(texts: Iterable[str], byte_level: bool = False) -> pa.Table:
    """The words of texts in memory and their counts: columns `word` and `count`, by word."""
    batches = _batches(texts, TASK_BYTES // 16)
    return merged(count_words(batch, byte_level) for batch in batches)


def _batches(texts: Iterable[str], num_bytes: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= num_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def count_words(texts: Sequence[str], byte_level: bool = False) -> pa.Table:
    """Words and counts of texts, in no order; a long word may stand in several rows.

    A word is what stands between two spaces, with the spaces before it, in one sentence: "a  b" -> "a" and "  b".
    byte_level: a word also begins with the line ends before its spaces, and the line ends of sentences are counted, for
    pre-tokenization patterns, which look at all white space."""
    raw = [(text if byte_level else text.replace(SPACE_SIGN, " ")).encode(errors="replace") for text in texts]
    ends = np.cumsum([len(text) for text in raw], dtype=np.int64)
    boundaries = boundaries_before_spaces() if byte_level else _boundaries_before_spaces()
    return _count(*sentences(np.frombuffer(b"".join(raw), np.uint8), ends, not byte_level), boundaries)


def sentences(buffer: np.ndarray, ends: np.ndarray, strip: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """(UTF-8 of all sentences, int64: their ends) of UTF-8 texts that lie one after another.

    A sentence is lines until they hold SENTENCE_LENGTH characters; a longer line is cut. strip: its line end is left
    out, as sentencepiece leaves it out."""
    padded = np.concatenate([buffer, np.zeros(2, np.uint8)])
    written = np.empty(len(buffer), np.uint8)
    sentence_ends = np.empty(len(ends) + 2 * len(buffer) // SENTENCE_LENGTH + 1, np.int64)
    count = _sentences(padded, ends, strip, written, sentence_ends)
    sentence_ends = sentence_ends[:count]
    return written[: sentence_ends[-1] if count else 0], sentence_ends


@cached_njit()
def _sentences(buffer, ends, strip, written, sentence_ends):
    """Returns the number of sentences. Lines end as for str.splitlines."""
    count = filled = position = 0
    for end in ends:
        size = in_line = 0
        while position < end:
            byte, after, third = buffer[position], buffer[position + 1], buffer[position + 2]
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            ends_line = byte == 0x0A or byte == 0x0B or byte == 0x0C or (byte >= 0x1C and byte <= 0x1E)
            ends_line |= byte == 0x0D and (after != 0x0A or position + 1 == end)
            ends_line |= byte == 0xC2 and after == 0x85
            ends_line |= byte == 0xE2 and after == 0x80 and (third == 0xA8 or third == 0xA9)
            for at in range(length):
                written[filled + at] = buffer[position + at]
            filled += length
            position += length
            size += 1
            in_line += 1
            if ends_line or in_line == SENTENCE_LENGTH:
                in_line = 0
            if position == end or (in_line == 0 and size >= SENTENCE_LENGTH):
                start = sentence_ends[count - 1] if count else 0
                while strip and filled > start and (written[filled - 1] == 0x0A or written[filled - 1] == 0x0D):
                    filled -= 1
                sentence_ends[count] = filled
                count += 1
                size = in_line = 0
    return count


def _boundaries_before_spaces() -> np.ndarray:
    """bool[65536], as `adjacent_bytes`: False (a boundary) before a space that follows no space."""
    adjacent = np.ones((256, 256), dtype=np.bool_)
    adjacent[:, SPACE] = False
    adjacent[SPACE, SPACE] = True
    return adjacent.reshape(-1)


def _count(buffer: np.ndarray, ends: np.ndarray, adjacent: np.ndarray) -> pa.Table:
    """Segments of UTF-8 texts that lie one after another, with their counts. ends: int64[texts]."""
    slots = np.full(NUM_SLOTS, NO_ENTRY, dtype=np.int64)
    entries = np.zeros((1 << 16, ENTRY_COLUMNS), np.int64)
    keys, counts = np.zeros(len(buffer) + PADDING, np.uint8), np.zeros(1 << 16, np.int64)
    sizes = np.zeros(3, np.int64)
    padded = np.concatenate([buffer, np.zeros(PADDING, np.uint8)])
    starts, finished = np.empty(min(WINDOW_BYTES, len(buffer)) + 2, np.int64), np.empty(len(ends), np.int64)
    masks = np.array(SEGMENT_MASKS, np.uint64)
    tables = []
    position = document = 0
    while document < len(ends):
        if sizes[0] > NUM_SLOTS // 2:
            tables.append(_table(entries[: sizes[0]], keys[: sizes[1]], counts))
            slots.fill(NO_ENTRY)
            counts[:], sizes[:] = 0, 0
        place = position, document
        count, position, document = split_segments(buffer, ends, place, WINDOW_BYTES, adjacent, starts, finished)
        if sizes[0] + count > len(entries):
            extra = max(count, len(entries))
            entries = np.concatenate([entries, np.zeros((extra, ENTRY_COLUMNS), np.int64)])
            counts = np.concatenate([counts, np.zeros(extra, np.int64)])
        segments = np.empty(count, dtype=np.int32)
        look_up(padded, starts, masks, segments, (slots, entries, keys, sizes))
        _add(segments, counts)
    return pa.concat_tables([*tables, _table(entries[: sizes[0]], keys[: sizes[1]], counts)])


@cached_njit()
def _add(segments, counts):
    for segment in segments:
        counts[segment] += 1


def _table(entries: np.ndarray, keys: np.ndarray, counts: np.ndarray) -> pa.Table:
    """Keys lie in the order of the entries, one after another."""
    offsets = np.concatenate([[0], np.cumsum(entries[:, KEY] & LOW_32)]).astype(np.int64)
    buffers = [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(keys.tobytes())]
    words = pa.Array.from_buffers(pa.large_binary(), len(entries), buffers)
    return pa.table([words, pa.array(counts[: len(entries)].copy())], schema=SCHEMA)


def merged(tables: Iterable[pa.Table]) -> pa.Table:
    """Equal words added up, by word; at most MAX_WORDS, thinned where there are more. Depends on the tables' order
    where it is thinned."""
    pending: list[pa.Table] = [SHORT_SCHEMA.empty_table()]
    rows = 0
    for table in tables:
        pending.append(table.cast(SHORT_SCHEMA))
        rows += len(table)
        if rows > MAX_ROWS:
            pending = [thinned(_added_up(pending), MAX_MERGED)]
            rows = len(pending[0])
    return thinned(_added_up(pending), MAX_WORDS).cast(SCHEMA).sort_by("word")


def _added_up(tables: list[pa.Table]) -> pa.Table:
    """Equal words added up, in no order; empties the list. Arrow groups words with offsets of 32 bits seven times as
    fast."""
    joined = pa.concat_tables(tables, promote_options="permissive")
    tables.clear()
    if joined["word"].nbytes >= MAX_SHORT_BYTES:
        joined = joined.cast(SCHEMA)
    totals = joined.group_by("word", use_threads=False).aggregate([("count", "sum")])
    return totals.rename_columns({"count_sum": "count"}).select(SCHEMA.names)


def thinned(table: pa.Table, max_words: int) -> pa.Table:
    """The table, or if it has more than max_words rows a sample of it with the same expected counts."""
    if len(table) <= max_words:
        return table
    return with_least_count(table, _threshold(table["count"].to_numpy(), max_words))


def with_least_count(table: pa.Table, threshold: int) -> pa.Table:
    """A sample of the table with the same expected counts, none of them below the threshold: a rarer word is kept with
    probability count / threshold."""
    counts = table["count"].to_numpy()
    generator = np.random.default_rng([len(table), int(counts.sum())])  # other draws at each thinning
    order = pc.sort_indices(table["word"]).to_numpy()  # so that the draws do not depend on the order of the rows
    draws = np.empty(len(table))
    draws[order] = generator.random(len(table))
    kept = draws < counts / threshold
    values = pa.array(np.maximum(counts[kept], threshold))
    return pa.table([table["word"].filter(pa.array(kept)), values], schema=SCHEMA)


def _threshold(counts: np.ndarray, max_words: int) -> int:
    """The least count t so that sum(min(1, count / t)) <= max_words."""
    low, high = 1, int(counts.sum()) // max_words + 2
    while low < high:
        middle = (low + high) // 2
        if np.minimum(1.0, counts / middle).sum() <= max_words:
            high = middle
        else:
            low = middle + 1
    return low


def words_and_counts(table: pa.Table) -> Iterator[tuple[str, int]]:
    """(word, count) in the order of the table. Bytes that are no UTF-8 cannot occur: words are cut between
    characters."""
    for batch in table.to_batches(max_chunksize=1 << 16):
        words = batch.column("word").cast(pa.large_string()).to_pylist()
        yield from zip(words, batch.column("count").to_pylist(), strict=True)

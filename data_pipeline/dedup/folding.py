"""Folded text, text keys and picked texts: what near-duplicate and exact detection compare. Folded text is lower-case
words with one space after each, nothing else.

The rules, by Unicode code point (the tables are those of the running Python's `unicodedata`):
- letters, marks and digits (categories L, M, N) and `_` make words, in lower case;
- format characters (Cf: soft hyphen, joiners, direction marks) vanish, but U+200B, a space without width, separates;
- everything else (white space, punctuation, symbols, controls) separates words;
- in scripts written without spaces (`STANDS_ALONE`) every letter and mark is a word of its own, so that a word
  5-gram is five characters there."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_128_digest

from gristmill.data_pipeline.ledger.document_file import (
    load_array,
    open_document_file,
    packed_ids,
    save_array,
    sortable_ids,
)
from gristmill.data_pipeline.signals.characters import NUM_CODE_POINTS, category_letters, first_code_points
from gristmill.foundation.checksums import checksum_path, file_state, matches_checksum
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.kernels.kernel_files import cached_array
from gristmill.foundation.runtime.tasks.task_files import fetch

Fold = Literal["word", "character", "space"]
TEXT_KEY, KEY_BYTES = "text_key", 16  # column of annotated files: `folded_keys` of the texts folded by "space"

# First and last code point of the scripts written without spaces between words (Unicode 15, Blocks.txt).
STANDS_ALONE = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration mark and zero
    (0x3040, 0x312F),  # Hiragana, Katakana, Bopomofo
    (0x31F0, 0x31FF),  # Katakana extensions
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
    (0xFF66, 0xFF9F),  # half-width Katakana
    (0x20000, 0x3FFFF),  # Han, extensions B and later
)
SEPARATOR = np.uint32(0)
VANISHES = np.uint32(1 << 30)
ALONE = np.uint32(1 << 31)
CODE_POINT = np.uint32((1 << 21) - 1)
LAST_CASED = 0x20000  # no code point from here on has a lower case or is white space
SPACE = np.uint8(32)
LETTER = np.uint8(255)

# A folded character is at most half as long again as the raw one (U+023A, two bytes, folds to U+2C65, three;
# a three-byte character that stands alone gets a space); every text may need one more space at its end.
GROWTH = 1.5


@cached_array
def folding_table(fold: Fold) -> np.ndarray:
    """uint32[0x110000]: what each code point becomes, with the flags above.

    word, character: the rules above; only `word` cuts the scripts without spaces into characters. space: every
    character stays as it is, but white space (str.isspace) and NUL separate."""
    table = np.arange(NUM_CODE_POINTS, dtype=np.uint32)
    if fold == "space":
        table[:LAST_CASED][np.strings.isspace(first_code_points(LAST_CASED))] = SEPARATOR
        return table
    first_C, second_C = category_letters().T
    cased = np.flatnonzero((second_C == ord("u")) | (second_C == ord("t")) | (second_C == ord("l")))
    cased = cased[cased < LAST_CASED]  # Lu, Lt and Nl, the Roman numerals; Ll stays as it is
    table[cased] = np.strings.lower(first_code_points(LAST_CASED)[cased]).view(np.uint32)
    separates = (first_C != ord("L")) & (first_C != ord("M")) & (first_C != ord("N"))
    separates[ord("_")] = False
    table[separates] = SEPARATOR
    table[(first_C == ord("C")) & (second_C == ord("f"))] = VANISHES
    table[0x200B] = SEPARATOR
    if fold == "word":
        for first, last in STANDS_ALONE:
            block = table[first : last + 1]
            block[(block & CODE_POINT) > 0] |= ALONE
    return table


@cached_njit(nogil=True)
def fold_one(raw, start, stop, table, ascii_table, folded, at):
    """Writes the folded form of raw[start:stop] (UTF-8) at folded[at:]; returns where it ends.

    "Don't  PANIC!" -> "don t panic ". The text must be valid UTF-8, as a Parquet string column is."""
    last = SPACE
    i = start
    while i < stop:
        byte = raw[i]
        if byte < 128:
            # No branch on what the byte is: a space after a space is written and then written over.
            code8 = ascii_table[byte]
            folded[at] = code8
            at += (code8 != SPACE) | (last != SPACE)
            last = code8
            i += 1
            continue
        if byte < 0xE0:
            point = (np.uint32(byte & 31) << 6) | (raw[i + 1] & 63)
            i += 2
        elif byte < 0xF0:
            point = (np.uint32(byte & 15) << 12) | (np.uint32(raw[i + 1] & 63) << 6) | (raw[i + 2] & 63)
            i += 3
        else:
            point = (
                (np.uint32(byte & 7) << 18)
                | (np.uint32(raw[i + 1] & 63) << 12)
                | (np.uint32(raw[i + 2] & 63) << 6)
                | (raw[i + 3] & 63)
            )
            i += 4
        code = table[point]
        if code & VANISHES:
            continue
        if code == 0 or code & ALONE:
            folded[at] = SPACE
            at += last != SPACE
            last = SPACE
            if code == 0:
                continue
        at = _write_utf8(folded, at, code & CODE_POINT)
        last = LETTER
        if code & ALONE:
            folded[at] = last = SPACE
            at += 1
    folded[at] = SPACE
    return at + (last != SPACE)


@cached_njit(nogil=True)
def _write_utf8(out: np.ndarray, at: int, point: int) -> int:
    if point < 0x80:
        out[at] = point
        return at + 1
    if point < 0x800:
        out[at] = 0xC0 | (point >> 6)
        out[at + 1] = 0x80 | (point & 63)
        return at + 2
    if point < 0x10000:
        out[at] = 0xE0 | (point >> 12)
        out[at + 1] = 0x80 | ((point >> 6) & 63)
        out[at + 2] = 0x80 | (point & 63)
        return at + 3
    out[at] = 0xF0 | (point >> 18)
    out[at + 1] = 0x80 | ((point >> 12) & 63)
    out[at + 2] = 0x80 | ((point >> 6) & 63)
    out[at + 3] = 0x80 | (point & 63)
    return at + 4


def fold_texts(data: np.ndarray, offsets: np.ndarray, fold: Fold = "word") -> tuple[np.ndarray, np.ndarray]:
    """The folded forms of data[offsets[i]:offsets[i + 1]], as (bytes uint8, offsets int64[texts + 1]).

    The bytes are followed by eight spaces, so that eight may be read at a time."""
    size = int((offsets[-1] - offsets[0]) * GROWTH) + 2 * len(offsets) + 8
    folded = np.empty(size, np.uint8)
    ends = np.zeros(len(offsets), np.int64)
    table = folding_table(fold)
    ascii_table = np.where(table[:128] == SEPARATOR, SPACE, table[:128]).astype(np.uint8)
    _fold_all(data, offsets, table, ascii_table, folded, ends)
    return folded, ends


def text_keys(data: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """XXH3-128 of each text after white space is folded, as exact deduplication compares texts: the column TEXT_KEY."""
    folded, ends = fold_texts(data, np.asarray(offsets, np.int64), "space")
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(KEY_BYTES), len(offsets) - 1, [None, pa.py_buffer(folded_keys(folded, ends))]
    )


def folded_keys(folded: np.ndarray, ends: np.ndarray, seed: int = 0) -> bytes:
    """XXH3-128 with this seed of every folded text, KEY_BYTES each."""
    view = memoryview(folded.data)
    return b"".join([xxh3_128_digest(view[first:last], seed) for first, last in pairwise(ends.tolist())])


@cached_njit(nogil=True)
def _fold_all(data, offsets, table, ascii_table, folded, ends):
    at = 0
    for index in range(len(offsets) - 1):
        at = fold_one(data, offsets[index], offsets[index + 1], table, ascii_table, folded, at)
        ends[index + 1] = at
    folded[at : at + 8] = SPACE


def fold_text(text: str, fold: Fold = "word") -> str:
    """The folded form of one text, without the last space: the words with one space between each two."""
    data = np.frombuffer(text.encode(), np.uint8)
    folded, ends = fold_texts(data, np.array([0, len(data)], np.int64), fold)
    return bytes(folded[: ends[1]]).decode().rstrip(" ")


def word_spans(text: str) -> np.ndarray:
    """int64[2, words]: first and last + 1 character of every folded word in the raw text.

    "Hey, you" -> [[0, 5], [3, 8]]."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.uint32)
    spans = np.empty((2, len(points)), np.int64)
    count = _word_spans(points, folding_table("word"), spans)
    return spans[:, :count]


@cached_njit(nogil=True)
def _word_spans(points, table, spans):
    count = 0
    inside = False
    for at in range(len(points)):
        code = table[points[at]]
        if code & VANISHES:
            continue
        alone = code & ALONE != 0
        if code == SEPARATOR or alone or not inside:
            inside = False
            if code & CODE_POINT != 0:
                spans[0, count] = at
                count += 1
                inside = not alone
        if code & CODE_POINT != 0:
            spans[1, count - 1] = at + 1
    return count


# Ids and text keys of an annotated file's documents, in an array beside it (STEM.keys.npy), for steps that need no
# more of a document. The array is deleted before its file is written again, so it is never that of another file.


# key: the 16 bytes of TEXT_KEY as two numbers, big end first. readable: the record could be read. start: place of the
# text in the file, with its length before it; 0 where it is not known.
DOCUMENT_KEY = np.dtype([("id", "<u8", 2), ("key", "<u8", 2), ("bytes", "<u4"), ("readable", "?"), ("start", "<u8")])
COLUMNS = ["doc_id", TEXT_KEY, "num_bytes", "unreadable"]
MAPPED_ARRAYS = 1024  # that a process keeps mapped


def keys_path(path: Path) -> Path:
    """The array of the annotated file at this path."""
    return path.with_name(f"{path.stem}.keys.npy")


def has_keys(path: Path) -> bool:
    """Whether the file has text keys: it is an annotated one."""
    return keys_path(path).is_file() or TEXT_KEY in open_document_file(fetch(path)).schema_arrow.names


def document_keys(path: Path) -> np.ndarray:
    """DOCUMENT_KEY[rows] of an annotated file; read from the file itself if it has no array."""
    array_path = keys_path(path)
    with suppress(OSError):
        keys = _mapped_keys(array_path, tuple(file_state(array_path).values()))
        if keys is not None:
            return keys
    with pq.ParquetFile(fetch(path)) as file:
        keys = keys_of(file.read(COLUMNS), path)
        keys["start"] = _text_starts(file.metadata, keys)
        return keys


@lru_cache(maxsize=MAPPED_ARRAYS)
def _mapped_keys(array_path: Path, _: tuple[int, ...]) -> np.ndarray | None:
    """The array in this state, mapped from disk; None if it is not whole, or has other fields. Several steps read it,
    one after the other, and to check and map it takes as long as to read 100,000 keys."""
    keys = load_array(array_path, mapped=True) if matches_checksum(array_path) else None
    return keys if keys is not None and keys.dtype == DOCUMENT_KEY else None


def document_ids(path: Path) -> np.ndarray:
    """uint64[rows, 2]: packed ids of any document file."""
    if has_keys(path):
        return np.ascontiguousarray(document_keys(path)["id"])
    with pq.ParquetFile(fetch(path)) as file:
        return packed_ids(file.read(["doc_id"]).column("doc_id"), path)


def keys_of(table: pa.Table, path: Path) -> np.ndarray:
    """DOCUMENT_KEY[rows] of a table with COLUMNS, without the places of the texts."""
    keys = np.zeros(len(table), DOCUMENT_KEY)
    if len(table):
        column = table.column(TEXT_KEY).combine_chunks()
        stored = np.frombuffer(column.buffers()[1], ">u8")[KEY_BYTES // 8 * column.offset :][
            : KEY_BYTES // 8 * len(keys)
        ]
        keys["id"] = packed_ids(table.column("doc_id"), path)
        keys["key"] = stored.reshape(-1, 2)
        keys["bytes"] = table.column("num_bytes").to_numpy()
        keys["readable"] = pc.is_null(table.column("unreadable")).to_numpy()
    return keys


def write_keys(path: Path, keys: np.ndarray) -> None:
    """Writes the array of the annotated file at this path, with the places of its texts."""
    with_starts = keys.copy()
    with_starts["start"] = _text_starts(pq.read_metadata(path), keys)
    save_array(keys_path(path), with_starts)


def restore_keys(path: Path) -> None:
    """Writes the array of an annotated file whose writer was stopped between the two."""
    save_array(keys_path(path), document_keys(path))


def remove_keys(path: Path) -> None:
    """Removes the array of an annotated file that is about to change."""
    keys_path(path).unlink(missing_ok=True)
    checksum_path(keys_path(path)).unlink(missing_ok=True)


PREFIX_BITS = 20


@dataclass(frozen=True)
class KnownValues:
    """Values of 16 bytes, looked up among many others. words: uint64[N, 2], in ascending order of their first halves.
    has_prefix: bool[2**PREFIX_BITS], the first bits of one of them; most others are told from them by those alone."""

    words: np.ndarray
    has_prefix: np.ndarray

    @classmethod
    def of(cls, words: np.ndarray) -> Self:
        """words: uint64[N, 2]."""
        has_prefix = np.zeros(1 << PREFIX_BITS, bool)
        has_prefix[words[:, 0] >> np.uint64(64 - PREFIX_BITS)] = True
        return cls(words[np.argsort(words[:, 0], kind="stable")], has_prefix)

    def among(self, words: np.ndarray) -> np.ndarray:
        """int64[]: rows of words, uint64[N, 2], that are one of the values; ascending."""
        if not len(self.words):
            return np.empty(0, np.int64)
        rows = np.flatnonzero(self.has_prefix[words[:, 0] >> np.uint64(64 - PREFIX_BITS)])
        wanted = words[rows]
        place = np.minimum(np.searchsorted(self.words[:, 0], wanted[:, 0]), len(self.words) - 1)
        is_alike = self.words[place, 0] == wanted[:, 0]
        rows, wanted = rows[is_alike], wanted[is_alike]
        return rows[np.isin(sortable_ids(wanted), sortable_ids(self.words))]


def bytes_of_words(words: np.ndarray) -> np.ndarray:
    """uint8[N, 16] of the ids or keys uint64[N, 2]."""
    return np.ascontiguousarray(words.astype(">u8")).view(np.uint8).reshape(-1, KEY_BYTES)


# A few texts of an annotated file, read without the others.
#
# Annotated files keep their texts uncompressed in one page of each row group (`open_annotated`). A text's place is in
# the array of document keys, so the file's footer, which describes 100 columns of each row group, is not parsed. The
# length that stands before each text is compared; where the file is written in another way, its row groups are read.

TEXT = "text"
LENGTH_BYTES = 4  # before each text, little end first (Parquet, encoding PLAIN)
PICKED_BYTES = 8_000_000  # of texts that are read at a time


def _text_starts(metadata: pq.FileMetaData, keys: np.ndarray) -> np.ndarray:
    """uint64[rows]: places of the lengths of the texts; 0 where texts are compressed. An unreadable record has an empty
    text."""
    starts, first = np.zeros(len(keys), np.uint64), 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        of_group = keys[first : first + group.num_rows]
        columns = map(group.column, range(group.num_columns))
        column = next((column for column in columns if column.path_in_schema == TEXT), None)
        if column is not None and column.compression == "UNCOMPRESSED":
            sizes = of_group["bytes"].astype(np.int64) + LENGTH_BYTES
            before = column.data_page_offset + column.total_compressed_size - int(sizes.sum())
            starts[first : first + len(of_group)] = max(before, 0) + np.cumsum(sizes) - sizes
        first += group.num_rows
    return starts


def has_picked_texts(path: Path) -> bool:
    """Whether the file is an annotated one with an array of document keys."""
    return keys_path(path).is_file()


def picked_texts(path: Path, rows: Sequence[int] | np.ndarray) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """(rows, their texts) of these ascending rows of an annotated file, a bounded number at a time."""
    rows = np.asarray(rows, np.int64)
    keys = document_keys(path)[rows]
    run_of = (np.cumsum(keys["bytes"], dtype=np.int64) - keys["bytes"]) // PICKED_BYTES
    bounds = [*np.flatnonzero(np.diff(run_of, prepend=-1)).tolist(), len(rows)]
    for first, last in pairwise(bounds):
        texts = _texts_at(fetch(path), keys[first:last]) if keys["start"][first:last].all() else None
        if texts is None:
            yield from _texts_of_groups(path, rows[first:last])
        else:
            yield rows[first:last], pa.array(texts, pa.string())


def _texts_at(path: Path, keys: np.ndarray) -> list[bytes] | None:
    """Texts by their places; None if one is not there."""
    texts = []
    with path.open("rb", buffering=0) as file:
        for start, size in zip(keys["start"].tolist(), keys["bytes"].tolist(), strict=True):
            content = os.pread(file.fileno(), LENGTH_BYTES + size, start)
            if len(content) != LENGTH_BYTES + size or content[:LENGTH_BYTES] != size.to_bytes(LENGTH_BYTES, "little"):
                return None
            texts.append(content[LENGTH_BYTES:])
    return texts if _are_texts(texts) else None


def _texts_of_groups(path: Path, rows: np.ndarray) -> Iterator[tuple[np.ndarray, pa.Array]]:
    """As picked_texts, one row group after the other."""
    with pq.ParquetFile(fetch(path)) as file:
        start = 0
        for group in range(file.num_row_groups):
            stop = start + file.metadata.row_group(group).num_rows
            inside = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
            if len(inside):
                table = file.read_row_group(group, columns=[TEXT], use_threads=False)
                yield start + inside, table.column(TEXT).combine_chunks().take(pa.array(inside))
            start = stop


def _are_texts(texts: Sequence[bytes]) -> bool:
    try:
        for text in texts:
            text.decode()
    except UnicodeDecodeError:
        return False
    return True

"""Annotated files of made documents, so small that 10^8 of them fit on one disk, and a signature store that need not
keep its signatures.

A document is 14 words of three letters: 10 shingles, 55 bytes. By its row in its file: one in five is the one before it
with another last word (similarity 9 / 11), one in fifty has a text of a pool in which each is drawn four times, one in
a thousand is of one family that differs in the last word, one in a hundred fails the rule, and in one file of fifty one
in fifty quotes a benchmark."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.candidates import LINK, Banding, StoredDocuments, write_run_of_keys
from gristmill.data_pipeline.dedup.folding import DOCUMENT_KEY, fold_texts, folded_keys, write_keys
from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.dedup.signatures import (
    SignatureScheme,
    SignatureShard,
    StoredFile,
    documents_file,
    signatures_file,
    signed_batches,
    write_signatures,
)
from gristmill.data_pipeline.ledger.document_file import DocumentFile, unpacked_ids
from gristmill.foundation.checksums import checksum_path, checksummed_path
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles

WORDS, LETTERS = 14, 3
TEXT_BYTES = WORDS * (LETTERS + 1) - 1
ROW_GROUP_ROWS, PAGE_BYTES = 16_384, 8_000_000  # those of annotated files
COPIED, POOLED, FAMILY, SHORT = 5, 50, 1000, 100  # one document of so many
POOL_SHARE = 200  # documents for each text of the pool
QUOTING_FILES, QUOTES, QUESTIONS = 50, 50, 5_000
LETTER_CODES = np.arange(ord("a"), ord("z") + 1, dtype=np.uint8)
NULLS = ("url", "language", "metadata", "unreadable")
SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("text", pa.string()),
        *((name, pa.string()) for name in NULLS),
        ("raw_digest", pa.string()),
        ("record", pa.int64()),
        ("text_hash", pa.uint64()),
        ("changes", pa.list_(pa.string())),
        ("num_bytes", pa.int64()),
        ("num_words", pa.int64()),
        ("detected_language", pa.string()),
    ]
)


@dataclass(frozen=True)
class SparseFile:
    """documents: of all files, which decides the size of the pool."""

    path: Path
    number: int
    rows: int
    documents: int


def write_sparse_file(file: SparseFile) -> None:
    """The annotated file and its array of document keys."""
    generator = np.random.default_rng([1, file.number])
    words = _words(file, generator)
    texts, data, offsets = _texts(words)
    keys = np.empty(file.rows, DOCUMENT_KEY)
    keys["id"] = generator.integers(1 << 64, size=(file.rows, 2), dtype=np.uint64)
    folded = folded_keys(*fold_texts(data, offsets, "space"), 0)
    keys["key"] = np.frombuffer(folded, ">u8").reshape(-1, 2)
    keys["bytes"], keys["readable"] = TEXT_BYTES, True
    is_short = np.arange(file.rows) % SHORT == SHORT - 2
    empty = pa.nulls(file.rows, pa.string())
    columns = {name: empty for name in NULLS} | {
        "doc_id": unpacked_ids(keys["id"]),
        "text": texts,
        "raw_digest": pa.repeat(pa.scalar("0" * 64), file.rows),
        "record": np.arange(file.rows),
        "text_hash": keys["key"][:, 1],
        "changes": pa.nulls(file.rows, pa.list_(pa.string())),
        "num_bytes": np.full(file.rows, TEXT_BYTES),
        "num_words": np.where(is_short, 3, WORDS),
        "detected_language": pa.repeat(pa.scalar("en"), file.rows),
    }
    table = pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)
    repeated = ["language", "raw_digest", "unreadable", "detected_language"]
    compression = {name: "zstd" for name in SCHEMA.names if name not in ("text", "changes")}
    with checksummed_path(file.path) as temporary:
        pq.write_table(
            table,
            temporary,
            row_group_size=ROW_GROUP_ROWS,
            compression=compression,
            use_dictionary=repeated,
            write_statistics=False,
            data_page_size=PAGE_BYTES,
        )
    write_keys(file.path, keys)


def _words(file: SparseFile, generator: np.random.Generator) -> np.ndarray:
    """uint32[rows, WORDS]: three letters and a space."""
    table = _table()
    numbers = generator.integers(len(table), size=(file.rows, WORDS), dtype=np.uint16)
    rows = np.arange(file.rows)
    pooled = rows[rows % POOLED == POOLED - 2]
    drawn = generator.integers(max(file.documents // POOL_SHARE, 1), size=len(pooled), dtype=np.uint64)
    numbers[pooled] = _numbers_of(drawn + np.uint64(1))
    if file.number % QUOTING_FILES == 0:
        quoting = rows[rows % QUOTES == 2]
        numbers[quoting] = _numbers_of(
            QUESTION_SEED + generator.integers(QUESTIONS, size=len(quoting), dtype=np.uint64)
        )
    family = rows[rows % FAMILY == 1]
    numbers[family, : WORDS - 1] = _numbers_of(np.zeros(1, np.uint64))[:, : WORDS - 1]
    copies = rows[rows % COPIED == COPIED - 1]
    numbers[copies, : WORDS - 1] = numbers[copies - 1, : WORDS - 1]
    return table[numbers]


QUESTION_SEED = np.uint64(1 << 40)


def _table() -> np.ndarray:
    """uint32[26**3 words]"""
    first, second, third = np.meshgrid(LETTER_CODES, LETTER_CODES, LETTER_CODES, indexing="ij")
    letters = np.stack([first, second, third, np.full_like(first, ord(" "))], axis=-1)
    return np.ascontiguousarray(letters).view(np.uint32).reshape(-1)


def _numbers_of(seeds: np.ndarray) -> np.ndarray:
    """uint16[seeds, WORDS]: the words of the text with this number, by SplitMix64."""
    with np.errstate(over="ignore"):
        state = (seeds[:, None] * np.uint64(WORDS) + np.arange(WORDS, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) % np.uint64(26**3)).astype(np.uint16)


def _texts(words: np.ndarray) -> tuple[pa.Array, np.ndarray, np.ndarray]:
    """(the texts, their bytes, int64 offsets)"""
    data = np.ascontiguousarray(words.view(np.uint8).reshape(len(words), -1)[:, :TEXT_BYTES]).reshape(-1)
    offsets = np.arange(len(words) + 1, dtype=np.int64) * TEXT_BYTES
    texts = pa.StringArray.from_buffers(len(words), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data))
    return texts, data, offsets


def questions() -> list[str]:
    """The texts of the benchmark."""
    words = _table()[_numbers_of(QUESTION_SEED + np.arange(QUESTIONS, dtype=np.uint64))]
    return _texts(words)[0].to_pylist()


@dataclass(frozen=True)
class SignedRows:
    """The signatures of a document file, computed when some of them are asked for."""

    document_file: DocumentFile
    scheme: SignatureScheme

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """uint32[places, hashes], of ascending places among the kept documents."""
        kept = self.document_file.kept_mask()
        wanted = np.zeros(len(kept), bool)
        wanted[np.flatnonzero(kept)[places]] = True
        return np.concatenate([each for _, each in signed_batches(self.document_file, self.scheme, wanted)])


@dataclass(frozen=True)
class SignedAgain(SignatureShard):
    """A shard whose signatures are computed when the file that held them is gone."""

    document_file: DocumentFile | None = None
    scheme: SignatureScheme | None = None

    def signatures(self) -> Any:
        if signatures_file(self.folder, self.number).exists():
            return super().signatures()
        assert self.document_file is not None and self.scheme is not None
        return SignedRows(self.document_file, self.scheme)


@dataclass(frozen=True)
class Unwritten(SignatureShard):
    """A shard of documents of which only the number of shingles is asked."""

    def documents(self, columns: Sequence[str] = ()) -> pa.Table:
        assert list(columns) == ["shingles"]
        return pa.table({"shingles": np.full(self.stored.documents, WORDS - 4)})


def unwritten(documents: int, file_documents: int) -> StoredDocuments:
    sizes = [min(file_documents, documents - start) for start in range(0, documents, file_documents)]
    shards = tuple(
        Unwritten(Path(), 0, number, StoredFile(source="made", priority=1, documents=size))
        for number, size in enumerate(sizes)
    )
    return StoredDocuments(shards, np.cumsum([0, *sizes]), np.zeros(len(shards), bool))


def write_made_links(task: tuple[PartitionedFiles, int, int]) -> None:
    """One part of the links that these documents have: of each pair in 0.3 of the bands, where it shares its bucket
    with a probability of (9 / 11) ** 6, in one range of the keys; of the family, all in one range of each band."""
    links, part, documents = task
    generator = np.random.default_rng([2, part])
    bands = NearDedupConfig().bands
    ranges = links.map_outputs // (bands + 1)
    rights = np.arange(COPIED - 1, documents, COPIED)
    rights = rights[generator.random(len(rights), np.float32) < (9 / 11) ** NearDedupConfig().rows / ranges]
    pairs = np.stack([rights - 1, rights])
    if part % ranges == 0:
        family = np.arange(1, documents, FAMILY)
        pairs = np.concatenate([pairs, np.stack([family[:-1], family[1:]])], axis=1)
    records = np.empty(pairs.shape[1] if part < bands * ranges else 0, LINK)  # the last band is of ids
    order = np.argsort(pairs[0], kind="stable")[: len(records)]
    records["left"], records["right"] = pairs[0][order], pairs[1][order]
    links.write(part, records, np.array([0, len(records)]))


def signed_again(
    document_files: Sequence[DocumentFile], counts: Sequence[int], scheme: SignatureScheme, folder: Path
) -> tuple[SignedAgain, ...]:
    return tuple(
        SignedAgain(
            folder,
            scheme.hashes,
            number,
            StoredFile(source=document_file.source, priority=document_file.priority, documents=count),
            document_file,
            scheme,
        )
        for number, (document_file, count) in enumerate(zip(document_files, counts, strict=True))
    )


def count_kept(document_file: DocumentFile) -> int:
    return int(document_file.kept_mask().sum())


def sign_and_key(task: tuple[Sequence[SignedAgain], Banding, PartitionedFiles, int]) -> float:
    """Tables and band keys of the shards; their signatures only until these are made. The CPU seconds of signing."""
    started = time.process_time()
    for shard in task[0]:
        assert shard.document_file is not None and shard.scheme is not None
        paths = documents_file(shard.folder, shard.number), signatures_file(shard.folder, shard.number)
        write_signatures(
            signed_batches(shard.document_file, shard.scheme), shard.stored.documents, shard.scheme, *paths
        )
    signed = time.process_time() - started
    write_run_of_keys(task)
    for shard in task[0]:
        path = signatures_file(shard.folder, shard.number)
        path.unlink()
        checksum_path(path).unlink()
    return signed

"""Rows of single documents, found by the index of ids, and searches of texts and of similar
documents that read a corpus for a bounded time."""

import io
import posixpath
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.corpus_files import CorpusFiles, picked_rows
from gristmill.data_pipeline.corpus.id_index import RowPlace
from gristmill.data_pipeline.corpus.sketches import ANNOTATED_FOLDER
from gristmill.data_pipeline.corpus.small_sources import is_batch_file, rows_by_source, source_in_name
from gristmill.data_pipeline.dedup.minhash import jaccard, shingle_sets
from gristmill.data_pipeline.dedup.near_copies import EXCERPT, Neighbour, count_agreeing, signed_text
from gristmill.data_pipeline.dedup.signatures import (
    STORE_FILE,
    STORE_FOLDER,
    SignatureStore,
    documents_file,
    signatures_file,
    store_of,
)
from gristmill.data_pipeline.ledger.document_file import utf8_of
from gristmill.data_pipeline.readers.document import hosts_of
from gristmill.foundation.errors import InputError

SEARCH_SECONDS = 0.12
LISTED = ("doc_id", "source", "outcome", "split", "step", "rule", "value", "threshold", "duplicate_of", "bytes")
LedgerPlace = tuple[int, int]  # number of the shard of the source's ledger, row in it


@dataclass(frozen=True)
class Filters:
    """Which documents: each field is a value of its column, or "" for all. words: all of them are in the text of the
    kept document, in any case."""

    outcome: str = ""
    source: str = ""
    rule: str = ""
    split: str = ""
    language: str = ""
    host: str = ""
    words: str = ""

    @property
    def of_ledger(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("outcome", "source", "rule", "split")}

    @property
    def reads_text(self) -> bool:
        return bool(self.host or self.words.split())

    @property
    def reads_documents(self) -> bool:
        """Whether only documents of the corpus can match."""
        return bool(self.reads_text or self.language)


@dataclass(frozen=True)
class Cursor:
    """Where a search goes on: a file, a row group of it, and the matches of that group that were listed."""

    file: int = 0
    group: int = 0
    skip: int = 0

    @classmethod
    def parse(cls, text: str) -> "Cursor":
        """FILE-GROUP-SKIP; "" for the start. Raises InputError for anything else."""
        numbers = (text or str(cls())).split("-")
        if len(numbers) != 3 or not all(n.isascii() and n.isdigit() and len(n) < 10 for n in numbers):
            raise InputError(f"after={text[:30]}: is no place in a search; start again without it")
        return cls(*map(int, numbers))

    def __str__(self) -> str:
        return f"{self.file}-{self.group}-{self.skip}"


@dataclass(frozen=True)
class Search:
    """A page of a search. after: where it goes on; None at the end. searched: rows that this page read."""

    rows: list[dict[str, Any]]
    after: Cursor | None
    searched: int


class DocumentRows:
    """Rows of a corpus with an index of ids. annotated: files with the texts as they were read, of removed documents
    too."""

    def __init__(self, files: CorpusFiles, annotated: Sequence[Path]):
        self.files, self._annotated = files, annotated
        self._starts: dict[str, list[tuple[LedgerPlace, Path, int]]] = {}
        self._starting = threading.Lock()

    def texts(self, doc_ids: Sequence[str]) -> dict[str, str]:
        """Document -> its text: of a kept one as it is in the corpus, of another as it was read, where that is kept."""
        places = {doc_id: place for doc_id in set(doc_ids) if (place := self.files.row_place(doc_id, "documents"))}
        texts = {doc_id: row["text"] for doc_id, row in self.files.rows(places, ["text"]).items()}
        return texts | {
            doc_id: text
            for doc_id in sorted(set(doc_ids) - texts.keys())
            if (text := self.text_as_read(doc_id)) is not None
        }

    def text_as_read(self, doc_id: str) -> str | None:
        """The text before any edit; None where the work folder does not have it."""
        place = self.files.row_place(doc_id, "ledger")
        if place is None or not self._annotated:
            return None
        source, _, number = Path(place.table).stem.rpartition("-")
        starts = self._annotated_starts(source)
        at = bisect_right([start for start, *_ in starts], (int(number), place.row)) - 1
        if at < 0:
            return None
        (first_number, first_row), path, first = starts[at]
        row = (
            first + place.row - first_row + sum(self._ledger_rows(source, n) for n in range(first_number, int(number)))
        )
        with pq.ParquetFile(path) as file:
            rows = picked_rows(file, [(row, doc_id)], ["doc_id", "text"])
        return rows[doc_id]["text"] if doc_id in rows and rows[doc_id]["doc_id"] == doc_id else None

    def _ledger_rows(self, source: str, number: int) -> int:
        with self.files.parquet(f"ledger/{source}-{number:05}.parquet") as file:
            return int(file.metadata.num_rows)

    def _annotated_starts(self, source: str) -> list[tuple[LedgerPlace, Path, int]]:
        """(place in the ledger, annotated file, row in it) of the source's first document in each of its files, in
        their order there."""
        with self._starting:
            return self._starts_of(source)

    @cached_property
    def _rows_of_files(self) -> dict[str, list[tuple[Path, int, int]]]:
        """By source, (annotated file, first row, last + 1)."""
        rows: dict[str, list[tuple[Path, int, int]]] = {}
        for path in self._annotated:
            for source, start, stop in rows_by_source(path):
                rows.setdefault(source, []).append((path, start, stop))
        return rows

    def _starts_of(self, source: str) -> list[tuple[LedgerPlace, Path, int]]:
        if source not in self._starts:
            starts = []
            for path, first, stop in self._rows_of_files.get(source, ()):
                if first == stop:
                    continue
                with pq.ParquetFile(path) as file:
                    doc_id = picked_rows(file, [(first, "")], ["doc_id"])[""]["doc_id"]
                if (place := self.files.row_place(doc_id, "ledger")) is not None:
                    number = int(Path(place.table).stem.rpartition("-")[2])
                    starts.append(((number, place.row), path, first))
            self._starts[source] = sorted(starts)
        return self._starts[source]

    def search(self, filters: Filters, cursor: Cursor, limit: int, seconds: float = SEARCH_SECONDS) -> Search:
        """The next matches in the order of the files, as many as are found in so many seconds (of one row group at
        least)."""
        folder = "documents" if filters.reads_documents else "ledger"
        names = [name for name in self.files.tables(folder) if _may_match(name, filters)]
        if not any(map(self.files.tables, ("documents", "ledger"))):  # a run that has annotated files alone
            names = [name for name in self.files.tables(ANNOTATED_FOLDER) if _may_match(name, filters)]
        rows: list[dict[str, Any]] = []
        searched, deadline = 0, time.monotonic() + seconds
        for number in range(cursor.file, len(names)):
            with self.files.parquet(names[number]) as file:
                for group in range(cursor.group if number == cursor.file else 0, file.num_row_groups):
                    at = Cursor(number, group, cursor.skip if (number, group) == (cursor.file, cursor.group) else 0)
                    if searched and time.monotonic() > deadline:
                        return Search(rows, Cursor(number, group), searched)
                    table = self._matches(names[number], file, group, filters)
                    searched += file.metadata.row_group(group).num_rows
                    fitting = limit - len(rows)
                    rows += table.slice(at.skip, fitting).to_pylist()
                    if len(rows) == limit:
                        return Search(rows, Cursor(number, group, at.skip + fitting), searched)
        return Search(rows, None, searched)

    def _matches(self, name: str, file: pq.ParquetFile, group: int, filters: Filters) -> pa.Table:
        """The rows of a row group that pass, with the columns of a list."""
        is_annotated = name.startswith(f"{ANNOTATED_FOLDER}/")
        if not filters.reads_documents and not is_annotated:
            table = file.read_row_group(group, columns=list(LISTED), use_threads=False)
            for column, value in filters.of_ledger.items():
                table = table.filter(pc.equal(table.column(column), value)) if value else table
            return table
        columns = ["doc_id", "text", *(["url"] if filters.host else [])]
        of_batch = is_annotated and is_batch_file(Path(name))
        columns += ["detected_language", "unreadable"] if is_annotated else []
        columns += [] if is_annotated and not of_batch else ["source"]
        table = file.read_row_group(group, columns=columns, use_threads=False)
        if is_annotated:
            table = table.filter(pc.is_null(table.column("unreadable")))
        if is_annotated and not of_batch:
            table = table.append_column("source", pa.repeat(pa.scalar(source_in_name(Path(name))), len(table)))
        if of_batch and filters.source:
            table = table.filter(pc.equal(table.column("source"), filters.source))
        if filters.language and is_annotated:
            table = table.filter(pc.equal(table.column("detected_language"), filters.language))
        elif filters.language:
            with self.files.parquet(name.replace("documents/", "signals/", 1)) as signals:
                languages = _rows_of(signals, file, group, "detected_language")
            table = table.filter(pc.equal(languages, filters.language))
        if filters.host:
            table = table.filter(pc.equal(hosts_of(table.column("url")), filters.host.lower()))
        for word in filters.words.split():
            table = table.filter(pc.match_substring(table.column("text"), word, ignore_case=True))
        split, outcome = (None, "annotated") if is_annotated else (name.split("/")[1], "kept")
        size = len(table)
        added = {
            "outcome": pa.repeat(pa.scalar(outcome), size),
            "split": pa.repeat(pa.scalar(split, pa.string()), size),
        }
        excerpts = pc.utf8_slice_codeunits(table.column("text"), 0, 1000)
        table = table.select(["doc_id", "source"]).append_column("excerpt", excerpts)
        for column, values in (added | {"rule": pa.nulls(size, pa.string())}).items():
            table = table.append_column(column, values)
        return table


def _may_match(name: str, filters: Filters) -> bool:
    """Whether the shard of this name can have a document that passes."""
    source = source_in_name(Path(name))
    if filters.source and source != filters.source and not is_batch_file(Path(name)):
        return False
    if name.startswith(f"{ANNOTATED_FOLDER}/"):
        return filters.outcome in ("", "annotated") and not filters.rule and not filters.split
    if name.startswith("documents/"):
        return filters.outcome in ("", "kept") and not filters.rule and filters.split in ("", name.split("/")[1])
    return True


def _rows_of(signals: pq.ParquetFile, documents: pq.ParquetFile, group: int, column: str) -> pa.ChunkedArray:
    """A column of the signals of the rows of a row group of documents, whose groups are smaller."""
    first = sum(documents.metadata.row_group(n).num_rows for n in range(group))
    size = documents.metadata.row_group(group).num_rows
    bounds = [0]
    for n in range(signals.num_row_groups):
        bounds.append(bounds[-1] + signals.metadata.row_group(n).num_rows)
    groups = [n for n, (start, stop) in enumerate(pairwise(bounds)) if start < first + size and stop > first]
    read = signals.read_row_groups(groups, columns=[column], use_threads=False).column(0)
    return read.slice(first - bounds[groups[0]], size) if groups else read


# Similar documents of a corpus: the signatures of its store are compared for a bounded time, a file at a time.

COMPARE_SECONDS = 0.08
BLOCK_DOCUMENTS = 16_384  # signatures in memory at a time: 8 MB of 128 hashes
NEAREST = 10


@dataclass(frozen=True)
class NearestPage:
    """neighbours: the most similar first. compared: documents whose signatures this page read, of so many in all.
    after: the block of signatures at which to go on; None at the end."""

    neighbours: list[Neighbour]
    compared: int
    documents: int
    after: int | None


class StoredSignatures:
    """The signature store of a corpus, of which a page reads a part."""

    def __init__(self, files: CorpusFiles):
        self._files = files

    @cached_property
    def _store(self) -> SignatureStore:
        name = f"{STORE_FOLDER}/{STORE_FILE}"
        if not self._files.exists(name):
            raise InputError(
                "the corpus has no signature store; write near_dedup: {keep_signatures: true} into the recipe, or ask "
                "`gristmill similar`, which computes the signatures"
            )
        return store_of(self._files.read(name), Path(self._files.place) / STORE_FOLDER)

    def nearest(self, text: str, after: int = 0, seconds: float = COMPARE_SECONDS) -> NearestPage:
        """The documents whose signatures agree most with the text's, with their exact similarity. One block of
        signatures is compared at least. Raises InputError where the corpus has no store and for a text without a
        word."""
        store = self._store
        signature, of_text = signed_text(text, store)
        blocks = [
            (number, first)
            for number, stored in enumerate(store.files)
            for first in range(0, stored.documents, BLOCK_DOCUMENTS)
        ]
        best: list[tuple[int, int, int]] = []  # (agreeing values, file number, place in it)
        compared, deadline, at = 0, time.monotonic() + seconds, after
        while at < len(blocks) and (at == after or time.monotonic() < deadline):
            number, first = blocks[at]
            counts = count_agreeing(self._signatures(number, first), signature)
            places = np.argsort(-counts, kind="stable")[:NEAREST]
            best += [(int(counts[place]), number, first + int(place)) for place in places if counts[place]]
            compared, at = compared + len(counts), at + 1
        best = sorted(best, key=lambda entry: (-entry[0], entry[1:]))[:NEAREST]
        neighbours = self._measured(of_text, best)
        documents = sum(stored.documents for stored in store.files)
        return NearestPage(neighbours, compared, documents, at if at < len(blocks) else None)

    def _signatures(self, number: int, first: int) -> np.ndarray:
        """uint32[documents, hashes]: the block of signatures that begins there."""
        stored, hashes = self._store.files[number], self._store.scheme.hashes
        name = f"{STORE_FOLDER}/{signatures_file(Path(), number).name}"
        size, stop = self._files.size(name), min(first + BLOCK_DOCUMENTS, stored.documents)
        header = size - 4 * hashes * stored.documents  # an .npy file: a header, and the values row by row
        try:
            described = io.BytesIO(self._files.read(name, 0, max(header, 0)))
            np.lib.format.read_magic(described)
            shape, by_column, dtype = np.lib.format.read_array_header_1_0(described)
        except ValueError as error:
            raise InputError(f"{self._files.place}/{name}: no .npy file ({error}); curate the corpus again") from error
        if (shape, by_column, dtype) != ((stored.documents, hashes), False, np.dtype("<u4")):
            raise InputError(f"{self._files.place}/{name}: {dtype}{shape}, wanted uint32; curate the corpus again")
        content = self._files.read(name, header + 4 * hashes * first, header + 4 * hashes * stop)
        return np.frombuffer(content, "<u4").reshape(stop - first, hashes)

    def _measured(self, of_text: np.ndarray, best: Sequence[tuple[int, int, int]]) -> list[Neighbour]:
        scheme = self._store.scheme
        neighbours = []
        rows = self._documents(best)
        for (count, number, _), row in zip(best, rows, strict=True):
            other = shingle_sets(*utf8_of(pa.array([row["text"]])), scheme.ngram, scheme.unit)[0]
            similarity = jaccard(of_text, other)
            if similarity > 0:
                said = " ".join(row["text"][: 2 * EXCERPT].split())[:EXCERPT]
                source = self._store.files[number].source
                neighbours.append(Neighbour(row["doc_id"], source, similarity, count / scheme.hashes, said))
        return sorted(neighbours, key=lambda neighbour: (-neighbour.similarity, neighbour.doc_id))

    def _documents(self, best: Sequence[tuple[int, int, int]]) -> list[dict[str, Any]]:
        """doc_id and text of these documents of the store."""
        stored_places = {
            str(n): RowPlace(f"{STORE_FOLDER}/{documents_file(Path(), number).name}", place)
            for n, (_, number, place) in enumerate(best)
        }
        stored = self._files.rows(stored_places, ["row"])
        places = {key: RowPlace(self._table(best[int(key)][1]), int(row["row"])) for key, row in stored.items()}
        rows = self._files.rows(places, ["doc_id", "text"])
        return [rows[str(n)] for n in range(len(best))]

    def _table(self, number: int) -> str:
        """The path in the corpus of a file of documents, which the store gives as seen from its folder."""
        name = posixpath.normpath(posixpath.join(STORE_FOLDER, self._store.files[number].file))
        if PurePosixPath(name).parts[0] != "documents":
            raise InputError(f"{STORE_FOLDER}/{STORE_FILE}: names {name!r}, which is no file of this corpus")
        return name

"""Similar documents of a corpus: the signatures of its store are compared for a bounded time, a file at a time."""

import io
import posixpath
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.corpus.corpus_files import CorpusFiles
from gristmill.data_pipeline.corpus.id_index import RowPlace
from gristmill.data_pipeline.dedup.minhash import jaccard, shingle_sets, signatures_of
from gristmill.data_pipeline.dedup.near_copies import EXCERPT, Neighbour, count_agreeing
from gristmill.data_pipeline.dedup.signatures import (
    STORE_FILE,
    STORE_FOLDER,
    SignatureStore,
    documents_file,
    signatures_file,
    store_of,
)
from gristmill.data_pipeline.ledger.document_file import utf8_of
from gristmill.foundation.errors import InputError

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
        raw = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        offsets = np.array([0, len(raw)], np.int64)
        scheme = store.scheme
        signature, shingles = signatures_of(raw, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
        if not shingles[0]:
            raise InputError("the text holds no word, so nothing can be similar to it")
        of_text = shingle_sets(raw, offsets, scheme.ngram, scheme.unit)[0]
        blocks = [
            (number, first)
            for number, stored in enumerate(store.files)
            for first in range(0, stored.documents, BLOCK_DOCUMENTS)
        ]
        best: list[tuple[int, int, int]] = []  # (agreeing values, file number, place in it)
        compared, deadline, at = 0, time.monotonic() + seconds, after
        while at < len(blocks) and (at == after or time.monotonic() < deadline):
            number, first = blocks[at]
            counts = count_agreeing(self._signatures(number, first), signature[0])
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

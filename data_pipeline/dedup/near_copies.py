"""Near copies of given texts among documents, by their signatures and exact Jaccard similarity.

Of many texts by shared bands of kept signatures (`BandLookup`), of one text in a signature store (`similar`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Self

import numpy as np

from gristmill.data_pipeline.dedup.minhash import band_keys, jaccard, shingle_sets, signatures_of
from gristmill.data_pipeline.dedup.signatures import (
    BLOCK_DOCUMENTS,
    SignatureCache,
    SignatureScheme,
    SignatureStore,
    minhash_of,
)
from gristmill.data_pipeline.ledger.document_file import DocumentFile, utf8_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.tasks.engine import Engine

# Documents by their band keys, to find which of many others share a band with one of them.


# Most keys are told from those of the documents by their first bits, without a search: so many more bits than it takes
# to number the documents leave one other key in 64.
MORE_BITS, MAX_BITS = 6, 24


@dataclass(frozen=True)
class BandLookup:
    """Band keys of D documents. keys uint64[bands, D], sorted; orders int64[bands, D]: the document of each.
    prefixes bool[bands, 2**bits]: whether a key begins with these bits."""

    keys: np.ndarray
    orders: np.ndarray
    prefixes: np.ndarray

    @classmethod
    def of(cls, keys: np.ndarray) -> Self:
        """keys: uint64[bands, D]."""
        orders = np.argsort(keys, axis=1, kind="stable")
        ordered = np.take_along_axis(keys, orders, axis=1)
        bits = min(keys.shape[1].bit_length() + MORE_BITS, MAX_BITS)
        prefixes = np.zeros((len(keys), 1 << bits), bool)
        for band, of_band in enumerate(ordered):
            prefixes[band, of_band >> np.uint64(64 - bits)] = True
        return cls(ordered, orders, prefixes)

    def first_matches(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places in keys uint64[bands, N], the first document with that key), int64[] each, for every band and key
        that a document has."""
        matches = [self._ranges(band, of_band) for band, of_band in enumerate(keys)]
        places = np.concatenate([np.empty(0, np.int64), *(place for place, _, _ in matches)])
        firsts = [self.orders[band][first] for band, (_, first, _) in enumerate(matches)]
        return places, np.concatenate([np.empty(0, np.int64), *firsts])

    def pairs(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places in keys uint64[bands, N], documents that share a band), int64[] each; each pair once."""
        size = max(self.keys.shape[1], 1)
        pairs = [np.empty(0, np.int64)]
        for band, of_band in enumerate(keys):
            place, first, sizes = self._ranges(band, of_band)
            inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            pairs.append(np.repeat(place, sizes) * size + self.orders[band][np.repeat(first, sizes) + inside])
        places, documents = np.divmod(np.unique(np.concatenate(pairs)), size)
        return places, documents

    def _ranges(self, band: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(places of the keys that a document has, place of the first such document in the order, how many there
        are)."""
        shift = np.uint64(65 - self.prefixes.shape[1].bit_length())
        place = np.flatnonzero(self.prefixes[band][keys >> shift])
        first = np.searchsorted(self.keys[band], keys[place], side="left")
        sizes = np.searchsorted(self.keys[band], keys[place], side="right") - first
        has_key = sizes > 0
        return place[has_key], first[has_key], sizes[has_key]


# Bands of 3 hashes: of 120 there are 40; of pairs of similarity 0.8 one in 10^12 shares none, (1 - 0.8**3)**40.
ROWS = 3
# Below the threshold by so much an estimate from 120 hashes falls once in 10^7 (5 standard errors of 0.037).
MARGIN = 0.2


@dataclass(frozen=True)
class SignedTexts:
    """Signatures, sets of shingles and band keys of the texts whose copies are wanted."""

    scheme: SignatureScheme
    signatures: np.ndarray
    sets: list[np.ndarray]
    lookup: BandLookup

    @classmethod
    def of(cls, texts: Sequence[str], scheme: SignatureScheme) -> "SignedTexts":
        """Texts without a word have no copies."""
        raw = [text.encode() for text in texts]
        data = np.frombuffer(b"".join(raw) or b"\0", np.uint8)
        offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
        signatures, shingles = signatures_of(data, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
        with_words = np.flatnonzero(shingles > 0)
        all_sets = shingle_sets(data, offsets, scheme.ngram, scheme.unit)
        signatures = np.ascontiguousarray(signatures[with_words])
        lookup = BandLookup.of(_band_keys(signatures))
        return cls(scheme, signatures, [all_sets[place] for place in with_words.tolist()], lookup)


def _band_keys(signatures: np.ndarray) -> np.ndarray:
    rows = min(ROWS, signatures.shape[1])
    return band_keys(signatures, signatures.shape[1] // rows, rows, np.uint64(0))


@dataclass(frozen=True)
class NearCopy:
    """file: number of the document file; row: in it. similarity: to the most similar of the texts."""

    file: int
    row: int
    doc_id: str
    similarity: float


def near_copies(
    texts: SignedTexts, document_files: Sequence[DocumentFile], cache: SignatureCache, threshold: float, engine: Engine
) -> list[NearCopy]:
    """Documents with a kept signature whose similarity to one of the texts is at least the threshold.

    A file is read only if one of its signatures proposes a document. Files without signatures have no copies."""
    if not len(texts.signatures):
        return []
    tasks = [(texts, document_file, cache, number, threshold) for number, document_file in enumerate(document_files)]
    copies = engine.map(_copies_in_file, tasks, "near copies", unit="files")
    return [copy for of_file in copies for copy in of_file]


def _copies_in_file(task: tuple[SignedTexts, DocumentFile, SignatureCache, int, float]) -> list[NearCopy]:
    texts, document_file, cache, number, threshold = task
    signatures = cache.signatures(document_file)
    pairs = [
        _candidates(texts, signatures[start : start + BLOCK_DOCUMENTS], threshold) + np.array([[start], [0]])
        for start in range(0, len(signatures), BLOCK_DOCUMENTS)
    ]
    place, text = np.concatenate([np.empty((2, 0), np.int64), *pairs], axis=1)
    if not len(place):
        return []
    row_of_place = cache.rows(document_file)
    rows = row_of_place[place]
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[rows[rows >= 0]] = True
    copies = []
    for batch_rows, doc_ids, batch_texts in document_file.batches(wanted):
        sets = shingle_sets(*utf8_of(batch_texts), texts.scheme.ngram, texts.scheme.unit)
        for row, doc_id, shingles in zip(batch_rows.tolist(), doc_ids.to_pylist(), sets, strict=True):
            of_row = ((shingles, texts.sets[other]) for other in np.unique(text[rows == row]).tolist())
            similarity = max(starmap(jaccard, of_row))
            if similarity >= threshold:
                copies.append(NearCopy(number, row, doc_id, similarity))
    return copies


def _candidates(texts: SignedTexts, signatures: np.ndarray, threshold: float) -> np.ndarray:
    """int64[2, pairs]: places of documents and texts that share a band and whose estimate is near the threshold."""
    place, text = texts.lookup.pairs(_band_keys(np.ascontiguousarray(signatures)))
    estimate = (signatures[place] == texts.signatures[text]).mean(axis=1)
    return np.stack([place, text])[:, estimate >= threshold - MARGIN]


# The nearest documents of a corpus to one text: proposed by its signatures, measured exactly.

# Rows of a band when one text is looked up: at 120 hashes a document of similarity 0.5 is proposed with probability
# 1 - (1 - 0.5**3)**40 = 0.995, of 0.3 with 0.66. All that is proposed is measured, so more of them cost time alone.
LOOKUP_ROWS = 3
# Documents measured exactly for each one that is shown: the estimate's standard error is 0.04 at 128 hashes.
MEASURED = 4
EXCERPT = 160


@dataclass(frozen=True)
class Neighbour:
    """similarity: exact Jaccard of the shingle sets. estimate: the share of equal values in the signatures."""

    doc_id: str
    source: str
    similarity: float
    estimate: float
    excerpt: str


def similar(
    text: str, store: SignatureStore, document_files: Sequence[DocumentFile], limit: int = 10, exhaustive: bool = False
) -> list[Neighbour]:
    """The `limit` most similar documents, the nearest first; those that share no shingle are left out.

    document_files: those the store was made from, in its order. The store is loaded into datasketch's MinHashLSH, which
    proposes; exact similarity is measured of what it proposes. exhaustive: every signature of the store is compared
    instead (0.5 s a million), so nothing is missed but what the estimate ranks far too low.
    Raises InputError if the text has no word, or the files are not the store's."""
    if len(document_files) != len(store.files):
        raise InputError(f"{store.folder}: signatures of {len(store.files)} files, but {len(document_files)} are given")
    raw = np.frombuffer(text.encode(), np.uint8)
    offsets = np.array([0, len(raw)], np.int64)
    scheme = store.scheme
    signature, shingles = signatures_of(raw, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
    if not shingles[0]:
        raise InputError("the text holds no word, so nothing can be similar to it")
    shingles_of_text = shingle_sets(raw, offsets, scheme.ngram, scheme.unit)[0]
    proposed = _estimated(signature[0], store) if exhaustive else _proposed(signature[0], store)
    best = sorted(proposed, key=lambda f: (-f[0], f[1], f[2]))[: limit * MEASURED]
    neighbours = [
        _measured(shingles_of_text, estimate, document_files[number], row, store) for estimate, number, row in best
    ]
    neighbours = [neighbour for neighbour in neighbours if neighbour.similarity > 0]
    return sorted(neighbours, key=lambda n: (-n.similarity, n.doc_id))[:limit]


def _proposed(signature: np.ndarray, store: SignatureStore) -> Iterator[tuple[float, int, int]]:
    """(estimate, file number, row) of the documents that share a bucket with the signature in datasketch's index."""
    from datasketch import MinHashLSH  # 0.6 s to load, which nothing else need wait for

    rows = min(LOOKUP_ROWS, store.scheme.hashes)
    index = MinHashLSH(num_perm=store.scheme.hashes, params=(store.scheme.hashes // rows, rows))
    places: dict[str, tuple[int, int, int]] = {}
    minhashes = store.minhashes()
    with index.insertion_session() as session:
        for number in range(len(store.files)):
            for place, row in enumerate(store.documents(number).column("row").to_pylist()):
                doc_id, minhash = next(minhashes)
                session.insert(doc_id, minhash)
                places[doc_id] = (number, place, row)
    for doc_id in index.query(minhash_of(signature, store.scheme)):
        number, place, row = places[doc_id]
        yield float((store.signatures(number)[place] == signature).mean()), number, row


def _estimated(signature: np.ndarray, store: SignatureStore) -> Iterator[tuple[float, int, int]]:
    """(estimate, file number, row) of all documents."""
    for number in range(len(store.files)):
        rows = store.documents(number).column("row").to_numpy()
        signatures = store.signatures(number)
        for start in range(0, len(signatures), BLOCK_DOCUMENTS):
            agreeing = count_agreeing(np.asarray(signatures[start : start + BLOCK_DOCUMENTS]), signature)
            for place in np.flatnonzero(agreeing):
                yield float(agreeing[place] / store.scheme.hashes), number, int(rows[start + place])


@cached_njit(nogil=True)
def count_agreeing(signatures: np.ndarray, signature: np.ndarray) -> np.ndarray:
    """int32[documents]: how many values of each signature, uint32[documents, hashes], are those of this one."""
    counts = np.zeros(len(signatures), np.int32)
    for document in range(len(signatures)):
        count = 0
        for place in range(len(signature)):
            count += signatures[document, place] == signature[place]
        counts[document] = count
    return counts


def _measured(
    shingles: np.ndarray, estimate: float, document_file: DocumentFile, row: int, store: SignatureStore
) -> Neighbour:
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[row] = True
    for _, doc_ids, texts in document_file.batches(wanted):
        other_shingles = shingle_sets(*utf8_of(texts), store.scheme.ngram, store.scheme.unit)[0]
        text = " ".join(texts[0].as_py()[: 2 * EXCERPT].split())[:EXCERPT]
        return Neighbour(doc_ids[0].as_py(), document_file.source, jaccard(shingles, other_shingles), estimate, text)
    raise InputError(f"{document_file.path}: row {row} of the signature store is not there; sign the corpus again")

"""Near copies of given texts among annotated documents, by kept signatures and exact Jaccard similarity."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Self

import numpy as np

from gristmill.data_pipeline.dedup.minhash import band_keys, jaccard, shingle_sets, signatures_of
from gristmill.data_pipeline.dedup.signature_cache import SignatureCache
from gristmill.data_pipeline.dedup.signatures import BLOCK_DOCUMENTS, SignatureScheme
from gristmill.data_pipeline.ledger.document_file import DocumentFile, utf8_of
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

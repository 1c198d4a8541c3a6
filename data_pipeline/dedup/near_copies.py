"""Near copies of given texts among documents, by their signatures and exact Jaccard similarity.

Of many texts by shared bands of kept signatures (`BandLookup`), of one text in a signature store (`similar`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.dedup.folding import document_ids, has_picked_texts, picked_texts
from gristmill.data_pipeline.dedup.minhash import ShingleHash, band_key, band_keys, jaccard, shingle_sets, signatures_of
from gristmill.data_pipeline.dedup.signature_cache import SignatureCache
from gristmill.data_pipeline.dedup.signatures import BLOCK_DOCUMENTS, SignatureScheme, SignatureStore
from gristmill.data_pipeline.ledger.document_file import DocumentFile, unpacked_ids, utf8_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence

if TYPE_CHECKING:  # 0.6 s to load, which the workers need not wait for
    from datasketch import MinHash

# Documents by their band keys, to find which of many others share a band with one of them.


# Most keys are told from those of the documents by their first bits, without a search: so many more bits than it takes
# to number the keys leave one other key in 64. Before a key is made of a band's hashes, the last bits of the first hash
# are compared, which leave one other band in 16.
MORE_BITS, MAX_BITS = 6, 27
MORE_HASH_BITS, MIN_HASH_BITS, MAX_HASH_BITS = 4, 10, 19
BAND_STEP = np.uint64(0x9E3779B97F4A7C15)  # added to the keys of a band once more than to those of the band before
U3, U7 = np.uint64(3), np.uint64(7)


@dataclass(frozen=True)
class BandLookup:
    """Band keys of D documents, those of all bands in one order. keys, sorted: uint64[bands * D]. documents: the owner
    of each. prefixes uint8[2**bits / 8]: a bit for the first bits of a key that a document has. endings uint8[bands,
    2**hash_bits / 8]: a bit for the last bits of the first hash of a band that a document has. rows: hashes of a
    band."""

    keys: np.ndarray
    documents: np.ndarray
    prefixes: np.ndarray
    endings: np.ndarray
    rows: int

    @classmethod
    def of(cls, keys: np.ndarray, hashes: np.ndarray, rows: int) -> Self:
        """keys: uint64[bands, D]. hashes uint32[bands, D]: the first hash of each band."""
        joined = joined_bands(keys)
        order = np.argsort(joined, kind="stable")
        bits = min(len(joined).bit_length() + MORE_BITS, MAX_BITS)
        prefixes = np.zeros(1 << bits, np.uint8)
        prefixes[joined >> np.uint64(64 - bits)] = 1
        documents = np.tile(np.arange(keys.shape[1]), len(keys))[order]
        hash_bits = min(max(keys.shape[1].bit_length() + MORE_HASH_BITS, MIN_HASH_BITS), MAX_HASH_BITS)
        endings = np.zeros((len(keys), 1 << hash_bits), np.uint8)
        endings[np.arange(len(keys))[:, None], hashes & np.uint32((1 << hash_bits) - 1)] = 1
        packed, packed_endings = (np.packbits(bits, axis=-1, bitorder="little") for bits in (prefixes, endings))
        return cls(joined[order], documents, packed, packed_endings, rows)

    def keys_like(self, signatures: np.ndarray, salt: np.uint64) -> tuple[np.ndarray, np.ndarray]:
        """(places of documents in signatures uint32[N, hashes], keys): all keys of theirs that a document of the lookup
        has, and a few others."""
        bands = signatures.shape[1] // self.rows
        shift = np.uint64(62 - len(self.prefixes).bit_length())  # 8 bits a byte
        size = max(len(signatures) * bands // 16, 1024)
        while True:
            places, keys = np.empty(size, np.int64), np.empty(size, np.uint64)
            known = self.endings, self.prefixes
            count = _keys_with_prefixes(signatures, bands, self.rows, salt, shift, known, places, keys)
            if count <= size:
                return places[:count], keys[:count]
            size = count

    def first_matches(self, places: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places, the first document with the key), int64[] each, for every key that a document has."""
        place, first, _ = self._ranges(places, keys)
        return place, self.documents[first]

    def pairs(self, places: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(places, documents that have one of their keys), int64[] each; each pair once."""
        place, first, sizes = self._ranges(places, keys)
        inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        size = int(self.documents.max(initial=0)) + 1
        pairs = np.unique(np.repeat(place, sizes) * size + self.documents[np.repeat(first, sizes) + inside])
        left, right = np.divmod(pairs, size)
        return left, right

    def _ranges(self, places: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(places of the keys that a document has, place of the first such key in the order, how many there are)."""
        first = np.searchsorted(self.keys, keys, side="left")
        has_key = (
            np.flatnonzero(self.keys[np.minimum(first, len(self.keys) - 1)] == keys) if len(self.keys) else first[:0]
        )
        first = first[has_key]
        return places[has_key], first, np.searchsorted(self.keys, keys[has_key], side="right") - first


def joined_bands(keys: np.ndarray) -> np.ndarray:
    """uint64[bands * N] of keys uint64[bands, N], band after band: those of two bands differ."""
    return (keys + BAND_STEP * np.arange(len(keys), dtype=np.uint64)[:, None]).ravel()


@cached_njit(nogil=True)
def _keys_with_prefixes(signatures, bands, rows, salt, shift, known, places, keys):
    """How many keys of the documents begin with a known prefix; the first of them, as joined_bands makes them, and the
    documents' places."""
    endings, prefixes = known
    ending_bits = np.uint32(8 * endings.shape[1] - 1)
    count = 0
    for document in range(len(signatures)):
        for band in range(bands):
            ending = signatures[document, band * rows] & ending_bits
            if not (endings[band, ending >> np.uint32(3)] >> np.uint8(ending & np.uint32(7))) & 1:
                continue
            key = band_key(signatures, document, band, rows, salt) + BAND_STEP * np.uint64(band)
            prefix = key >> shift
            if (prefixes[prefix >> U3] >> np.uint8(prefix & U7)) & 1:
                if count < len(places):
                    places[count], keys[count] = document, key
                count += 1
    return count


# Bands of 3 hashes: of 120 there are 40; of pairs of similarity 0.8 one in 10^12 shares none, (1 - 0.8**3)**40.
ROWS = 3
# Below the threshold by so much an estimate from 120 hashes falls once in 10^7 (5 standard errors of 0.037).
MARGIN = 0.2
NO_SALT = np.uint64(0)


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
        rows = min(ROWS, scheme.hashes)
        bands = scheme.hashes // rows
        lookup = BandLookup.of(
            band_keys(signatures, bands, rows, NO_SALT), signatures[:, : bands * rows : rows].T, rows
        )
        return cls(scheme, signatures, [all_sets[place] for place in with_words.tolist()], lookup)


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
    tasks = LazySequence(
        lambda number: (texts, document_files[number], cache, number, threshold), range(len(document_files))
    )
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
    places, place_of_pair = np.unique(place, return_inverse=True)
    rows = cache.rows(document_file, places)[place_of_pair]
    copies = []
    for batch_rows, doc_ids, batch_texts in _documents(document_file, np.unique(rows[rows >= 0])):
        sets = shingle_sets(*utf8_of(batch_texts), texts.scheme.ngram, texts.scheme.unit)
        for row, doc_id, shingles in zip(batch_rows.tolist(), doc_ids.to_pylist(), sets, strict=True):
            of_row = ((shingles, texts.sets[other]) for other in np.unique(text[rows == row]).tolist())
            similarity = max(starmap(jaccard, of_row))
            if similarity >= threshold:
                copies.append(NearCopy(number, row, doc_id, similarity))
    return copies


def _documents(document_file: DocumentFile, rows: np.ndarray) -> Iterator[tuple[np.ndarray, pa.Array, pa.Array]]:
    """(rows, doc_id, text) of these ascending rows, a bounded number at a time."""
    if has_picked_texts(document_file.path):
        ids = document_ids(document_file.path)
        for some_rows, texts in picked_texts(document_file.path, rows):
            yield some_rows, unpacked_ids(ids[some_rows]), texts
        return
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[rows] = True
    yield from document_file.batches(wanted)


def _candidates(texts: SignedTexts, signatures: np.ndarray, threshold: float) -> np.ndarray:
    """int64[2, pairs]: places of documents and texts that share a band and whose estimate is near the threshold."""
    place, text = texts.lookup.pairs(*texts.lookup.keys_like(signatures, NO_SALT))
    estimate = _count_equal(signatures, place, texts.signatures, text) / texts.scheme.hashes
    return np.stack([place, text])[:, estimate >= threshold - MARGIN]


@cached_njit(nogil=True)
def _count_equal(signatures, places, others, other_places):
    """int32[pairs]: how many values the signatures of each pair have in common. signatures, others: uint32[documents,
    hashes]."""
    counts = np.zeros(len(places), np.int32)
    for pair in range(len(places)):
        left, right = signatures[places[pair]], others[other_places[pair]]
        count = 0
        for place in range(len(left)):
            count += left[place] == right[place]
        counts[pair] = count
    return counts


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
    signature, shingles_of_text = signed_text(text, store)
    proposed = _estimated(signature, store) if exhaustive else _proposed(signature, store)
    best = sorted(proposed, key=lambda f: (-f[0], f[1], f[2]))[: limit * MEASURED]
    neighbours = [
        _measured(shingles_of_text, estimate, document_files[number], row, store) for estimate, number, row in best
    ]
    neighbours = [neighbour for neighbour in neighbours if neighbour.similarity > 0]
    return sorted(neighbours, key=lambda n: (-n.similarity, n.doc_id))[:limit]


def signed_text(text: str, store: SignatureStore) -> tuple[np.ndarray, np.ndarray]:
    """(signature, shingles) of one text by the store's scheme. Raises InputError if the text has no word."""
    raw, scheme = np.frombuffer(text.encode("utf-8", "replace"), np.uint8), store.scheme
    offsets = np.array([0, len(raw)], np.int64)
    signatures, shingles = signatures_of(raw, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
    if not shingles[0]:
        raise InputError("the text holds no word, so nothing can be similar to it")
    return signatures[0], shingle_sets(raw, offsets, scheme.ngram, scheme.unit)[0]


def minhashes(store: SignatureStore) -> "Iterator[tuple[str, MinHash]]":
    """Every document as (doc_id, datasketch.MinHash): to fill datasketch's LSH, Forest or Redis storage."""
    permutations = minhash_of(np.zeros(store.scheme.hashes, np.uint32), store.scheme).permutations
    for number in range(len(store.files)):
        ids = store.documents(number).column("doc_id").to_pylist()
        for doc_id, values in zip(ids, store.signatures(number), strict=True):
            yield doc_id, minhash_of(values, store.scheme, permutations)


def minhash_of(values: np.ndarray, scheme: SignatureScheme, permutations: Any = None) -> "MinHash":
    """A signature as datasketch's MinHash. permutations: those of another of the scheme, which are then shared."""
    from datasketch import MinHash

    if permutations is None:
        permutations = MinHash(scheme.hashes, scheme.seed, scheme=scheme.scheme).permutations
    return MinHash(
        seed=scheme.seed,
        hashvalues=values,
        permutations=permutations,
        scheme=scheme.scheme,
        hashfunc=ShingleHash(scheme.unit),
    )


def _proposed(signature: np.ndarray, store: SignatureStore) -> Iterator[tuple[float, int, int]]:
    """(estimate, file number, row) of the documents that share a bucket with the signature in datasketch's index."""
    from datasketch import MinHashLSH  # 0.6 s to load, which nothing else need wait for

    rows = min(LOOKUP_ROWS, store.scheme.hashes)
    index = MinHashLSH(num_perm=store.scheme.hashes, params=(store.scheme.hashes // rows, rows))
    places: dict[str, tuple[int, int, int]] = {}
    documents = minhashes(store)
    with index.insertion_session() as session:
        for number in range(len(store.files)):
            for place, row in enumerate(store.documents(number).column("row").to_pylist()):
                doc_id, minhash = next(documents)
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

"""The nearest documents of a corpus to one text: proposed by its signatures, measured exactly."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.data_pipeline.dedup.minhash import signatures_of
from gristmill.data_pipeline.dedup.signatures import SignatureStore, minhash_of
from gristmill.data_pipeline.dedup.verify import jaccard, shingle_sets
from gristmill.data_pipeline.ledger.document_file import DocumentFile, utf8_of
from gristmill.foundation.errors import InputError

# Rows of a band when one text is looked up: at 120 hashes a document of similarity 0.5 is proposed with probability
# 1 - (1 - 0.5**3)**40 = 0.995, of 0.3 with 0.66. All that is proposed is measured, so more of them cost time alone.
LOOKUP_ROWS = 3
# Documents whose signatures are compared at a time: 32 MB of signatures of 128 hashes.
BLOCK_DOCUMENTS = 65536
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
    mine = shingle_sets(raw, offsets, scheme.ngram, scheme.unit)[0]
    proposed = _estimated(signature[0], store) if exhaustive else _proposed(signature[0], store)
    best = sorted(proposed, key=lambda f: (-f[0], f[1], f[2]))[: limit * MEASURED]
    found = [_measured(mine, estimate, document_files[number], row, store) for estimate, number, row in best]
    found = [neighbour for neighbour in found if neighbour.similarity > 0]
    return sorted(found, key=lambda n: (-n.similarity, n.doc_id))[:limit]


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
            agreeing = (signatures[start : start + BLOCK_DOCUMENTS] == signature).mean(axis=1)
            for place in np.flatnonzero(agreeing):
                yield float(agreeing[place]), number, int(rows[start + place])


def _measured(
    mine: np.ndarray, estimate: float, document_file: DocumentFile, row: int, store: SignatureStore
) -> Neighbour:
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[row] = True
    for _, doc_ids, texts in document_file.batches(wanted):
        theirs = shingle_sets(*utf8_of(texts), store.scheme.ngram, store.scheme.unit)[0]
        text = " ".join(texts[0].as_py()[: 2 * EXCERPT].split())[:EXCERPT]
        return Neighbour(doc_ids[0].as_py(), document_file.source, jaccard(mine, theirs), estimate, text)
    raise InputError(f"{document_file.path}: row {row} of the signature store is not there; sign the corpus again")

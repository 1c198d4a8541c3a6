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
    text: str, store: SignatureStore, parts: Sequence[DocumentFile], limit: int = 10, exhaustive: bool = False
) -> list[Neighbour]:
    """The `limit` most similar documents, the nearest first; those that share no shingle are left out.

    parts: those the store was made from, in its order. The store is loaded into datasketch's MinHashLSH, which
    proposes; exact similarity is measured of what it proposes. exhaustive: every signature of the store is compared
    instead (0.5 s a million), so nothing is missed but what the estimate ranks far too low.
    Raises InputError if the text has no word, or the parts are not the store's."""
    if len(parts) != len(store.parts):
        raise InputError(f"{store.folder}: signatures of {len(store.parts)} parts, but {len(parts)} are given")
    raw = np.frombuffer(text.encode(), np.uint8)
    offsets = np.array([0, len(raw)], np.int64)
    scheme = store.scheme
    signature, shingles = signatures_of(raw, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
    if not shingles[0]:
        raise InputError("the text holds no word, so nothing can be similar to it")
    mine = shingle_sets(raw, offsets, scheme.ngram, scheme.unit)[0]
    proposed = _estimated(signature[0], store) if exhaustive else _proposed(signature[0], store)
    best = sorted(proposed, key=lambda f: (-f[0], f[1], f[2]))[: limit * MEASURED]
    found = [_measured(mine, estimate, parts[part], row, store) for estimate, part, row in best]
    found = [neighbour for neighbour in found if neighbour.similarity > 0]
    return sorted(found, key=lambda n: (-n.similarity, n.doc_id))[:limit]


def _proposed(signature: np.ndarray, store: SignatureStore) -> Iterator[tuple[float, int, int]]:
    """(estimate, part, row) of the documents that share a bucket with the signature in datasketch's index."""
    from datasketch import MinHashLSH  # 0.6 s to load, which nothing else need wait for

    rows = min(LOOKUP_ROWS, store.scheme.hashes)
    index = MinHashLSH(num_perm=store.scheme.hashes, params=(store.scheme.hashes // rows, rows))
    places: dict[str, tuple[int, int, int]] = {}
    minhashes = store.minhashes()
    with index.insertion_session() as session:
        for part in range(len(store.parts)):
            for place, row in enumerate(store.documents(part).column("row").to_pylist()):
                doc_id, minhash = next(minhashes)
                session.insert(doc_id, minhash)
                places[doc_id] = (part, place, row)
    for doc_id in index.query(minhash_of(signature, store.scheme)):
        part, place, row = places[doc_id]
        yield float((store.signatures(part)[place] == signature).mean()), part, row


def _estimated(signature: np.ndarray, store: SignatureStore) -> Iterator[tuple[float, int, int]]:
    """(estimate, part, row) of all documents."""
    for part in range(len(store.parts)):
        rows = store.documents(part).column("row").to_numpy()
        signatures = store.signatures(part)
        for start in range(0, len(signatures), BLOCK_DOCUMENTS):
            agreeing = (signatures[start : start + BLOCK_DOCUMENTS] == signature).mean(axis=1)
            for place in np.flatnonzero(agreeing):
                yield float(agreeing[place]), part, int(rows[start + place])


def _measured(mine: np.ndarray, estimate: float, part: DocumentFile, row: int, store: SignatureStore) -> Neighbour:
    wanted = np.zeros(len(part.kept_mask()), bool)
    wanted[row] = True
    for _, doc_ids, texts in part.batches(wanted):
        theirs = shingle_sets(*utf8_of(texts), store.scheme.ngram, store.scheme.unit)[0]
        text = " ".join(texts[0].as_py()[: 2 * EXCERPT].split())[:EXCERPT]
        return Neighbour(doc_ids[0].as_py(), part.source, jaccard(mine, theirs), estimate, text)
    raise InputError(f"{part.path}: row {row} of the signature store is not there; sign the corpus again")

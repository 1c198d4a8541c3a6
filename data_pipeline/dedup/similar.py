"""The nearest documents of a corpus to one text: proposed by the signature store, measured exactly."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.dedup.arrays import claim, part_identity
from gristmill.data_pipeline.dedup.minhash import signatures_of
from gristmill.data_pipeline.dedup.part import Part, utf8_of
from gristmill.data_pipeline.dedup.signatures import SignatureScheme, SignatureStore, sign_corpus
from gristmill.data_pipeline.dedup.verify import jaccard, shingle_sets
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.errors import InputError

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


def corpus_parts(corpus: Path) -> list[Part]:
    """The files of a curated corpus, documents/SPLIT/SOURCE-NUMBER.parquet, as parts.

    Raises InputError if there are none."""
    paths = sorted((corpus / "documents").glob("*/*.parquet"))
    if not paths:
        raise InputError(f"{corpus}: no documents/*/*.parquet; name the folder that `gristmill curate` filled")
    return [Part(path, path.stem.rpartition("-")[0], priority=1) for path in paths]


def similar_in_corpus(
    text: str, corpus: Path, scheme: SignatureScheme, engine: LocalEngine, cache: Path, limit: int = 10
) -> list[Neighbour]:
    """As `similar`, over a curated corpus. Its signatures are made in `cache` the first time, and used from then on."""
    parts = corpus_parts(corpus)
    claim(cache, {"scheme": scheme.model_dump(), "parts": [part_identity(part) for part in parts]})
    return similar(text, sign_corpus(parts, scheme, engine, cache), parts, limit)


def similar(text: str, store: SignatureStore, parts: Sequence[Part], limit: int = 10) -> list[Neighbour]:
    """The `limit` most similar documents, the nearest first; those that share no shingle are left out.

    parts: those the store was made from, in its order. Every signature of the store is compared (0.5 s a million), so
    nothing is missed but what the estimate ranks far too low. Raises InputError if the text has no word, or the
    parts are not the store's."""
    if len(parts) != len(store.parts):
        raise InputError(f"{store.folder}: signatures of {len(store.parts)} parts, but {len(parts)} are given")
    raw = np.frombuffer(text.encode(), np.uint8)
    offsets = np.array([0, len(raw)], np.int64)
    scheme = store.scheme
    signature, shingles = signatures_of(raw, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
    if not shingles[0]:
        raise InputError("the text holds no word, so nothing can be similar to it")
    mine = shingle_sets(raw, offsets, scheme.ngram, scheme.unit)[0]
    found = []
    for estimate, part, row in _most_promising(signature[0], store, limit * MEASURED):
        found.append(_measured(mine, estimate, parts[part], row, store))
    found = [neighbour for neighbour in found if neighbour.similarity > 0]
    return sorted(found, key=lambda n: (-n.similarity, n.doc_id))[:limit]


def _most_promising(signature: np.ndarray, store: SignatureStore, count: int) -> list[tuple[float, int, int]]:
    """(estimate, part, row) of the documents whose signatures agree most."""
    found: list[tuple[float, int, int]] = []
    for part in range(len(store.parts)):
        rows = store.documents(part).column("row").to_numpy()
        signatures = store.signatures(part)
        for start in range(0, len(signatures), BLOCK_DOCUMENTS):
            agreeing = (signatures[start : start + BLOCK_DOCUMENTS] == signature).mean(axis=1)
            best = np.argsort(-agreeing, kind="stable")[:count]
            found += [(float(agreeing[i]), part, int(rows[start + i])) for i in best]
        found = sorted(found, key=lambda f: (-f[0], f[1], f[2]))[:count]
    return found


def _measured(mine: np.ndarray, estimate: float, part: Part, row: int, store: SignatureStore) -> Neighbour:
    wanted = np.zeros(len(part.living()), bool)
    wanted[row] = True
    for _, doc_ids, texts in part.batches(wanted):
        theirs = shingle_sets(*utf8_of(texts), store.scheme.ngram, store.scheme.unit)[0]
        text = " ".join(texts[0].as_py()[: 2 * EXCERPT].split())[:EXCERPT]
        return Neighbour(doc_ids[0].as_py(), part.source, jaccard(mine, theirs), estimate, text)
    raise InputError(f"{part.path}: row {row} of the signature store is not there; sign the corpus again")

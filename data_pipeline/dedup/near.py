"""Near duplicates: LSH proposes, exact Jaccard decides, and only a document that is kept removes another."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from gristmill.data_pipeline.dedup.candidates import (
    CANDIDATE,
    Banding,
    StoredDocuments,
    find_links,
    write_groups,
)
from gristmill.data_pipeline.dedup.exact import DUPLICATE, table_of
from gristmill.data_pipeline.dedup.minhash import Unit
from gristmill.data_pipeline.dedup.near_decisions import (
    MAX_DOCUMENTS,
    NEAR_DECISIONS,
    STATE_VERSION,
    ChangedDocuments,
    DecidedRun,
    KeptDecisions,
    Undecided,
    are_few,
    bucket_neighbours,
    ids_of_shard,
    placed_by_file,
    refuse_known,
    still_there,
    undecided_at_first,
    write_duplicates,
)
from gristmill.data_pipeline.dedup.signature_cache import SIGNATURE_CACHE, SignatureCache
from gristmill.data_pipeline.dedup.signatures import (
    STORE_FOLDER,
    SignatureScheme,
    SignatureStore,
    find_store,
    open_store,
    same_scheme,
    sign_corpus,
)
from gristmill.data_pipeline.dedup.verify_candidates import verify_batches, write_candidate_sets
from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    document_file_identity,
    open_workspace,
)
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles

MAX_HASHES = 4096

# Shingles verified at a time, with repetition: 64 MB of 64-bit hashes. A larger group of candidates is a batch by
# itself, of which two blocks of so many shingles are in memory.
BATCH_SHINGLES = 8_000_000
BLOCK_SHINGLES = 16_000_000


class NearDedupConfig(Config):
    """Two documents are near duplicates if the Jaccard similarity of their shingle sets is >= threshold.

    unit, ngram: a shingle is `ngram` words (or characters) of the folded text in a row (see `folding.py`).
    bands, rows: two documents of similarity s are compared with probability 1 - (1 - s**rows)**bands.
    hashes: length of a signature; bands x rows if not given. scope: one pool for all sources, or each by itself.
    seed: of the permutations; 1 is datasketch's.
    keep_signatures: the corpus keeps the signatures of its documents (folder `signatures`), so that later ones can be
    deduplicated against it. protected: such corpora (work folder, curate folder or signature store); they remove
    documents and lose none. Where they lie decides nothing; what they hold does."""

    unit: Unit = "word"
    ngram: int = Field(default=5, ge=1)  # FineWeb's word 5-grams (datatrove, examples/fineweb.py)
    # 20 bands of 6: of pairs at the threshold 0.8, 0.2 % are missed (16 x 8, as often used: 5 %), and a pair of
    # similarity 0.3 is looked at once in 70 (32 x 4: once in 4). Both 1 - (1 - s**rows)**bands.
    bands: int = Field(default=20, ge=1)
    rows: int = Field(default=6, ge=1)
    hashes: int | None = Field(default=None, ge=1)
    threshold: float = Field(default=0.8, gt=0.0, le=1.0)  # MT-NLG 530B, near-duplicate removal
    scope: Literal["all", "source"] = "all"
    seed: int = Field(default=1, ge=0, lt=1 << 32)
    keep_signatures: bool = False
    protected: tuple[Path, ...] = Field(default=(), json_schema_extra={"execution": True})

    @model_validator(mode="after")
    def bands_divide_the_hashes(self) -> Self:
        used = self.bands * self.rows
        if used > MAX_HASHES:
            raise ValueError(f"bands={self.bands} x rows={self.rows} is over {MAX_HASHES} hashes; try 16 x 8")
        if self.hashes is not None and (self.hashes % used or self.hashes > MAX_HASHES):
            raise ValueError(
                f"bands={self.bands} x rows={self.rows} does not divide hashes={self.hashes}; try hashes={used}"
            )
        return self

    @property
    def scheme(self) -> SignatureScheme:
        """Settings that decide the signatures."""
        hashes = self.hashes or self.bands * self.rows
        return SignatureScheme(unit=self.unit, ngram=self.ngram, hashes=hashes, seed=self.seed)

    @property
    def banding(self) -> Banding:
        return Banding(self.bands, self.rows, self.scope == "source", self.ngram, self.unit)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide which documents are removed, but for the corpora themselves."""
        return self.model_dump(mode="json", exclude={"keep_signatures", "protected"})


@dataclass(frozen=True)
class Protected:
    """An existing corpus that removes documents and loses none: its signature store and the files it was made from."""

    store: Path
    document_files: Sequence[DocumentFile]


@dataclass(frozen=True)
class EarlierRuns:
    """cache: of a work folder. sources: identity of the texts of each source. code_version: of the stage."""

    cache: Path
    sources: Mapping[str, str]
    code_version: int = 0

    def decisions(self, config: Any) -> KeptDecisions:
        folder = self.cache / NEAR_DECISIONS / fingerprint([config, self.code_version, STATE_VERSION])[:16]
        return KeptDecisions(folder, self.sources)


def near_duplicates(
    document_files: Sequence[DocumentFile],
    config: NearDedupConfig,
    engine: Engine,
    folder: Path,
    protected: Sequence[Protected] = (),
) -> pa.Table:
    """Duplicates that `find_near_duplicates` finds, in memory: doc_id, duplicate_of, similarity; sorted by doc_id."""
    return table_of(find_near_duplicates(document_files, config, engine, folder, protected))


def find_near_duplicates(
    document_files: Sequence[DocumentFile],
    config: NearDedupConfig,
    engine: Engine,
    folder: Path,
    protected: Sequence[Protected] = (),
    earlier: EarlierRuns | None = None,
) -> PartitionedFiles:
    """Every kept document that has exact Jaccard similarity >= threshold with a document that is itself kept: records
    of DUPLICATE, a range a document file.

    Documents are looked at in the order (source priority, longer first, doc_id), after the protected ones; a removed
    document removes no other (star-only), so `duplicate_of` is never itself removed. It names the most similar of the
    kept documents before it. The result depends neither on workers nor on the division into files nor on their order.
    This process holds nothing of a document; what tasks hold is bounded (docs/deduplication.md).
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them.
    `folder / "signatures"` is the signature store of the files: keep it to protect this corpus from later ones.
    earlier: keeps signatures and decisions, which are taken from there in the next run (near_decisions.py).
    Raises InputError for a damaged file, a document given twice, or a protected store of another scheme."""
    stores = _protected_stores(protected, config.scheme)
    sides = [document_file for side in protected for document_file in side.document_files]
    open_workspace(folder, _identity(document_files, sides, config))
    cache = None if earlier is None else SignatureCache.of(earlier.cache / SIGNATURE_CACHE, config.scheme)
    own = sign_corpus(document_files, config.scheme, engine, folder / "signatures", cache=cache)
    documents = StoredDocuments.of([*((store, True) for store in stores), (own, False)])
    kept = (
        None if earlier is None or protected or len(documents) > MAX_DOCUMENTS else earlier.decisions(config.identity)
    )
    if kept is None:
        every_file = [*sides, *document_files] if sides else document_files
        return _compare_all(every_file, documents, config, engine, folder)
    return _decide_changed(document_files, documents, config, kept, engine, folder)


def _compare_all(
    document_files: Sequence[DocumentFile],
    documents: StoredDocuments,
    config: NearDedupConfig,
    engine: Engine,
    folder: Path,
) -> PartitionedFiles:
    """The duplicates. document_files: of the documents' shards."""
    links = find_links(documents, config.banding, engine, folder)
    candidates = write_groups(documents, links, BATCH_SHINGLES, engine, folder)
    sets = write_candidate_sets(document_files, documents, candidates, config.banding, engine, folder)
    own_files = len(document_files) - int(documents.is_protected.sum())
    duplicates = PartitionedFiles(folder / "verified", DUPLICATE, sets.members.ranges, own_files)
    return verify_batches(sets, config.threshold, BLOCK_SHINGLES, duplicates, engine)


def _decide_changed(
    document_files: Sequence[DocumentFile],
    documents: StoredDocuments,
    config: NearDedupConfig,
    kept: KeptDecisions,
    engine: Engine,
    folder: Path,
) -> PartitionedFiles:
    """The duplicates, of which those that an earlier run decided are taken from there if few documents are undecided.
    Keeps the decisions for the next run, last: after a kill the same ones are taken."""
    run, entries = kept.read(), kept.entries_of(documents, document_files)
    decisions = None
    ids: Iterator[np.ndarray] = map(ids_of_shard, documents.shards)
    if run is not None:
        changes = ChangedDocuments.since(run, documents, entries, folder)
        decisions = _decide_few(document_files, documents, config, (run, changes), engine, folder)
        ids = changes.blocks_of_ids()
    if decisions is None:
        duplicates = _compare_all(document_files, documents, config, engine, folder)
        kept.write(entries, documents.starts, ids, placed_by_file(documents, duplicates))
    else:
        duplicates = PartitionedFiles(folder / "known", DUPLICATE, 1, len(document_files))
        write_duplicates(decisions, duplicates)
        kept.write(entries, documents.starts, ids, [decisions])
    return duplicates


def _decide_few(
    document_files: Sequence[DocumentFile],
    documents: StoredDocuments,
    config: NearDedupConfig,
    since: tuple[DecidedRun, ChangedDocuments],
    engine: Engine,
    folder: Path,
) -> np.ndarray | None:
    """The decisions on all removed documents; None if so many are undecided that all are compared better."""
    run, changes = since
    known = still_there(run, changes, documents)
    positions = undecided_at_first(run, changes, known, documents.starts)
    for number in count():
        if not are_few(positions, len(documents)):
            return None
        if not number:
            refuse_known(documents, changes)
        undecided, work = Undecided.of(documents, changes.ids, positions, known), folder / f"round-{number}"
        if not len(positions):
            return undecided.known
        neighbours = bucket_neighbours(documents, positions, changes.ids, config.banding, engine, work)
        candidates = PartitionedFiles(work / "candidates", CANDIDATE, 1, len(documents.shards))
        batches = candidates, undecided.write_candidates(neighbours, BATCH_SHINGLES, candidates)
        sets = write_candidate_sets(document_files, documents, batches, config.banding, engine, work)
        duplicates = PartitionedFiles(work / "verified", DUPLICATE, sets.members.ranges, len(document_files))
        verify_batches(sets, config.threshold, BLOCK_SHINGLES, duplicates, engine)
        decisions, reopened = undecided.with_decided(duplicates.read_all())
        if not len(reopened):
            return decisions
        positions = np.union1d(positions, reopened)
    raise AssertionError  # count() does not end


def _protected_stores(protected: Sequence[Protected], scheme: SignatureScheme) -> list[SignatureStore]:
    stores = []
    for side in protected:
        store = open_store(side.store)
        same_scheme(scheme, store.scheme, store.folder)
        if len(store.files) != len(side.document_files):
            raise InputError(
                f"{side.store}: signatures of {len(store.files)} files, but {len(side.document_files)} are given; "
                "hand over the files the store was made from, in that order"
            )
        stores.append(store)
    return stores


def _identity(document_files: Sequence[DocumentFile], sides: Sequence[DocumentFile], config: NearDedupConfig) -> dict:
    return {
        "config": config.identity,
        "document_files": [document_file_identity(document_file) for document_file in document_files],
        "protected": [document_file_identity(document_file) for document_file in sides],
    }


# Corpora that keep their signatures, and are protected from later ones by them.


def corpus_document_files(corpus: Path) -> list[DocumentFile]:
    """The files of a curated corpus, documents/SPLIT/SOURCE-NUMBER.parquet.

    Raises InputError if there are none."""
    paths = sorted((corpus / "documents").glob("*/*.parquet"))
    if not paths:
        raise InputError(f"{corpus}: no documents/*/*.parquet; name the folder that `gristmill curate` filled")
    return [DocumentFile(path, path.stem.rpartition("-")[0], priority=1) for path in paths]


def keep_signatures(corpus: Path, scheme: SignatureScheme, engine: Engine) -> SignatureStore:
    """The folder `signatures` of a curated corpus: a store of all documents that stand in it."""
    return sign_corpus(corpus_document_files(corpus), scheme, engine, corpus / STORE_FOLDER, is_kept=True)


def protected_corpora(config: NearDedupConfig | None) -> list[Protected]:
    """The corpora that the config protects. Raises InputError for one without a store, or of another scheme."""
    corpora = []
    for folder in config.protected if config is not None else ():
        store = open_store(find_store(folder))
        assert config is not None
        same_scheme(config.scheme, store.scheme, store.folder)
        corpora.append(Protected(store.folder, store.document_files()))
    return corpora

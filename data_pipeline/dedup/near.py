"""Near duplicates: LSH proposes, exact Jaccard decides, and only a document that is kept removes another."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from gristmill.data_pipeline.dedup.arrays import document_file_identity, load_array, open_workspace, save_array
from gristmill.data_pipeline.dedup.candidates import (
    Candidates,
    Documents,
    read_candidates,
    read_documents,
    write_band_keys,
    write_buckets,
)
from gristmill.data_pipeline.dedup.duplicates import Duplicates
from gristmill.data_pipeline.dedup.shingles import Unit
from gristmill.data_pipeline.dedup.signatures import (
    SignatureScheme,
    SignatureStore,
    open_store,
    same_scheme,
    sign_corpus,
)
from gristmill.data_pipeline.dedup.verify import joined_shingle_sets, keep_first
from gristmill.data_pipeline.ledger.document_file import DocumentFile, utf8_of
from gristmill.foundation.config import Config
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.errors import InputError

MAX_HASHES = 4096

# Shingles verified at a time, with repetition: 64 MB of 64-bit hashes. A group of candidates is never divided.
BATCH_SHINGLES = 8_000_000

# Removed documents of one batch: int64[4, removed], rows position, position of the kept one, shared shingles, all
# shingles.
POSITION, KEEPER, BOTH, EITHER = range(4)


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
        """What decides the signatures."""
        hashes = self.hashes or self.bands * self.rows
        return SignatureScheme(unit=self.unit, ngram=self.ngram, hashes=hashes, seed=self.seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which documents are removed, but for the corpora themselves."""
        return self.model_dump(mode="json", exclude={"keep_signatures", "protected"})


@dataclass(frozen=True)
class Protected:
    """An existing corpus that removes documents and loses none: its signature store and the files it was made from."""

    store: Path
    document_files: Sequence[DocumentFile]


def near_duplicates(
    document_files: Sequence[DocumentFile],
    config: NearDedupConfig,
    engine: Engine,
    folder: Path,
    protected: Sequence[Protected] = (),
) -> pa.Table:
    """The table of `find_near_duplicates`: doc_id, duplicate_of, similarity; sorted by doc_id."""
    return find_near_duplicates(document_files, config, engine, folder, protected).table()


def find_near_duplicates(
    document_files: Sequence[DocumentFile],
    config: NearDedupConfig,
    engine: Engine,
    folder: Path,
    protected: Sequence[Protected] = (),
) -> Duplicates:
    """Every kept document that has exact Jaccard similarity >= threshold with a document that is itself kept.

    Documents are looked at in the order (source priority, longer first, doc_id), after the protected ones; a removed
    document removes no other (star-only), so `duplicate_of` is never itself removed. It names the most similar of the
    kept documents before it. The result depends neither on workers nor on the division into files nor on their order.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them.
    `folder / "signatures"` is the signature store of the files: keep it to protect this corpus from later ones.
    Raises InputError for a damaged file, a document given twice, or a protected store of another scheme."""
    stores = _protected_stores(protected, config.scheme)
    sides = [document_file for side in protected for document_file in side.document_files]
    open_workspace(folder, _identity(document_files, sides, config))
    own = sign_corpus(document_files, config.scheme, engine, folder / "signatures")
    documents = read_documents([*((store, True) for store in stores), (own, False)])
    keys = write_band_keys([*stores, own], config.bands, config.rows, config.scope == "source", engine, folder)
    files = write_buckets(documents, keys, config.bands, engine, folder)
    candidates = read_candidates(documents, files, config.bands)
    sets = _write_sets([*sides, *document_files], documents, candidates, config, engine, folder)
    verified = _verify(documents, candidates, sets, config, engine, folder)
    return _duplicates(documents, verified, len(sides))


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
        "document_files": [document_file_identity(each) for each in document_files],
        "protected": [document_file_identity(each) for each in sides],
    }


def _write_sets(
    document_files: Sequence[DocumentFile],
    documents: Documents,
    candidates: Candidates,
    config: NearDedupConfig,
    engine: Engine,
    folder: Path,
) -> list[Path]:
    """The shingle sets of all candidates, file by file: .npy of hashes, and of (row, end) of each document's set."""
    owners, rows = documents.files_of(candidates.positions), documents.rows[candidates.positions]
    files = [folder / f"sets-{number:05d}.npy" for number in range(len(document_files))]
    tasks = []
    for number, (document_file, file) in enumerate(zip(document_files, files, strict=True)):
        wanted = np.sort(rows[owners == number])
        if len(wanted) and not _index_of(file).exists():
            tasks.append((document_file, wanted, config, file))
    engine.map(_write_sets_of_file, tasks, "candidates' shingles", [task[0].bytes for task in tasks], "B")
    return files


def _index_of(sets: Path) -> Path:
    return sets.with_suffix(".index.npy")


def _write_sets_of_file(task: tuple[DocumentFile, np.ndarray, NearDedupConfig, Path]) -> None:
    document_file, wanted_rows, config, path = task
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[wanted_rows] = True
    found_rows, sizes, sets = [], [], []
    for rows, _, texts in document_file.batches(wanted):
        values, bounds = joined_shingle_sets(*utf8_of(texts), config.ngram, config.unit)
        found_rows.append(rows)
        sizes.append(np.diff(bounds))
        sets.append(values)
    save_array(path, np.concatenate(sets))
    save_array(_index_of(path), np.stack([np.concatenate(found_rows), np.cumsum(np.concatenate(sizes))]))


def _verify(
    documents: Documents,
    candidates: Candidates,
    sets: Sequence[Path],
    config: NearDedupConfig,
    engine: Engine,
    folder: Path,
) -> list[Path]:
    weights = documents.shingles[candidates.positions]
    batches = _batches(candidates.group, weights)
    tasks, files = [], []
    for number, (start, stop) in enumerate(batches):
        positions = candidates.positions[start:stop]
        file_of = documents.files_of(positions)
        place = (file_of, documents.rows[positions], documents.protected[file_of])
        files.append(folder / f"verified-{number:05d}.npy")
        if not files[-1].exists():
            tasks.append(
                (positions, *place, candidates.bucket_of[start:stop], tuple(sets), config.threshold, files[-1])
            )
    engine.map(_verify_batch, tasks, "verification", [len(task[0]) for task in tasks], "documents")
    return files


def _batches(group: np.ndarray, weights: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of runs of whole groups of about BATCH_SHINGLES each."""
    if not len(group):
        return []
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    before = np.concatenate([[0], np.cumsum(weights)])[firsts]
    starts = firsts[np.flatnonzero(np.diff(before // BATCH_SHINGLES, prepend=-1))]
    return list(zip(starts.tolist(), [*starts[1:].tolist(), len(group)], strict=True))


def _verify_batch(task) -> None:
    positions, file_of, row, protected, bucket_of, files, threshold, path = task
    sets, bounds = _read_sets(files, file_of, row)
    buckets, numbered = _renumbered(bucket_of)
    keepers, boths = np.empty(len(positions), np.int64), np.zeros(len(positions), np.int64)
    keep_first(numbered, buckets, protected, sets, bounds, threshold, keepers, boths)
    removed = np.flatnonzero(keepers >= 0)
    sizes = np.diff(bounds)
    both, kept = boths[removed], keepers[removed]
    save_array(path, np.stack([positions[removed], positions[kept], both, sizes[removed] + sizes[kept] - both]))


def _read_sets(files: Sequence[Path], file_of: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The documents' sets, one after the other, and int64[documents + 1] bounds."""
    starts, sizes = np.empty(len(file_of), np.int64), np.empty(len(file_of), np.int64)
    numbers = np.unique(file_of).tolist()
    for number in numbers:
        mine = file_of == number
        rows, ends = load_array(_index_of(files[number]))
        place = np.searchsorted(rows, row[mine])
        starts[mine] = np.concatenate([[0], ends])[place]
        sizes[mine] = ends[place] - starts[mine]
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    sets = np.empty(bounds[-1], np.uint64)
    for number in numbers:
        mine = np.flatnonzero(file_of == number)
        values = np.asarray(load_array(files[number], mapped=True))  # a memmap takes a microsecond longer to slice
        ranges = zip(bounds[mine].tolist(), starts[mine].tolist(), sizes[mine].tolist(), strict=True)
        for place, start, size in ranges:
            sets[place : place + size] = values[start : start + size]
    return sets, bounds


def _renumbered(bucket_of: np.ndarray) -> tuple[int, np.ndarray]:
    """(number of buckets, bucket_of with buckets numbered across all bands), -1 kept."""
    bands = bucket_of.shape[1]
    across = np.where(bucket_of >= 0, bucket_of.astype(np.int64) * bands + np.arange(bands), -1)
    values, numbered = np.unique(np.append(across.ravel(), -1), return_inverse=True)
    return len(values) - 1, numbered[:-1].reshape(bucket_of.shape) - 1


def _duplicates(documents: Documents, files: Sequence[Path], num_protected: int) -> Duplicates:
    """num_protected: how many document files stand before the first of those that lose documents."""
    found = np.concatenate([np.empty((4, 0), np.int64), *(load_array(file) for file in files)], axis=1)
    removed, kept = found[POSITION], found[KEEPER]
    return Duplicates(
        (documents.files_of(removed) - num_protected).astype(np.int32),
        documents.rows[removed],
        documents.ids[removed],
        documents.ids[kept],
        found[BOTH] / found[EITHER],
    )

"""The signature store: the MinHash signatures of a corpus, on disk, for later corpora to be compared with.

A folder: `store.json` (scheme and document files), and for each document file N
  documents-N.parquet   doc_id, row (in the document file), length (bytes of UTF-8), shingles (with repetition)
  signatures-N.npy      uint32[documents, hashes], row for row
With `scheme` affine32, seed and `ShingleHash`, the values are datasketch's (see `minhash.py`)."""

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from gristmill.data_pipeline.dedup.folding import document_ids
from gristmill.data_pipeline.dedup.minhash import Unit, signatures_of
from gristmill.data_pipeline.dedup.signature_cache import CachedSignatures, SignatureCache
from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    load_array,
    packed_ids,
    parquet_metadata,
    utf8_of,
)
from gristmill.foundation.checksums import (
    check_outputs,
    checksummed_path,
    link_with_checksum,
)
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, file_digest, write_atomic
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.task_files import fetch

STORE_FILE = "store.json"
SIGN_AGAIN = "sign the corpus again"
STORED_SCHEMA = pa.schema(
    [("doc_id", pa.string()), ("row", pa.int64()), ("length", pa.int64()), ("shingles", pa.int64())]
)
STORED_COLUMNS = tuple(STORED_SCHEMA.names)
STORE_FOLDER = "signatures"  # of a curated corpus


class SignatureScheme(Config):
    """All that decides a signature's values. Two stores can be compared if their schemes are equal."""

    version: Literal[1] = 1
    scheme: Literal["affine32"] = "affine32"
    unit: Unit = "word"
    ngram: int = Field(default=5, ge=1)
    hashes: int = Field(default=128, ge=1)
    seed: int = Field(default=1, ge=0)


class StoredFile(Config):
    """One document file of a store: where its documents came from, and how many there are.

    file: the Parquet file its rows are of, seen from the store's folder; "" if no one needs to find it again."""

    source: str
    priority: int
    documents: int
    file: str = ""


@dataclass(frozen=True)
class SignatureShard:
    """The documents of one document file of a store: file `number`. hashes: the length of a signature."""

    folder: Path
    hashes: int
    number: int
    stored: StoredFile

    def documents(self, columns: Sequence[str] = STORED_COLUMNS) -> pa.Table:
        """doc_id, row, length and shingles (or these columns) of the documents."""
        path = documents_file(self.folder, self.number)
        try:
            with pq.ParquetFile(fetch(path)) as file:  # pq.read_table imports pyarrow.dataset
                table = file.read(list(columns))
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{path}: no readable table of a signature store ({error}); {SIGN_AGAIN}") from error
        self._check_rows(path, len(table))
        return table

    def signatures(self) -> np.ndarray:
        """uint32[documents, hashes], mapped from disk."""
        path = signatures_file(self.folder, self.number)
        signatures = load_array(path, mapped=True)
        if signatures.dtype != np.uint32 or signatures.shape[1:] != (self.hashes,):
            raise InputError(f"{path}: no uint32[documents, {self.hashes}]; {SIGN_AGAIN}")
        self._check_rows(path, len(signatures))
        return signatures

    def _check_rows(self, path: Path, rows: int) -> None:
        if rows != self.stored.documents:
            raise InputError(f"{path}: {rows} documents, {STORE_FILE} says {self.stored.documents}; {SIGN_AGAIN}")


@dataclass(frozen=True)
class SignatureStore:
    """An open store."""

    folder: Path
    scheme: SignatureScheme
    files: tuple[StoredFile, ...]

    def shard(self, number: int) -> SignatureShard:
        """The documents of file `number`."""
        return SignatureShard(self.folder, self.scheme.hashes, number, self.files[number])

    def documents(self, number: int) -> pa.Table:
        """doc_id, row, length and shingles of the documents of file `number`."""
        return self.shard(number).documents()

    def signatures(self, number: int) -> np.ndarray:
        """uint32[documents, hashes], mapped from disk."""
        return self.shard(number).signatures()

    def document_files(self) -> list[DocumentFile]:
        """The files that the store's documents stand in. Raises InputError if it does not know them or one is gone."""
        document_files = []
        for stored in self.files:
            path = (self.folder / stored.file).resolve()
            if not stored.file or not path.is_file():
                raise InputError(
                    f"{self.folder}: the documents it was made from ({path.name}) are not where they were; keep them "
                    "together, or curate that corpus again with near_dedup.keep_signatures"
                )
            document_files.append(DocumentFile(path, stored.source, stored.priority))
        return document_files


def documents_file(folder: Path, number: int) -> Path:
    return folder / f"documents-{number:05d}.parquet"


def signatures_file(folder: Path, number: int) -> Path:
    return folder / f"signatures-{number:05d}.npy"


def sign_corpus(
    document_files: Sequence[DocumentFile],
    scheme: SignatureScheme,
    engine: Engine,
    folder: Path,
    is_kept: bool = False,
    cache: SignatureCache | None = None,
) -> SignatureStore:
    """Writes (or, after a kill, completes) the store of the files' kept documents at `folder`.

    is_kept: the store is to outlive this work, so it says where its document files stand, seen from its folder.
    cache: signatures of earlier runs, which are not computed again."""

    def task(number: int) -> SignTask:
        return document_files[number], scheme, folder, number, cache

    missing = [number for number in range(len(document_files)) if not _is_signed(task(number))]
    sizes = [document_files[number].bytes for number in missing]
    signed = engine.map(_sign_file, LazySequence(task, missing), "near duplicates: MinHash signatures", sizes, "B")
    rows_of = dict(zip(missing, signed, strict=True))
    stored = []
    for number, document_file in enumerate(document_files):
        rows = rows_of[number] if number in rows_of else parquet_metadata(documents_file(folder, number)).num_rows
        file = _seen_from(folder, document_file.path) if is_kept else ""
        stored.append(
            StoredFile(source=document_file.source, priority=document_file.priority, documents=rows, file=file)
        )
    return _write_store(folder, scheme, tuple(stored))


def _seen_from(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def find_store(folder: Path) -> Path:
    """The store in this folder: itself, or `signatures` in it or its `curate`. Raises InputError if there is none."""
    if not (stores := _stores_in(folder)):
        raise InputError(f"{folder}: no signature store; curate that corpus with near_dedup: {{keep_signatures: true}}")
    check_outputs(stores[0].parent, lambda path: path.startswith(f"{STORE_FOLDER}/"))
    return stores[0]


def has_store(folder: Path) -> bool:
    return bool(_stores_in(folder))


def _stores_in(folder: Path) -> list[Path]:
    places = (folder, folder / STORE_FOLDER, folder / "curate" / STORE_FOLDER)
    return [place for place in places if (place / STORE_FILE).is_file()]


def store_digest(folder: Path) -> str:
    """Digest of what decides who is a duplicate: the store's scheme, its documents' ids, lengths and places."""
    store = open_store(folder)
    files = [file_digest(documents_file(folder, number)) for number in range(len(store.files))]
    return fingerprint([store.scheme.model_dump(), [[stored.source, stored.priority] for stored in store.files], files])


def open_store(folder: Path) -> SignatureStore:
    """Raises InputError if the folder holds no store, or one of another version."""
    path = folder / STORE_FILE
    try:
        return store_of(path.read_bytes(), folder)
    except OSError as error:
        raise InputError(f"{path}: no signature store ({error}); make one by deduplicating the corpus") from error


def store_of(described: bytes, folder: Path) -> SignatureStore:
    """described: the content of store.json. Raises InputError if it describes no store of this version."""
    path = folder / STORE_FILE
    try:
        content = orjson.loads(described)
        scheme = SignatureScheme.model_validate(content["scheme"])
        stored = tuple(StoredFile.model_validate(entry) for entry in content["files"])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: no signature store ({error}); make one by deduplicating the corpus") from error
    except ValidationError as error:
        raise InputError(f"{path}: a store of another scheme; sign the corpus again ({error.errors()[0]})") from error
    return SignatureStore(folder, scheme, stored)


def merge_stores(stores: Sequence[Path], folder: Path) -> SignatureStore:
    """One store with the documents of all, copied to the new `folder`.

    Raises InputError if their schemes differ, a document is in two of them, or `folder` holds anything."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: is not empty; name a new folder for the merged store")
    opened = [open_store(store) for store in stores]
    for store in opened[1:]:
        same_scheme(opened[0].scheme, store.scheme, store.folder)
    seen: set[str] = set()
    merged: list[StoredFile] = []
    for store in opened:
        for number, stored in enumerate(store.files):
            ids = store.documents(number).column("doc_id").to_pylist()
            if not seen.isdisjoint(ids):
                raise InputError(f"{store.folder}: document {min(seen & set(ids))} is in another store already")
            seen.update(ids)
            for name in (signatures_file, documents_file):
                with atomic_path(name(folder, len(merged))) as temporary:
                    shutil.copyfile(name(store.folder, number), temporary)
            file = _seen_from(folder, store.folder / stored.file) if stored.file else ""
            merged.append(StoredFile(**{**stored.model_dump(), "file": file}))
    return _write_store(folder, opened[0].scheme, tuple(merged))


def same_scheme(wanted: SignatureScheme, actual: SignatureScheme, folder: Path) -> None:
    """Raises InputError, naming the fields, if the schemes differ: their signatures say nothing of each other."""
    for field in type(wanted).model_fields:
        want, has = getattr(wanted, field), getattr(actual, field)
        if want != has:
            mend = "sign that corpus again, or use its settings"
            raise InputError(f"{folder}: signatures with {field}={has!r}, but {want!r} is wanted; {mend}")


def _write_store(folder: Path, scheme: SignatureScheme, files: tuple[StoredFile, ...]) -> SignatureStore:
    content = {"scheme": scheme.model_dump(), "files": [stored.model_dump() for stored in files]}
    write_atomic(folder / STORE_FILE, canonical_json(content))
    return SignatureStore(folder, scheme, files)


SignTask = tuple[DocumentFile, SignatureScheme, Path, int, SignatureCache | None]


def _is_signed(task: SignTask) -> bool:
    """Whether the shard is written, and kept in the cache."""
    document_file, _, folder, number, cache = task
    return documents_file(folder, number).exists() and (cache is None or cache.is_of(document_file))


def _sign_file(task: SignTask) -> int:
    """The number of documents."""
    document_file, scheme, folder, number, cache = task
    names = documents_file(folder, number), signatures_file(folder, number)
    documents = int(document_file.kept_mask().sum())
    if cache is not None and names[0].exists():  # a run was stopped before it kept them
        cache.keep(document_file, *names)
        return documents
    if cache is not None and cache.is_of(document_file):
        table_path, signatures_path = cache.paths(document_file.path.stem)
        link_with_checksum(signatures_path, names[1])
        link_with_checksum(table_path, names[0])  # last: it says that both are whole
        return documents
    stored = None if cache is None else cache.part(document_file)
    if stored is None or not write_from_cache(document_file, scheme, stored, *names):
        write_signatures(signed_batches(document_file, scheme), documents, scheme, *names)
    if cache is not None:
        cache.keep(document_file, *names)
    return documents


SignedBatch = tuple[pa.RecordBatch, np.ndarray]  # STORED_COLUMNS and the signatures of some documents


def signed_batches(
    document_file: DocumentFile, scheme: SignatureScheme, wanted: np.ndarray | None = None
) -> Iterator[SignedBatch]:
    """Signatures of the kept documents in their order. wanted: bool[rows], narrows them."""
    for rows, doc_ids, texts in document_file.batches(wanted):
        packed_ids(doc_ids, document_file.path)
        data, offsets = utf8_of(texts)
        signatures, shingles = signatures_of(data, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
        columns = [doc_ids.cast(pa.string()), pa.array(rows), pa.array(np.diff(offsets)), pa.array(shingles)]
        yield pa.record_batch(columns, schema=STORED_SCHEMA), signatures


def write_signatures(
    batches: Iterable[SignedBatch], documents: int, scheme: SignatureScheme, table_path: Path, signatures_path: Path
) -> None:
    """The two files of a store's shard; the table last, which says that both are whole."""
    tables = []
    with checksummed_path(signatures_path) as temporary, temporary.open("wb") as file:
        header = {"descr": "<u4", "fortran_order": False, "shape": (documents, scheme.hashes)}
        np.lib.format.write_array_header_1_0(file, header)
        for table, signatures in batches:
            file.write(np.ascontiguousarray(signatures, "<u4").tobytes())
            tables.append(table)
    with checksummed_path(table_path) as temporary:
        pq.write_table(pa.Table.from_batches(tables, schema=STORED_SCHEMA), temporary, compression="zstd")


def write_from_cache(
    document_file: DocumentFile,
    scheme: SignatureScheme,
    stored: CachedSignatures,
    table_path: Path,
    signatures_path: Path,
) -> bool:
    """Writes the shard from known signatures, and signs the documents that are not among them. False, and nothing is
    written, if they are more than half."""
    rows = np.flatnonzero(document_file.kept_mask())
    places = stored.places(document_ids(document_file.path)[rows])
    missing = np.flatnonzero(places < 0)
    if 2 * len(missing) > len(rows):
        return False
    wanted = np.zeros(len(document_file.kept_mask()), bool)
    wanted[rows[missing]] = True
    new = list(signed_batches(document_file, scheme, wanted)) if len(missing) else []
    places[missing] = len(stored.table) + np.arange(len(missing))
    table = pa.concat_tables([stored.table, *(pa.Table.from_batches([batch]) for batch, _ in new)])
    extra = np.concatenate([np.empty((0, scheme.hashes), np.uint32), *(signatures for _, signatures in new)])
    table = table.take(pa.array(places)).set_column(1, "row", pa.array(rows)).cast(STORED_SCHEMA).combine_chunks()
    batches = (
        (batch, stored.rows(places[start : start + len(batch)], extra))
        for start, batch in zip(range(0, len(rows), BLOCK_DOCUMENTS), table.to_batches(BLOCK_DOCUMENTS), strict=True)
    )
    write_signatures(batches, len(rows), scheme, table_path, signatures_path)
    return True


# Documents whose signatures are compared at a time: 32 MB of signatures of 128 hashes.
BLOCK_DOCUMENTS = 65536

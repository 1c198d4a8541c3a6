"""The signature store: the MinHash signatures of a corpus, on disk, for later corpora to be compared with.

A folder: `store.json` (scheme and parts), and for each part N
  documents-N.parquet   doc_id, row (in the part's file), length (bytes of UTF-8), shingles (with repetition)
  signatures-N.npy      uint32[documents, hashes], row for row
With `scheme` affine32, seed and `ShingleHash`, the values are datasketch's (see `minhash.py`)."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from datasketch import MinHash
from pydantic import Field, ValidationError

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.dedup.arrays import load_array
from gristmill.data_pipeline.dedup.minhash import signatures_of
from gristmill.data_pipeline.dedup.part import Part, packed_ids, utf8_of
from gristmill.data_pipeline.dedup.shingles import ShingleHash, Unit
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.errors import InputError
from gristmill.data_pipeline.provenance.canonical import canonical_json
from gristmill.data_pipeline.provenance.files import atomic_path, write_atomic

STORE_FILE = "store.json"


class SignatureScheme(Config):
    """All that decides a signature's values. Two stores can be compared if their schemes are equal."""

    version: Literal[1] = 1
    scheme: Literal["affine32"] = "affine32"
    unit: Unit = "word"
    ngram: int = Field(default=5, ge=1)
    hashes: int = Field(default=128, ge=1)
    seed: int = Field(default=1, ge=0)


class StoredPart(Config):
    """One part of a store: where its documents came from, and how many there are."""

    source: str
    priority: int
    documents: int


@dataclass(frozen=True)
class SignatureStore:
    """An open store."""

    folder: Path
    scheme: SignatureScheme
    parts: tuple[StoredPart, ...]

    def documents(self, part: int) -> pa.Table:
        """doc_id, row, length and shingles of one part's documents."""
        return pq.read_table(documents_file(self.folder, part))

    def signatures(self, part: int) -> np.ndarray:
        """uint32[documents, hashes], mapped from disk."""
        return load_array(signatures_file(self.folder, part), mapped=True)

    def minhashes(self) -> Iterator[tuple[str, MinHash]]:
        """Every document as (doc_id, datasketch.MinHash): to fill datasketch's LSH, Forest or Redis storage."""
        scheme = self.scheme
        shared = MinHash(scheme.hashes, scheme.seed, scheme=scheme.scheme)
        for part in range(len(self.parts)):
            for doc_id, values in zip(
                self.documents(part).column("doc_id").to_pylist(), self.signatures(part), strict=True
            ):
                yield (
                    doc_id,
                    MinHash(
                        seed=scheme.seed,
                        hashvalues=values,
                        permutations=shared.permutations,
                        scheme=scheme.scheme,
                        hashfunc=ShingleHash(scheme.unit),
                    ),
                )


def documents_file(folder: Path, part: int) -> Path:
    return folder / f"documents-{part:05d}.parquet"


def signatures_file(folder: Path, part: int) -> Path:
    return folder / f"signatures-{part:05d}.npy"


def sign_corpus(parts: Sequence[Part], scheme: SignatureScheme, engine: LocalEngine, folder: Path) -> SignatureStore:
    """Writes (or, after a kill, completes) the store of the parts' living documents at `folder`."""
    tasks = [(part, scheme, folder, number) for number, part in enumerate(parts)]
    missing = [task for task in tasks if not documents_file(folder, task[3]).exists()]
    engine.map(_sign_part, missing, "signatures", [task[0].bytes for task in missing], "B")
    stored = []
    for number, part in enumerate(parts):
        rows = pq.read_metadata(documents_file(folder, number)).num_rows
        stored.append(StoredPart(source=part.source, priority=part.priority, documents=rows))
    return _write_store(folder, scheme, tuple(stored))


def open_store(folder: Path) -> SignatureStore:
    """Raises InputError if the folder holds no store, or one of another version."""
    path = folder / STORE_FILE
    try:
        content = orjson.loads(path.read_bytes())
        scheme = SignatureScheme.model_validate(content["scheme"])
        parts = tuple(StoredPart.model_validate(part) for part in content["parts"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: no signature store ({error}); make one by deduplicating the corpus") from error
    except ValidationError as error:
        raise InputError(f"{path}: a store of another scheme; sign the corpus again ({error.errors()[0]})") from error
    return SignatureStore(folder, scheme, parts)


def merge_stores(stores: Sequence[Path], folder: Path) -> SignatureStore:
    """One store with the documents of all, copied to the new `folder`.

    Raises InputError if their schemes differ or a document stands in two of them."""
    opened = [open_store(store) for store in stores]
    for store in opened[1:]:
        same_scheme(opened[0].scheme, store.scheme, store.folder)
    seen: set[str] = set()
    parts: list[StoredPart] = []
    for store in opened:
        for number, part in enumerate(store.parts):
            ids = store.documents(number).column("doc_id").to_pylist()
            if not seen.isdisjoint(ids):
                raise InputError(f"{store.folder}: document {min(seen & set(ids))} stands in another store already")
            seen.update(ids)
            for name in (signatures_file, documents_file):
                with atomic_path(name(folder, len(parts))) as temporary:
                    shutil.copyfile(name(store.folder, number), temporary)
            parts.append(part)
    return _write_store(folder, opened[0].scheme, tuple(parts))


def same_scheme(wanted: SignatureScheme, found: SignatureScheme, folder: Path) -> None:
    """Raises InputError, naming the fields, if the schemes differ: their signatures say nothing of each other."""
    for field in type(wanted).model_fields:
        want, has = getattr(wanted, field), getattr(found, field)
        if want != has:
            mend = "sign that corpus again, or use its settings"
            raise InputError(f"{folder}: signatures with {field}={has!r}, but {want!r} is wanted; {mend}")


def _write_store(folder: Path, scheme: SignatureScheme, parts: tuple[StoredPart, ...]) -> SignatureStore:
    content = {"scheme": scheme.model_dump(), "parts": [part.model_dump() for part in parts]}
    write_atomic(folder / STORE_FILE, canonical_json(content))
    return SignatureStore(folder, scheme, parts)


def _sign_part(task: tuple[Part, SignatureScheme, Path, int]) -> None:
    part, scheme, folder, number = task
    documents = int(part.living().sum())
    columns: list[tuple[pa.Array, ...]] = []
    with atomic_path(signatures_file(folder, number)) as temporary, temporary.open("wb") as file:
        header = {"descr": "<u4", "fortran_order": False, "shape": (documents, scheme.hashes)}
        np.lib.format.write_array_header_1_0(file, header)
        for rows, doc_ids, texts in part.batches():
            packed_ids(doc_ids, part.path)
            data, offsets = utf8_of(texts)
            signatures, shingles = signatures_of(data, offsets, scheme.ngram, scheme.unit, scheme.hashes, scheme.seed)
            file.write(signatures.tobytes())
            columns.append((doc_ids.cast(pa.string()), pa.array(rows), pa.array(np.diff(offsets)), pa.array(shingles)))
    with atomic_path(documents_file(folder, number)) as temporary:
        pq.write_table(_documents(columns), temporary, compression="zstd")


def _documents(columns: list[tuple[pa.Array, ...]]) -> pa.Table:
    schema = pa.schema([("doc_id", pa.string()), ("row", pa.int64()), ("length", pa.int64()), ("shingles", pa.int64())])
    batches = [pa.record_batch(list(arrays), schema=schema) for arrays in columns]
    return pa.Table.from_batches(batches, schema=schema)

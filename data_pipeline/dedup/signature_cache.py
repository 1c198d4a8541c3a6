"""MinHash signatures kept from run to run: a document whose annotated file has the same name is not signed again.

`cache/signatures/SCHEME/STEM.parquet` and `STEM.npy` hold what a signature store holds of one annotated file. Documents
are found by id, so a file that lost rows, or other rows of which are kept, still has signatures of the rest."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.folding import document_ids
from gristmill.data_pipeline.ledger.document_file import DocumentFile, load_array, packed_ids, sortable_ids
from gristmill.foundation.checksums import is_sealed, link_sealed, seal_of
from gristmill.foundation.config import Config
from gristmill.foundation.files import remove_tree
from gristmill.foundation.fingerprint import fingerprint

SIGNATURE_CACHE = "signatures"  # in the cache of a work folder
SCHEME_CHARACTERS = 16


@dataclass(frozen=True)
class CachedSignatures:
    """table: columns of a signature store's table. signatures: uint32[documents, hashes], row for row."""

    table: pa.Table
    signatures: np.ndarray
    ids: np.ndarray

    def places(self, ids: np.ndarray) -> np.ndarray:
        """int64[ids]: the row of each packed id, -1 where it has none."""
        if not len(self.ids):
            return np.full(len(ids), -1, np.int64)
        known, wanted = sortable_ids(self.ids), sortable_ids(ids)
        order = np.argsort(known, kind="stable")
        place = order[np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)]
        return np.where(known[place] == wanted, place, -1)

    def rows(self, places: np.ndarray, extra: np.ndarray) -> np.ndarray:
        """Signatures at these places of `signatures` followed by `extra`."""
        if not len(extra):
            return self.signatures[places]
        is_stored = places < len(self.signatures)
        rows = np.empty((len(places), self.signatures.shape[1]), np.uint32)
        rows[is_stored] = self.signatures[places[is_stored]]
        rows[~is_stored] = extra[places[~is_stored] - len(self.signatures)]
        return rows


@dataclass(frozen=True)
class SignatureCache:
    """folder: of one scheme."""

    folder: Path

    @classmethod
    def of(cls, folder: Path, scheme: Config) -> Self:
        return cls(folder / fingerprint(scheme.model_dump(mode="json"))[:SCHEME_CHARACTERS])

    def paths(self, stem: str) -> tuple[Path, Path]:
        """Files of the table and the signatures of the annotated file with this stem."""
        return self.folder / f"{stem}.parquet", self.folder / f"{stem}.npy"

    def has(self, document_file: DocumentFile) -> bool:
        """Whether the file's documents were signed."""
        return all(is_sealed(path) for path in self.paths(document_file.path.stem))

    def signatures(self, document_file: DocumentFile) -> np.ndarray:
        """uint32[documents, hashes], mapped from disk; of documents that the file has lost, too. The file was
        signed."""
        return load_array(self.paths(document_file.path.stem)[1], mapped=True)

    def rows(self, document_file: DocumentFile) -> np.ndarray:
        """int64[documents]: the row in the file of the document of each signature, -1 if the file has lost it."""
        stored = sortable_ids(_packed_column(self.paths(document_file.path.stem)[0]))
        current = sortable_ids(document_ids(document_file.path))
        if not len(current):
            return np.full(len(stored), -1, np.int64)
        order = np.argsort(current, kind="stable")
        row = order[np.minimum(np.searchsorted(current[order], stored), len(current) - 1)]
        return np.where(current[row] == stored, row, -1)

    def part(self, document_file: DocumentFile) -> CachedSignatures | None:
        """Signatures of the file's documents; None if there are none."""
        table_path, signatures_path = self.paths(document_file.path.stem)
        if not self.has(document_file):
            return None
        with pq.ParquetFile(table_path) as file:
            table = file.read().combine_chunks()
        signatures = load_array(signatures_path, mapped=True)
        if len(signatures) != len(table):
            return None
        return CachedSignatures(table, signatures, packed_ids(table.column("doc_id"), table_path))

    def keep(self, document_file: DocumentFile, table_path: Path, signatures_path: Path) -> None:
        """Links the files of a store's part to the cache."""
        for path, kept in zip((table_path, signatures_path), self.paths(document_file.path.stem), strict=True):
            link_sealed(path, kept)

    def prune(self, stems: Collection[str]) -> None:
        """Removes the signatures of other annotated files, and of other schemes."""
        for folder in self.folder.parent.glob("*"):
            if folder != self.folder:
                remove_tree(folder)
        for path in self.folder.glob("*.*"):
            if not path.name.startswith(".") and path.stem not in stems:
                path.unlink()
                seal_of(path).unlink(missing_ok=True)


def _packed_column(path: Path) -> np.ndarray:
    """Packed ids of the column doc_id."""
    with pq.ParquetFile(path) as file:
        return packed_ids(file.read(["doc_id"]).column("doc_id").combine_chunks(), path)

"""Signatures kept from run to run, so that a document of an annotated file of the same name is not signed again:
`cache/signatures/SCHEME/STEM.parquet` and `STEM.npy` hold what a store holds of one annotated file. Documents
are found by id, so a file that lost rows, or other rows of which are kept, still has signatures of the rest."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.folding import KnownValues, document_ids
from gristmill.data_pipeline.ledger.document_file import DocumentFile, id_places, load_array, packed_ids
from gristmill.foundation.checksums import checksum_path, link_with_checksum, matches_checksum, read_cached
from gristmill.foundation.config import Config
from gristmill.foundation.files import remove_tree
from gristmill.foundation.fingerprint import fingerprint

SIGNATURE_CACHE = "signatures"  # in the cache of a work folder
SCHEME_CHARACTERS = 16
KEPT_ROWS = "kept_rows"  # in the checksum files of kept signatures


@dataclass(frozen=True)
class CachedSignatures:
    """table: columns of a signature store's table. signatures: uint32[documents, hashes], row for row."""

    table: pa.Table
    signatures: np.ndarray
    ids: np.ndarray

    def places(self, ids: np.ndarray) -> np.ndarray:
        """int64[ids]: the row of each packed id, -1 where it has none."""
        return id_places(ids, self.ids, is_sorted=False)

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
        return all(matches_checksum(path) for path in self.paths(document_file.path.stem))

    def signatures(self, document_file: DocumentFile) -> np.ndarray:
        """uint32[documents, hashes], mapped from disk; of documents that the file has lost, too. The file was
        signed."""
        return load_array(self.paths(document_file.path.stem)[1], mapped=True)

    def rows(self, document_file: DocumentFile, places: np.ndarray) -> np.ndarray:
        """int64[]: the row in the file of the document of each of these signatures, -1 if the file has lost it."""
        wanted = _packed_column(self.paths(document_file.path.stem)[0])[places]
        current = document_ids(document_file.path)
        rows = KnownValues.of(wanted).among(current)
        place = id_places(wanted, current[rows], is_sorted=False)
        return np.where(place >= 0, rows[place], -1) if len(rows) else place

    def part(self, document_file: DocumentFile) -> CachedSignatures | None:
        """Signatures of the file's documents; None if there are none."""
        table_path, signatures_path = self.paths(document_file.path.stem)
        if not self.has(document_file) or len(self._notes(document_file)) != 1:
            return None
        with pq.ParquetFile(table_path) as file:
            table = file.read().combine_chunks()
        signatures = load_array(signatures_path, mapped=True)
        if len(signatures) != len(table):
            return None
        return CachedSignatures(table, signatures, packed_ids(table.column("doc_id"), table_path))

    def keep(self, document_file: DocumentFile, table_path: Path, signatures_path: Path) -> None:
        """Links the files of a store's shard to the cache."""
        made_from = document_file.kept_rows
        for path, kept in zip((signatures_path, table_path), self.paths(document_file.path.stem)[::-1], strict=True):
            link_with_checksum(path, kept, note={KEPT_ROWS: made_from})

    def is_of(self, document_file: DocumentFile) -> bool:
        """Whether the signatures are those of the file's kept documents, row for row: they were kept for the same rows
        of the same file. Nothing of them is read."""
        made_from = document_file.kept_rows
        return made_from is not None and self.has(document_file) and self._notes(document_file) == {made_from}

    def _notes(self, document_file: DocumentFile) -> set[str | None]:
        """Notes of the two files, which may be of two runs after a kill."""
        checksums = (read_cached(checksum_path(path)) for path in self.paths(document_file.path.stem))
        return {checksum.get(KEPT_ROWS) for checksum in checksums if isinstance(checksum, dict)}

    def prune(self, stems: Collection[str]) -> None:
        """Removes the signatures of other annotated files, and of other schemes."""
        for folder in self.folder.parent.glob("*"):
            if folder != self.folder:
                remove_tree(folder)
        for path in self.folder.glob("*.*"):
            if not path.name.startswith(".") and path.stem not in stems:
                path.unlink()
                checksum_path(path).unlink(missing_ok=True)


def _packed_column(path: Path) -> np.ndarray:
    """Packed ids of the column doc_id."""
    with pq.ParquetFile(path) as file:
        return packed_ids(file.read(["doc_id"]).column("doc_id").combine_chunks(), path)

"""Exact duplicates: documents whose normalized texts are the same."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator
from xxhash import xxh3_64_intdigest

from gristmill.data_pipeline.dedup.folding import document_keys, fold_texts, folded_keys, has_keys
from gristmill.data_pipeline.dedup.minhash import key_order, repeated_keys
from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    document_file_identity,
    keep_order,
    num_rows_of,
    open_workspace,
    packed_ids,
    sortable_ids,
    unpacked_ids,
    utf8_of,
)
from gristmill.foundation.checksums import checksum_path, link_with_checksum, matches_checksum
from gristmill.foundation.config import Config
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, range_of_keys, ranges_for

HASHED = np.dtype([("key", "<u8", 2), ("id", "<u8", 2), ("length", "<u8"), ("row", "<u4")])

PRESETS: dict[str, dict[str, Any]] = {"mgpt": {"normalization": "bytes", "hash_bits": 64}}


class ExactDedupConfig(Config):
    """scope: one pool for all sources, or each source by itself.

    normalization: what counts as the same text: `bytes` (every byte), `whitespace` (runs of white space are one space,
    none at the ends) or `words` (the folded words of `folding.py`: case and punctuation do not count, so that two
    programs that differ in an operator would be the same). preset `mgpt`: bytes, compared by 64 bits of their hash, as
    in arXiv 2204.07580; two different texts in 2^32 then have an even chance to be taken for equal somewhere."""

    preset: Literal["mgpt"] | None = Field(None, description="a published setting of the other fields")
    scope: Literal["all", "source"] = "all"
    normalization: Literal["bytes", "whitespace", "words"] = "whitespace"
    hash_bits: Literal[64, 128] = Field(128, description="of the hash by which texts are compared")

    @model_validator(mode="before")
    @classmethod
    def preset_sets_its_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.get("preset") not in PRESETS:
            return fields
        preset = PRESETS[fields["preset"]]
        for name, value in preset.items():
            if fields.get(name, value) != value:
                raise ValueError(f"preset {fields['preset']} means {name}: {value}; drop the preset or {name}")
        return {**fields, **preset}


EXACT_KEYS = "exact_keys"  # in the cache of a work folder
MIN_KEPT_RECORDS = 1024  # of a file: fewer are made as fast as their links


@dataclass(frozen=True)
class KeptHashes:
    """Sorted hashes of the kept documents of each file, by the file's content. folder: takes links to them.
    code_version: of the stage."""

    folder: Path
    code_version: int

    def path(self, document_file: DocumentFile, config: ExactDedupConfig, ranges: int) -> Path | None:
        """None if the file's content is not known."""
        if document_file.kept_rows is None:
            return None
        made_from = [document_file.kept_rows, document_file.source, config.model_dump(), ranges, self.code_version]
        return self.folder / f"{document_file.path.stem}-{fingerprint(made_from)[:16]}.rec"

    def prune(self, paths: Collection[Path | None]) -> None:
        """Removes all others."""
        for path in self.folder.glob("*.rec"):
            if path not in paths:
                path.unlink()
                checksum_path(path).unlink(missing_ok=True)


def find_exact_duplicates(
    document_files: Sequence[DocumentFile],
    config: ExactDedupConfig,
    engine: Engine,
    folder: Path,
    kept: KeptHashes | None = None,
) -> PartitionedFiles:
    """Every kept document that is not the first of its equals, with that first one: records of DUPLICATE, a range a
    document file.

    `duplicate_of` is never itself removed.
    First means (source priority, longer first, doc_id), so the result does not depend on files, order or workers.
    Texts are compared by 128 or 64 bits of XXH3. Each task holds 12 bytes a document of its range of the hashes, and
    100 for each that has an equal; this process holds nothing of a document.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them. kept:
    hashes of earlier runs, which are not made again."""
    identities = [document_file_identity(document_file) for document_file in document_files]
    open_workspace(folder, {"config": config.model_dump(), "document_files": identities})
    num_rows = sum(num_rows_of(document_file) for document_file in document_files)
    hashes = PartitionedFiles(folder / "hashes", HASHED, len(document_files), ranges_for(num_rows))
    kept_paths = [
        None if kept is None else kept.path(document_file, config, hashes.ranges) for document_file in document_files
    ]
    if kept is not None:
        kept.prune(set(kept_paths))
    duplicates = PartitionedFiles(folder / "equals", DUPLICATE, hashes.ranges, len(document_files))
    if not duplicates.is_whole():
        missing = [number for number in range(len(document_files)) if not hashes.has(number)]
        tasks = LazySequence(
            lambda number: (document_files[number], config, hashes, number, kept_paths[number]), missing
        )
        sizes = [document_files[number].bytes for number in missing]
        engine.map(_hash_file, tasks, "exact duplicates: hash texts", sizes, "B")
        priorities = np.array([document_file.priority for document_file in document_files], np.int64)
        ranges = [(hashes, priorities, duplicates, part) for part in range(hashes.ranges) if not duplicates.has(part)]
        (engine if hashes.ranges > 1 else LocalEngine(1, engine.reporter)).map(
            _find_equals, ranges, "exact duplicates: compare hashes"
        )
    hashes.remove()
    return duplicates


def _hash_file(task: tuple[DocumentFile, ExactDedupConfig, PartitionedFiles, int, Path | None]) -> None:
    document_file, config, hashes, number, kept_path = task
    if kept_path is not None and matches_checksum(kept_path):
        link_with_checksum(kept_path, hashes.path(number))
        return
    records = np.concatenate([np.empty(0, HASHED), *_hashed(document_file, config)])
    if config.hash_bits == 64:
        records["key"][:, 1] = 0
    records = records[key_order(np.ascontiguousarray(records["key"][:, 0]))]
    hashes.write_sorted(number, records, range_of_keys(records["key"][:, 0], hashes.ranges))
    if kept_path is not None and len(records) >= MIN_KEPT_RECORDS:
        link_with_checksum(hashes.path(number), kept_path)


def _hashed(document_file: DocumentFile, config: ExactDedupConfig) -> Iterator[np.ndarray]:
    """HASHED[] of the kept documents; `row` is set. Keys that the file holds are not computed again."""
    seed = xxh3_64_intdigest(document_file.source.encode()) if config.scope == "source" else 0
    if config.normalization == "whitespace" and has_keys(document_file.path):
        yield _stored_keys(document_file, seed)
        return
    for rows, doc_ids, texts in document_file.batches():
        data, offsets = utf8_of(texts)
        records = np.empty(len(rows), HASHED)
        records["key"] = np.frombuffer(_keys(data, offsets, config.normalization, seed), ">u8").reshape(-1, 2)
        records["id"] = packed_ids(doc_ids, document_file.path)
        records["length"], records["row"] = np.diff(offsets), rows
        yield records


def _stored_keys(document_file: DocumentFile, seed: int) -> np.ndarray:
    keys = document_keys(document_file.path)
    rows = np.flatnonzero(document_file.kept_mask_of(len(keys)))
    kept = keys[rows]
    records = np.empty(len(rows), HASHED)
    records["key"] = kept["key"]
    records["key"][:, 0] ^= np.uint64(seed)
    records["id"], records["length"], records["row"] = kept["id"], kept["bytes"], rows
    return records


def _keys(data: np.ndarray, offsets: np.ndarray, normalization: str, seed: int) -> bytes:
    """XXH3-128 with this seed of every normalized text, one after the other."""
    if normalization != "bytes":
        data, offsets = fold_texts(data, offsets, "space" if normalization == "whitespace" else "word")
    return folded_keys(data, offsets, seed)


def _find_equals(task: tuple[PartitionedFiles, np.ndarray, PartitionedFiles, int]) -> None:
    """Writes the documents of one range of the hashes that are not the first of their equals."""
    hashes, priorities, removed_documents, number = task
    pieces = list(hashes.segments(number))
    high = np.concatenate([np.empty(0, np.uint64), *(piece["key"][:, 0] for _, piece in pieces)])
    chosen = repeated_keys(high)
    starts = np.cumsum([0, *(len(piece) for _, piece in pieces)])
    records, files = [np.empty(0, HASHED)], [np.empty(0, np.int32)]
    for (part, piece), start, stop in zip(pieces, starts[:-1], starts[1:], strict=True):
        first, last = np.searchsorted(chosen, [start, stop])
        records.append(piece[chosen[first:last] - start])
        files.append(np.full(last - first, part, np.int32))
    hashed, file = np.concatenate(records), np.concatenate(files)
    order = keep_order(priorities[file], hashed["length"].astype(np.int64), hashed["id"])
    removed, kept = (order[places] for places in _equals(hashed["key"][order, 0], hashed["key"][order, 1]))
    duplicates = np.empty(len(removed), DUPLICATE)
    duplicates["file"], duplicates["row"], duplicates["id"] = (
        file[removed],
        hashed["row"][removed],
        hashed["id"][removed],
    )
    duplicates["duplicate_of"], duplicates["value"] = hashed["id"][kept], 1.0
    duplicates = duplicates[np.lexsort((duplicates["row"], duplicates["file"]))]
    removed_documents.write_sorted(number, duplicates, duplicates["file"])


def _equals(high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(removed, kept): the index of every key that came before, and that of its first. Keys 7 5 7 -> ([2], [0])."""
    order = np.lexsort((low, high))  # stable: equals stay in their order
    new = np.ones(len(order), bool)
    new[1:] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    firsts = order[np.flatnonzero(new)[np.cumsum(new) - 1]] if len(order) else order
    return order[~new], firsts[~new]


# Duplicates found by exact and near deduplication: where they are, and the kept document of each.

DUPLICATES = pa.schema([("doc_id", pa.string()), ("duplicate_of", pa.string()), ("similarity", pa.float64())])
# A document to remove: which of the given document files, the row in it, packed ids of it and of the kept one.
DUPLICATE = np.dtype([("file", "<i4"), ("row", "<i8"), ("id", "<u8", 2), ("duplicate_of", "<u8", 2), ("value", "<f8")])


# Removed documents that a task of `reassign_copies` reads: 100 MB. So many or fewer are read by the driver.
REMOVED_OF_RANGE = 1 << 19


def table_of(duplicates: PartitionedFiles) -> pa.Table:
    """Records of DUPLICATE in memory: doc_id, duplicate_of, similarity; sorted by doc_id."""
    records = duplicates.read_all()
    records = records[np.lexsort((records["id"][:, 1], records["id"][:, 0]))]
    columns = [unpacked_ids(records["id"]), unpacked_ids(records["duplicate_of"]), pa.array(records["value"])]
    return pa.table(columns, schema=DUPLICATES)


def reassign_copies(
    exact: PartitionedFiles, near: PartitionedFiles, folder: Path, engine: Engine
) -> tuple[PartitionedFiles, PartitionedFiles]:
    """(exact, near), a range a document file, after every copy of a document that near deduplication removed was moved
    to `near`.

    A copy has its document's words, hence its shingles, hence its similarity to the document that is kept. So every
    `duplicate_of` names a document that is itself kept:
    exact [(c, b)], near [(b, a, 0.9)] -> exact [], near [(b, a, 0.9), (c, a, 0.9)].
    Memory of a task: 200 bytes for each removed document of its range of the ids."""
    ranges = ranges_for(exact.num_records() + near.num_records(), REMOVED_OF_RANGE)
    sized = engine if ranges > 1 else LocalEngine(1, engine.reporter)
    sides = [(exact, "duplicate_of", folder / "exact"), (near, "id", folder / "near")]
    by_id = []
    for side, field, prefix in sides if ranges > 1 else ():
        shuffled = PartitionedFiles(prefix.with_name(f"{prefix.name}-by-id"), DUPLICATE, side.map_outputs, ranges)
        tasks = [(side, field, shuffled, part) for part in range(side.map_outputs) if not shuffled.has(part)]
        sized.map(_shuffle_by_id, tasks, "duplicates: removed documents")
        by_id.append(shuffled)
    left, moved = (PartitionedFiles(prefix, DUPLICATE, ranges, side.ranges) for side, _, prefix in sides)
    removals = (by_id[0], by_id[1]) if by_id else (exact, near)
    joins = [(removals[0], removals[1], left, moved, number) for number in range(ranges) if not moved.has(number)]
    sized.map(_reassign_range, joins, "duplicates: copies of removed documents")
    return left, moved


def _shuffle_by_id(task: tuple[PartitionedFiles, str, PartitionedFiles, int]) -> None:
    side, field, shuffled, part = task
    records = np.asarray(side.map_output(part)[1])
    shuffled.write_unsorted(part, records, range_of_keys(records[field][:, 0], shuffled.ranges))


def _reassign_range(task: tuple[PartitionedFiles, PartitionedFiles, PartitionedFiles, PartitionedFiles, int]) -> None:
    exact_by_id, near_by_id, exact_out, near_out, number = task
    is_only = exact_out.map_outputs == 1  # then the sides are not shuffled by id
    exact, near = (side.read_all() if is_only else side.read(number) for side in (exact_by_id, near_by_id))
    near = near[np.lexsort((near["id"][:, 1], near["id"][:, 0]))]
    place = _places(exact["duplicate_of"], near["id"])
    is_moved = place >= 0
    moved = exact[is_moved]
    for field in ("duplicate_of", "value"):
        moved[field] = near[field][place[is_moved]]
    for shuffle, records in ((exact_out, exact[~is_moved]), (near_out, np.concatenate([near, moved]))):
        records = records[np.lexsort((records["row"], records["file"]))]
        shuffle.write_sorted(number, records, records["file"])


def _places(wanted: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """int64[wanted]: the place of each packed id in ids, which ascend and are distinct; -1 where it is not there."""
    if not len(ids):
        return np.full(len(wanted), -1, np.int64)
    place = np.searchsorted(sortable_ids(ids), sortable_ids(wanted))
    place = np.minimum(place, len(ids) - 1)
    return np.where((ids[place] == wanted).all(axis=1), place, -1)

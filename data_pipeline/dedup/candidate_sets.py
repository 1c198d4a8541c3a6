"""The candidates' shingle sets, written part by part and read batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.dedup.candidates import Banding, StoredDocuments, keys_of
from gristmill.data_pipeline.dedup.signatures import StorePart
from gristmill.data_pipeline.dedup.verify import joined_shingle_sets
from gristmill.data_pipeline.ledger.document_file import DocumentFile, packed_ids, utf8_of
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.shuffle import Shuffle

SHINGLE = np.dtype("<u8")


def member_dtype(bands: int) -> np.dtype:
    """A candidate with all that decides its place in keep-order and whom it is compared with.

    group: candidates of another are never compared. priority: of its source, or below all others if it is protected.
    length: bytes of its text. file, row: where it stands, counted without the protected files. size: of its set. keys:
    of its bands."""
    return np.dtype(
        [
            ("group", "<i8"),
            ("priority", "<i8"),
            ("length", "<i8"),
            ("id", "<u8", 2),
            ("row", "<i8"),
            ("size", "<i8"),
            ("file", "<i4"),
            ("protected", "?"),
            ("keys", "<u8", bands),
        ]
    )


@dataclass(frozen=True)
class CandidateSets:
    """members: by batch. sets: the members' sets of 64-bit hashes, one after the other in the order of the members of a
    part."""

    members: Shuffle
    sets: Shuffle


@dataclass(frozen=True)
class SetsTask:
    """document_file: of the part `number`, of which the first `protected` ones are protected."""

    document_file: DocumentFile
    part: StorePart
    number: int
    start: int
    num_protected: int
    candidates: Shuffle
    banding: Banding
    written: CandidateSets


def write_candidate_sets(
    document_files: Sequence[DocumentFile],
    documents: StoredDocuments,
    candidates: tuple[Shuffle, int],
    banding: Banding,
    engine: Engine,
    folder: Path,
) -> CandidateSets:
    """document_files: of the documents' parts. candidates: as `write_groups` returns them."""
    found, batches = candidates
    parts = len(documents.parts)
    written = CandidateSets(
        Shuffle(folder / "members", member_dtype(banding.bands), parts, batches),
        Shuffle(folder / "sets", SHINGLE, parts, batches),
    )
    num_protected = int(documents.is_protected.sum())
    tasks = [
        SetsTask(each, part, number, int(start), num_protected, found, banding, written)
        for number, (each, part, start) in enumerate(
            zip(document_files, documents.parts, documents.starts[:-1], strict=True)
        )
        if not written.members.has(number)
    ]
    engine.map(_write_sets, tasks, "candidates' shingles", [task.document_file.bytes for task in tasks], "B")
    return written


def _write_sets(task: SetsTask) -> None:
    found = task.candidates.read(task.number)
    table = task.part.documents()
    places = found["position"] - task.start
    members = np.zeros(len(found), task.written.members.dtype)
    rows = table.column("row").to_numpy()[places]
    members["group"], members["row"] = found["group"], rows
    members["length"] = table.column("length").to_numpy()[places]
    members["id"] = packed_ids(table.column("doc_id"), task.part.folder)[places]
    members["file"] = task.number - task.num_protected
    members["protected"] = task.number < task.num_protected
    members["priority"] = np.iinfo(np.int64).min if task.number < task.num_protected else task.part.stored.priority
    if len(places):
        members["keys"] = keys_of(task.part, task.banding, places)
    values, bounds = _sets(task, rows)
    members["size"] = np.diff(bounds)
    order = np.argsort(found["batch"], kind="stable")
    batch, sizes = found["batch"][order].astype(np.int64), members["size"][order]
    picked = np.concatenate([np.empty(0, SHINGLE), *(values[bounds[i] : bounds[i + 1]] for i in order.tolist())])
    firsts = np.searchsorted(batch, np.arange(task.written.sets.ranges + 1))
    task.written.sets.write(task.number, picked, np.concatenate([[0], np.cumsum(sizes)])[firsts])
    task.written.members.write(task.number, members[order], firsts)  # last: its file says that both are whole


def _sets(task: SetsTask, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sets of these rows, which ascend, one after the other, and int64[rows + 1] bounds."""
    wanted = np.zeros(len(task.document_file.kept_mask()), bool)
    wanted[rows] = True
    sets, sizes = [np.empty(0, SHINGLE)], [np.zeros(1, np.int64)]
    if len(rows):
        for _, _, texts in task.document_file.batches(wanted):
            values, bounds = joined_shingle_sets(*utf8_of(texts), task.banding.ngram, task.banding.unit)
            sets.append(values)
            sizes.append(np.diff(bounds))
    return np.concatenate(sets), np.cumsum(np.concatenate(sizes))

"""The steps of curation that remove whole documents: exact copies, then near duplicates."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.dedup.duplicates import Duplicates, reassign_copies
from gristmill.data_pipeline.dedup.exact import ExactDedupConfig, find_exact_duplicates
from gristmill.data_pipeline.dedup.near import NearDedupConfig, Protected, find_near_duplicates
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.removal_step import RemovalStep
from gristmill.data_pipeline.ledger.source_state import SourceState, kept_document_files
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.engine.engine import Engine


@dataclass(frozen=True)
class DedupSettings:
    """exact, near: None switches the step off. protected: the corpora that near deduplication compares against."""

    exact: ExactDedupConfig | None
    near: NearDedupConfig | None
    protected: Sequence[Protected] = ()


def deduplicate(
    curated: Sequence[SourceState],
    removals: Sequence[RemovalStep],
    settings: DedupSettings,
    folder: Path,
    engine: Engine,
) -> list[RemovalStep]:
    """Removes exact duplicates and then near duplicates from what `removals` left; returns `removals` and these.

    `duplicate_of` always names a document that is kept. `folder` takes intermediate files."""
    exact, near = Duplicates.none(), Duplicates.none()
    steps: list[RemovalStep] = []
    if settings.exact is not None:
        document_files = kept_document_files(curated, removals)
        work = work_folder(folder, "exact", document_files, settings.exact.model_dump(mode="json"))
        exact = find_exact_duplicates(document_files, settings.exact, engine, work)
        steps.append(_removal_step("exact_dedup", 1.0, exact))
    if settings.near is not None:
        document_files = kept_document_files(curated, [*removals, *steps])
        work = work_folder(folder, "near", document_files, settings.near.identity)
        near = find_near_duplicates(document_files, settings.near, engine, work, settings.protected)
        exact, near = reassign_copies(exact, near)
        steps = [_removal_step("exact_dedup", 1.0, exact)] if settings.exact is not None else []
        steps.append(_removal_step("near_dedup", settings.near.threshold, near))
    return [*removals, *steps]


def _removal_step(name: str, threshold: float, found: Duplicates) -> RemovalStep:
    return RemovalStep(name, threshold, found.files, found.rows, found.similarities, found.duplicate_of).sorted()


def work_folder(folder: Path, step: str, document_files: Sequence[DocumentFile], settings: Any) -> Path:
    """A folder for the step's intermediate files, named by what they are made from.

    Annotated files are named by what they hold; rewritten ones stand in a folder that is."""
    made_from = [
        [
            document_file.path.parent.parent.name,
            document_file.path.name,
            "" if document_file.kept is None else hashlib.sha256(np.packbits(document_file.kept).tobytes()).hexdigest(),
        ]
        for document_file in document_files
    ]
    work = folder / f"{step}-{fingerprint([made_from, settings])}"
    work.mkdir(parents=True, exist_ok=True)
    return work

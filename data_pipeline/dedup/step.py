"""The steps of curation that remove whole documents: exact copies, then near duplicates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.dedup.copies import reassign_copies
from gristmill.data_pipeline.dedup.exact import DUPLICATES, ExactDedupConfig, exact_duplicates
from gristmill.data_pipeline.dedup.near import NearDedupConfig, Protected, near_duplicates
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.ledger import RemovalStep
from gristmill.data_pipeline.ledger.source_state import SourceState, kept_document_files
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.engine.local import LocalEngine


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
    engine: LocalEngine,
) -> list[RemovalStep]:
    """Removes exact duplicates and then near duplicates from what `removals` left; returns `removals` and these.

    `duplicate_of` always names a document that is kept. `folder` takes intermediate files."""
    exact, near = DUPLICATES.empty_table(), DUPLICATES.empty_table()
    steps: list[RemovalStep] = []
    if settings.exact is not None:
        parts = kept_document_files(curated, removals)
        work = work_folder(folder, "exact", parts, settings.exact.model_dump(mode="json"))
        exact = exact_duplicates(parts, settings.exact, engine, work)
        steps.append(RemovalStep.from_table("exact_dedup", 1.0, exact))
    if settings.near is not None:
        parts = kept_document_files(curated, [*removals, *steps])
        work = work_folder(folder, "near", parts, settings.near.identity)
        near = near_duplicates(parts, settings.near, engine, work, settings.protected)
        exact, near = reassign_copies(exact, near)
        steps = [RemovalStep.from_table("exact_dedup", 1.0, exact)] if settings.exact is not None else []
        steps.append(RemovalStep.from_table("near_dedup", settings.near.threshold, near))
    return [*removals, *steps]


def work_folder(folder: Path, step: str, parts: Sequence[DocumentFile], settings: Any) -> Path:
    """A folder for the step's intermediate files, named by what they are made from.

    Annotated files are named by what they hold; rewritten ones stand in a folder that is."""
    made_from = [
        [
            part.path.parent.parent.name,
            part.path.name,
            "" if part.kept is None else np.packbits(part.kept).tobytes().hex(),
        ]
        for part in parts
    ]
    work = folder / f"{step}-{fingerprint([made_from, settings])}"
    work.mkdir(parents=True, exist_ok=True)
    return work

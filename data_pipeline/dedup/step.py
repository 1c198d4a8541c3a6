"""The steps of curation that remove whole documents: exact copies, then near duplicates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.dedup.exact import ExactDedupConfig, find_exact_duplicates, reassign_copies
from gristmill.data_pipeline.dedup.near import EarlierRuns, NearDedupConfig, Protected, find_near_duplicates
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.removal_step import Removals, SourceState, StoredRemovals, kept_document_files
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.task_files import Shuffle


@dataclass(frozen=True)
class DedupSettings:
    """exact, near: None switches the step off. protected: the corpora that near deduplication compares against.
    earlier: keeps signatures and decided groups for the next run."""

    exact: ExactDedupConfig | None
    near: NearDedupConfig | None
    protected: Sequence[Protected] = ()
    earlier: EarlierRuns | None = None


def deduplicate(
    curated: Sequence[SourceState],
    removals: Sequence[Removals],
    settings: DedupSettings,
    folder: Path,
    engine: Engine,
) -> list[Removals]:
    """Removes exact duplicates and then near duplicates from what `removals` left; returns `removals` and these.

    `duplicate_of` always names a document that is kept. `folder` takes intermediate files."""
    exact = near = None
    if settings.exact is not None:
        document_files = kept_document_files(curated, removals)
        work = work_folder(folder, "exact", document_files, settings.exact.model_dump(mode="json"))
        exact = find_exact_duplicates(document_files, settings.exact, engine, work)
    if settings.near is not None:
        before = [*removals, *_steps(exact, None, settings)]
        document_files = kept_document_files(curated, before)
        work = work_folder(folder, "near", document_files, settings.near.identity)
        near = find_near_duplicates(document_files, settings.near, engine, work, settings.protected, settings.earlier)
        if exact is not None:
            exact, near = reassign_copies(exact, near, work / "reassigned", engine)
    return [*removals, *_steps(exact, near, settings)]


def _steps(exact: Shuffle | None, near: Shuffle | None, settings: DedupSettings) -> list[StoredRemovals]:
    steps = [] if exact is None else [StoredRemovals("exact_dedup", 1.0, exact)]
    if near is not None and settings.near is not None:
        steps.append(StoredRemovals("near_dedup", settings.near.threshold, near))
    return steps


def work_folder(folder: Path, step: str, document_files: Sequence[DocumentFile], settings: Any) -> Path:
    """A folder for the step's intermediate files, named by what they are made from.

    Annotated files are named by what they hold; rewritten ones stand in a folder that is."""
    made_from = [
        [
            document_file.path.parent.parent.name,
            document_file.path.name,
            document_file.kept_digest(),
        ]
        for document_file in document_files
    ]
    work = folder / f"{step}-{fingerprint([made_from, settings])}"
    work.mkdir(parents=True, exist_ok=True)
    return work

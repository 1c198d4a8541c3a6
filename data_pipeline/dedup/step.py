"""The steps of curation that remove whole documents: exact copies, then near duplicates."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.dedup.copies import copies_follow
from gristmill.data_pipeline.dedup.exact import DUPLICATES, exact_duplicates
from gristmill.data_pipeline.dedup.near import Protected, near_duplicates
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.ledger import RemovalStep
from gristmill.data_pipeline.ledger.source_state import SourceState, kept_document_files
from gristmill.foundation.canonical_json import fingerprint
from gristmill.foundation.engine.local import LocalEngine


def deduplicate(
    curated: Sequence[SourceState],
    later: Sequence[RemovalStep],
    config: CurateConfig,
    protected: Sequence[Protected],
    folder: Path,
    engine: LocalEngine,
) -> list[RemovalStep]:
    """Exact, then near duplicates among what the steps before kept; what the first took the second does not see.

    Either way the document that is named as the other is one that is kept. Returns the steps before and these."""
    exact, near = DUPLICATES.empty_table(), DUPLICATES.empty_table()
    steps: list[RemovalStep] = []
    if config.exact_dedup is not None:
        parts = kept_document_files(curated, later)
        work = work_folder(folder, "exact", parts, config.exact_dedup.model_dump(mode="json"))
        exact = exact_duplicates(parts, config.exact_dedup, engine, work)
        steps.append(RemovalStep.from_table("exact_dedup", 1.0, exact))
    if config.near_dedup is not None:
        parts = kept_document_files(curated, [*later, *steps])
        work = work_folder(folder, "near", parts, config.near_dedup.identity)
        near = near_duplicates(parts, config.near_dedup, engine, work, protected)
        exact, near = copies_follow(exact, near)
        steps = [RemovalStep.from_table("exact_dedup", 1.0, exact)] if config.exact_dedup is not None else []
        steps.append(RemovalStep.from_table("near_dedup", config.near_dedup.threshold, near))
    return [*later, *steps]


def work_folder(folder: Path, step: str, parts: Sequence[DocumentFile], settings: Any) -> Path:
    """A folder for the step's intermediate files, named by what they are made from.

    Annotated files are named by what they hold; rewritten ones stand in a folder that is."""
    made_from = [
        [
            part.path.parent.parent.name,
            part.path.name,
            "" if part.alive is None else np.packbits(part.alive).tobytes().hex(),
        ]
        for part in parts
    ]
    work = folder / f"{step}-{fingerprint([made_from, settings])}"
    work.mkdir(parents=True, exist_ok=True)
    return work

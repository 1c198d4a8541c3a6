"""The steps of curation that edit texts: duplicate paragraphs and lines, repeated substrings, benchmark texts.

Each step reads the texts that the step before wrote, and records every span that it removes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.matches import MATCHES
from gristmill.data_pipeline.decontamination.step import Decontamination, decontaminate
from gristmill.data_pipeline.dedup.spans import SpanDedupConfig, duplicate_spans
from gristmill.data_pipeline.dedup.step import work_folder
from gristmill.data_pipeline.dedup.substrings import SubstringDedupConfig, repeated_substrings
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.ledger import Evidence, RemovalStep
from gristmill.data_pipeline.ledger.removed_spans import sorted_spans
from gristmill.data_pipeline.ledger.source_state import SourceState, kept_document_files
from gristmill.data_pipeline.text_edits.edit_documents import EditedFile, SpanRemoval, edit_document_files
from gristmill.foundation.engine.local import LocalEngine


@dataclass(frozen=True)
class TextEdits:
    """parts: all annotated files in their order, row for row, with the edited texts where there are any.
    removals: the steps before and these. removed_spans: rows of REMOVED_SPANS. contamination: the benchmark texts
    that were found; None if the recipe names no benchmarks."""

    parts: list[DocumentFile]
    removals: list[RemovalStep]
    removed_spans: pa.Table
    contamination: Decontamination | None

    def evidence(self) -> Evidence:
        """What the ledger records of edited and contaminated documents."""
        found = self.contamination
        if found is None:
            return Evidence(self.removed_spans, {}, MATCHES.empty_table())
        pieces: dict[str, tuple[str, ...]] = {}
        for path in found.piece_files:
            if path is not None:
                for row in pq.read_table(path, columns=["parent_id", "doc_id"]).to_pylist():
                    pieces[row["parent_id"]] = (*pieces.get(row["parent_id"], ()), row["doc_id"])
        return Evidence(self.removed_spans, pieces, found.matches)

    def after_removal(
        self, curated: Sequence[SourceState], step: RemovalStep, parts: Sequence[DocumentFile]
    ) -> "TextEdits":
        """The edits after a step that removed documents."""
        doc_ids = [results.doc_ids for one in curated for results in one.filter_results]
        left = [
            replace(part, kept=part.kept_mask() & ~step.removed_mask(ids))
            for part, ids in zip(parts, doc_ids, strict=True)
        ]
        return replace(self, parts=left, removals=[*self.removals, step])


@dataclass(frozen=True)
class EditSettings:
    """spans, substrings, decontaminate: empty or None switches the step off. task_examples: the texts of the tasks
    that `decontaminate` names."""

    spans: Sequence[SpanDedupConfig]
    substrings: SubstringDedupConfig | None
    decontaminate: DecontaminateConfig | None
    task_examples: Sequence[Example] = ()


def edit_texts(
    curated: Sequence[SourceState],
    removals: Sequence[RemovalStep],
    settings: EditSettings,
    folder: Path,
    engine: LocalEngine,
) -> TextEdits:
    """Removes duplicate spans, repeated substrings and benchmark texts from the documents that `removals` left.

    `folder` takes intermediate files; called again with the same arguments after a kill, it resumes from them."""
    state = TextEdits(kept_document_files(curated, removals), list(removals), sorted_spans([]), None)
    for spans in settings.spans:
        state = _spans(state, curated, spans, folder, engine)
    if settings.substrings is not None:
        state = _substrings(state, curated, settings.substrings, folder, engine)
    if settings.decontaminate is not None:
        config = settings.decontaminate
        work = work_folder(folder, "decontaminate", state.parts, config.model_dump(mode="json"))
        found = decontaminate(state.parts, config, engine, work, settings.task_examples)
        state = replace(
            state, removed_spans=sorted_spans([state.removed_spans, found.removed_spans]), contamination=found
        )
        state = state.after_removal(curated, _dropped(found), state.parts)
    return state


def _spans(
    state: TextEdits, curated: Sequence[SourceState], config: SpanDedupConfig, folder: Path, engine: LocalEngine
) -> TextEdits:
    step = f"{config.unit}_dedup"
    work = work_folder(folder, step, state.parts, config.model_dump(mode="json"))
    spans = duplicate_spans(state.parts, config, engine, work / "spans")
    edited = edit_document_files(state.parts, spans, SpanRemoval(f"{step}.min_count"), engine, work / "texts")
    state = replace(state, removed_spans=sorted_spans([state.removed_spans, edited.removed_spans]))
    return state.after_removal(curated, _emptied(step, edited), edited.parts)


def _substrings(
    state: TextEdits, curated: Sequence[SourceState], config: SubstringDedupConfig, folder: Path, engine: LocalEngine
) -> TextEdits:
    step = "substring_dedup"
    work = work_folder(folder, step, state.parts, config.model_dump(mode="json"))
    spans = repeated_substrings(state.parts, config, engine, work / "spans")
    removal = SpanRemoval(f"{step}.{config.policy}", in_bytes=True, is_applied=config.policy == "remove")
    edited = edit_document_files(state.parts, spans, removal, engine, work / "texts")
    state = replace(state, removed_spans=sorted_spans([state.removed_spans, edited.removed_spans]))
    if config.policy == "annotate":
        return state
    if config.policy == "remove":
        return state.after_removal(curated, _emptied(step, edited), edited.parts)
    chosen = edited.left.filter(pa.array(edited.left.column("share").to_numpy() > config.drop_share))
    taken = _taken(step, "drop_share", chosen, chosen.column("share").to_numpy(), config.drop_share)
    return state.after_removal(curated, taken, edited.parts)


def _emptied(step: str, edited: EditedFile) -> RemovalStep:
    """Removes the documents that hold only white space after the edit."""
    chosen = edited.left.filter(pa.array(edited.left.column("left").to_numpy() == 0))
    return _taken(step, "nothing_left", chosen, np.zeros(len(chosen)), 1)


def _taken(step: str, rule: str, documents: pa.Table, values: np.ndarray, threshold: float) -> RemovalStep:
    doc_ids = np.array(documents.column("doc_id").to_pylist(), dtype="S32")
    rules = np.full(len(doc_ids), f"{step}.{rule}", dtype=object)
    nobody = np.full(len(doc_ids), b"", dtype="S32")
    return RemovalStep(step, threshold, doc_ids, nobody, np.array(values, np.float64), None, rules)


def _dropped(found: Decontamination) -> RemovalStep:
    rows = found.hits.filter(pc.equal(found.hits.column("fate"), "dropped"))
    doc_ids = np.array(rows.column("doc_id").to_pylist(), dtype="S32")
    return RemovalStep(
        "decontaminate",
        1.0,
        doc_ids,
        np.full(len(doc_ids), b"", dtype="S32"),
        rows.column("value").to_numpy().astype(np.float64),
        rows.column("threshold").to_numpy().astype(np.float64),
        np.array(rows.column("rule").to_pylist(), dtype=object),
    )

"""The steps of curation that rewrite texts: paragraphs and lines, substrings, benchmark texts.

Each sees the texts as the one before left them. What they cut, and why, is on record span by span."""

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
from gristmill.data_pipeline.ledger.removed_spans import in_order
from gristmill.data_pipeline.ledger.source_state import SourceState, kept_document_files
from gristmill.data_pipeline.text_edits.edit_documents import EditedFile, edit_document_files
from gristmill.foundation.engine.local import LocalEngine


@dataclass(frozen=True)
class TextEdits:
    """parts: all annotated files in their order, each as it stands or with its texts rewritten, row for row.
    later: the steps before and these. cuts: a row a span (see CUTS). contamination: what of the
    benchmarks was found; None if the recipe names none."""

    parts: list[DocumentFile]
    later: list[RemovalStep]
    cuts: pa.Table
    contamination: Decontamination | None

    def evidence(self) -> Evidence:
        """What the ledger says of documents that were rewritten or hit."""
        found = self.contamination
        if found is None:
            return Evidence(self.cuts, {}, MATCHES.empty_table())
        pieces: dict[str, tuple[str, ...]] = {}
        for path in found.piece_files:
            if path is not None:
                for row in pq.read_table(path, columns=["parent_id", "doc_id"]).to_pylist():
                    pieces[row["parent_id"]] = (*pieces.get(row["parent_id"], ()), row["doc_id"])
        return Evidence(self.cuts, pieces, found.matches)

    def lives_on(self, curated: Sequence[SourceState], step: RemovalStep, parts: Sequence[DocumentFile]) -> "TextEdits":
        """The same after a step that took documents."""
        doc_ids = [verdict.doc_ids for one in curated for verdict in one.verdicts]
        left = [replace(part, alive=part.living() & ~step.holds(ids)) for part, ids in zip(parts, doc_ids, strict=True)]
        return replace(self, parts=left, later=[*self.later, step])


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
    later: Sequence[RemovalStep],
    settings: EditSettings,
    folder: Path,
    engine: LocalEngine,
) -> TextEdits:
    """Removes duplicate spans, repeated substrings and benchmark texts from the documents that `later` kept.

    `folder` takes intermediate files; called again with the same arguments after a kill, it resumes from them."""
    state = TextEdits(kept_document_files(curated, later), list(later), in_order([]), None)
    for spans in settings.spans:
        state = _spans(state, curated, spans, folder, engine)
    if settings.substrings is not None:
        state = _substrings(state, curated, settings.substrings, folder, engine)
    if settings.decontaminate is not None:
        config = settings.decontaminate
        work = work_folder(folder, "decontaminate", state.parts, config.model_dump(mode="json"))
        found = decontaminate(state.parts, config, engine, work, settings.task_examples)
        state = replace(state, cuts=in_order([state.cuts, found.cuts]), contamination=found)
        state = state.lives_on(curated, _dropped(found), state.parts)
    return state


def _spans(
    state: TextEdits, curated: Sequence[SourceState], config: SpanDedupConfig, folder: Path, engine: LocalEngine
) -> TextEdits:
    step = f"{config.unit}_dedup"
    work = work_folder(folder, step, state.parts, config.model_dump(mode="json"))
    spans = duplicate_spans(state.parts, config, engine, work / "spans")
    rewritten = edit_document_files(state.parts, spans, f"{step}.least_count", False, engine, work / "texts")
    state = replace(state, cuts=in_order([state.cuts, rewritten.cuts]))
    return state.lives_on(curated, _emptied(step, rewritten), rewritten.parts)


def _substrings(
    state: TextEdits, curated: Sequence[SourceState], config: SubstringDedupConfig, folder: Path, engine: LocalEngine
) -> TextEdits:
    step = "substring_dedup"
    work = work_folder(folder, step, state.parts, config.model_dump(mode="json"))
    spans = repeated_substrings(state.parts, config, engine, work / "spans")
    is_cut = config.policy == "remove"
    rewritten = edit_document_files(state.parts, spans, f"{step}.{config.policy}", True, engine, work / "texts", is_cut)
    state = replace(state, cuts=in_order([state.cuts, rewritten.cuts]))
    if config.policy == "annotate":
        return state
    if config.policy == "remove":
        return state.lives_on(curated, _emptied(step, rewritten), rewritten.parts)
    chosen = rewritten.left.filter(pa.array(rewritten.left.column("share").to_numpy() > config.drop_share))
    taken = _taken(step, "drop_share", chosen, chosen.column("share").to_numpy(), config.drop_share)
    return state.lives_on(curated, taken, rewritten.parts)


def _emptied(step: str, rewritten: EditedFile) -> RemovalStep:
    """The documents of which nothing is left but white space."""
    chosen = rewritten.left.filter(pa.array(rewritten.left.column("left").to_numpy() == 0))
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

"""The steps of curation that edit texts: duplicate paragraphs and lines, repeated substrings, benchmark texts.

Each step reads the texts that the step before wrote, and records every span that it removes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.step import Decontamination, decontaminate
from gristmill.data_pipeline.dedup.spans import SpanDedupConfig, find_duplicate_spans
from gristmill.data_pipeline.dedup.step import work_folder
from gristmill.data_pipeline.dedup.substrings import SubstringDedupConfig, repeated_substrings
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.evidence import EvidenceFiles
from gristmill.data_pipeline.ledger.removal_step import Removals, RemovalStep
from gristmill.data_pipeline.ledger.source_state import KeptAfter, SourceState, kept_document_files
from gristmill.data_pipeline.text_edits.edit_documents import EditedFile, SpanRemoval, edit_document_files
from gristmill.foundation.engine.engine import Engine


@dataclass(frozen=True)
class TextEdits:
    """document_files: all annotated files in their order, row for row, with the edited texts where there are any.
    removals: the steps before and these. span_files: by document file, the files of its removed spans, one a step.
    contamination: the benchmark texts that were found; None if the recipe names no benchmarks."""

    document_files: list[DocumentFile]
    removals: list[Removals]
    span_files: list[tuple[Path, ...]]
    contamination: Decontamination | None

    def evidence(self) -> list[EvidenceFiles]:
        """By document_file, what the ledger records of edited and contaminated documents."""
        found = []
        for number, spans in enumerate(self.span_files):
            of_benchmarks = EvidenceFiles() if self.contamination is None else self.contamination.evidence(number)
            found.append(replace(of_benchmarks, removed_spans=(*spans, *of_benchmarks.removed_spans)))
        return found

    def with_edits(self, edited: EditedFile) -> "TextEdits":
        span_files = [(*held, path) for held, path in zip(self.span_files, edited.span_files, strict=True)]
        return replace(self, span_files=span_files)

    def after_removal(self, step: RemovalStep, document_files: Sequence[DocumentFile], prefix: Path) -> "TextEdits":
        """The edits after a step that removed documents. prefix: of the files that list them."""
        removed = step.stored(prefix, len(document_files))
        left = [
            replace(document_file, kept=KeptAfter(document_file, number, removed))
            for number, document_file in enumerate(document_files)
        ]
        return replace(self, document_files=left, removals=[*self.removals, removed])


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
    removals: Sequence[Removals],
    settings: EditSettings,
    folder: Path,
    engine: Engine,
) -> TextEdits:
    """Removes duplicate spans, repeated substrings and benchmark texts from the documents that `removals` left.

    `folder` takes intermediate files; called again with the same arguments after a kill, it resumes from them."""
    document_files = kept_document_files(curated, removals)
    state = TextEdits(document_files, list(removals), [()] * len(document_files), None)
    for spans in settings.spans:
        state = _spans(state, spans, folder, engine)
    if settings.substrings is not None:
        state = _substrings(state, settings.substrings, folder, engine)
    if settings.decontaminate is not None:
        config = settings.decontaminate
        work = work_folder(folder, "decontaminate", state.document_files, config.model_dump(mode="json"))
        found = decontaminate(state.document_files, config, engine, work, settings.task_examples)
        state = replace(state, contamination=found).after_removal(
            _dropped(found), state.document_files, work / "removed"
        )
    return state


def _spans(state: TextEdits, config: SpanDedupConfig, folder: Path, engine: Engine) -> TextEdits:
    step = f"{config.unit}_dedup"
    work = work_folder(folder, step, state.document_files, config.model_dump(mode="json"))
    spans = find_duplicate_spans(state.document_files, config, engine, work / "spans")
    edited = edit_document_files(state.document_files, spans, SpanRemoval(f"{step}.min_count"), engine, work / "texts")
    return state.with_edits(edited).after_removal(_emptied(step, edited), edited.document_files, work / "removed")


def _substrings(state: TextEdits, config: SubstringDedupConfig, folder: Path, engine: Engine) -> TextEdits:
    step = "substring_dedup"
    work = work_folder(folder, step, state.document_files, config.model_dump(mode="json"))
    spans = repeated_substrings(state.document_files, config, engine, work / "spans")
    removal = SpanRemoval(f"{step}.{config.policy}", in_bytes=True, is_applied=config.policy == "remove")
    edited = edit_document_files(state.document_files, spans, removal, engine, work / "texts")
    state = state.with_edits(edited)
    if config.policy == "annotate":
        return state
    if config.policy == "remove":
        return state.after_removal(_emptied(step, edited), edited.document_files, work / "removed")
    chosen = edited.left.filter(pa.array(edited.left.column("share").to_numpy() > config.drop_share))
    removed = _removal_step(step, "drop_share", chosen, chosen.column("share").to_numpy(), config.drop_share)
    return state.after_removal(removed, edited.document_files, work / "removed")


def _emptied(step: str, edited: EditedFile) -> RemovalStep:
    """Removes the documents that hold only white space after the edit."""
    chosen = edited.left.filter(pa.array(edited.left.column("left").to_numpy() == 0))
    return _removal_step(step, "nothing_left", chosen, np.zeros(len(chosen)), 1)


def _removal_step(step: str, rule: str, documents: pa.Table, values: np.ndarray, threshold: float) -> RemovalStep:
    files, rows = (documents.column(name).to_numpy() for name in ("file", "row"))
    return RemovalStep(step, threshold, files, rows, values, rule_names=(rule,)).sorted()


def _dropped(found: Decontamination) -> RemovalStep:
    hits = found.located_hits.filter(pc.equal(found.located_hits.column("outcome"), "dropped"))
    rules = hits.column("rule").combine_chunks().dictionary_encode()
    files, rows, values, thresholds = (hits.column(name).to_numpy() for name in ("file", "row", "value", "threshold"))
    return RemovalStep(
        "decontaminate",
        1.0,
        files,
        rows,
        values,
        thresholds=thresholds,
        rules=rules.indices.to_numpy().astype(np.int8),
        rule_names=tuple(name.removeprefix("decontaminate.") for name in rules.dictionary.to_pylist()),
    ).sorted()

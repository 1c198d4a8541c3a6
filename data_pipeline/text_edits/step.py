"""The steps of curation that edit texts: duplicate paragraphs and lines, repeated substrings, benchmark texts.

Each step reads the texts that the step before wrote, and records every span that it removes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.decontamination.step import Decontamination, decontaminate
from gristmill.data_pipeline.dedup.spans import SpanDedupConfig, find_duplicate_spans
from gristmill.data_pipeline.dedup.step import work_folder
from gristmill.data_pipeline.dedup.substrings import SubstringDedupConfig, find_repeated_substrings
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.evidence import EvidenceFiles
from gristmill.data_pipeline.ledger.removal_step import Removals
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

    def after_removal(self, removed: Removals, document_files: Sequence[DocumentFile]) -> "TextEdits":
        """The edits after a step that removed documents."""
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
        state = replace(state, contamination=found).after_removal(found.removals, state.document_files)
    return state


def _spans(state: TextEdits, config: SpanDedupConfig, folder: Path, engine: Engine) -> TextEdits:
    step = f"{config.unit}_dedup"
    work = work_folder(folder, step, state.document_files, config.model_dump(mode="json"))
    spans = find_duplicate_spans(state.document_files, config, engine, work / "spans")
    removal = SpanRemoval(step, "min_count")
    edited = edit_document_files(state.document_files, spans, removal, engine, work / "texts")
    return state.with_edits(edited).after_removal(edited.removals, edited.document_files)


def _substrings(state: TextEdits, config: SubstringDedupConfig, folder: Path, engine: Engine) -> TextEdits:
    step, policy = "substring_dedup", config.policy
    work = work_folder(folder, step, state.document_files, config.model_dump(mode="json"))
    spans = find_repeated_substrings(state.document_files, config, engine, work / "spans")
    drop_share = config.drop_share if policy == "drop" else None
    removal = SpanRemoval(step, policy, in_bytes=True, is_applied=policy == "remove", drop_share=drop_share)
    edited = edit_document_files(state.document_files, spans, removal, engine, work / "texts")
    state = state.with_edits(edited)
    return state if policy == "annotate" else state.after_removal(edited.removals, edited.document_files)

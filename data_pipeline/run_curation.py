"""Curation from raw files to a corpus: annotate, filter, score, deduplicate, edit texts, annotate again, write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.annotate.annotate import (
    AnnotateConfig,
    AnnotateTask,
    annotate_all,
    annotation_tasks,
    batch_task,
    delete_other_annotations,
    text_identity,
)
from gristmill.data_pipeline.annotate.optional_signals import origin_fields
from gristmill.data_pipeline.annotate.tombstones import Tombstones, drop_documents, write_tombstones
from gristmill.data_pipeline.corpus.counts import (
    check_training_documents,
    count_files,
    count_source,
    rule_table,
    write_summary,
)
from gristmill.data_pipeline.corpus.merged_sketches import sketch_tasks, write_sketches
from gristmill.data_pipeline.corpus.shards import HELD_OUT_FOLDER, SourceToWrite
from gristmill.data_pipeline.corpus.small_sources import BatchToWrite, SourceGroup, group_sources, write_batch_ledgers
from gristmill.data_pipeline.corpus.splits import SPLITS, one_split, split_indices
from gristmill.data_pipeline.corpus.writer import (
    OUTPUT_CACHE,
    ReusedFiles,
    SourcesToWrite,
    write_corpus,
    write_examples,
)
from gristmill.data_pipeline.curate_config import (
    CurateConfig,
    check_filters,
    check_languages,
    optional_signals,
    rules_by_source,
    source_filters,
)
from gristmill.data_pipeline.decontamination.config import BenchmarkExample, missing_fields
from gristmill.data_pipeline.decontamination.decontaminate import all_examples, write_contamination
from gristmill.data_pipeline.dedup.exact import (
    EXACT_KEYS,
    ExactDedupConfig,
    KeptHashes,
    find_exact_duplicates,
    reassign_copies,
)
from gristmill.data_pipeline.dedup.near import (
    EarlierRuns,
    NearDedupConfig,
    Protected,
    find_near_duplicates,
    keep_signatures,
    protected_corpora,
)
from gristmill.data_pipeline.dedup.signature_cache import SIGNATURE_CACHE, SignatureCache
from gristmill.data_pipeline.dedup.signatures import STORE_FILE
from gristmill.data_pipeline.filters.apply import FILTER_RESULTS, FilterTask, apply_filters_to_files
from gristmill.data_pipeline.filters.presets import FilterChoice
from gristmill.data_pipeline.ledger.document_file import IDENTITY_FILE
from gristmill.data_pipeline.ledger.ledger import ledger_tasks, quarantined_rows, write_ledger, write_quarantine
from gristmill.data_pipeline.ledger.removal_step import (
    Removals,
    SourceState,
    StoredRemovals,
    kept_document_files,
    source_states,
    work_folder,
)
from gristmill.data_pipeline.quality.config import QUALITY_FOLDER
from gristmill.data_pipeline.quality.remove_by_quality import QualityFolders, score_quality
from gristmill.data_pipeline.quality.scores import write_model_reports
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.signals.language import model_digest
from gristmill.data_pipeline.text_edits.edit_texts import EditSettings, TextEdits, edit_texts, reannotate
from gristmill.foundation.checksums import drop_damaged, remove_checksums
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import DigestCache, remove_tree
from gristmill.foundation.lock import Lock
from gristmill.foundation.runtime.tasks.engine import Engine


@dataclass(frozen=True)
class CurationInputs:
    """folder: takes the corpus. cache: takes annotated files, where a removals run with other thresholds finds them.
    task_examples: the texts of the tasks that config.decontaminate names. tombstones: of documents to leave out.
    code_version: of the stage, for what earlier runs kept. digests: takes those of files that are taken over."""

    sources: Sequence[SourceConfig]
    config: CurateConfig
    seed: int
    lock: Lock
    folder: Path
    cache: Path
    engine: Engine
    task_examples: Sequence[BenchmarkExample] = ()
    tombstones: Tombstones | None = None
    code_version: int = 0
    digests: DigestCache = field(default_factory=DigestCache)

    @property
    def work(self) -> Path:
        """Intermediate files of deduplication and of the edits; removed at the end."""
        return self.cache / "dedup"


@dataclass(frozen=True)
class CurationState:
    """Results of the steps so far.

    groups: the sources, of which small ones are in batches. annotated: by group, its annotated files. sources: the
    same with the results of the filters. removals: the removals steps that removed documents. scores: by source, the
    file of the quality scores of each of its files. edits: the edited texts. final: the groups to write, with a new
    file in the place of each annotated one whose texts were edited."""

    groups: Sequence[SourceGroup]
    annotated: Sequence[list[AnnotateTask]]
    sources: Sequence[SourceState] = ()
    removals: Sequence[Removals] = ()
    scores: Mapping[str, Sequence[Path]] = field(default_factory=dict)
    edits: TextEdits | None = None
    final: Sequence[SourceState] = ()


def curate(inputs: CurationInputs) -> dict[str, Any]:
    """Writes documents, signals, ledger, quarantine and counts to `inputs.folder`; returns the counts.

    A run that was stopped resumes: complete shards and annotated files of the same config and lock are kept.
    Raises InputError for a source without files or documents, or one of which nothing is kept; for a benchmark that
    cannot be read and a protected corpus without its signatures, before any work starts."""
    protected = _check_inputs(inputs)
    state = _annotate(inputs)
    state = _filter(state, inputs)
    state = _score_quality(state, inputs)
    state = _deduplicate(state, inputs, protected)
    state = _edit_texts(state, inputs)
    state = _reannotate(state, inputs)
    return _write(state, inputs)


def _check_inputs(inputs: CurationInputs) -> list[Protected]:
    """Reports missing benchmark fields, deletes damaged cache files and opens the protected corpora."""
    config, reporter = inputs.config, inputs.engine.reporter
    if config.decontaminate is not None:
        for name, missing in missing_fields(all_examples(config.decontaminate, inputs.task_examples)).items():
            fields = ", ".join(f"{field!r} in {times}" for field, times in missing.items())
            reporter.info(f"decontaminate: {name}: fields are missing in some records: {fields}")
    protected = protected_corpora(config.near_dedup)
    drop_damaged(inputs.cache, reporter.info, without_checksum=(IDENTITY_FILE, STORE_FILE))
    return protected


def _annotate(inputs: CurationInputs) -> CurationState:
    groups = _groups(inputs.sources, inputs.config, inputs.lock)
    return CurationState(groups, _annotated_files(groups, inputs.cache, inputs.engine, inputs.tombstones))


def _filter(state: CurationState, inputs: CurationInputs) -> CurationState:
    rules = rules_by_source([group.source for group in state.groups], inputs.config)
    paths = [tuple(task.path for task in tasks) for tasks in state.annotated]
    filter_tasks = [
        FilterTask(path, rule, _split_of(group.source, inputs))
        for group, rule, of_group in zip(state.groups, rules, paths, strict=True)
        for path in of_group
    ]
    folder = inputs.cache / FILTER_RESULTS
    results = apply_filters_to_files(filter_tasks, inputs.engine, folder, inputs.code_version)
    first_files = [0, *accumulate(map(len, paths))][:-1]
    sources = [
        SourceState(
            group.source,
            rule,
            of_group,
            results[first : first + len(of_group)],
            first,
            group.sources if group.is_batch else (),
        )
        for group, rule, of_group, first in zip(state.groups, rules, paths, first_files, strict=True)
    ]
    return replace(state, sources=sources)


def _split_of(source: SourceConfig, inputs: CurationInputs) -> "partial[np.ndarray]":
    if source.held_out is not None:
        return partial(one_split, split=source.held_out)
    return partial(split_indices, config=inputs.config.splits, seed=inputs.seed)


def _score_quality(state: CurationState, inputs: CurationInputs) -> CurationState:
    config = inputs.config.quality
    if config is None:
        return state
    folders = QualityFolders(inputs.cache / "quality", inputs.folder / QUALITY_FOLDER, inputs.work / "quality")
    removed, scores = score_quality(state.sources, config, folders, inputs.engine)
    return replace(state, removals=[*state.removals, removed], scores=scores)


def _deduplicate(state: CurationState, inputs: CurationInputs, protected: Sequence[Protected]) -> CurationState:
    identities = {tasks[0].source.name: text_identity(tasks[0]) for tasks in state.annotated if tasks}
    earlier = EarlierRuns(inputs.cache, identities, inputs.code_version)
    settings = DedupSettings(inputs.config.exact_dedup, inputs.config.near_dedup, protected, earlier)
    removals = deduplicate(state.sources, state.removals, settings, inputs.work, inputs.engine)
    return replace(state, removals=removals)


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
    earlier = settings.earlier
    kept = None if earlier is None else KeptHashes(earlier.cache / EXACT_KEYS, earlier.code_version)
    if settings.exact is None and kept is not None:
        kept.prune(())
    if settings.exact is not None:
        document_files = kept_document_files(curated, removals)
        work = work_folder(folder, "exact", document_files, settings.exact.model_dump(mode="json"))
        exact = find_exact_duplicates(document_files, settings.exact, engine, work, kept)
    if settings.near is not None:
        before = removals if exact is None else [*removals, StoredRemovals("exact_dedup", 1.0, exact)]
        document_files = kept_document_files(curated, before)
        work = work_folder(folder, "near", document_files, settings.near.identity)
        near = find_near_duplicates(document_files, settings.near, engine, work, settings.protected, earlier)
        if exact is not None:
            exact, near = reassign_copies(exact, near, work / "reassigned", engine)
    steps = [] if exact is None else [StoredRemovals("exact_dedup", 1.0, exact)]
    if near is not None and settings.near is not None:
        steps.append(StoredRemovals("near_dedup", settings.near.threshold, near))
    return [*removals, *steps]


def _edit_texts(state: CurationState, inputs: CurationInputs) -> CurationState:
    config = inputs.config
    settings = EditSettings(config.span_dedup, config.substring_dedup, config.decontaminate, inputs.task_examples)
    edits = edit_texts(state.sources, state.removals, settings, inputs.work, inputs.engine)
    return replace(state, edits=edits, removals=edits.removals)


def _reannotate(state: CurationState, inputs: CurationInputs) -> CurationState:
    assert state.edits is not None
    configs = [group.config for group in state.groups]
    final, scores = reannotate(state.sources, state.edits, state.scores, configs, inputs.work, inputs.engine)
    return replace(state, final=final, scores=scores)


def _write(state: CurationState, inputs: CurationInputs) -> dict[str, Any]:
    """Counts are written last. Of a source of which nothing is kept, the ledger is written, which explains it. Returns
    the counts."""
    config, folder, engine = inputs.config, inputs.folder, inputs.engine
    assert state.edits is not None
    alone = [of_group for of_group in state.sources if not of_group.batch]
    ledgers = ledger_tasks(alone, state.removals, state.edits.evidence(), folder, SPLITS, engine)
    batches = _batches_to_write(state, inputs)
    read = source_states(state.sources, [source.name for source in inputs.sources])
    summary = {"sources": _counts(state, read, inputs), "rules": rule_table(read)}
    try:
        check_training_documents(read, summary, folder, engine.reporter.info)
    except InputError:
        engine.map(write_ledger, ledgers, "write ledger", unit="files")
        engine.map(write_batch_ledgers, batches, "write ledger", unit="batches")
        raise
    reused = ReusedFiles(inputs.cache / OUTPUT_CACHE, inputs.code_version, folder, inputs.digests)
    sources = _sources_to_write(state, inputs)
    corpus = SourcesToWrite(sources, config.shard_bytes, config.pii, batches)
    keys, of_batches = write_corpus(corpus, ledgers, folder, engine, reused)
    remove_tree(folder / HELD_OUT_FOLDER)
    write_quarantine(read, folder)
    write_examples(read, state.removals, folder, engine)
    if state.edits.contamination is not None:
        write_contamination(state.edits.contamination, folder)
    write_model_reports(config.quality_scores, folder / QUALITY_FOLDER)
    if config.near_dedup is not None and config.near_dedup.keep_signatures:
        keep_signatures(folder, config.near_dedup.scheme, engine)
    tables = sketch_tasks(folder, ledgers, config.pii, of_batches)
    keys += write_sketches(tables, folder, inputs.work / "sketches", engine, reused)
    if inputs.tombstones is not None:
        write_tombstones(folder, inputs.tombstones)
    write_summary(summary, folder)
    delete_other_annotations(inputs.cache, state.annotated)
    _delete_other_signatures(inputs, state.annotated)
    reused.prune(keys)
    remove_tree(inputs.work)
    remove_checksums(folder)
    return summary


def _sources_to_write(state: CurationState, inputs: CurationInputs) -> list[SourceToWrite]:
    return [
        SourceToWrite(of_source, group.config, state.scores.get(of_source.source.name))
        for of_source, group in zip(state.final, state.groups, strict=True)
        if not of_source.batch
    ]


def _batches_to_write(state: CurationState, inputs: CurationInputs) -> list[BatchToWrite]:
    assert state.edits is not None
    evidence, config = state.edits.evidence(), inputs.config
    return [
        BatchToWrite(
            read,
            written,
            group.config,
            tuple(state.removals),
            evidence[read.first_file],
            config.shard_bytes,
            config.pii,
            inputs.folder,
            inputs.work / "batches" / read.source.name,
        )
        for read, written, group in zip(state.sources, state.final, state.groups, strict=True)
        if read.batch
    ]


def _counts(state: CurationState, sources: Sequence[SourceState], inputs: CurationInputs) -> dict[str, Any]:
    """By source, its entry in counts.json."""
    assert state.edits is not None
    files = count_files(state.sources, state.final, state.removals, state.edits.evidence(), inputs.engine)
    counts = {}
    for read in sources:
        reasons = quarantined_rows(read, ["unreadable"])
        counts[read.source.name] = count_source(read, files[read.source.name], reasons)
    return counts


def _delete_other_signatures(inputs: CurationInputs, tasks: Sequence[Sequence[AnnotateTask]]) -> None:
    near, folder = inputs.config.near_dedup, inputs.cache / SIGNATURE_CACHE
    if near is None:
        remove_tree(folder)
    else:
        SignatureCache.of(folder, near.scheme).prune({task.path.stem for group in tasks for task in group})


def annotated(
    sources: Sequence[SourceConfig],
    config: CurateConfig,
    lock: Lock,
    cache: Path,
    engine: Engine,
    tombstones: Tombstones | None = None,
) -> list[tuple[str, list[FilterTask]]]:
    """By source, its annotated files with its rules, for a threshold sweep. Annotates what the cache does not hold."""
    groups = _groups(sources, config, lock)
    tasks = _annotated_files(groups, cache, engine, tombstones)
    rules = rules_by_source([group.source for group in groups], config)
    by_name = {
        name: [FilterTask(task.path, of_group, source=name if group.is_batch else "") for task in files]
        for group, files, of_group in zip(groups, tasks, rules, strict=True)
        for name in group.names
    }
    return [(source.name, by_name[source.name]) for source in sources]


def _groups(sources: Sequence[SourceConfig], config: CurateConfig, lock: Lock) -> list[SourceGroup]:
    """The sources in groups; of small ones that all steps treat alike, batches. There are none where a step looks at
    each source by itself."""
    scopes = [step.scope for step in (config.exact_dedup, config.near_dedup, *config.span_dedup) if step is not None]
    by_settings: dict[str, AnnotateConfig] = {}
    settings = [
        repr((source.filters, source.languages, source.keep_page_kinds, origin_fields(source))) for source in sources
    ]
    for source, of_source in zip(sources, settings, strict=True):
        if of_source not in by_settings:
            by_settings[of_source] = annotate_config(source, config)
    configs = [by_settings[of_source] for of_source in settings]
    may_batch = (
        config.quality is None
        and "source" not in scopes
        and not any(source_config.optional.own for source_config in configs)
    )
    kinds = [
        f"{source.priority} {source.held_out} {of_source}" for source, of_source in zip(sources, settings, strict=True)
    ]
    locked = [lock.source(source.name) for source in sources]
    return group_sources(sources, locked, configs, kinds, may_batch)


def _annotated_files(
    groups: Sequence[SourceGroup], cache: Path, engine: Engine, tombstones: Tombstones | None
) -> list[list[AnnotateTask]]:
    """By group, the tasks of its annotated files, which are all in the cache afterwards, without documents that have a
    tombstone."""
    folder = cache / "annotated"
    alone = [(group.source, group.locked[0], group.config) for group in groups if not group.is_batch]
    tasks_of_alone = iter(annotation_tasks(alone, folder, engine))
    tasks = [
        [batch_task(group.source, group.members, group.config, folder)] if group.is_batch else next(tasks_of_alone)
        for group in groups
    ]
    every_task = [task for group in tasks for task in group]
    annotate_all(every_task, engine)
    drop_documents(every_task, tombstones, engine)
    return tasks


def annotate_config(source: SourceConfig, config: CurateConfig) -> AnnotateConfig:
    """How the source is annotated. Of the filters that edit, only the line options count: a new threshold of such a
    filter needs no new annotation.

    Raises RecipeError for a filter on a signal that the recipe does not measure."""
    check_filters(source_filters(source, config), config)
    check_languages(config.languages, config)
    check_languages(source.languages or (), config, f"source {source.name}: languages")
    edits = [
        FilterChoice(preset=choice.preset, thresholds=options)
        for choice in source_filters(source, config)
        if (options := choice.line_options()) is not None
    ]
    return AnnotateConfig(
        normalize=config.normalize,
        word_tokenizer=config.word_tokenizer,
        language_id=config.language_id,
        language_model=None if config.language_id is None else model_digest(config.language_id.model),
        edits=tuple(edits),
        optional=optional_signals(
            config, source_filters(source, config), source.keep_page_kinds, origin_fields(source)
        ),
    )

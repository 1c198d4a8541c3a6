"""Curation from raw files to a corpus: read, annotate, decide, deduplicate, cut, split, write."""

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig, AnnotateTask, annotate_all, annotation_tasks
from gristmill.data_pipeline.corpus.counts import check_not_empty, count
from gristmill.data_pipeline.corpus.splits import SPLITS, split_indices
from gristmill.data_pipeline.corpus.writer import (
    unreadable,
    write_contamination,
    write_examples,
    write_ledgers,
    write_quarantine,
    write_shards,
)
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.decontamination.benchmark import Example, missing_fields
from gristmill.data_pipeline.decontamination.step import all_examples
from gristmill.data_pipeline.dedup.arrays import MARK_NAME
from gristmill.data_pipeline.dedup.protected import keep_signatures, protected_corpora
from gristmill.data_pipeline.dedup.signatures import STORE_FILE
from gristmill.data_pipeline.dedup.step import deduplicate
from gristmill.data_pipeline.filters.apply import FilterTask, Rules, apply_filters_to_files, rules_of
from gristmill.data_pipeline.filters.choice import FilterChoice
from gristmill.data_pipeline.filters.pii import pii_rules
from gristmill.data_pipeline.filters.profiles import load_profiles
from gristmill.data_pipeline.ledger.ledger import Evidence, RemovalStep
from gristmill.data_pipeline.ledger.source_state import SourceState
from gristmill.data_pipeline.quality.step import score_quality
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.recipe_signals import (
    check_filters,
    check_languages,
    optional_signals,
    unmeasured,
    used_profiles,
)
from gristmill.data_pipeline.signals.language_model import model_digest
from gristmill.data_pipeline.text_edits.reannotate import reannotate
from gristmill.data_pipeline.text_edits.step import edit_texts
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.checksum_files import drop_damaged, remove_seals, seal_of
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.lock import Lock

COUNTS_NAME = "counts.json"


def curate(
    sources: Sequence[SourceConfig],
    config: CurateConfig,
    seed: int,
    lock: Lock,
    folder: Path,
    cache: Path,
    engine: LocalEngine,
    task_examples: Sequence[Example] = (),
) -> dict[str, Any]:
    """Fills `folder` with documents, signals, ledger, quarantine and counts; returns the counts.

    Annotated files go to `cache`, where a later run with other thresholds finds them. Shards that stand in `folder`
    already, from a run of the same config and lock that was stopped, are kept where they are as they were written, and
    so are files of the cache. task_examples: the texts of the tasks that config.decontaminate names.
    Raises InputError for a source without files or documents, or one that the rules leave empty; for a benchmark
    that cannot be read and a protected corpus without its signatures, before any work starts."""
    if config.decontaminate is not None:
        for name, missing in missing_fields(all_examples(config.decontaminate, task_examples)).items():
            said = ", ".join(f"{field!r} in {times}" for field, times in missing.items())
            engine.reporter.say(f"decontaminate: {name}: fields are missing in some records: {said}")
    protected = protected_corpora(config.near_dedup)
    drop_damaged(cache, engine.reporter.say, unsealed=(MARK_NAME, STORE_FILE))
    annotated_folder = cache / "annotated"
    tasks = [
        annotation_tasks(s, lock.source(s.name), annotate_config(s, config), annotated_folder, engine) for s in sources
    ]
    annotate_all([task for group in tasks for task in group], engine)
    curated = _decide(sources, config, tasks, engine)
    later: list[RemovalStep] = []
    scores: dict[Path, Path] = {}
    if config.quality is not None:
        step, scores = score_quality(curated, config.quality, cache / "quality", folder / "quality", engine)
        later.append(step)
    later = deduplicate(curated, later, config, protected, cache / "dedup", engine)
    rewriting = edit_texts(curated, later, config, task_examples, cache / "dedup", engine)
    edits = [annotate_config(source, config) for source in sources]
    final, scores = reannotate(curated, rewriting, scores, edits, cache / "dedup", engine)
    evidence = rewriting.evidence()
    counts = _counts(curated, final, rewriting.later, evidence, config, seed)
    read_splits = [_splits(one, rewriting.later, config, seed) for one in curated]
    write_ledgers(curated, read_splits, rewriting.later, evidence, folder, engine)
    summary = {"sources": counts, "rules": _rule_table(curated)}
    _check_not_empty(curated, summary, folder)
    splits = [_splits(one, rewriting.later, config, seed) for one in final]
    write_shards(final, splits, edits, scores, config, folder, engine)
    write_quarantine(curated, folder)
    write_examples(curated, rewriting.later, folder)
    if rewriting.contamination is not None:
        write_contamination(rewriting.contamination, folder)
    if config.near_dedup is not None and config.near_dedup.keep_signatures:
        keep_signatures(folder, config.near_dedup.scheme, engine)
    write_atomic(folder / COUNTS_NAME, canonical_json(summary) + b"\n")
    _forget_others(cache / "annotated", tasks)
    shutil.rmtree(cache / "dedup", ignore_errors=True)
    remove_seals(folder)
    return summary


def annotated(
    sources: Sequence[SourceConfig], config: CurateConfig, lock: Lock, cache: Path, engine: LocalEngine
) -> list[tuple[str, list[FilterTask]]]:
    """By source, its annotated files with its rules, for a sweep. What is not in the cache is annotated."""
    annotated_folder = cache / "annotated"
    tasks = [
        annotation_tasks(s, lock.source(s.name), annotate_config(s, config), annotated_folder, engine) for s in sources
    ]
    annotate_all([task for group in tasks for task in group], engine)
    return [
        (source.name, [FilterTask(task.path, source_rules(source, config)) for task in group])
        for source, group in zip(sources, tasks, strict=True)
    ]


def annotate_config(source: SourceConfig, config: CurateConfig) -> AnnotateConfig:
    """Of the edits, the line options alone count: another threshold of a filter that edits measures nothing anew.

    Raises RecipeError for a filter that looks at what the recipe does not have measured."""
    check_filters(source_filters(source, config), config)
    check_languages(config)
    edits = [
        FilterChoice(preset=choice.preset, thresholds=options)
        for choice in source_filters(source, config)
        if (options := choice.line_options()) is not None
    ]
    return AnnotateConfig(
        normalize=config.normalize,
        words=config.words,
        language_id=config.language_id,
        language_model=None if config.language_id is None else model_digest(config.language_id.model),
        edits=tuple(edits),
        optional=optional_signals(config),
    )


def source_filters(source: SourceConfig, config: CurateConfig) -> tuple[FilterChoice, ...]:
    """The source's own filters if it has any, else the recipe's."""
    return config.filters if source.filters is None else source.filters


def source_rules(source: SourceConfig, config: CurateConfig) -> Rules:
    filters = source_filters(source, config)
    wanted = used_profiles(config)
    profiles = None if wanted is None else load_profiles(wanted)
    missing, last = unmeasured(config), pii_rules(config.pii)
    return rules_of(filters, config.languages, config.language_id, missing, last, profiles)


def _decide(
    sources: Sequence[SourceConfig], config: CurateConfig, tasks: Sequence[list[AnnotateTask]], engine: LocalEngine
) -> list[SourceState]:
    rules = [source_rules(source, config) for source in sources]
    paths = [[task.path for task in group] for group in tasks]
    flat = [FilterTask(path, rule) for rule, group in zip(rules, paths, strict=True) for path in group]
    verdicts = iter(apply_filters_to_files(flat, engine))
    return [
        SourceState(source, rule, tuple(group), tuple(next(verdicts) for _ in group))
        for source, rule, group in zip(sources, rules, paths, strict=True)
    ]


def _splits(one: SourceState, later: Sequence[RemovalStep], config: CurateConfig, seed: int) -> np.ndarray:
    """U10[rows]: the split of every kept document, "" for the others."""
    names = np.array(SPLITS)[split_indices(one.hashes, config.splits, seed)]
    return np.where(one.living(later), names, "")


def _counts(
    curated: Sequence[SourceState],
    final: Sequence[SourceState],
    later: Sequence[RemovalStep],
    evidence: Evidence,
    config: CurateConfig,
    seed: int,
) -> dict[str, Any]:
    """By source."""
    found = {}
    for read, written in zip(curated, final, strict=True):
        reasons = list(unreadable(read, ["unreadable", "reason"]))
        name = read.source.name
        found[name] = count(read, written, _splits(written, later, config, seed), later, evidence, reasons)
    return found


def _check_not_empty(curated: Sequence[SourceState], summary: dict[str, Any], folder: Path) -> None:
    """Raises InputError if a source is left with nothing to train on. The ledger, which must stand by then, is left
    with counts and quarantine beside it, so that `gristmill why` can show what took each document."""
    for one in curated:
        reason = next((row["reason"] for row in unreadable(one, ["unreadable", "reason"])), "")
        try:
            check_not_empty(one.source.name, summary["sources"][one.source.name], reason)
        except InputError as error:
            write_quarantine(curated, folder)
            write_atomic(folder / COUNTS_NAME, canonical_json(summary) + b"\n")
            raise InputError(
                f"{error}. What took each document stands in {folder / 'ledger'}; `gristmill why DOC_ID --corpus "
                f"{folder}` tells of one"
            ) from error


def _rule_table(curated: Sequence[SourceState]) -> dict[str, Any]:
    """By source: each rule with its signal, side, threshold and where the number is from."""
    return {
        one.source.name: [
            {
                "rule": r.label,
                "signal": r.signal,
                "keep": r.keep,
                "threshold": float(r.threshold),
                "source": r.source,
                "profiles": _by_profile(one, place),
            }
            for place, r in enumerate(one.rules.rules)
        ]
        for one in curated
    }


def _by_profile(one: SourceState, place: int) -> dict[str, float | None]:
    """The rule's threshold in each language profile that the source's documents have, null where it is off."""
    wanted = [key for key in np.unique(one.languages).tolist() if key in one.rules.by_profile]
    numbers = {key: one.rules.by_profile[key][place] for key in wanted}
    return {key: None if np.isnan(number) else float(number) for key, number in numbers.items()}


def _forget_others(folder: Path, tasks: Sequence[Sequence[AnnotateTask]]) -> None:
    """Annotated files of earlier settings or raw files go; the next run of this recipe needs only these."""
    wanted = {path for group in tasks for task in group for path in (task.path, seal_of(task.path))}
    for path in folder.iterdir():
        if path not in wanted:
            path.unlink()


def counted(summary: Mapping[str, Any]) -> dict[str, int]:
    """Documents read, kept, removed and quarantined over all sources, for one line to the user."""
    found = Counter[str]()
    for entry in summary["sources"].values():
        found["read"] += entry["read"]["documents"]
        for fate in ("kept", "removed", "quarantined"):
            found[fate] += sum(held["documents"] for held in entry[fate].values())
    return dict(found)

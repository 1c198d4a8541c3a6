"""Curation from raw files to a corpus: read, annotate, decide, deduplicate, split, write."""

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate import AnnotateConfig, AnnotateTask, annotate_all, annotation_tasks
from gristmill.data_pipeline.corpus import ShardTask, write_shard
from gristmill.data_pipeline.counts import Tally, check_not_empty, source_counts
from gristmill.data_pipeline.curate import CurateConfig
from gristmill.data_pipeline.decide import KEPT, QUARANTINED, DecideTask, Rules, Verdicts, decide_all, rules_of
from gristmill.data_pipeline.dedup.copies import copies_follow
from gristmill.data_pipeline.dedup.exact import DUPLICATES, exact_duplicates
from gristmill.data_pipeline.dedup.near import near_duplicates
from gristmill.data_pipeline.dedup.part import Part
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.examples import duplicate_examples, rule_examples
from gristmill.data_pipeline.filters.choice import FilterChoice
from gristmill.data_pipeline.judge import judge
from gristmill.data_pipeline.ledger import LEDGER_ROWS, LaterStep, LedgerTask, write_ledger
from gristmill.data_pipeline.measured import check_filters, optional_signals, unmeasured
from gristmill.data_pipeline.pii import pii_rules
from gristmill.data_pipeline.provenance.canonical import canonical_json, fingerprint
from gristmill.data_pipeline.provenance.files import write_atomic
from gristmill.data_pipeline.provenance.lock import Lock
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.slices import Slice, cut_by_weight
from gristmill.data_pipeline.splits import SPLITS, split_indices

QUARANTINE_NAME = "quarantine.jsonl"
COUNTS_NAME = "counts.json"
EXAMPLES_NAME = "examples.jsonl"


@dataclass(frozen=True)
class CuratedSource:
    """A source on its way: its annotated files in canonical order, and the verdict on each of their rows."""

    source: SourceConfig
    rules: Rules
    paths: tuple[Path, ...]
    verdicts: tuple[Verdicts, ...]

    @property
    def doc_ids(self) -> np.ndarray:
        return np.concatenate([v.doc_ids for v in self.verdicts]) if self.verdicts else np.array([], "S32")

    @property
    def taken_by(self) -> np.ndarray:
        return np.concatenate([v.taken_by for v in self.verdicts]) if self.verdicts else np.array([], np.int16)

    @property
    def bytes(self) -> np.ndarray:
        return np.concatenate([v.bytes for v in self.verdicts]) if self.verdicts else np.array([], np.int64)

    @property
    def hashes(self) -> np.ndarray:
        return np.concatenate([v.hashes for v in self.verdicts]) if self.verdicts else np.array([], np.uint64)

    @property
    def kept(self) -> np.ndarray:
        """bool[rows]: what the filters kept."""
        return self.taken_by == KEPT

    def slices(self, rows: np.ndarray) -> tuple[Slice, ...]:
        """The annotated rows behind these row numbers of the source (rising)."""
        starts = np.cumsum([0, *(len(v.taken_by) for v in self.verdicts)])
        cuts = []
        for path, start, end in zip(self.paths, starts[:-1], starts[1:], strict=True):
            first, last = np.searchsorted(rows, [start, end])
            if last > first:
                cuts.append(Slice(path, rows[first:last] - start))
        return tuple(cuts)


def curate(
    sources: Sequence[SourceConfig],
    config: CurateConfig,
    seed: int,
    lock: Lock,
    folder: Path,
    cache: Path,
    engine: LocalEngine,
) -> dict[str, Any]:
    """Fills `folder` with documents, signals, ledger, quarantine and counts; returns the counts.

    Annotated files go to `cache`, where a later run with other thresholds finds them. Shards that stand in `folder`
    already, from a run of the same config and lock that was stopped, are kept.
    Raises InputError for a source without files or documents, or one that the rules leave empty."""
    tasks = [annotation_tasks(s, lock.source(s.name), annotate_config(s, config), cache / "annotated") for s in sources]
    annotate_all([task for group in tasks for task in group], engine)
    curated = _decide(sources, config, tasks, engine)
    later: list[LaterStep] = []
    scores: dict[Path, Path] = {}
    if config.quality is not None:
        step, scores = judge(curated, config.quality, cache / "quality", folder / "quality", engine)
        later.append(step)
    later = _deduplicate(curated, later, config, cache / "dedup", engine)
    splits = [_splits(one, later, config, seed) for one in curated]
    counts = {one.source.name: _count(one, later, split) for one, split in zip(curated, splits, strict=True)}
    for one in curated:
        reason = next((row["reason"] for row in _unreadable(one, ["reason"])), "")
        check_not_empty(one.source.name, counts[one.source.name], reason)
    _write_shards(curated, splits, scores, config, folder, engine)
    _write_ledgers(curated, splits, later, folder, engine)
    _write_quarantine(curated, folder)
    _write_examples(curated, later, folder)
    summary = {"sources": counts, "rules": _rule_table(curated)}
    write_atomic(folder / COUNTS_NAME, canonical_json(summary) + b"\n")
    _forget_others(cache / "annotated", tasks)
    shutil.rmtree(cache / "dedup", ignore_errors=True)
    return summary


def annotated(
    sources: Sequence[SourceConfig], config: CurateConfig, lock: Lock, cache: Path, engine: LocalEngine
) -> list[tuple[str, list[DecideTask]]]:
    """By source, its annotated files with its rules, for a sweep. What is not in the cache is annotated."""
    tasks = [annotation_tasks(s, lock.source(s.name), annotate_config(s, config), cache / "annotated") for s in sources]
    annotate_all([task for group in tasks for task in group], engine)
    return [
        (source.name, [DecideTask(task.path, source_rules(source, config)) for task in group])
        for source, group in zip(sources, tasks, strict=True)
    ]


def annotate_config(source: SourceConfig, config: CurateConfig) -> AnnotateConfig:
    """Of the edits, the line options alone count: another threshold of a filter that edits measures nothing anew."""
    check_filters(source_filters(source, config), config)
    edits = [
        FilterChoice(preset=choice.preset, thresholds=options)
        for choice in source_filters(source, config)
        if (options := choice.line_options()) is not None
    ]
    return AnnotateConfig(
        normalize=config.normalize,
        words=config.words,
        language_id=config.language_id,
        edits=tuple(edits),
        optional=optional_signals(config),
    )


def source_filters(source: SourceConfig, config: CurateConfig) -> tuple[FilterChoice, ...]:
    """The source's own filters if it has any, else the recipe's."""
    return config.filters if source.filters is None else source.filters


def source_rules(source: SourceConfig, config: CurateConfig) -> Rules:
    filters = source_filters(source, config)
    return rules_of(filters, config.languages, config.language_id, unmeasured(config), pii_rules(config.pii))


def _decide(
    sources: Sequence[SourceConfig], config: CurateConfig, tasks: Sequence[list[AnnotateTask]], engine: LocalEngine
) -> list[CuratedSource]:
    rules = [source_rules(source, config) for source in sources]
    paths = [[task.path for task in group] for group in tasks]
    flat = [DecideTask(path, rule) for rule, group in zip(rules, paths, strict=True) for path in group]
    verdicts = iter(decide_all(flat, engine))
    return [
        CuratedSource(source, rule, tuple(group), tuple(next(verdicts) for _ in group))
        for source, rule, group in zip(sources, rules, paths, strict=True)
    ]


def _deduplicate(
    curated: Sequence[CuratedSource],
    later: Sequence[LaterStep],
    config: CurateConfig,
    folder: Path,
    engine: LocalEngine,
) -> list[LaterStep]:
    """Exact, then near duplicates among what the filters kept; what the first took the second does not see.

    Either way the document that is named as the other is one that is kept."""
    exact, near = DUPLICATES.empty_table(), DUPLICATES.empty_table()
    steps: list[LaterStep] = []
    if config.exact_dedup is not None:
        parts = _living_parts(curated, later)
        exact = exact_duplicates(parts, config.exact_dedup, engine, _work(folder, "exact", parts, config.exact_dedup))
        steps.append(LaterStep.from_table("exact_dedup", 1.0, exact))
    if config.near_dedup is not None:
        parts = _living_parts(curated, [*later, *steps])
        near = near_duplicates(parts, config.near_dedup, engine, _work(folder, "near", parts, config.near_dedup))
        exact, near = copies_follow(exact, near)
        steps = [LaterStep.from_table("exact_dedup", 1.0, exact)] if config.exact_dedup is not None else []
        steps.append(LaterStep.from_table("near_dedup", config.near_dedup.threshold, near))
    return [*later, *steps]


def _work(folder: Path, step: str, parts: Sequence[Part], config: Any) -> Path:
    """A folder for the step's intermediate files, named by what they are made from."""
    alive = [[p.path.name, np.packbits(p.alive).tobytes().hex() if p.alive is not None else ""] for p in parts]
    work = folder / f"{step}-{fingerprint([alive, config.model_dump(mode='json')])}"
    work.mkdir(parents=True, exist_ok=True)
    return work


def _living_parts(curated: Sequence[CuratedSource], later: Sequence[LaterStep]) -> list[Part]:
    return [
        Part(path, one.source.name, one.source.priority, _living(verdict.taken_by, verdict.doc_ids, later))
        for one in curated
        for path, verdict in zip(one.paths, one.verdicts, strict=True)
    ]


def _living(taken_by: np.ndarray, doc_ids: np.ndarray, later: Sequence[LaterStep]) -> np.ndarray:
    alive = taken_by == KEPT
    for step in later:
        alive &= ~step.holds(doc_ids)
    return alive


def _splits(one: CuratedSource, later: Sequence[LaterStep], config: CurateConfig, seed: int) -> np.ndarray:
    """U10[rows]: the split of every kept document, "" for the others."""
    names = np.array(SPLITS)[split_indices(one.hashes, config.splits, seed)]
    return np.where(_living(one.taken_by, one.doc_ids, later), names, "")


def _count(one: CuratedSource, later: Sequence[LaterStep], splits: np.ndarray) -> dict[str, Any]:
    kept, removed, quarantined = Tally(), Tally(), Tally()
    taken_by, num_bytes, doc_ids = one.taken_by, one.bytes, one.doc_ids
    for split in SPLITS:
        kept.add_rows(split, splits == split, num_bytes)
    for index, rule in enumerate(one.rules.rules):
        removed.add_rows(rule.label, taken_by == index, num_bytes)
    for step in later:
        removed.add_rows(step.step, (taken_by == KEPT) & step.holds(doc_ids), num_bytes)
    for row in _unreadable(one, ["unreadable"]):
        quarantined.add(row["unreadable"], 1, 0)
    read = {"documents": len(taken_by), "bytes": int(num_bytes.sum())}
    return source_counts(read, kept, removed, quarantined) | {"changed": _changes(one)}


def _changes(one: CuratedSource) -> dict[str, int]:
    """How many documents each repair of the text changed."""
    found: Counter[str] = Counter()
    for path in one.paths:
        changes = pq.read_table(path, columns=["changes"]).column("changes")
        for entry in pc.value_counts(pc.list_flatten(changes)).to_pylist():
            found[entry["values"]] += entry["counts"]
    return dict(sorted(found.items()))


def _write_shards(
    curated: Sequence[CuratedSource],
    splits: Sequence[np.ndarray],
    scores: Mapping[Path, Path],
    config: CurateConfig,
    folder: Path,
    engine: LocalEngine,
) -> None:
    tasks = []
    for one, split_of in zip(curated, splits, strict=True):
        edits = tuple(edit.preset for edit in annotate_config(one.source, config).edits)
        is_judged = config.quality is not None and one.source.name in config.quality.judged
        for split in SPLITS:
            rows = np.flatnonzero(split_of == split)
            for number, (start, end) in enumerate(cut_by_weight(one.bytes[rows], config.shard_bytes)):
                name = f"{one.source.name}-{number:05}.parquet"
                slices = one.slices(rows[start:end])
                judged = tuple(scores[cut.path] for cut in slices) if is_judged else None
                tasks.append(
                    ShardTask(
                        folder,
                        split,
                        name,
                        one.source.name,
                        slices,
                        edits,
                        config.pii,
                        judged,
                        optional_signals(config),
                    )
                )
    engine.map(write_shard, tasks, "write corpus", unit="shards")


def _write_ledgers(
    curated: Sequence[CuratedSource],
    splits: Sequence[np.ndarray],
    later: Sequence[LaterStep],
    folder: Path,
    engine: LocalEngine,
) -> None:
    tasks = []
    for one, split_of in zip(curated, splits, strict=True):
        taken_by, doc_ids = one.taken_by, one.doc_ids
        for number, start in enumerate(range(0, max(len(taken_by), 1), LEDGER_ROWS)):
            rows = np.arange(start, min(start + LEDGER_ROWS, len(taken_by)))
            slices = one.slices(rows)
            ends = np.cumsum([len(cut.rows) for cut in slices])[:-1] + start
            tasks.append(
                LedgerTask(
                    path=folder / "ledger" / f"{one.source.name}-{number:05}.parquet",
                    source=one.source.name,
                    rules=one.rules,
                    slices=slices,
                    taken_by=tuple(np.split(taken_by[rows], ends - start)),
                    splits=tuple(np.split(split_of[rows], ends - start)),
                    later=tuple(step.of(doc_ids[rows]) for step in later),
                )
            )
    engine.map(write_ledger, tasks, "write ledger", unit="shards")


def _write_quarantine(curated: Sequence[CuratedSource], folder: Path) -> None:
    """One JSON line a record that could not be read. Files are named by digest; the lock has their names."""
    columns = ["doc_id", "raw_digest", "record", "offset", "unreadable", "reason", "excerpt"]
    lines = [
        orjson.dumps({"source": one.source.name, **row}) + b"\n" for one in curated for row in _unreadable(one, columns)
    ]
    write_atomic(folder / QUARANTINE_NAME, b"".join(lines))


def _unreadable(one: CuratedSource, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The source's records that could not be read."""
    for path, verdict in zip(one.paths, one.verdicts, strict=True):
        if (verdict.taken_by == QUARANTINED).any():
            yield from pq.read_table(path, columns=list(columns), filters=pc.field("unreadable").is_valid()).to_pylist()


def _write_examples(curated: Sequence[CuratedSource], later: Sequence[LaterStep], folder: Path) -> None:
    lines = []
    for one in curated:
        slices = one.slices(np.arange(len(one.taken_by)))
        found = [*rule_examples(one.source.name, slices, one.rules, one.taken_by)]
        for step in later:
            found += duplicate_examples(one.source.name, slices, one.doc_ids, step)
        lines += [orjson.dumps(example) + b"\n" for example in found]
    write_atomic(folder / EXAMPLES_NAME, b"".join(lines))


def _rule_table(curated: Sequence[CuratedSource]) -> dict[str, Any]:
    """By source: each rule with its signal, side, threshold and where the number is from."""
    return {
        one.source.name: [
            {"rule": r.label, "signal": r.signal, "keep": r.keep, "threshold": float(r.threshold), "source": r.source}
            for r in one.rules.rules
        ]
        for one in curated
    }


def _forget_others(folder: Path, tasks: Sequence[Sequence[AnnotateTask]]) -> None:
    """Annotated files of earlier settings or raw files go; the next run of this recipe needs only these."""
    wanted = {task.path for group in tasks for task in group}
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

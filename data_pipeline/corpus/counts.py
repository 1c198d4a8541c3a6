"""Document and byte counts of a source, checked: read = kept + removed by each rule + quarantined."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.dedup.folding import document_ids
from gristmill.data_pipeline.filters.apply import KEPT, QUARANTINED, FilterResults, Results, SourceRows
from gristmill.data_pipeline.ledger.document_file import unpacked_ids
from gristmill.data_pipeline.ledger.ledger import quarantined_rows, write_quarantine
from gristmill.data_pipeline.ledger.removal_step import (
    Evidence,
    EvidenceFiles,
    Removals,
    SourceState,
    read_evidence,
    rows_by_document,
)
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.progress import amount
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence, joined

ANNOTATIONS = (".annotate", ".drop")  # rules that only record their spans


class DocumentCounts:
    """Documents and bytes by name, in the order in which the names were added."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}

    def add(self, name: str, documents: int, num_bytes: int) -> None:
        entry = self.counts.setdefault(name, {"documents": 0, "bytes": 0})
        entry["documents"] += int(documents)
        entry["bytes"] += int(num_bytes)

    def add_rows(self, name: str, chosen_N: np.ndarray, bytes_N: np.ndarray) -> None:
        if chosen_N.any():
            self.add(name, chosen_N.sum(), bytes_N[chosen_N].sum(dtype=np.int64))

    def update(self, other: "DocumentCounts") -> None:
        for name, entry in other.counts.items():
            self.add(name, entry["documents"], entry["bytes"])

    def total(self) -> dict[str, int]:
        return {unit: sum(entry[unit] for entry in self.counts.values()) for unit in ("documents", "bytes")}


@dataclass
class FileCounts:
    """Counts of annotated files. num_bytes: of all their documents. kept: by split; removed: by rule or step.
    languages: by language profile (detected language, where none are used), int64[1 + rules]: documents that no rule of
    the filters removed, and removed by each. changes: repair -> documents it changed. removed_spans: step -> documents,
    spans and bytes. pieces: documents added by splitting. The last two are of kept documents alone."""

    num_bytes: int = 0
    kept: DocumentCounts = field(default_factory=DocumentCounts)
    removed: DocumentCounts = field(default_factory=DocumentCounts)
    languages: dict[str, np.ndarray] = field(default_factory=dict)
    changes: Counter[str] = field(default_factory=Counter)
    removed_spans: dict[str, Counter[str]] = field(default_factory=dict)
    pieces: int = 0

    def update(self, other: "FileCounts") -> None:
        """Add those of other files."""
        self.num_bytes += other.num_bytes
        self.kept.update(other.kept)
        self.removed.update(other.removed)
        for name, counts in other.languages.items():
            self.languages[name] = self.languages.get(name, 0) + counts
        self.changes.update(other.changes)
        for step, spans in other.removed_spans.items():
            self.removed_spans.setdefault(step, Counter()).update(spans)
        self.pieces += other.pieces


@dataclass(frozen=True)
class CountTask:
    """path: of the annotated file with the number `file` among those of all sources. read: its results. written: those
    of the file in its place, whose KEPT rows are written. rules: the labels of the filters' rules. sources: of a
    batch, whose documents are counted by source; empty for one source."""

    path: Path
    file: int
    read: Results
    written: Results
    rules: tuple[str, ...]
    removals: tuple[Removals, ...]
    evidence: EvidenceFiles
    sources: tuple[str, ...] = ()


def count_files(
    curated: Sequence[SourceState],
    written: Sequence[SourceState],
    removals: Sequence[Removals],
    evidence: Sequence[EvidenceFiles],
    engine: Engine,
) -> dict[str, FileCounts]:
    """By source, the counts of its annotated files. written: the sources with the files that are written."""
    tasks = joined([_count_tasks(*states, tuple(removals), evidence) for states in zip(curated, written, strict=True)])
    by_source = {state.source.name: FileCounts() for state in curated if not state.batch}
    owners = (state.batch or (state.source,) for state in curated for _ in state.paths)
    for sources, counts in zip(owners, engine.imap(_count_file, tasks, "count outcomes", unit="files"), strict=True):
        for source, of_source in zip(sources, counts, strict=True):
            by_source.setdefault(source.name, FileCounts()).update(of_source)
    return by_source


def _count_tasks(
    state: SourceState, written: SourceState, removals: tuple[Removals, ...], evidence: Sequence[EvidenceFiles]
) -> Sequence[CountTask]:
    labels = tuple(rule.label for rule in state.rules.rules)
    batch = tuple(source.name for source in state.batch)

    def task(file: int) -> CountTask:
        number, read, results = state.files[file], state.filter_results[file], written.filter_results[file]
        return CountTask(state.paths[file], number, read, results, labels, removals, evidence[number], batch)

    return LazySequence(task, range(len(state.paths)))


def _count_file(task: CountTask) -> list[FileCounts]:
    """Counts of each source of the file."""
    read, written = task.read.load(), task.written.load()
    masks = [step.removed_mask(task.file, read.num_documents) for step in task.removals]
    ids, evidence = (document_ids(task.path), read_evidence(task.evidence)) if task.evidence else (None, None)
    if not task.sources:
        return [_count_rows(task, (read, written), masks, (ids, evidence))]
    counts = []
    rows, rows_written = ({of.source: of for of in results.sources} for results in (read, written))
    for name in task.sources:
        none = SourceRows(name, 0, 0)
        of_source = rows.get(name, none)
        chosen = slice(of_source.start, of_source.stop)
        results = read.of_source(of_source), written.of_source(rows_written.get(name, none))
        edits = None if ids is None else ids[chosen], evidence
        counts.append(_count_rows(task, results, [mask[chosen] for mask in masks], edits))
    return counts


def _count_rows(
    task: CountTask,
    results: tuple[FilterResults, FilterResults],
    masks: Sequence[np.ndarray],
    edits: tuple[np.ndarray | None, Evidence | None],
) -> FileCounts:
    """results: of the rows as read, and as written. masks: which of them each step removed. edits: their ids and what
    the edits recorded of the file's documents; None if nothing was."""
    read, written = results
    kept, removed = DocumentCounts(), DocumentCounts()
    for split, name in enumerate(SPLITS):
        kept.add_rows(name, (written.failed_rule == KEPT) & (written.splits == split), written.bytes)
    for index in np.unique(read.failed_rule[read.failed_rule >= 0]).tolist():
        removed.add_rows(task.rules[index], read.failed_rule == index, read.bytes)
    passed = read.failed_rule == KEPT
    left = passed.copy()
    for step, mask in zip(task.removals, masks, strict=True):
        removed.add_rows(step.step, mask & passed, read.bytes)
        left &= ~mask
    num_bytes, languages = int(read.bytes.sum(dtype=np.int64)), _language_counts(read, len(task.rules))
    return FileCounts(num_bytes, kept, removed, languages, Counter(read.changes), *_edit_counts(*edits, left))


def _edit_counts(
    ids: np.ndarray | None, evidence: Evidence | None, kept: np.ndarray
) -> tuple[dict[str, Counter[str]], int]:
    """(removed_spans, pieces) of FileCounts."""
    if ids is None or evidence is None:
        return {}, 0
    doc_ids = unpacked_ids(ids[kept])
    spans, _ = rows_by_document(evidence.removed_spans, "doc_id", doc_ids)
    pieces, _ = rows_by_document(evidence.pieces, "parent_id", doc_ids)
    return removed_span_counts(spans), len(pieces) - len(pieces.column("parent_id").unique())


def _language_counts(read: FilterResults, num_rules: int) -> dict[str, np.ndarray]:
    readable = read.failed_rule != QUARANTINED
    codes = read.languages[readable].astype(np.int64) * (1 + num_rules)
    codes += np.maximum(read.failed_rule[readable], KEPT) + 1
    counts = np.bincount(codes, minlength=len(read.language_names) * (1 + num_rules))
    rows = zip(read.language_names, counts.reshape(-1, 1 + num_rules), strict=True)
    return {name: language_row for name, language_row in rows if language_row.any()}


def count_source(read: SourceState, files: FileCounts, quarantined_rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The source's entry in counts.json. files: of its files."""
    quarantined, spans, labels = DocumentCounts(), files.removed_spans, [rule.label for rule in read.rules.rules]
    for row in quarantined_rows:
        quarantined.add(row["unreadable"], 1, 0)
    spans_by_step = {name: dict(spans[name]) for name in sorted(spans)}
    outcomes = OutcomeCounts(files.kept, files.removed, quarantined, spans_by_step)
    return {
        **source_counts({"documents": read.num_documents, "bytes": files.num_bytes}, outcomes, files.pieces),
        "changed": dict(sorted(files.changes.items())),
        "languages": {
            name: {"documents": int(counts.sum()), "removed": _by_label(labels, counts[1:].tolist())}
            for name, counts in sorted(files.languages.items())
        },
    }


def _by_label(labels: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Counts by label; of rules with one label, the count of the last."""
    return {label: count for label, count in dict(zip(labels, counts, strict=True)).items() if count}


def removed_span_counts(removed_spans: pa.Table) -> dict[str, Counter[str]]:
    """By step: documents that lost something, spans, their bytes. Spans that were only annotated are left out."""
    counts_of_steps: dict[str, Counter[str]] = {}
    rules = removed_spans.column("rule")
    for rule in sorted(rules.unique().to_pylist()):
        if not rule.endswith(ANNOTATIONS):
            spans = removed_spans.filter(pc.equal(rules, rule))
            counts_of_steps[rule.split(".")[0]] = Counter(
                documents=len(spans.column("doc_id").unique()),
                spans=len(spans),
                bytes=int(spans.column("bytes").to_numpy().sum()),
            )
    return counts_of_steps


@dataclass(frozen=True)
class OutcomeCounts:
    """A source's documents by what became of them. removed_spans: by step, what kept documents lost."""

    kept: DocumentCounts
    removed: DocumentCounts
    quarantined: DocumentCounts
    removed_spans: Mapping[str, Mapping[str, int]]


def source_counts(read: Mapping[str, int], outcomes: OutcomeCounts, pieces: int) -> dict[str, Any]:
    """Checked: what was read, and the pieces that splitting added, is what was kept, removed, quarantined and (of
    the bytes) removed as spans of what was kept. Raises RuntimeError otherwise: that would be a fault of ours."""
    totals = [counts.total() for counts in (outcomes.kept, outcomes.removed, outcomes.quarantined)]
    spans = dict(outcomes.removed_spans)
    before = {"documents": read["documents"] + pieces, "bytes": read["bytes"]}
    of_spans = {"documents": 0, "bytes": sum(entry["bytes"] for entry in spans.values())}
    for unit in ("documents", "bytes"):
        if before[unit] != of_spans[unit] + sum(total[unit] for total in totals):
            outcome = f"kept, removed, quarantined {totals}, removed spans {spans}, pieces {pieces}"
            raise RuntimeError(f"{unit} do not add up: read {read[unit]}, {outcome}")
    return {
        "read": dict(read),
        "kept": outcomes.kept.counts,
        "removed": outcomes.removed.counts,
        "quarantined": outcomes.quarantined.counts,
        "removed_spans": spans,
        "pieces": pieces,
    }


def check_not_empty(source: SourceConfig, counts: Mapping[str, Any], first_reason: str = "") -> None:
    """Raises InputError if no document of the source is left to train on (of a held-out source: to score), naming what
    removed most of them.

    first_reason: why the first record in quarantine could not be read."""
    if counts["kept"].get(source.held_out or "train", {}).get("documents"):
        return
    read = counts["read"]["documents"]
    if not read:
        raise InputError(f"source {source.name}: its files hold no documents; check its paths and format")
    quarantined = sum(entry["documents"] for entry in counts["quarantined"].values())
    if quarantined == read:
        raise InputError(f"source {source.name}: none of its {read} documents can be read; the first: {first_reason}")
    lost = {**counts["removed"], **{f"quarantine ({k})": v for k, v in counts["quarantined"].items()}}
    if not lost:
        raise InputError(f"source {source.name}: all {read} documents are in held-out splits; lower curate.splits")
    name, largest = max(lost.items(), key=lambda item: item[1]["documents"])
    num_held_out = sum(entry["documents"] for entry in counts["kept"].values())
    purpose = f"to train on ({num_held_out} are held out)" if source.held_out is None else "to score"
    raise InputError(
        f"source {source.name}: of {read} documents none is left {purpose}; {name} removed {largest['documents']} of "
        f"them; {_loosening_advice(name)}"
    )


def _loosening_advice(name: str) -> str:
    """The part of a recipe that keeps more of the documents that a rule, a stage or the quarantine removed."""
    if name.startswith("quarantine"):
        return "check the source's format and fields; quarantine.jsonl says why each of them could not be read"
    if name in ("exact_dedup", "near_dedup"):
        return f"they are copies of other documents; curate.{name}: null keeps copies"
    return "loosen that rule in curate.filters or the source's filters"


# counts.json: the counts and the rules of every source, and the check that every source keeps training documents.
COUNTS_NAME = "counts.json"


def write_summary(summary: Mapping[str, Any], folder: Path) -> None:
    write_atomic(folder / COUNTS_NAME, canonical_json(summary) + b"\n")


def check_training_documents(
    sources: Sequence[SourceState], summary: Mapping[str, Any], folder: Path, info: Callable[[str], None]
) -> None:
    """Says which sources have no documents left. Raises InputError if one of them has on_empty: error, or if no source
    that is trained on has any.

    The caller writes the ledger. Counts and quarantine are written here, so that `gristmill why` can explain each
    document."""
    empty: dict[str, InputError] = {}
    for state in sources:
        reason = next((row["reason"] for row in quarantined_rows(state, ["unreadable", "reason"])), "")
        try:
            check_not_empty(state.source, summary["sources"][state.source.name], reason)
        except InputError as error:
            empty[state.source.name] = error
    trained_on = [state.source.name for state in sources if state.source.held_out is None]
    fatal = [state.source.name for state in sources if state.source.name in empty and state.source.on_empty == "error"]
    if trained_on and all(name in empty for name in trained_on):
        fatal = [*fatal, *trained_on]
    if fatal:
        write_quarantine(sources, folder)
        write_summary(summary, folder)
        raise InputError(
            f"{empty[fatal[0]]}. The ledger in {folder / 'ledger'} records why each document was removed; show one "
            f"document with `gristmill why DOC_ID --corpus {folder}`"
        ) from empty[fatal[0]]
    for why in empty.values():
        info(f"NOTHING KEPT: {why}. The run goes on without it; set on_empty: error of the source to stop instead")


def sources_without_documents(corpus: Path, names: Iterable[str]) -> frozenset[str]:
    """Those of the sources of which curation kept no training document; it has said so, and the run goes on. None
    where the corpus has no counts: then the stage that finds no documents says so."""
    path = corpus / COUNTS_NAME
    counts = json.loads(path.read_bytes())["sources"] if path.is_file() else {}
    without = (name for name in names if name in counts)
    return frozenset(name for name in without if not counts[name]["kept"].get("train", {}).get("documents"))


def rule_table(sources: Sequence[SourceState]) -> dict[str, Any]:
    """By source: each rule with its signal, comparison, threshold and where the number is from."""
    return {
        state.source.name: [
            {
                "rule": rule.label,
                "signal": rule.signal,
                "keep": rule.keep,
                "threshold": float(rule.threshold),
                "source": rule.source,
                "profiles": _profile_thresholds(state, index),
            }
            for index, rule in enumerate(state.rules.rules)
        ]
        for state in sources
    }


def _profile_thresholds(state: SourceState, rule_index: int) -> dict[str, float | None]:
    """The rule's threshold in each language profile that the source's documents have; null where the rule is off."""
    present: set[str] = set()
    for results in state.filter_results:
        present.update(results.present_languages)
    profiles = sorted(present & state.rules.by_profile.keys())
    thresholds = {key: state.rules.by_profile[key][rule_index] for key in profiles}
    return {key: None if np.isnan(number) else float(number) for key, number in thresholds.items()}


def document_totals(summary: Mapping[str, Any]) -> dict[str, int]:
    """Documents read, kept, removed and quarantined, summed over all sources."""
    totals = Counter[str]()
    for entry in summary["sources"].values():
        totals["read"] += entry["read"]["documents"]
        for outcome in ("kept", "removed", "quarantined"):
            totals[outcome] += sum(counts["documents"] for counts in entry[outcome].values())
    return dict(totals)


# The steps after the filters.
STEPS_AFTER_FILTERS = (
    "quality",
    "exact_dedup",
    "near_dedup",
    "paragraph_dedup",
    "line_dedup",
    "substring_dedup",
    "decontaminate",
)


def rule_order(counts: Mapping[str, Any]) -> list[str]:
    """All configured rules and steps, in the recipe's order."""
    configured = [rule["rule"] for rules in counts["rules"].values() for rule in rules]
    removing = {label for entry in counts["sources"].values() for label in entry["removed"]}
    return list(dict.fromkeys([*configured, *STEPS_AFTER_FILTERS, *sorted(removing)]))


# The table that the terminal shows after curation.

MAX_TABLE_SOURCES = 10  # beyond, one table of all sources together


def removal_table(summary: Mapping[str, Any]) -> list[str]:
    """Aligned lines by source: documents and bytes read, what each step and rule removed, what is kept, and the share
    of the documents that is left. summary: of counts.json."""
    sources = summary["sources"]
    rows: list[tuple[str, ...]] = [("source", "step or rule", "documents", "text", "left")]
    if len(sources) <= MAX_TABLE_SOURCES:
        for name, entry in sources.items():
            rows += _removal_rows(name, [entry], rule_order(summary))
    if len(sources) > 1:
        rows += _removal_rows(f"all {len(sources):,}", list(sources.values()), rule_order(summary))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width) for place, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def _removal_rows(name: str, entries: Sequence[Mapping[str, Any]], order: Sequence[str]) -> list[tuple[str, ...]]:
    def total(outcome: str) -> dict[str, Counter[str]]:
        sums: dict[str, Counter[str]] = {}
        for entry in entries:
            for label, counts in entry[outcome].items():
                sums.setdefault(label, Counter()).update(counts)
        return sums

    read = sum((Counter(entry["read"]) for entry in entries), Counter[str]())
    pieces = sum(entry["pieces"] for entry in entries)
    left = before = max(read["documents"] + pieces, 1)
    rows: list[tuple[str, ...]] = [(name, "read", f"{read['documents']:,}", amount(read["bytes"], "B"), "100.0 %")]
    if pieces:
        rows.append(("", "pieces of split documents", f"+{pieces:,}", "", ""))
    removed = total("quarantined") | {label: total("removed")[label] for label in order if label in total("removed")}
    for label, gone in removed.items():
        left -= gone["documents"]
        text = f"-{amount(gone['bytes'], 'B')}" if gone["bytes"] else ""
        rows.append(("", label, f"-{gone['documents']:,}", text, f"{100 * left / before:.1f} %"))
    for step, spans in total("removed_spans").items():
        rows.append(("", f"{step} in kept documents", f"{spans['documents']:,}", f"-{amount(spans['bytes'], 'B')}", ""))
    kept = total("kept")
    splits = ", ".join(f"{split} {kept[split]['documents']:,}" for split in SPLITS if split in kept)
    documents, num_bytes = (sum(counts[unit] for counts in kept.values()) for unit in ("documents", "bytes"))
    cells = f"{documents:,}", amount(num_bytes, "B"), f"{100 * documents / before:.1f} %"
    return [*rows, ("", f"kept ({splits})" if splits else "kept", *cells)]

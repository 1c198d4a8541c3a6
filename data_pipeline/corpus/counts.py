"""Document and byte counts of a source, checked: read = kept + removed by each rule + quarantined."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.filters.apply import KEPT, QUARANTINED
from gristmill.data_pipeline.ledger.evidence import EvidenceFiles, read_evidence, rows_by_document
from gristmill.data_pipeline.ledger.removal_step import RemovalStep
from gristmill.data_pipeline.ledger.source_state import SourceState
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.errors import InputError

ANNOTATIONS = (".annotate", ".drop")  # rules that only record their spans


class Tally:
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

    def total(self) -> dict[str, int]:
        return {
            "documents": sum(entry["documents"] for entry in self.counts.values()),
            "bytes": sum(entry["bytes"] for entry in self.counts.values()),
        }


@dataclass(frozen=True)
class FileCounts:
    """Counts of one annotated file. changes: repair -> documents it changed. removed_spans: step -> documents, spans
    and bytes. pieces: documents added by splitting. The last two are of kept documents alone."""

    changes: Counter[str]
    removed_spans: dict[str, Counter[str]]
    pieces: int


def count_files(
    curated: Sequence[SourceState],
    removals: Sequence[RemovalStep],
    evidence: Sequence[EvidenceFiles],
    engine: Engine,
) -> list[FileCounts]:
    """The counts of every annotated file of all sources."""
    tasks = [
        (path, mask if files else None, files)
        for one in curated
        for path, mask, files in zip(
            one.paths, one.kept_masks(removals), evidence[one.files.start : one.files.stop], strict=True
        )
    ]
    return engine.map(_count_file, tasks, "count", unit="files")


def _count_file(task: tuple[Path, np.ndarray | None, EvidenceFiles]) -> FileCounts:
    path, kept, files = task
    changes: Counter[str] = Counter()
    with pq.ParquetFile(path) as file:  # pq.read_table imports pyarrow.dataset
        found = file.read(["changes"] if kept is None else ["changes", "doc_id"])
    for entry in pc.value_counts(pc.list_flatten(found["changes"])).to_pylist():
        changes[entry["values"]] += entry["counts"]
    if kept is None:
        return FileCounts(changes, {}, 0)
    doc_ids = found.column("doc_id").combine_chunks().filter(pa.array(kept))
    evidence = read_evidence(files)
    spans, _ = rows_by_document(evidence.removed_spans, "doc_id", doc_ids)
    pieces, _ = rows_by_document(evidence.pieces, "parent_id", doc_ids)
    added = len(pieces) - len(pieces.column("parent_id").unique())
    return FileCounts(changes, removed_span_counts(spans), added)


def count_source(
    read: SourceState,
    written: SourceState,
    removals: Sequence[RemovalStep],
    files: Sequence[FileCounts],
    quarantined_rows: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """The source's entry in counts.json. written: the files whose KEPT rows are written. files: of its files."""
    kept, removed, quarantined = Tally(), Tally(), Tally()
    for split, name in enumerate(SPLITS):
        for mask, results in zip(written.kept_masks(), written.filter_results, strict=True):
            kept.add_rows(name, mask & (results.splits == split), results.bytes)
    for index, rule in enumerate(read.rules.rules):
        for results in read.filter_results:
            removed.add_rows(rule.label, results.failed_rule == index, results.bytes)
    for step in removals:
        for file, results in zip(read.files, read.filter_results, strict=True):
            mask = step.removed_mask(file, len(results.bytes)) & (results.failed_rule == KEPT)
            removed.add_rows(step.step, mask, results.bytes)
    for row in quarantined_rows:
        quarantined.add(row["unreadable"], 1, 0)
    num_bytes = sum(int(results.bytes.sum(dtype=np.int64)) for results in read.filter_results)
    spans: dict[str, Counter[str]] = {}
    for one in files:
        for name, counts in one.removed_spans.items():
            spans.setdefault(name, Counter()).update(counts)
    tallies = Tallies(kept, removed, quarantined, {name: dict(spans[name]) for name in sorted(spans)})
    totals = {"documents": read.num_documents, "bytes": num_bytes}
    changes: Counter[str] = sum((one.changes for one in files), Counter())
    return {
        **source_counts(totals, tallies, sum(one.pieces for one in files)),
        "changed": dict(sorted(changes.items())),
        "languages": language_counts(read),
    }


def language_counts(read: SourceState) -> dict[str, dict[str, Any]]:
    """By language profile (detected language, where none are used): documents read that could be, and how many each
    rule of the filters removed."""
    num_rules = len(read.rules.rules)
    found: dict[str, np.ndarray] = {}  # int64[1 + rules]: documents that no rule removed, and removed by each
    for results in read.filter_results:
        readable = results.failed_rule != QUARANTINED
        codes = results.languages[readable].astype(np.int64) * (1 + num_rules)
        codes += np.maximum(results.failed_rule[readable], KEPT) + 1
        counts = np.bincount(codes, minlength=len(results.language_names) * (1 + num_rules))
        for name, mine in zip(results.language_names, counts.reshape(-1, 1 + num_rules), strict=True):
            if mine.any():
                found[name] = found.get(name, 0) + mine
    return {
        name: {
            "documents": int(found[name].sum()),
            "removed": _by_label([rule.label for rule in read.rules.rules], found[name][1:].tolist()),
        }
        for name in sorted(found)
    }


def _by_label(labels: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Of rules with one label the last one's count."""
    return {label: count for label, count in dict(zip(labels, counts, strict=True)).items() if count}


def removed_span_counts(removed_spans: pa.Table) -> dict[str, Counter[str]]:
    """By step: documents that lost something, spans, their bytes. Spans that were only annotated are left out."""
    found: dict[str, Counter[str]] = {}
    rules = removed_spans.column("rule")
    for rule in sorted(rules.unique().to_pylist()):
        if not rule.endswith(ANNOTATIONS):
            mine = removed_spans.filter(pc.equal(rules, rule))
            found[rule.split(".")[0]] = Counter(
                documents=len(mine.column("doc_id").unique()),
                spans=len(mine),
                bytes=int(mine.column("bytes").to_numpy().sum()),
            )
    return found


@dataclass(frozen=True)
class Tallies:
    """A source's documents by what became of them. removed_spans: by step, what kept documents lost."""

    kept: Tally
    removed: Tally
    quarantined: Tally
    removed_spans: Mapping[str, Mapping[str, int]]


def source_counts(read: Mapping[str, int], tallies: Tallies, pieces: int) -> dict[str, Any]:
    """Checked: what was read, and the pieces that splitting added, is what was kept, removed, quarantined and (of
    the bytes) removed as spans of what was kept. Raises RuntimeError otherwise: that would be a fault of ours."""
    totals = [tally.total() for tally in (tallies.kept, tallies.removed, tallies.quarantined)]
    spans = dict(tallies.removed_spans)
    before = {"documents": read["documents"] + pieces, "bytes": read["bytes"]}
    of_spans = {"documents": 0, "bytes": sum(entry["bytes"] for entry in spans.values())}
    for unit in ("documents", "bytes"):
        if before[unit] != of_spans[unit] + sum(total[unit] for total in totals):
            raise RuntimeError(
                f"{unit} do not add up: read {read[unit]}, kept, removed, quarantined {totals}, removed spans {spans}, "
                f"pieces {pieces}"
            )
    return {
        "read": dict(read),
        "kept": tallies.kept.counts,
        "removed": tallies.removed.counts,
        "quarantined": tallies.quarantined.counts,
        "removed_spans": spans,
        "pieces": pieces,
    }


def check_not_empty(source: str, counts: Mapping[str, Any], first_reason: str = "") -> None:
    """Raises InputError if no training document of the source is left, naming what removed most of them.

    first_reason: why the first record in quarantine could not be read."""
    if counts["kept"].get("train", {}).get("documents"):
        return
    read = counts["read"]["documents"]
    if not read:
        raise InputError(f"source {source}: its files hold no documents; check its paths and format")
    quarantined = sum(entry["documents"] for entry in counts["quarantined"].values())
    if quarantined == read:
        raise InputError(f"source {source}: none of its {read} documents can be read; the first: {first_reason}")
    lost = {**counts["removed"], **{f"quarantine ({k})": v for k, v in counts["quarantined"].items()}}
    if not lost:
        raise InputError(f"source {source}: all {read} documents are in held-out splits; lower curate.splits")
    name, largest = max(lost.items(), key=lambda item: item[1]["documents"])
    held = sum(entry["documents"] for entry in counts["kept"].values())
    raise InputError(
        f"source {source}: of {read} documents none is left to train on ({held} are held out); {name} removed "
        f"{largest['documents']} of them; loosen that rule in curate.filters or the source's filters"
    )

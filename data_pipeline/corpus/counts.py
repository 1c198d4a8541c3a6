"""Document and byte counts of a source, checked: read = kept + removed by each rule + quarantined."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.filters.apply import KEPT, QUARANTINED
from gristmill.data_pipeline.ledger.ledger import Evidence, RemovalStep
from gristmill.data_pipeline.ledger.source_state import SourceState
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
            self.add(name, chosen_N.sum(), bytes_N[chosen_N].sum())

    def total(self) -> dict[str, int]:
        return {
            "documents": sum(entry["documents"] for entry in self.counts.values()),
            "bytes": sum(entry["bytes"] for entry in self.counts.values()),
        }


def count_source(
    read: SourceState,
    written: SourceState,
    splits: np.ndarray,
    removals: Sequence[RemovalStep],
    evidence: Evidence,
    quarantined_rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The source's entry in counts.json. splits: of each row that is written."""
    kept, removed, quarantined = Tally(), Tally(), Tally()
    failed_rule, num_bytes, doc_ids = read.failed_rule, read.bytes, read.doc_ids
    for split in SPLITS:
        kept.add_rows(split, splits == split, written.bytes)
    for index, rule in enumerate(read.rules.rules):
        removed.add_rows(rule.label, failed_rule == index, num_bytes)
    for step in removals:
        removed.add_rows(step.step, (failed_rule == KEPT) & step.removed_mask(doc_ids), num_bytes)
    for row in quarantined_rows:
        quarantined.add(row["unreadable"], 1, 0)
    totals = {"documents": len(failed_rule), "bytes": int(num_bytes.sum())}
    kept_ids = doc_ids[read.kept_mask(removals)].astype(str).tolist()
    mine = evidence.of(kept_ids)
    pieces = sum(len(ids) - 1 for ids in mine.pieces.values())
    counts = source_counts(totals, kept, removed, quarantined, removed_span_counts(mine.removed_spans), pieces)
    return counts | {"changed": changed_counts(read.paths), "languages": language_counts(read)}


def language_counts(read: SourceState) -> dict[str, dict[str, Any]]:
    """By language profile (detected language, where none are used): documents read that could be, and how many each
    rule of the filters took."""
    found = {}
    readable = read.failed_rule != QUARANTINED
    for language in np.unique(read.languages[readable]).tolist():
        mine = read.failed_rule[readable & (read.languages == language)]
        rules = {rule.label: int((mine == index).sum()) for index, rule in enumerate(read.rules.rules)}
        found[language] = {"documents": len(mine), "removed": {label: n for label, n in rules.items() if n}}
    return found


def removed_span_counts(removed_spans: pa.Table) -> dict[str, dict[str, int]]:
    """By step: documents that lost something, spans, their bytes. Spans that were only annotated are left out."""
    found: dict[str, dict[str, int]] = {}
    rules = removed_spans.column("rule")
    for rule in sorted(set(rules.to_pylist())):
        if not rule.endswith(ANNOTATIONS):
            mine = removed_spans.filter(pc.equal(rules, rule))
            found[rule.split(".")[0]] = {
                "documents": len(mine.column("doc_id").unique()),
                "spans": len(mine),
                "bytes": int(mine.column("bytes").to_numpy().sum()),
            }
    return found


def changed_counts(annotated: Sequence[Path]) -> dict[str, int]:
    """How many documents each repair of the text changed."""
    found: Counter[str] = Counter()
    for path in annotated:
        changes = pq.read_table(path, columns=["changes"]).column("changes")
        for entry in pc.value_counts(pc.list_flatten(changes)).to_pylist():
            found[entry["values"]] += entry["counts"]
    return dict(sorted(found.items()))


def source_counts(
    read: Mapping[str, int],
    kept: Tally,
    removed: Tally,
    quarantined: Tally,
    cut: Mapping[str, Mapping[str, int]],
    pieces: int,
) -> dict[str, Any]:
    """Checked: what was read, and the pieces that splitting added, is what was kept, removed, quarantined and (of
    the bytes) cut out of what was kept. Raises RuntimeError otherwise: that would be a fault of ours."""
    parts = [kept.total(), removed.total(), quarantined.total()]
    came = {"documents": read["documents"] + pieces, "bytes": read["bytes"]}
    gone = {"documents": 0, "bytes": sum(entry["bytes"] for entry in cut.values())}
    for unit in ("documents", "bytes"):
        if came[unit] != gone[unit] + sum(part[unit] for part in parts):
            raise RuntimeError(
                f"{unit} do not add up: read {read[unit]}, kept, removed, quarantined {parts}, cut {dict(cut)}, "
                f"pieces {pieces}"
            )
    return {
        "read": dict(read),
        "kept": kept.counts,
        "removed": removed.counts,
        "quarantined": quarantined.counts,
        "cut": dict(cut),
        "pieces": pieces,
    }


def check_not_empty(source: str, counts: Mapping[str, Any], first_reason: str = "") -> None:
    """Raises InputError if no training document of the source is left, naming what took them.

    first_reason: why the first record in quarantine could not be read."""
    if counts["kept"].get("train", {}).get("documents"):
        return
    read = counts["read"]["documents"]
    if not read:
        raise InputError(f"source {source}: its files hold no documents; check its paths and format")
    quarantined = sum(entry["documents"] for entry in counts["quarantined"].values())
    if quarantined == read:
        raise InputError(f"source {source}: none of its {read} documents can be read; the first: {first_reason}")
    taken = {**counts["removed"], **{f"quarantine ({k})": v for k, v in counts["quarantined"].items()}}
    if not taken:
        raise InputError(f"source {source}: all {read} documents fell into held-out splits; lower curate.splits")
    name, most = max(taken.items(), key=lambda item: item[1]["documents"])
    held = sum(entry["documents"] for entry in counts["kept"].values())
    raise InputError(
        f"source {source}: of {read} documents none is left to train on ({held} are held out); {name} took "
        f"{most['documents']} of them; loosen that rule in curate.filters or the source's filters"
    )

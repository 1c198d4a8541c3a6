"""Writes the output folder of curation: shards, ledger, quarantine, examples, decontamination report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig
from gristmill.data_pipeline.corpus.borderline_examples import duplicate_examples, rule_examples
from gristmill.data_pipeline.corpus.shards import ShardTask, write_shard
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.decontamination.questions import found_questions
from gristmill.data_pipeline.decontamination.report import report_markdown
from gristmill.data_pipeline.decontamination.step import Decontamination
from gristmill.data_pipeline.filters.apply import QUARANTINED
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger.ledger import LEDGER_ROWS, Evidence, LedgerTask, RemovalStep, write_ledger
from gristmill.data_pipeline.ledger.parquet_rows import RowRange, split_by_weight
from gristmill.data_pipeline.ledger.source_state import SourceState
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.files import write_atomic

QUARANTINE_NAME = "quarantine.jsonl"
EXAMPLES_NAME = "examples.jsonl"
DECONTAMINATION_FOLDER = "decontamination"
REPORT_JSON, REPORT_MARKDOWN, QUESTIONS_NAME = "report.json", "report.md", "questions.jsonl"


@dataclass(frozen=True)
class SourceToWrite:
    """state: the annotated files. splits: of each row, the split; "" for those not kept. annotation: how the files
    were annotated. scores: annotated file -> its quality scores; None if the source was not scored."""

    state: SourceState
    splits: np.ndarray
    annotation: AnnotateConfig
    scores: Mapping[Path, Path] | None


def write_shards(
    sources: Sequence[SourceToWrite], shard_bytes: int, pii: PiiConfig | None, folder: Path, engine: LocalEngine
) -> None:
    """Writes the documents and signals of every source and split, in shards of about `shard_bytes` of text."""
    tasks = [
        task for source in sources for split in SPLITS for task in _shard_tasks(source, split, shard_bytes, pii, folder)
    ]
    engine.map(write_shard, tasks, "write corpus", unit="shards")


def _shard_tasks(
    source: SourceToWrite, split: str, shard_bytes: int, pii: PiiConfig | None, folder: Path
) -> Iterator[ShardTask]:
    state, name = source.state, source.state.source.name
    rows = np.flatnonzero(source.splits == split)
    for number, (start, end) in enumerate(split_by_weight(state.bytes[rows], shard_bytes)):
        slices = state.slices(rows[start:end])
        yield ShardTask(
            folder=folder,
            split=split,
            name=f"{name}-{number:05}.parquet",
            source=name,
            slices=slices,
            edits=tuple(edit.preset for edit in source.annotation.edits),
            optional=source.annotation.optional,
            pii=pii,
            scores=None if source.scores is None else tuple(source.scores[one.path] for one in slices),
        )


def write_ledgers(
    curated: Sequence[SourceState],
    splits: Sequence[np.ndarray],
    removals: Sequence[RemovalStep],
    evidence: Evidence,
    folder: Path,
    engine: LocalEngine,
) -> None:
    """splits: of each source, the split of each document that was read, "" for those not kept."""
    tasks = []
    for one, split_of in zip(curated, splits, strict=True):
        failed_rule, doc_ids = one.failed_rule, one.doc_ids
        for number, start in enumerate(range(0, max(len(failed_rule), 1), LEDGER_ROWS)):
            rows = np.arange(start, min(start + LEDGER_ROWS, len(failed_rule)))
            slices = one.slices(rows)
            tasks.append(
                LedgerTask(
                    path=folder / "ledger" / f"{one.source.name}-{number:05}.parquet",
                    source=one.source.name,
                    rules=one.rules,
                    slices=slices,
                    failed_rule=_by_slice(failed_rule[rows], slices),
                    splits=_by_slice(split_of[rows], slices),
                    removals=tuple(step.of(doc_ids[rows]) for step in removals),
                    evidence=evidence.of(doc_ids[rows].astype(str).tolist()),
                )
            )
    engine.map(write_ledger, tasks, "write ledger", unit="shards")


def _by_slice(values: np.ndarray, slices: Sequence[RowRange]) -> tuple[np.ndarray, ...]:
    """The values of each slice's rows. A source without documents has no slices."""
    bounds = np.cumsum([0, *(len(one.rows) for one in slices)]).tolist()
    return tuple(values[start:end] for start, end in pairwise(bounds))


def write_quarantine(curated: Sequence[SourceState], folder: Path) -> None:
    """One JSON line a record that could not be read. Files are named by digest; the lock has their names."""
    columns = ["doc_id", "raw_digest", "record", "offset", "unreadable", "reason", "excerpt"]
    lines = [
        orjson.dumps({"source": one.source.name, **row}) + b"\n"
        for one in curated
        for row in quarantined_rows(one, columns)
    ]
    write_atomic(folder / QUARANTINE_NAME, b"".join(lines))


def quarantined_rows(one: SourceState, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The source's records that could not be read."""
    for path, results in zip(one.paths, one.filter_results, strict=True):
        if (results.failed_rule == QUARANTINED).any():
            yield from pq.read_table(path, columns=list(columns), filters=pc.field("unreadable").is_valid()).to_pylist()


def write_examples(curated: Sequence[SourceState], removals: Sequence[RemovalStep], folder: Path) -> None:
    lines = []
    for one in curated:
        slices = one.slices(np.arange(len(one.failed_rule)))
        found = [*rule_examples(one.source.name, slices, one.rules, one.failed_rule)]
        for step in removals:
            found += duplicate_examples(one.source.name, slices, one.doc_ids, step)
        lines += [orjson.dumps(example) + b"\n" for example in found]
    write_atomic(folder / EXAMPLES_NAME, b"".join(lines))


def write_contamination(found: Decontamination, folder: Path) -> None:
    """What of which benchmark stood in the corpus, for programs and for people."""
    where = folder / DECONTAMINATION_FOLDER
    write_atomic(where / REPORT_JSON, canonical_json(found.report) + b"\n")
    write_atomic(where / REPORT_MARKDOWN, report_markdown(found.report).encode())
    lines = [canonical_json(question) + b"\n" for question in found_questions(found.matches, found.hits)]
    write_atomic(where / QUESTIONS_NAME, b"".join(lines))

"""What curation leaves in its folder: shards, ledger, quarantine, examples, decontamination report, signatures."""

from collections.abc import Iterator, Mapping, Sequence
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
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.decontamination.questions import found_questions
from gristmill.data_pipeline.decontamination.report import report_markdown
from gristmill.data_pipeline.decontamination.step import Decontamination
from gristmill.data_pipeline.filters.apply import QUARANTINED
from gristmill.data_pipeline.ledger.ledger import LEDGER_ROWS, Evidence, LedgerTask, RemovalStep, write_ledger
from gristmill.data_pipeline.ledger.parquet_rows import split_by_weight
from gristmill.data_pipeline.ledger.source_state import SourceState
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.files import write_atomic

QUARANTINE_NAME = "quarantine.jsonl"
EXAMPLES_NAME = "examples.jsonl"
DECONTAMINATION_FOLDER = "decontamination"
REPORT_JSON, REPORT_MARKDOWN, QUESTIONS_NAME = "report.json", "report.md", "questions.jsonl"


def write_shards(
    sources: Sequence[SourceState],
    splits: Sequence[np.ndarray],
    edits: Sequence[AnnotateConfig],
    scores: Mapping[Path, Path],
    config: CurateConfig,
    folder: Path,
    engine: LocalEngine,
) -> None:
    """splits: of each source, the split of each row, "" for those not kept. edits: what annotated each source."""
    tasks = []
    for one, split_of, annotated in zip(sources, splits, edits, strict=True):
        presets = tuple(edit.preset for edit in annotated.edits)
        is_judged = config.quality is not None and one.source.name in config.quality.judged
        for split in SPLITS:
            rows = np.flatnonzero(split_of == split)
            for number, (start, end) in enumerate(split_by_weight(one.bytes[rows], config.shard_bytes)):
                name = f"{one.source.name}-{number:05}.parquet"
                slices = one.slices(rows[start:end])
                judged = tuple(scores[cut.path] for cut in slices) if is_judged else None
                tasks.append(
                    ShardTask(
                        folder=folder,
                        split=split,
                        name=name,
                        source=one.source.name,
                        slices=slices,
                        edits=presets,
                        optional=annotated.optional,
                        pii=config.pii,
                        scores=judged,
                    )
                )
    engine.map(write_shard, tasks, "write corpus", unit="shards")


def write_ledgers(
    curated: Sequence[SourceState],
    splits: Sequence[np.ndarray],
    later: Sequence[RemovalStep],
    evidence: Evidence,
    folder: Path,
    engine: LocalEngine,
) -> None:
    """splits: of each source, the split of each document that was read, "" for those not kept."""
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
                    evidence=evidence.of(doc_ids[rows].astype(str).tolist()),
                )
            )
    engine.map(write_ledger, tasks, "write ledger", unit="shards")


def write_quarantine(curated: Sequence[SourceState], folder: Path) -> None:
    """One JSON line a record that could not be read. Files are named by digest; the lock has their names."""
    columns = ["doc_id", "raw_digest", "record", "offset", "unreadable", "reason", "excerpt"]
    lines = [
        orjson.dumps({"source": one.source.name, **row}) + b"\n" for one in curated for row in unreadable(one, columns)
    ]
    write_atomic(folder / QUARANTINE_NAME, b"".join(lines))


def unreadable(one: SourceState, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The source's records that could not be read."""
    for path, verdict in zip(one.paths, one.verdicts, strict=True):
        if (verdict.taken_by == QUARANTINED).any():
            yield from pq.read_table(path, columns=list(columns), filters=pc.field("unreadable").is_valid()).to_pylist()


def write_examples(curated: Sequence[SourceState], later: Sequence[RemovalStep], folder: Path) -> None:
    lines = []
    for one in curated:
        slices = one.slices(np.arange(len(one.taken_by)))
        found = [*rule_examples(one.source.name, slices, one.rules, one.taken_by)]
        for step in later:
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

"""Writes the output folder of curation: shards, ledger, quarantine, examples, decontamination report."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import orjson
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.annotate import AnnotateConfig
from gristmill.data_pipeline.corpus.borderline_examples import borderline_examples
from gristmill.data_pipeline.corpus.shard_plan import ShardPlan, plan_shards
from gristmill.data_pipeline.corpus.shards import ShardFormat, ShardRows, ShardTask, write_shard_run
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.decontamination.report import report_markdown
from gristmill.data_pipeline.decontamination.step import Decontamination
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger.evidence import EvidenceFiles
from gristmill.data_pipeline.ledger.ledger import LEDGER_ROWS, LedgerRows, LedgerTask, write_ledger
from gristmill.data_pipeline.ledger.parquet_rows import spans_of_runs
from gristmill.data_pipeline.ledger.removal_step import Removals
from gristmill.data_pipeline.ledger.source_state import SourceState
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.engine.engine import Engine
from gristmill.foundation.files import atomic_path, write_atomic

MAX_RUN = 4  # consecutive shards that one task writes
RUNS_PER_WORKER = 4  # at least, where there are so many shards, so that none waits long for the last
HELD_OUT_FOLDER = "held_out"  # of intermediate files
QUARANTINE_NAME = "quarantine.jsonl"
EXAMPLES_NAME = "examples.jsonl"
DECONTAMINATION_FOLDER = "decontamination"
REPORT_JSON, REPORT_MARKDOWN, QUESTIONS_NAME = "report.json", "report.md", "questions.jsonl"


@dataclass(frozen=True)
class SourceToWrite:
    """state: the annotated files, of whose rows the KEPT ones are written. annotation: how the files were annotated.
    scores: annotated file -> its quality scores; None if the source was not scored."""

    state: SourceState
    annotation: AnnotateConfig
    scores: Mapping[Path, Path] | None


def write_corpus(
    sources: Sequence[SourceToWrite],
    ledgers: Sequence[LedgerTask],
    shard_bytes: int,
    pii: PiiConfig | None,
    folder: Path,
    engine: Engine,
) -> None:
    """Writes the ledgers, and the documents and signals of every source and split in shards of about `shard_bytes` of
    text, or fewer so that a source of some size has TARGET_SHARDS.

    The training shards are written first; their tasks put the held-out documents that they meet into files below
    HELD_OUT_FOLDER (which the caller removes), from which the other shards are written."""
    training: list[ShardTask] = []
    held_out: list[ShardTask] = []
    for source in sources:
        tasks, plan = _training_shards(source, shard_bytes, pii, folder)
        training += tasks
        for split in range(1, len(SPLITS)):
            held_out += _held_out_shards(tasks, plan, split)
    runs = _runs(training, engine.workers)
    # together, so that no worker waits for the last shard or ledger
    files: list[LedgerTask | tuple[ShardTask, ...]] = [*runs, *ledgers]
    engine.map(_write, files, "write corpus", [*map(len, runs), *([1] * len(ledgers))], "files")
    runs = _runs(held_out, engine.workers)
    engine.map(_write, runs, "write held-out documents", [len(run) for run in runs], "files")


def _write(task: LedgerTask | tuple[ShardTask, ...]) -> None:
    if isinstance(task, LedgerTask):
        write_ledger(task)
    else:
        write_shard_run(task)


def _runs(tasks: Sequence[ShardTask], workers: int) -> list[tuple[ShardTask, ...]]:
    """Runs of up to MAX_RUN consecutive shards of one source and split, fewer where the workers would be unevenly
    loaded. Each run is written by one worker."""
    size = MAX_RUN if workers == 1 else min(max(len(tasks) // (RUNS_PER_WORKER * workers), 1), MAX_RUN)
    found: list[tuple[ShardTask, ...]] = []
    for _, group in groupby(tasks, lambda task: (task.format.source, task.split)):
        shards = tuple(group)
        found += [shards[start : start + size] for start in range(0, len(shards), size)]
    return found


def _training_shards(
    source: SourceToWrite, shard_bytes: int, pii: PiiConfig | None, folder: Path
) -> tuple[list[ShardTask], ShardPlan]:
    state, name = source.state, source.state.source.name
    plan = plan_shards(state, shard_bytes)
    edits = tuple(edit.preset for edit in source.annotation.edits)
    shard_format = ShardFormat(name, edits, pii, source.scores is not None, source.annotation.optional)
    spans = spans_of_runs(plan.kept, list(pairwise(plan.starts)))
    tasks = []
    for number in plan.shards:
        rows = tuple(
            ShardRows(state.paths[file], first, last, state.filter_results[file]) for file, first, last in spans[number]
        )
        held_out = {
            split: folder / HELD_OUT_FOLDER / SPLITS[split] / f"{name}-{number:05}.parquet"
            for split in range(1, len(SPLITS))
            if plan.held_out[number, split]
        }
        scores = None if source.scores is None else tuple(source.scores[one.path] for one in rows)
        tasks.append(ShardTask(folder, SPLITS[0], f"{name}-{number:05}.parquet", shard_format, rows, scores, held_out))
    return tasks, plan


def _held_out_shards(training: Sequence[ShardTask], plan: ShardPlan, split: int) -> Iterator[ShardTask]:
    """The shards of a held-out split, from the files that the training shards' tasks write."""
    shards = [number for number, task in enumerate(training) if split in task.held_out]
    files = [(training[number].held_out[split], plan.held_out[number, split]) for number in shards]
    first = training[0]
    for number, spans in enumerate(spans_of_runs([rows for _, rows in files], plan.held_out_runs[split])):
        rows = tuple(ShardRows(files[file][0], start, stop) for file, start, stop in spans)
        name = f"{first.format.source}-{number:05}.parquet"
        yield ShardTask(first.folder, SPLITS[split], name, first.format, rows)


def ledger_tasks(
    curated: Sequence[SourceState],
    removals: Sequence[Removals],
    evidence: Sequence[EvidenceFiles],
    folder: Path,
) -> list[LedgerTask]:
    """evidence: of each annotated file of all sources."""
    tasks = []
    for one in curated:
        for number, start in enumerate(range(0, max(one.num_documents, 1), LEDGER_ROWS)):
            rows = tuple(
                LedgerRows(
                    one.paths[file],
                    first,
                    last,
                    one.filter_results[file],
                    tuple(removals),
                    one.first_file + file,
                    evidence[one.first_file + file],
                )
                for file, first, last in one.row_ranges(start, start + LEDGER_ROWS)
            )
            path = folder / "ledger" / f"{one.source.name}-{number:05}.parquet"
            tasks.append(LedgerTask(path, one.source.name, one.rules, rows, SPLITS))
    return tasks


def write_quarantine(curated: Sequence[SourceState], folder: Path) -> None:
    """One JSON line a record that could not be read. Files are named by digest; the lock has their names."""
    columns = ["doc_id", "raw_digest", "record", "offset", "unreadable", "reason", "excerpt"]
    with atomic_path(folder / QUARANTINE_NAME) as temporary, temporary.open("wb") as file:
        for one in curated:
            for row in quarantined_rows(one, columns):
                file.write(orjson.dumps({"source": one.source.name, **row}) + b"\n")


def quarantined_rows(one: SourceState, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The source's records that could not be read."""
    for path, results in zip(one.paths, one.filter_results, strict=True):
        if results.num_quarantined:
            yield from pq.read_table(path, columns=list(columns), filters=pc.field("unreadable").is_valid()).to_pylist()


def write_examples(curated: Sequence[SourceState], removals: Sequence[Removals], folder: Path, engine: Engine) -> None:
    lines = [orjson.dumps(example) + b"\n" for one in curated for example in borderline_examples(one, removals, engine)]
    write_atomic(folder / EXAMPLES_NAME, b"".join(lines))


def write_contamination(found: Decontamination, folder: Path) -> None:
    """What of which benchmark stood in the corpus, for programs and for people."""
    where = folder / DECONTAMINATION_FOLDER
    write_atomic(where / REPORT_JSON, canonical_json(found.report) + b"\n")
    write_atomic(where / REPORT_MARKDOWN, report_markdown(found.report).encode())
    with atomic_path(where / QUESTIONS_NAME) as temporary, temporary.open("wb") as file:
        for path in found.question_files:
            with path.open("rb") as lines:
                shutil.copyfileobj(lines, file)

"""Merging of the sketches of shards, and the step of curation that writes the sketches and the index of ids."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.id_index import (
    ID_RECORD,
    LARGEST_CLUSTERS,
    IndexTask,
    shuffle_records,
    table_records,
    write_ids,
    write_index_file,
)
from gristmill.data_pipeline.corpus.reused_files import ReusedFiles, sketch_key
from gristmill.data_pipeline.corpus.sketches import (
    COUNT_KEYS,
    COUNT_SCHEMA,
    COUNTS_FILE,
    LANGUAGE_SAMPLES,
    LISTED_HOSTS,
    PERSONAL_SAMPLES,
    SAMPLE_SCHEMA,
    SAMPLES_FILE,
    SKETCHES_FOLDER,
    SOURCE_SAMPLES,
    SketchTask,
    count_table,
    write_sketch,
    write_table,
)
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger.ledger import LedgerTask
from gristmill.foundation.checksums import is_sealed, link_file
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.foundation.runtime.tasks.shuffle import Shuffle, ranges_for
from gristmill.foundation.runtime.tasks.task_files import fetch

MERGED_HOSTS = 20_000  # the others are host_rest
MERGED_FILES = 32  # in memory at a time


def write_sketches(
    folder: Path,
    ledgers: Sequence[LedgerTask],
    pii: PiiConfig | None,
    work: Path,
    engine: Engine,
    reused: ReusedFiles,
) -> list[str]:
    """Writes the sketches of all shards of a corpus, the merged ones, and the index of ids. work: for intermediate
    files, from which a run that was stopped goes on. Sketches of the run before are taken from there. Returns the keys
    of the shards' sketches."""
    tables = sketch_tasks(folder, ledgers, pii)
    rows = _rows_of_tables(tables)
    tasks = [task for task, size in zip(tables, rows, strict=True) if size]
    _link_empty_sketches([task for task, size in zip(tables, rows, strict=True) if not size])
    keys = [sketch_key(task) for task in tasks]
    for task, key in zip(tasks, keys, strict=True):
        if not is_sealed(task.samples):
            reused.take(key, _sketch_files(task))
    records = Shuffle(work / "ids", ID_RECORD, len(tasks), ranges_for(sum(rows)))
    numbers = [number for number, size in enumerate(rows) if size]
    sketched = [(task, records, part, number) for part, (task, number) in enumerate(zip(tasks, numbers, strict=True))]
    engine.map(_sketch_shard, sketched, "sketches", unit="files")
    ranges = [IndexTask(records, number, folder) for number in range(records.ranges)]
    sizes = engine.map(write_ids, ranges, "index of ids", unit="files")
    write_index_file(folder, [f"{task.name}.parquet" for task in tables], [size for size, _, _ in sizes])
    merges = [(group, work / "merged" / f"{number:05d}") for number, group in enumerate(_merge_groups(tasks))]
    engine.map(_merge_group, merges, "merge sketches")
    clusters = cluster_counts([pair for _, largest, _ in sizes for pair in largest], [counts for *_, counts in sizes])
    merged = [_merged_paths(prefix) for _, prefix in merges]
    counts = merge_counts([clusters, *(pq.ParquetFile(path).read() for path, _ in merged)])
    write_table(folder / SKETCHES_FOLDER / COUNTS_FILE, counts)
    samples = merge_files([path for _, path in merged], merge_samples, SAMPLE_SCHEMA)
    write_table(folder / SKETCHES_FOLDER / SAMPLES_FILE, samples)
    for task, key in zip(tasks, keys, strict=True):
        reused.keep(key, _sketch_files(task))
    return keys


def _rows_of_tables(tasks: Sequence[SketchTask]) -> list[int]:
    """Rows of the table of each task. Of files that are links to one, one is read."""
    known: dict[tuple[int, int], int] = {}
    rows = []
    for task in tasks:
        status = task.table.stat()
        file = status.st_dev, status.st_ino
        if file not in known:
            known[file] = pq.read_metadata(task.table).num_rows
        rows.append(known[file])
    return rows


def _link_empty_sketches(tasks: Sequence[SketchTask]) -> None:
    """The sketches of tables without rows: the first of the documents and of the ledger is written, the others are
    links to it."""
    written: dict[bool, SketchTask] = {}
    for task in tasks:
        first = written.setdefault(task.is_ledger, task)
        if first is task:
            write_sketch(task)
        else:
            link_file(first.counts, task.counts)
            link_file(first.samples, task.samples)


def _sketch_files(task: SketchTask) -> dict[str, Path]:
    return {COUNTS_FILE: task.counts, SAMPLES_FILE: task.samples}


def sketch_tasks(folder: Path, ledgers: Sequence[LedgerTask] = (), pii: PiiConfig | None = None) -> list[SketchTask]:
    """The shards of a corpus in a folder, sorted by path. ledgers: how those of the ledger were written, where that is
    known; without, samples of removed documents have no excerpts."""
    rows = {task.path.stem: task.rows for task in ledgers}
    paths = sorted([*folder.glob("documents/*/*.parquet"), *folder.glob("ledger/*.parquet")])
    tasks = []
    for path in paths:
        name = path.relative_to(folder).with_suffix("").as_posix()
        annotated = rows.get(path.stem, ()) if name.startswith("ledger/") else ()
        tasks.append(SketchTask(folder, name, path.stem.rpartition("-")[0], annotated, pii))
    return tasks


def _sketch_shard(task: tuple[SketchTask, Shuffle, int, int]) -> None:
    shard, records, part, number = task
    for path in (shard.table,) if shard.is_ledger else (shard.table, shard.signals):
        fetch(path)
    write_sketch(shard)
    if not records.has(part):
        shuffle_records(table_records(shard.table, number, shard.is_ledger), records, part)


def _merge_groups(tasks: Sequence[SketchTask]) -> list[tuple[SketchTask, ...]]:
    """The shards of each source together, and of several sources that have few: up to MERGED_FILES in all. Few are so
    many that none of their hosts are left out."""
    by_source: dict[str, list[SketchTask]] = {}
    for task in tasks:
        by_source.setdefault(task.source, []).append(task)
    groups: list[list[SketchTask]] = []
    for _, of_source in sorted(by_source.items()):
        is_small = len(of_source) * LISTED_HOSTS <= MERGED_HOSTS
        if groups and is_small and len(groups[-1]) + len(of_source) <= MERGED_FILES:
            groups[-1] += of_source
        else:
            groups.append(of_source)
    return [tuple(group) for group in groups]


def _merged_paths(prefix: Path) -> tuple[Path, Path]:
    return Path(f"{prefix}.{COUNTS_FILE}"), Path(f"{prefix}.{SAMPLES_FILE}")


def _merge_group(task: tuple[tuple[SketchTask, ...], Path]) -> None:
    shards, prefix = task
    counts, samples = _merged_paths(prefix)
    for shard in shards:
        fetch(shard.counts)
        fetch(shard.samples)
    is_one = len({shard.source for shard in shards}) == 1
    merge = merge_counts if is_one else partial(merge_counts, max_hosts=None)
    write_table(counts, merge_files([shard.counts for shard in shards], merge, COUNT_SCHEMA))
    write_table(samples, merge_files([shard.samples for shard in shards], merge_samples, SAMPLE_SCHEMA))


def cluster_counts(largest: Sequence[tuple[str, int]], sizes: Sequence[Sequence[int]]) -> pa.Table:
    """The kept documents with the most duplicates, and by power of two how many have so many. Exact: an id's records
    are all in one file of the index."""
    order = sorted(largest, key=lambda pair: (-pair[1], pair[0]))[:LARGEST_CLUSTERS]
    names, counts = pa.array([name for name, _ in order], pa.string()), np.array([n for _, n in order], np.int64)
    by_size = np.zeros(max(map(len, sizes), default=0), np.int64)
    for of_range in sizes:
        by_size[: len(of_range)] += np.array(of_range, np.int64)
    tables = [
        count_table({"kind": "cluster"}, name=names, documents=counts),
        count_table({"kind": "cluster_size"}, bin=np.arange(len(by_size)), documents=by_size),
    ]
    return pa.concat_tables(tables)


def merge_counts(tables: Sequence[pa.Table], max_hosts: int | None = MERGED_HOSTS) -> pa.Table:
    """One row for each key of the tables, sorted. Of hosts the max_hosts with the most documents."""
    table = pa.concat_tables([COUNT_SCHEMA.empty_table(), *tables])
    is_register = pc.equal(table.column("kind"), "host_register")
    registers = _grouped(table.filter(is_register), "max")
    sums = _grouped(table.filter(pc.invert(is_register)), "sum")
    is_host = pc.equal(sums.column("kind"), "host")
    hosts = sums.filter(is_host)
    if max_hosts is not None and len(hosts) > max_hosts:
        hosts = hosts.sort_by([("documents", "descending"), ("name", "ascending"), ("source", "ascending")])
        rest = hosts.slice(max_hosts)
        size = len(rest)
        replaced = {"kind": pa.repeat(pa.scalar("host_rest"), size), "name": pa.nulls(size, pa.string())}
        columns = [replaced.get(name, rest.column(name)) for name in COUNT_SCHEMA.names]
        rest = pa.table(columns, schema=COUNT_SCHEMA)
        sums = _grouped(pa.concat_tables([sums.filter(pc.invert(is_host)), hosts.slice(0, max_hosts), rest]), "sum")
    joined = pa.concat_tables([sums, registers])
    return joined.sort_by([(name, "ascending") for name in COUNT_KEYS]).combine_chunks()


def _grouped(table: pa.Table, function: str) -> pa.Table:
    sums = table.group_by(COUNT_KEYS).aggregate([("documents", function), ("bytes", function)])
    columns = [
        *(sums.column(name) for name in COUNT_KEYS),
        *(sums.column(f"{n}_{function}") for n in COUNT_SCHEMA.names[9:]),
    ]
    return pa.table(columns, schema=COUNT_SCHEMA)


def merge_samples(tables: Sequence[pa.Table]) -> pa.Table:
    """Samples with the smallest ids, of each source and rule, each source of kept documents and each language of it,
    and the kept documents with the most placeholders. Sorted by id."""
    table = pa.concat_tables([SAMPLE_SCHEMA.empty_table(), *tables]).sort_by(
        [("doc_id", "ascending"), ("outcome", "ascending"), ("source", "ascending")]
    )
    is_kept = pc.equal(table.column("outcome"), "kept").to_numpy(zero_copy_only=False)
    source, language = (_codes(table.column(name)) for name in ("source", "language"))
    rule = 2 * _codes(table.column("rule")) + table.column("alone").fill_null(False).to_numpy()
    many = int(max(language.max(initial=0), rule.max(initial=0))) + 1
    chosen = is_kept & (_ranks(np.where(is_kept, source, -1)) < SOURCE_SAMPLES)
    chosen |= is_kept & (_ranks(np.where(is_kept, source * many + language, -1)) < LANGUAGE_SAMPLES)
    chosen |= ~is_kept & (_ranks(np.where(is_kept, -1, source * many + rule)) < SOURCE_SAMPLES)
    replaced = table.column("replaced").fill_null(0).to_numpy()
    most = np.lexsort((np.arange(len(table)), -replaced))[:PERSONAL_SAMPLES]
    chosen[most[replaced[most] > 0]] = True
    return table.filter(pa.array(chosen)).combine_chunks()


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """int64[]: equal values have equal codes; null counts as the empty string."""
    encoded = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def _ranks(groups: np.ndarray) -> np.ndarray:
    """int64[]: how many of the same group stand before each. [5, 7, 5] -> [0, 0, 1]."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1)) if len(groups) else np.empty(0, np.int64)
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
    return ranks


def merge_files(paths: Sequence[Path], merge: Callable[[Sequence[pa.Table]], pa.Table], schema: pa.Schema) -> pa.Table:
    """The merged sketch of these files, of which few are in memory at a time."""
    merged = merge([])
    for start in range(0, len(paths), MERGED_FILES):
        tables = [pq.ParquetFile(path).read().cast(schema) for path in paths[start : start + MERGED_FILES]]
        merged = merge([merged, *tables])
    return merged

"""Merging of the sketches of shards, and the step of curation that writes the sketches and the index of ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.id_index import (
    DOCUMENT_COLUMNS,
    ID_RECORD,
    LARGEST_CLUSTERS,
    LEDGER_COLUMNS,
    IndexTask,
    KeptIndex,
    records_of_tables,
    shuffle_records,
    write_ids,
    write_index_file,
)
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
    ranks,
    write_sketch,
    write_table,
)
from gristmill.data_pipeline.corpus.small_sources import BatchTable
from gristmill.data_pipeline.corpus.writer import ReusedFiles, sketch_key
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger.document_file import parquet_metadata
from gristmill.data_pipeline.ledger.ledger import LedgerTask
from gristmill.foundation.checksums import content_digest, matches_checksum
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, fetch, ranges_for

MERGED_HOSTS = 20_000  # the others are host_rest
MERGED_FILES = 32  # in memory at a time
INDEX_CACHE = "id_index"  # in the cache of a work folder
RUN_UNITS = 8  # sketches that are merged first, about
# Tables of sources that have no more rows are sketched together, up to so many rows and tables.
UNIT_ROWS, UNIT_TABLES = 4_096, 256


class WrittenSketch:
    """Files of one sketch, by their prefix."""

    prefix: Path

    @property
    def files(self) -> dict[str, Path]:
        return _sketch_files(self.prefix)

    @property
    def is_complete(self) -> bool:
        return all(map(matches_checksum, self.files.values()))


@dataclass(frozen=True)
class SketchUnit(WrittenSketch):
    """Tables of a corpus that are sketched together: one, or all of small sources. numbers: of the tables in the index
    of ids. prefix: of the files of their sketch."""

    tables: tuple[SketchTask, ...]
    numbers: tuple[int, ...]
    prefix: Path


def _unit_prefix(work: Path, place: int) -> Path:
    return work / "units" / f"{place:05d}"


def _sketch_files(prefix: Path) -> dict[str, Path]:
    return {name: Path(f"{prefix}.{name}") for name in (COUNTS_FILE, SAMPLES_FILE)}


def write_sketches(
    tables: Sequence[SketchTask],
    folder: Path,
    work: Path,
    engine: Engine,
    reused: ReusedFiles,
) -> list[str]:
    """Writes the sketches of a corpus and the index of ids. tables: those of `sketch_tasks`. work: for intermediate
    files, from which a run that was stopped goes on. Sketches and records of tables of the run before are taken from
    there. Returns their keys."""
    rows = _rows_of_tables(tables)
    groups = _groups(tables, rows)
    keys = [sketch_key([tables[number] for number in group]) for group in groups]
    work = work / fingerprint([[task.name for task in tables], keys])[:16]  # of another corpus nothing is taken over

    def sketch_unit(place: int) -> SketchUnit:
        numbers = tuple(groups[place])
        return SketchUnit(tuple(tables[number] for number in numbers), numbers, _unit_prefix(work, place))

    units = LazySequence(sketch_unit, range(len(groups)))
    sources = [[tables[number].source for number in group] for group in groups]
    groups_of_runs = [_merge_runs(group, sources, keys, work) for group in _merge_groups(sources)]
    runs = [run for group in groups_of_runs for run in group]
    for run in runs:
        if not run.is_complete:
            reused.take(run.key, run.files)
    left = [run for run in runs if not run.is_complete]
    places_of_left = {place for run in left for place in run.places}
    for place in sorted(places_of_left):
        if not units[place].is_complete:
            reused.take(keys[place], units[place].files)
    with_marks = LazySequence(lambda place: (units[place], place in places_of_left), range(len(units)))
    sizes = _write_index(with_marks, tables, sum(rows), work, engine, reused)
    engine.map(_merge, left, "merge sketches")
    merges = [
        SketchMerge(tuple(run.prefix for run in group), group[0].is_one_source, work / "merged" / f"{number:05d}")
        for number, group in enumerate(groups_of_runs)
    ]
    engine.map(_merge, merges, "merge sketches")
    clusters = cluster_counts([pair for _, largest, _ in sizes for pair in largest], [counts for *_, counts in sizes])
    merged = [merge.files for merge in merges]
    counts = merge_counts([clusters, *(pq.ParquetFile(fetch(files[COUNTS_FILE])).read() for files in merged)])
    write_table(folder / SKETCHES_FOLDER / COUNTS_FILE, counts)
    samples = merge_files([files[SAMPLES_FILE] for files in merged], merge_samples, SAMPLE_SCHEMA)
    write_table(folder / SKETCHES_FOLDER / SAMPLES_FILE, samples)
    for key, unit in zip(keys, units, strict=True):
        if unit.is_complete:  # those of a run that was stopped after it merged them, too
            reused.keep(key, unit.files)
    for run in runs:
        reused.keep(run.key, run.files)
    return [*keys, *(run.key for run in runs)]


def _write_index(
    units: Sequence[tuple[SketchUnit, bool]],
    tables: Sequence[SketchTask],
    num_rows: int,
    work: Path,
    engine: Engine,
    reused: ReusedFiles,
) -> list[tuple[int, list[tuple[str, int]], list[int]]]:
    """Writes the index of ids and, while their tables are read, the sketches of the units that are marked True. work:
    for intermediate files. Records of tables of the run before are taken from its index. Returns what write_ids
    does."""
    folder = reused.corpus
    kept, ranges = KeptIndex(reused.folder.with_name(INDEX_CACHE)), ranges_for(num_rows)
    digests = [task.digests[0] if task.digests else content_digest(task.table) for task in tables]
    renumbered = kept.renumbered(digests, ranges)
    known = set() if renumbered is None else set(renumbered.tolist())
    new = [tuple(number for number in unit.numbers if number not in known) for unit, _ in units]
    prefix, parts = work / f"ids-{fingerprint(new)[:16]}", np.cumsum(list(map(bool, new)))
    records = PartitionedFiles(prefix, ID_RECORD, int(parts[-1]) if len(parts) else 0, ranges)

    def task(place: int) -> UnitTask:
        return UnitTask(*units[place], new[place], records, int(parts[place]) - 1 if new[place] else -1)

    wanted = [place for place, (_, is_sketched) in enumerate(units) if is_sketched or new[place]]
    engine.map(_sketch_unit, LazySequence(task, wanted), "sketches")
    index_tasks = [
        IndexTask(records, number, folder, None if renumbered is None else kept.path(number), renumbered)
        for number in range(ranges)
    ]
    sizes = engine.map(write_ids, index_tasks, "index of ids", unit="files")
    write_index_file(folder, [f"{task.name}.parquet" for task in tables], [size for size, _, _ in sizes])
    kept.keep(folder, digests, ranges)
    return sizes


def _rows_of_tables(tasks: Sequence[SketchTask]) -> list[int]:
    """Rows of the table of each task. Of files that are links to one, one is read."""
    known: dict[tuple[int, int], int] = {}
    rows = []
    for task in tasks:
        if task.stored is not None:
            rows.append(task.stored.num_rows)
            continue
        status = task.table.stat()
        file = status.st_dev, status.st_ino
        if file not in known:
            known[file] = parquet_metadata(task.table).num_rows
        rows.append(known[file])
    return rows


def _groups(tasks: Sequence[SketchTask], rows: Sequence[int]) -> list[list[int]]:
    """Numbers of the tables that have rows: of a small source, and of the small ones that follow it, together."""
    by_source: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        if rows[number]:
            by_source.setdefault(task.source, []).append(number)
    groups: list[list[int]] = []
    last_rows = UNIT_ROWS
    for _, numbers in sorted(by_source.items()):
        source_rows = sum(rows[number] for number in numbers)
        if last_rows + source_rows <= UNIT_ROWS and len(groups[-1]) + len(numbers) <= UNIT_TABLES:
            groups[-1] += numbers
            last_rows += source_rows
        elif source_rows <= UNIT_ROWS:
            groups.append(numbers)
            last_rows = source_rows
        else:
            groups += [[number] for number in numbers]
            last_rows = UNIT_ROWS
    return groups


def sketch_tasks(
    folder: Path,
    ledgers: Sequence[LedgerTask] = (),
    pii: PiiConfig | None = None,
    of_batches: Sequence[BatchTable] = (),
) -> Sequence[SketchTask]:
    """The shards of a corpus in a folder, sorted by path. ledgers: how those of the ledger were written, where that is
    known; without, samples of removed documents have no excerpts. of_batches: shards of small sources."""
    ledger_numbers = {f"ledger/{task.path.stem}": number for number, task in enumerate(ledgers)}
    known = {table.name: table for table in of_batches}
    paths = sorted([*folder.glob("documents/*/*.parquet"), *folder.glob("ledger/*.parquet")])
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in paths]

    def sketch_task(number: int) -> SketchTask:
        name = names[number]
        source = name.rpartition("/")[-1].rpartition("-")[0]
        if (table := known.get(name)) is not None:
            spans = () if table.annotated is None else (table.annotated,)
            return SketchTask(folder, name, source, spans, pii, table.rows, table.digests)
        annotated = ledgers[ledger_numbers[name]].rows if name in ledger_numbers else ()
        return SketchTask(folder, name, source, annotated, pii)

    return LazySequence(sketch_task, range(len(names)))


@dataclass(frozen=True)
class UnitTask:
    """is_sketched: whether the unit's sketch is wanted. numbers: of its tables whose records are wanted, as this part
    of the records."""

    unit: SketchUnit
    is_sketched: bool
    numbers: tuple[int, ...]
    records: PartitionedFiles
    part: int


def _sketch_unit(task: UnitTask) -> None:
    unit, records = task.unit, task.records
    for table in (table for table in unit.tables if table.stored is None):
        for path in (table.table,) if table.is_ledger else (table.table, table.signals):
            fetch(path)
    if task.is_sketched and not unit.is_complete:
        write_sketch(unit.tables, unit.files[COUNTS_FILE], unit.files[SAMPLES_FILE])
    if task.numbers and not records.has(task.part):
        numbered = [(t, n) for t, n in zip(unit.tables, unit.numbers, strict=True) if n in task.numbers]
        kinds = [[(t, n) for t, n in numbered if t.is_ledger == is_ledger] for is_ledger in (False, True)]
        new = [_records_of(of_kind) for of_kind in kinds if of_kind]
        shuffle_records(np.concatenate(new), records, task.part)


def _records_of(tables: Sequence[tuple[SketchTask, int]]) -> np.ndarray:
    """Records of tables of one kind, which have these numbers."""
    first = tables[0][0]
    read = [table.read(LEDGER_COLUMNS if first.is_ledger else DOCUMENT_COLUMNS) for table, _ in tables]
    return records_of_tables(read, [number for _, number in tables], first.table, first.is_ledger)


def _merge_groups(sources: Sequence[Sequence[str]]) -> list[list[int]]:
    """The places of the units of each source together, and of several sources that have few: up to MERGED_FILES in all.
    Few are so many that none of their hosts are left out. sources: of the tables of each unit."""
    by_source: dict[str, list[int]] = {}
    for place, of_unit in enumerate(sources):
        by_source.setdefault(of_unit[0], []).append(place)
    groups: list[list[int]] = []
    for of_source in by_source.values():
        is_small = len(of_source) * LISTED_HOSTS <= MERGED_HOSTS
        if groups and is_small and len(groups[-1]) + len(of_source) <= MERGED_FILES:
            groups[-1] += of_source
        else:
            groups.append(of_source)
    return groups


@dataclass(frozen=True)
class SketchMerge(WrittenSketch):
    """Sketches that are merged into one. parts: prefixes of their files; prefix: of the merged files. key: by which the
    merged files are taken over. places: of the units that are merged."""

    parts: Sequence[Path]
    is_one_source: bool
    prefix: Path
    key: str = ""
    places: Sequence[int] = ()


def _merge_runs(
    group: Sequence[int], sources: Sequence[Sequence[str]], keys: Sequence[str], work: Path
) -> list[SketchMerge]:
    """Runs of consecutive units, RUN_UNITS on average. They end where the keys say, so runs of units that have not
    changed are taken over, and few sketches are merged after a removal or an addition."""
    is_one = len({source for place in group for source in sources[place]}) == 1
    runs: list[list[int]] = []
    for place in group:
        if not runs or len(runs[-1]) == MERGED_FILES or int(keys[place][:8], 16) % RUN_UNITS == 0:
            runs.append([])
        runs[-1].append(place)
    merges = []
    for run in runs:
        key = fingerprint(["merged", is_one, [keys[place] for place in run]])
        prefixes = LazySequence(partial(_unit_prefix, work), run)
        merges.append(SketchMerge(prefixes, is_one, work / "runs" / f"{run[0]:05d}", key, run))
    return merges


def _merge(task: SketchMerge) -> None:
    parts = [_sketch_files(prefix) for prefix in task.parts]
    for files in parts:
        for path in files.values():
            fetch(path)
    counts = merge_counts if task.is_one_source else partial(merge_counts, max_hosts=None)
    for name, merge, schema in ((COUNTS_FILE, counts, COUNT_SCHEMA), (SAMPLES_FILE, merge_samples, SAMPLE_SCHEMA)):
        write_table(task.files[name], merge_files([files[name] for files in parts], merge, schema))


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
    chosen = is_kept & (ranks(np.where(is_kept, source, -1)) < SOURCE_SAMPLES)
    chosen |= is_kept & (ranks(np.where(is_kept, source * many + language, -1)) < LANGUAGE_SAMPLES)
    chosen |= ~is_kept & (ranks(np.where(is_kept, -1, source * many + rule)) < SOURCE_SAMPLES)
    replaced = table.column("replaced").fill_null(0).to_numpy()
    most = np.lexsort((np.arange(len(table)), -replaced))[:PERSONAL_SAMPLES]
    chosen[most[replaced[most] > 0]] = True
    return table.filter(pa.array(chosen)).combine_chunks()


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """int64[]: equal values have equal codes; null counts as the empty string."""
    encoded = pc.fill_null(column, "").combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)


def merge_files(paths: Sequence[Path], merge: Callable[[Sequence[pa.Table]], pa.Table], schema: pa.Schema) -> pa.Table:
    """The merged sketch of these files, of which few are in memory at a time."""
    merged = merge([])
    for start in range(0, len(paths), MERGED_FILES):
        tables = [pq.ParquetFile(fetch(path)).read().cast(schema) for path in paths[start : start + MERGED_FILES]]
        merged = merge([merged, *tables])
    return merged

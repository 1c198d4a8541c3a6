"""Filters applied to annotated files: thresholds on stored signals, so a new threshold needs no new measurement."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.profiles import PROFILE, WANTED_LANGUAGE, Rules
from gristmill.foundation.checksums import (
    checksum_path,
    content_digest,
    file_state,
    matches_checksum,
    write_with_checksum,
)
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine, LazySequence
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles, fetch

FILTER_RESULTS = "filters"  # in the cache of a work folder
NAME_END = len("-00000.rec")  # of the files of results
RESULTS_VERSION = 3  # of their format
CHANGES = "changes"  # column of annotated files: the repairs that changed a document
KEPT, QUARANTINED = -1, -2
REMOVED_LATER = -3  # by a step after the filters
EXAMPLES_PER_SIDE = 5
REMOVED_SIDE, KEPT_SIDE = 0, 1
NEAREST = ("rows", "values", "thresholds")  # arrays of NearestDocuments
SOURCE = "source"  # column of the file of a batch of sources


@dataclass(frozen=True)
class FilterTask:
    """split_of: the split's code (int8) of each document from the hash of its text (uint64). source: the source of a
    batch whose rows of the file are meant; "" for all rows."""

    path: Path
    rules: Rules
    split_of: "partial[np.ndarray] | None" = None
    source: str = ""


@dataclass(frozen=True)
class NearestDocuments:
    """Documents of a file that are nearest to the threshold of each rule: those that it removed, and kept ones.

    All [rules, sides, EXAMPLES_PER_SIDE], sides REMOVED_SIDE and KEPT_SIDE, nearest first, of equals the first row.
    rows int64, -1 where there are fewer. values, thresholds float64."""

    rows: np.ndarray
    values: np.ndarray
    thresholds: np.ndarray


@dataclass(frozen=True)
class SourceRows:
    """The rows start..stop - 1 of an annotated file, which are those of one source of a batch. languages: as
    present_languages of results. nearest: with rows counted from the start; None if no rule removed any. changes: as in
    FilterResults."""

    source: str
    start: int
    stop: int
    num_quarantined: int = 0
    languages: tuple[str, ...] = ()
    nearest: NearestDocuments | None = None
    changes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FilterResults:
    """Filter results of every row of one annotated file, in order: 10 bytes a row.

    failed_rule: int16[rows], the index of the first failed rule, KEPT or QUARANTINED. bytes: uint32[rows], of the
    repaired text. splits: int8[rows], as FilterTask.split_of gives them (0 without it). languages: int16[rows], the
    place in language_names of the language profile, or of the detected language if no profiles are used. marks:
    uint8[rows], as marks_of gives them. sources: of the file of a batch of sources, the rows of each that has any.
    changes: repair -> documents it changed."""

    failed_rule: np.ndarray
    bytes: np.ndarray
    splits: np.ndarray
    languages: np.ndarray
    marks: np.ndarray
    language_names: tuple[str, ...]
    nearest: NearestDocuments | None = None
    sources: tuple[SourceRows, ...] = ()
    changes: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        return len(self.failed_rule)

    @property
    def num_quarantined(self) -> int:
        return int((self.failed_rule == QUARANTINED).sum())

    @property
    def present_languages(self) -> tuple[str, ...]:
        """The languages that some row has."""
        return tuple(self.language_names[code] for code in np.unique(self.languages).tolist())

    def load(self) -> "FilterResults":
        return self

    def of_source(self, rows: SourceRows) -> "FilterResults":
        """The results of the rows of one source of a batch."""
        chosen = slice(rows.start, rows.stop)
        columns = {name: getattr(self, name)[chosen] for name in STORED.names or ()}
        return FilterResults(**columns, language_names=self.language_names, nearest=rows.nearest, changes=rows.changes)


class Results(Protocol):
    """The results of one annotated file, in memory (`FilterResults`) or to be loaded."""

    @property
    def num_documents(self) -> int: ...
    @property
    def num_quarantined(self) -> int: ...
    @property
    def present_languages(self) -> tuple[str, ...]: ...
    @property
    def nearest(self) -> NearestDocuments | None: ...
    @property
    def sources(self) -> tuple[SourceRows, ...]: ...
    def load(self) -> FilterResults: ...


REMEMBERED_FILES, REMEMBERED_ROWS = 512, 1024  # whose results a process keeps in memory: 5 MB at most
STORED = np.dtype([("failed_rule", "<i2"), ("bytes", "<u4"), ("splits", "i1"), ("languages", "<i2"), ("marks", "u1")])


def marks_of(hashes_N: np.ndarray) -> np.ndarray:
    """uint8[N]: trailing zero bits of the hash of each text. One text in 2**k has a mark of k or more: shards begin at
    such texts."""
    lowest = hashes_N & (~hashes_N + np.uint64(1))
    return np.where(hashes_N == 0, 64, np.log2(np.maximum(lowest, 1).astype(np.float64))).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class StoredResults:
    """FilterResults on disk, 10 bytes a row, and their counts. path: of both files, without the ends of their names."""

    path: Path
    num_documents: int
    num_quarantined: int
    present_languages: tuple[str, ...]

    @property
    def nearest(self) -> NearestDocuments | None:
        return self._summary()["nearest"]

    @property
    def sources(self) -> tuple[SourceRows, ...]:
        return self._summary()["sources"]

    def load(self) -> FilterResults:
        stored = PartitionedFiles(self.path, STORED, 1, 1)
        values: dict[str, Any]
        if self.num_documents > REMEMBERED_ROWS:
            values = _columns(stored)
        else:
            values = _remembered(str(self.path), tuple(file_state(fetch(stored.path(0))).values()))
        return FilterResults(**{**values, **self._summary()})

    def _summary(self) -> dict[str, Any]:
        return _read_summary(fetch(_summary_path(self.path)))[1]


def _columns(stored: PartitionedFiles) -> dict[str, np.ndarray]:
    """Columns of STORED, which nobody may change."""
    table = stored.map_output(0)[1]
    columns = {name: np.ascontiguousarray(table[name]) for name in STORED.names or ()}
    for column in columns.values():
        column.setflags(write=False)
    return columns


@lru_cache(maxsize=REMEMBERED_FILES)
def _remembered(path: str, _: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Columns of a file in this state. Every step reads those of all files, and they are small."""
    return _columns(PartitionedFiles(Path(path), STORED, 1, 1))


def apply_filters_to_files(
    tasks: Sequence[FilterTask], engine: Engine, folder: Path, code_version: int = 0
) -> Sequence[StoredResults]:
    """The results of each file, which the folder takes and keeps: those of the same documents, signals and rules are
    not computed again. This process holds their names and counts. code_version: of the stage."""
    names, sizes = [], []
    for task in tasks:
        names.append(f"{task.path.stem}-{_key(task, code_version)}")
        sizes.append(float(task.path.stat().st_size))
    named = LazySequence(lambda number: (tasks[number], folder / names[number]), range(len(names)))
    results = engine.map(_store_results, named, "apply rules", sizes, "B")
    _remove_others(folder, set(names))
    known: dict[tuple[str, ...], tuple[str, ...]] = {}  # many files have the same languages
    counts = [(documents, failed, known.setdefault(present, present)) for documents, failed, present in results]
    return LazySequence(lambda number: StoredResults(folder / names[number], *counts[number]), range(len(names)))


def _key(task: FilterTask, code_version: int) -> str:
    """Fingerprint of all that decides the results, besides the annotated file's name."""
    documents = content_digest(task.path)
    split = None if task.split_of is None else [task.split_of.func.__name__, repr(task.split_of.keywords)]
    return fingerprint([documents, task.rules.description, split, code_version, RESULTS_VERSION])[:16]


def _remove_others(folder: Path, names: Collection[str]) -> None:
    """Removes results of other files and rules."""
    for path in folder.glob("*"):
        if path.name[:-NAME_END] not in names and not path.name.startswith("."):
            path.unlink()
            checksum_path(path).unlink(missing_ok=True)


def _summary_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}-00000.sum")


def _store_results(task: tuple[FilterTask, Path]) -> tuple[int, int, tuple[str, ...]]:
    """The counts of StoredResults."""
    filter_task, prefix = task
    records, summary = PartitionedFiles(prefix, STORED, 1, 1), _summary_path(prefix)
    if not (matches_checksum(records.path(0)) and matches_checksum(summary)):
        results = apply_filters(filter_task)
        rows = np.empty(results.num_documents, STORED)
        for name in STORED.names or ():
            rows[name] = getattr(results, name)
        records.write(0, rows, np.array([0, len(rows)]))
        _write_summary(summary, results)
    return _read_summary(summary)[0]


def _write_summary(path: Path, results: FilterResults) -> None:
    """Counts of the results, which need none of a row: a line of JSON, then the arrays of NEAREST of the
    file and of the sources of a batch."""
    all_nearest = [results.nearest, *(source.nearest for source in results.sources)]
    arrays = [getattr(nearest, name) for nearest in all_nearest if nearest is not None for name in NEAREST]
    described = {
        "documents": results.num_documents,
        "quarantined": results.num_quarantined,
        "languages": list(results.language_names),
        "changes": dict(results.changes),
        "sources": [[s.source, s.start, s.stop, s.num_quarantined, s.languages, s.changes] for s in results.sources],
        "rules": len(arrays[0]) if arrays else 0,
        "with_nearest": [nearest is not None for nearest in all_nearest],
    }
    header = orjson.dumps(described) + b"\n"
    write_with_checksum(
        path, header, *(np.ascontiguousarray(array).astype("<" + array.dtype.str[1:]).tobytes() for array in arrays)
    )


def _read_summary(path: Path) -> tuple[tuple[int, int, tuple[str, ...]], dict[str, Any]]:
    """(the counts of StoredResults, those values of FilterResults that are not by row)."""
    header, _, content = path.read_bytes().partition(b"\n")
    described = orjson.loads(header)
    nearest = _nearest_in(content, described["rules"], described["with_nearest"])
    sources = tuple(
        SourceRows(name, start, stop, quarantined, tuple(languages), of_source, changes)
        for (name, start, stop, quarantined, languages, changes), of_source in zip(
            described["sources"], nearest[1:], strict=True
        )
    )
    languages = tuple(described["languages"])
    values = {"language_names": languages, "nearest": nearest[0], "sources": sources, "changes": described["changes"]}
    return (described["documents"], described["quarantined"], languages), values


def _nearest_in(content: bytes, rules: int, with_nearest: Sequence[bool]) -> list[NearestDocuments | None]:
    """content: int64 rows, float64 values and thresholds of each of them that has any."""
    shape = rules, len((REMOVED_SIDE, KEPT_SIDE)), EXAMPLES_PER_SIDE
    arrays = np.frombuffer(content, "<i8").reshape(sum(with_nearest), len(NEAREST), *shape)
    stored = iter(arrays)
    return [NearestDocuments(*_typed(next(stored))) if has_nearest else None for has_nearest in with_nearest]


def _typed(arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return arrays[0], *(array.view("<f8") for array in arrays[1:])


def apply_filters(task: FilterTask) -> FilterResults:
    """Reads one row group at a time, so that memory does not grow with the file."""
    language = PROFILE if task.rules.by_profile else "detected_language"
    columns = list(dict.fromkeys(["unreadable", "num_bytes", "text_hash", language, *task.rules.columns]))
    codes: dict[str, int] = {}  # of the languages, in the order in which they occur
    results: list[FilterResults] = []
    with pq.ParquetFile(task.path) as file:  # half the time of pq.read_table, which opens a dataset and threads
        columns += [CHANGES] if CHANGES in file.schema_arrow.names else []
        if SOURCE in file.schema_arrow.names:
            return _apply_to_batch(file.read([*columns, SOURCE], use_threads=False), task, language)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=columns, use_threads=False)
            results.append(_apply_to_table(table, task, language, codes))
        results = results or [_apply_to_table(file.schema_arrow.empty_table().select(columns), task, language, codes)]
    return FilterResults(
        failed_rule=np.concatenate([batch_results.failed_rule for batch_results in results]),
        bytes=np.concatenate([batch_results.bytes for batch_results in results]),
        splits=np.concatenate([batch_results.splits for batch_results in results]),
        languages=np.concatenate([batch_results.languages for batch_results in results]),
        marks=np.concatenate([batch_results.marks for batch_results in results]),
        language_names=tuple(codes),
        nearest=_nearest_of_all(results),
        changes=dict(sum((Counter(batch_results.changes) for batch_results in results), Counter[str]())),
    )


def _apply_to_batch(table: pa.Table, task: FilterTask, language: str) -> FilterResults:
    """Results of the file of a batch of sources, which is small."""
    codes: dict[str, int] = {}
    results, values_RN, thresholds_RN = _judged(table, task, language, codes)
    sources = []
    for name, start, stop in source_runs(table.column(SOURCE)):
        of_source = results.of_source(SourceRows(name, start, stop))
        present = np.unique(of_source.languages).tolist()
        nearest = None
        if (of_source.failed_rule >= 0).any():
            nearest = _nearest_documents(values_RN[:, start:stop], thresholds_RN[:, start:stop], of_source.failed_rule)
        languages = tuple(list(codes)[code] for code in present)
        changes = _changes_in(table.slice(start, stop - start))
        sources.append(SourceRows(name, start, stop, of_source.num_quarantined, languages, nearest, changes))
    return replace(results, language_names=tuple(codes), sources=tuple(sources))


def source_runs(names: pa.ChunkedArray) -> list[tuple[str, int, int]]:
    """(source, first row, last + 1) of the sources of a batch, whose rows stand together, from the column of their
    names."""
    if not len(names):
        return []
    codes = names.combine_chunks().dictionary_encode()
    indices = codes.indices.to_numpy()
    starts = np.flatnonzero(np.diff(indices, prepend=-1)).tolist()
    of_runs = codes.dictionary.take(pa.array(indices[starts])).to_pylist()
    return list(zip(of_runs, starts, [*starts[1:], len(indices)], strict=True))


def _apply_to_table(table: pa.Table, task: FilterTask, language: str, codes: dict[str, int]) -> FilterResults:
    """codes: of the languages so far; new ones are added."""
    results, values_RN, thresholds_RN = _judged(table, task, language, codes)
    return replace(results, nearest=_nearest_documents(values_RN, thresholds_RN, results.failed_rule))


def _judged(
    table: pa.Table, task: FilterTask, language: str, codes: dict[str, int]
) -> tuple[FilterResults, np.ndarray, np.ndarray]:
    """(results without the nearest documents, values float64[rules, rows], thresholds float64[rules, rows])."""
    values_RN, thresholds_RN, failed_RN = apply_rules(table, task.rules)
    first = np.where(failed_RN.any(axis=0), failed_RN.argmax(axis=0), KEPT)
    readable = pc.is_null(table.column("unreadable")).to_numpy(zero_copy_only=False)
    failed_rule = np.where(readable, first, QUARANTINED).astype(np.int16)
    languages = pc.fill_null(table.column(language).combine_chunks(), "").dictionary_encode()
    numbers = [codes.setdefault(name, len(codes)) for name in languages.dictionary.to_pylist()]
    hashes = table.column("text_hash").to_numpy()
    results = FilterResults(
        failed_rule=failed_rule,
        bytes=table.column("num_bytes").to_numpy().astype(np.uint32),
        splits=np.zeros(len(table), np.int8) if task.split_of is None else task.split_of(hashes),
        languages=np.array(numbers, np.int16)[languages.indices.to_numpy()],
        marks=marks_of(hashes),
        language_names=(),
        changes=_changes_in(table),
    )
    return results, values_RN, thresholds_RN


def _changes_in(table: pa.Table) -> dict[str, int]:
    if CHANGES not in table.schema.names:
        return {}
    counts = pc.value_counts(pc.list_flatten(table.column(CHANGES)))
    return dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True))


def _nearest_of_all(results: Sequence[FilterResults]) -> NearestDocuments:
    """The nearest documents of consecutive row groups, with rows counted from the first one."""
    starts = np.cumsum([0, *(len(batch_results.failed_rule) for batch_results in results[:-1])])
    nearest = [batch_results.nearest for batch_results in results if batch_results.nearest is not None]
    rows_RSN = np.concatenate(
        [
            np.where(batch_results.rows >= 0, batch_results.rows + start, -1)
            for batch_results, start in zip(nearest, starts, strict=True)
        ],
        axis=-1,
    )
    values_RSN, thresholds_RSN = (
        np.concatenate([getattr(batch_results, name) for batch_results in nearest], axis=-1)
        for name in ("values", "thresholds")
    )
    distances_RSN = np.where(rows_RSN >= 0, np.abs(values_RSN - thresholds_RSN), np.inf)
    chosen = np.argsort(distances_RSN, axis=-1, kind="stable")[..., :EXAMPLES_PER_SIDE]
    taken = (np.take_along_axis(array, chosen, axis=-1) for array in (rows_RSN, values_RSN, thresholds_RSN))
    return NearestDocuments(*taken)


def apply_rules(table: pa.Table, rules: Rules) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(values float64, thresholds float64, failed bool), all [rules, rows], each rule evaluated independently."""
    shape = len(rules.rules), table.num_rows
    thresholds_RN = rules.thresholds(table)
    values_RN, failed_RN = np.empty(shape), np.empty(shape, bool)
    for index, rule in enumerate(rules.rules):
        values_RN[index] = signal_values(table, rule.signal, rules.languages)
        failed_RN[index] = ~rule.passes(values_RN[index], thresholds_RN[index])
    return values_RN, thresholds_RN, failed_RN


def failures(table: pa.Table, rules: Rules) -> np.ndarray:
    """bool[rules, rows]: which document fails which rule."""
    return apply_rules(table, rules)[2]


def _nearest_documents(values_RN: np.ndarray, thresholds_RN: np.ndarray, failed_rule_N: np.ndarray) -> NearestDocuments:
    shape = len(values_RN), len((REMOVED_SIDE, KEPT_SIDE)), EXAMPLES_PER_SIDE
    rows, values, thresholds = np.full(shape, -1), np.zeros(shape), np.zeros(shape)
    kept = np.flatnonzero(failed_rule_N == KEPT)
    for rule in range(len(values_RN)):
        removed = np.flatnonzero(failed_rule_N == rule)
        for side, candidates in ((REMOVED_SIDE, removed), (KEPT_SIDE, kept)):
            distances = np.abs(values_RN[rule, candidates] - thresholds_RN[rule, candidates])
            nearest_rows = candidates[_smallest(distances, EXAMPLES_PER_SIDE)]
            rows[rule, side, : len(nearest_rows)] = nearest_rows
            values[rule, side, : len(nearest_rows)] = values_RN[rule, nearest_rows]
            thresholds[rule, side, : len(nearest_rows)] = thresholds_RN[rule, nearest_rows]
    return NearestDocuments(rows, values, thresholds)


def _smallest(distances: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` smallest finite numbers, in ascending order, of equals the first:
    [3, NaN, 1, 1], 2 -> [2, 3]."""
    if len(distances) > count:
        limit = np.partition(distances, count - 1)[count - 1]  # NaN is last
        chosen = np.flatnonzero(distances <= limit) if np.isfinite(limit) else np.flatnonzero(np.isfinite(distances))
    else:
        chosen = np.flatnonzero(np.isfinite(distances))
    return chosen[np.argsort(distances[chosen], kind="stable")[:count]]


def signal_values(table: pa.Table, signal: str, languages: Sequence[str]) -> np.ndarray:
    """float64[rows] of one signal."""
    if signal == WANTED_LANGUAGE:
        wanted = pc.is_in(table.column("detected_language"), pa.array(languages, pa.string()))
        return np.where(wanted.to_numpy(zero_copy_only=False), table.column("language_score").to_numpy(), 0.0)
    return table.column(signal).to_numpy().astype(np.float64)

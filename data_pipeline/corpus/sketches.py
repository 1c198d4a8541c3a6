"""Sketches of a corpus: small tables by which a page about it costs the same for any number of documents.

Counts are added, and samples are the documents with the smallest ids (ids are hashes, so they are drawn at random). So
neither the order of a merge nor which tables are sketched together decides anything. `sketches/counts.parquet` and
`sketches/samples.parquet` are those of the whole corpus."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.shards import PII_FIELD, replaced_texts
from gristmill.data_pipeline.corpus.small_sources import RowSpan, TableSlice, signals_name
from gristmill.data_pipeline.dedup.folding import picked_texts
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger.document_file import RowRange, read_rows
from gristmill.data_pipeline.ledger.ledger import LedgerRows
from gristmill.data_pipeline.readers.document import hosts_of
from gristmill.foundation.checksums import write_with_checksum
from gristmill.foundation.fingerprint import hyperloglog

SKETCHES_FOLDER = "sketches"
COUNTS_FILE, SAMPLES_FILE = "counts.parquet", "samples.parquet"
# Kinds of counts:
# documents: kept ones by split and language. signal: name, by language, the kept documents in each bin.
# host: name, kept documents; host_rest: the documents of hosts that are not listed.
# host_register: bin = a register of the HyperLogLog of hosts, documents = its value, merged by the maximum.
# outcome: ledger rows by outcome, split, step and rule.
# outcome of an annotated file: `annotated` (no decision yet) and quarantined.
# alone: documents that failed no other rule than this one, by the bin of the value.
# cluster: name = a kept document, its duplicates; cluster_size: bin = k, kept documents with 2**k or more duplicates.
COUNT_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("name", pa.string()),
        ("source", pa.string()),
        ("outcome", pa.string()),
        ("split", pa.string()),
        ("step", pa.string()),
        ("rule", pa.string()),
        ("language", pa.string()),
        ("bin", pa.int32()),
        ("documents", pa.int64()),
        ("bytes", pa.int64()),
    ]
)
COUNT_KEYS = COUNT_SCHEMA.names[:9]
SAMPLE_SCHEMA = pa.schema(
    [
        ("doc_id", pa.string()),
        ("source", pa.string()),
        ("outcome", pa.string()),
        ("split", pa.string()),
        ("step", pa.string()),
        ("rule", pa.string()),
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("duplicate_of", pa.string()),
        ("language", pa.string()),
        ("bytes", pa.int64()),
        ("alone", pa.bool_()),  # failed no other rule than `rule`
        ("replaced", pa.int64()),  # placeholders for personal data
        ("excerpt", pa.string()),  # null where the text is not stored
        ("signals", pa.map_(pa.string(), pa.float64())),  # of a kept document
    ]
)
SOURCE_SAMPLES = 200  # kept documents of a source with their signals, and removed ones of a source and rule
LANGUAGE_SAMPLES = 25  # kept documents of a source and language
PERSONAL_SAMPLES = 25  # with the most placeholders
EXCERPT_CHARACTERS = 240
LISTED_HOSTS = 1_000  # of a shard
SMALL_TABLE_ROWS = 1_024  # texts of a table of so many are read with its addresses, in one call
MANTISSA_SHIFT = 48  # of a float64: leaves sign, exponent and 4 bits, 16 bins between a number and its double
UNSIGNALLED = ("doc_id", "detected_language", "script", "profile", "main_language", "record", "text_hash", "offset")
ANNOTATED_FOLDER = "annotated"  # of the cache
Constants = Mapping[str, str | None]  # columns with one value for all rows


@dataclass(frozen=True)
class SketchTask:
    """A shard of documents (with its signals), or of the ledger, or an annotated file in the cache of a run that has no
    shards yet. name: its path in the folder, without the suffix. rows: of the annotated files behind a shard of the
    ledger, whose excerpts are read there. pii: what is replaced. stored: its rows where they stand with those of other
    tables, which are read at once. digests: XXH3-128 of its files; empty if they have checksum files."""

    folder: Path
    name: str
    source: str
    rows: tuple[LedgerRows | RowSpan, ...] = ()
    pii: PiiConfig | None = None
    stored: TableSlice | None = None
    digests: tuple[str, ...] = ()

    @property
    def is_ledger(self) -> bool:
        return self.name.startswith("ledger/")

    @property
    def is_annotated(self) -> bool:
        return self.name.startswith(f"{ANNOTATED_FOLDER}/")

    @property
    def constants(self) -> dict[str, str | None]:
        """Columns of the counts and samples of all its documents."""
        if self.is_annotated:
            return {"source": self.source, "outcome": "annotated", "split": None}
        return {"source": self.source, "outcome": "kept", "split": self.name.split("/")[1]}

    @property
    def table(self) -> Path:
        return self.folder / f"{self.name}.parquet"

    @property
    def signals(self) -> Path:
        return self.table if self.is_annotated else self.folder / f"{signals_name(self.name)}.parquet"

    @property
    def signal_columns(self) -> list[str]:
        schema = pq.read_schema(self.signals) if self.stored is None else self.stored.schema
        return [name for name in schema.names if name not in ("url", "text")]

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Columns of the table."""
        if self.stored is not None:
            return self.stored.read(columns)
        with pq.ParquetFile(self.table) as file:
            return file.read(list(columns), use_threads=False)


def write_sketch(tasks: Sequence[SketchTask], counts: Path, samples: Path) -> None:
    """Writes the sketch of these tables, not merged: several rows may have one key."""
    documents: dict[tuple[str, ...], list[SketchTask]] = {}
    for task in tasks:
        if not task.is_ledger:
            documents.setdefault(tuple(task.signal_columns), []).append(task)
    parts = [sketch_documents(group) for group in documents.values()]
    if ledgers := [task for task in tasks if task.is_ledger]:
        parts.append(sketch_ledgers(ledgers))
    for path, tables in zip((counts, samples), zip(*parts, strict=True), strict=True):
        write_table(path, pa.concat_tables(tables))


def write_table(path: Path, table: pa.Table) -> None:
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd")
    write_with_checksum(path, memoryview(content.getvalue()))


# Bins of a histogram whose range need not be known.


def bins_of(values: np.ndarray) -> np.ndarray:
    """int32[]: the bin of each number, which ascend as the numbers do; 0 has bin 0. Bins are a 16th of an octave wide:
    [1, 1.05, 1.07, 2] -> bins b, b, b + 1, b + 16."""
    numbers = np.asarray(values, np.float64)
    codes = (np.abs(numbers).view(np.int64) >> MANTISSA_SHIFT).astype(np.int32)
    return np.where(numbers < 0, -codes - 1, codes)


def bin_edges(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) of each bin: it has the numbers low <= x < high, a negative one low < x <= high."""
    codes = np.asarray(codes, np.int64)
    magnitude = np.where(codes < 0, -codes - 1, codes)
    near, far = ((magnitude + step << MANTISSA_SHIFT).view(np.float64) for step in (0, 1))
    return np.where(codes < 0, -far, near), np.where(codes < 0, -near, far)


# The sketch of tables, computed for all of them at once: of small ones a call for each would take longer than the work.


def sketch_documents(tasks: Sequence[SketchTask]) -> tuple[pa.Table, pa.Table]:
    """(counts, samples) of tables of kept documents, or of annotated files, whose signals have the same columns."""
    parts, signals, urls, texts = [], [], [], []
    for task in tasks:
        table = _signals_of(task)
        places = np.arange(len(table))
        if task.is_annotated:
            places = np.flatnonzero(table.column("unreadable").is_null().to_numpy())
            parts += _read_counts(task, table)
            table = table.take(pa.array(places))
        has_texts = task.stored is not None or len(table) <= SMALL_TABLE_ROWS
        read = task.read(["url", "text"] if has_texts else ["url"])
        signals.append(table)
        urls.append(read.column("url").take(pa.array(places)))
        texts.append(TableTexts(task.table, places, read.column("text") if "text" in read.schema.names else None))
    joined, table_of = pa.concat_tables(signals).combine_chunks(), _table_of(signals)
    languages = pc.fill_null(joined.column("detected_language"), "").combine_chunks().dictionary_encode()
    names = languages.dictionary
    joint = table_of * max(len(names), 1) + languages.indices.to_numpy(zero_copy_only=False)
    groups, codes = np.unique(joint, return_inverse=True)
    columns = constant_columns(tasks, groups // max(len(names), 1))
    columns["language"] = names.take(pa.array(groups % max(len(names), 1)))
    documents = np.bincount(codes, minlength=len(groups))
    num_bytes = np.zeros(len(groups), np.int64)
    np.add.at(num_bytes, codes, joined.column("num_bytes").to_numpy())
    parts.append(count_table({"kind": "documents"}, **columns, documents=documents, bytes=num_bytes))
    parts.append(_signal_counts(joined, codes, columns))
    parts += _host_counts(tasks, urls)
    return pa.concat_tables(parts), _kept_samples(tasks, joined, table_of, codes, texts)


def _signals_of(task: SketchTask) -> pa.Table:
    last = ["doc_id", "detected_language", *(["unreadable"] if task.is_annotated else [])]
    if task.stored is not None:
        return task.stored.read([*signal_names(task.stored.schema), *last])
    with pq.ParquetFile(task.signals) as file:
        return file.read([*signal_names(file.schema_arrow), *last], use_threads=False)


def _table_of(tables: Sequence[pa.Table]) -> np.ndarray:
    """int64[]: of each row of these tables, the table's number."""
    return np.repeat(np.arange(len(tables)), [len(table) for table in tables])


def constant_columns(tasks: Sequence[SketchTask], table_of: np.ndarray) -> dict[str, pa.Array]:
    """The columns that are the same for all documents of a table, of rows of these tables."""
    rows = pa.array(table_of)
    names = list(dict.fromkeys(name for task in tasks for name in task.constants))
    return {name: pa.array([task.constants[name] for task in tasks], pa.string()).take(rows) for name in names}


@dataclass(frozen=True)
class TableTexts:
    """Texts of a table. places: int64[], the row of each document in it. column: all texts, if they were read."""

    path: Path
    places: np.ndarray
    column: pa.ChunkedArray | None

    def excerpts(self, documents: np.ndarray) -> pa.Array:
        """Excerpts of these documents, int64[] ascending."""
        rows = self.places[documents]
        if self.column is not None:
            return excerpts(self.column.take(pa.array(rows)))
        return excerpts(read_rows(RowRange.of_rows(self.path, rows), ["text"]).column("text"))


def _signal_counts(signals: pa.Table, codes: np.ndarray, columns: Mapping[str, pa.Array]) -> pa.Table:
    """Kept documents by signal, group and bin. codes: int64[], the group of each document. columns: of each group."""
    names = signal_names(signals.schema)
    histograms = [(np.empty(0, np.int64),) * 3]
    for name in names:
        values = signals.column(name)
        column = (pc.cast(values, pa.float64()) if values.null_count else values).to_numpy().astype(np.float64)
        histograms.append(_histograms(codes, column))
    signal_of = np.repeat(np.arange(len(names)), [len(bins) for _, bins, _ in histograms[1:]])
    group_of, bins, counts = (np.concatenate(arrays) for arrays in zip(*histograms, strict=True))
    return count_table(
        {"kind": "signal"},
        **{name: column.take(pa.array(group_of)) for name, column in columns.items()},
        name=pa.array(names, pa.string()).take(pa.array(signal_of)),
        bin=bins,
        documents=counts,
    )


def _histograms(codes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(group, bin, documents), int64[] each, of the finite values float64[]. codes: int64[], the group of each."""
    known = np.isfinite(values)
    ordered = np.sort((codes[known] << 32) | (bins_of(values[known]).astype(np.int64) + (1 << 31)))
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    joint = ordered[starts]
    return joint >> 32, (joint & 0xFFFFFFFF) - (1 << 31), np.diff(starts, append=len(ordered))


def _read_counts(task: SketchTask, rows: pa.Table) -> list[pa.Table]:
    """Documents of an annotated file that wait for a decision, and records that could not be read, by kind."""
    is_read = rows.column("unreadable").is_null()
    read = rows.filter(is_read).column("num_bytes")
    waiting = {"documents": np.array([len(read)]), "bytes": np.array([pc.sum(read).as_py() or 0])}
    kinds = pc.value_counts(rows.column("unreadable").drop_null())
    unread = {"kind": "outcome", "source": task.source, "outcome": "quarantined"}
    return [
        count_table({"kind": "outcome", **task.constants}, **waiting),
        count_table(unread, rule=kinds.field("values"), documents=kinds.field("counts").to_numpy()),
    ]


def signal_names(schema: pa.Schema) -> list[str]:
    is_number = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    fields = [field for field in schema if field.name not in UNSIGNALLED]
    return [field.name for field in fields if any(is_kind(field.type) for is_kind in is_number)]


def count_table(constants: Constants, **columns: pa.Array | np.ndarray) -> pa.Table:
    """A table of COUNT_SCHEMA with these constants and columns, of which `documents` must be one."""
    size = len(columns["documents"])
    arrays = []
    for field in COUNT_SCHEMA:
        if field.name in columns:
            column = columns[field.name]
            arrays.append(pa.array(column).cast(field.type))
        elif field.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), size))
        else:
            arrays.append(pa.nulls(size, field.type))
    return pa.table(arrays, schema=COUNT_SCHEMA)


def _host_counts(tasks: Sequence[SketchTask], urls: Sequence[pa.ChunkedArray]) -> list[pa.Table]:
    """urls: of the documents of each table."""
    hosts = hosts_of(pa.chunked_array([chunk for column in urls for chunk in column.chunks], pa.string()))
    if hosts.null_count == len(hosts):
        return []
    tables, start = [], 0
    for task, column in zip(tasks, urls, strict=True):
        counted = pc.value_counts(hosts.slice(start, len(column)).drop_null())
        names, counts = counted.field("values"), counted.field("counts").to_numpy()
        order = np.lexsort((np.argsort(np.argsort(names.to_numpy(zero_copy_only=False))), -counts))
        listed, others = order[:LISTED_HOSTS], order[LISTED_HOSTS:]
        constants = {"kind": "host", **task.constants}
        tables.append(count_table(constants, name=names.take(pa.array(listed)), documents=counts[listed]))
        if len(others):
            tables.append(count_table({**constants, "kind": "host_rest"}, documents=counts[others].sum(keepdims=True)))
        start += len(column)
    registers = hyperloglog(pc.unique(hosts.drop_null()).to_pylist())
    filled = np.flatnonzero(registers)
    tables.append(count_table({"kind": "host_register"}, bin=filled, documents=registers[filled]))
    return tables


def _kept_samples(
    tasks: Sequence[SketchTask], signals: pa.Table, table_of: np.ndarray, codes: np.ndarray, texts: Sequence[TableTexts]
) -> pa.Table:
    """The documents of each table with the smallest ids, of each language too, and those with the most placeholders.

    table_of, codes: int64[], of each document its table, and its table and language."""
    order = pc.sort_indices(signals.column("doc_id").combine_chunks()).to_numpy().astype(np.int64)
    chosen = [order[ranks(of[order]) < most] for of, most in ((table_of, SOURCE_SAMPLES), (codes, LANGUAGE_SAMPLES))]
    replaced = np.zeros(len(order), np.int64)
    if PII_FIELD.name in signals.schema.names:
        replaced = signals.column(PII_FIELD.name).to_numpy()
        most = np.lexsort((np.argsort(order), -replaced))[:PERSONAL_SAMPLES]
        chosen.append(most[replaced[most] > 0])
    rows = np.unique(np.concatenate(chosen))
    picked, tables_of_rows = signals.take(pa.array(rows)), table_of[rows]
    names = signal_names(signals.schema)
    values = np.stack([pc.cast(picked.column(name), pa.float64()).to_numpy() for name in names], axis=1)
    offsets = np.arange(0, (len(rows) + 1) * len(names), len(names), dtype=np.int32)
    keys = pa.array(np.tile(np.array(names, object), len(rows)), pa.string())
    bounds = np.searchsorted(table_of, np.arange(len(tasks)))
    columns = {
        **constant_columns(tasks, tables_of_rows),
        "doc_id": picked.column("doc_id"),
        "language": pc.fill_null(picked.column("detected_language"), ""),
        "bytes": picked.column("num_bytes"),
        "replaced": pa.array(replaced[rows]),
        "excerpt": _by_table(tables_of_rows, lambda number, at: texts[number].excerpts(rows[at] - bounds[number])),
        "signals": pa.MapArray.from_arrays(pa.array(offsets), keys, pa.array(values.reshape(-1))),
    }
    return _sample_table(len(rows), columns)


def _by_table(table_of: np.ndarray, strings: Callable[[int, slice], pa.Array]) -> pa.Array:
    """Strings of rows of tables, table after table. strings: of the rows of a table, which are at this slice."""
    tables, starts = np.unique(table_of, return_index=True)
    bounds = [*starts.tolist(), len(table_of)]
    parts = [strings(number, slice(*bounds[at : at + 2])) for at, number in enumerate(tables.tolist())]
    return pa.concat_arrays([pa.array([], pa.string()), *parts])


def ranks(groups: np.ndarray) -> np.ndarray:
    """int64[]: how many of the same group stand before each. [5, 7, 5] -> [0, 0, 1]."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1)) if len(groups) else np.empty(0, np.int64)
    ranks_of = np.empty(len(groups), np.int64)
    ranks_of[order] = np.arange(len(groups)) - np.repeat(starts, np.diff(np.append(starts, len(groups))))
    return ranks_of


def excerpts(texts: pa.ChunkedArray) -> pa.Array:
    """The first characters of each text, as one line."""
    heads = pc.utf8_slice_codeunits(texts.combine_chunks(), 0, 4 * EXCERPT_CHARACTERS)
    return pa.array([" ".join(head.split())[:EXCERPT_CHARACTERS] for head in heads.to_pylist()], pa.string())


def _sample_table(size: int, columns: Mapping[str, pa.Array]) -> pa.Table:
    arrays = [columns[field.name] if field.name in columns else pa.nulls(size, field.type) for field in SAMPLE_SCHEMA]
    return pa.table(arrays, schema=SAMPLE_SCHEMA).sort_by("doc_id")


def sketch_ledgers(tasks: Sequence[SketchTask]) -> tuple[pa.Table, pa.Table]:
    """(counts, samples) of shards of the ledger; the samples are of documents that were not kept."""
    names = ["doc_id", "outcome", "split", "step", "rule", "value", "threshold", "duplicate_of", "failed", "bytes"]
    tables = [task.read(names) for task in tasks]
    rows, table_of = pa.concat_tables(tables).combine_chunks(), _table_of(tables)
    fails_one_rule = pc.equal(pc.list_value_length(rows.column("failed")), 1)
    is_alone = pc.and_(fails_one_rule, pc.equal(rows.column("step"), "filters"))
    rows = rows.drop_columns("failed").append_column("alone", pc.fill_null(is_alone, False))
    rows = rows.append_column("source", pa.array([task.source for task in tasks], pa.string()).take(pa.array(table_of)))
    keys = ["source", "outcome", "split", "step", "rule"]
    sums = rows.group_by(keys, use_threads=False).aggregate([("doc_id", "count"), ("bytes", "sum")])
    group = {name: sums.column(name).combine_chunks() for name in keys}
    documents, num_bytes = (sums.column(name).combine_chunks() for name in ("doc_id_count", "bytes_sum"))
    counts = count_table({"kind": "outcome"}, **group, documents=documents, bytes=num_bytes)
    alone = _alone_counts(rows.filter(rows.column("alone")))
    return pa.concat_tables([counts, alone]), _removed_samples(tasks, rows, table_of)


def _alone_counts(alone: pa.Table) -> pa.Table:
    """Documents that failed one rule, by source, rule and bin of the value."""
    sources, rules = (alone.column(name).combine_chunks().dictionary_encode() for name in ("source", "rule"))
    source_of, rule_of = (column.indices.to_numpy(zero_copy_only=False).astype(np.int64) for column in (sources, rules))
    many = max(len(rules.dictionary), 1)
    groups, bins, counts = _histograms(source_of * many + rule_of, alone.column("value").to_numpy())
    columns = {
        "source": sources.dictionary.take(pa.array(groups // many)),
        "rule": rules.dictionary.take(pa.array(groups % many)),
    }
    return count_table({"kind": "alone", "outcome": "removed"}, **columns, bin=bins, documents=counts)


def _removed_samples(tasks: Sequence[SketchTask], rows: pa.Table, table_of: np.ndarray) -> pa.Table:
    """By table and rule (kind of unreadable record), the documents with the smallest ids, and as many that failed it
    alone."""
    numbered = rows.append_column("row", pa.array(np.arange(len(rows))))
    gone = numbered.filter(pc.not_equal(numbered.column("outcome"), "kept")).sort_by("doc_id")
    rules = pc.fill_null(gone.column("rule"), "").combine_chunks().dictionary_encode()
    codes = 2 * rules.indices.to_numpy(zero_copy_only=False).astype(np.int64) + gone.column("alone").to_numpy()
    codes += table_of[gone.column("row").to_numpy()] * 2 * max(len(rules.dictionary), 1)
    gone = gone.filter(pa.array(ranks(codes) < SOURCE_SAMPLES)).sort_by("row")
    rows_of_gone = gone.column("row").to_numpy()
    tables_of_gone, bounds = table_of[rows_of_gone], np.searchsorted(table_of, np.arange(len(tasks)))
    columns = {field.name: gone.column(field.name) for field in SAMPLE_SCHEMA if field.name in gone.schema.names}
    columns["excerpt"] = _by_table(
        tables_of_gone, lambda number, at: _annotated_excerpts(tasks[number], rows_of_gone[at] - bounds[number])
    )
    return _sample_table(len(gone), columns)


def _annotated_excerpts(task: SketchTask, places: np.ndarray) -> pa.Array:
    """Excerpts of these rows of the shard, int64[] ascending, from the annotated files behind it, without the personal
    data that the corpus has not either. Nulls if the files are not known."""
    if not task.rows:
        return pa.nulls(len(places), pa.string())
    first, texts = 0, []
    for rows in task.rows:
        last = first + rows.stop - rows.start
        inside = places[(places >= first) & (places < last)] - first + rows.start
        if len(inside):
            column = pa.concat_arrays([of_group for _, of_group in picked_texts(rows.path, inside)])
            heads = pc.utf8_slice_codeunits(pc.fill_null(column, ""), 0, 4 * EXCERPT_CHARACTERS)
            texts.append(heads if task.pii is None else replaced_texts(heads, task.pii)[0])
        first = last
    return excerpts(pa.chunked_array(texts, pa.string()))

"""Sketches of a corpus: small tables by which a page about it costs the same for any number of documents.

For every shard of documents and of the ledger, `sketches/SHARD.counts.parquet` counts documents and
`sketches/SHARD.samples.parquet` holds a few of them. Counts are added and samples are those with the smallest ids (ids
are hashes, so they are drawn at random), so the order of a merge decides nothing. `sketches/counts.parquet` and
`sketches/samples.parquet` are the merged ones of the whole corpus."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from gristmill.data_pipeline.corpus.shards import PII_FIELD, replaced_texts
from gristmill.data_pipeline.filters.pii import PiiConfig
from gristmill.data_pipeline.ledger.ledger import LedgerRows
from gristmill.data_pipeline.ledger.parquet_rows import RowRange, read_rows
from gristmill.foundation.checksums import is_sealed, write_sealed

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
HLL_BITS = 11  # 2,048 registers: a standard error of 2.3 % (1.04 / sqrt(2048))
MANTISSA_SHIFT = 48  # of a float64: leaves sign, exponent and 4 bits, 16 bins between a number and its double
HOST = r"^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#@]*@)?(?P<host>[^/?#:]+)"  # RE2, which is linear
UNSIGNALLED = ("doc_id", "detected_language", "script", "profile", "main_language", "record", "text_hash", "offset")
ANNOTATED_FOLDER = "annotated"  # of the cache
Constants = Mapping[str, str | None]  # columns with one value for all rows


@dataclass(frozen=True)
class SketchTask:
    """A shard of documents (with its signals), or of the ledger, or an annotated file in the cache of a run that has no
    shards yet. name: its path in the folder, without the suffix. rows: of the
    annotated files behind a shard of the ledger, whose excerpts are read there. pii: what is replaced."""

    folder: Path
    name: str
    source: str
    rows: tuple[LedgerRows, ...] = ()
    pii: PiiConfig | None = None

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
        return (
            self.table
            if self.is_annotated
            else self.folder / "signals" / f"{self.name.removeprefix('documents/')}.parquet"
        )

    @property
    def counts(self) -> Path:
        return self.folder / SKETCHES_FOLDER / f"{self.name}.{COUNTS_FILE}"

    @property
    def samples(self) -> Path:
        return self.folder / SKETCHES_FOLDER / f"{self.name}.{SAMPLES_FILE}"


def write_sketch(task: SketchTask) -> None:
    """Writes both tables of a shard's sketch, unless they are complete."""
    if is_sealed(task.counts) and is_sealed(task.samples):
        return
    counts, samples = sketch_ledger(task) if task.is_ledger else sketch_documents(task)
    write_table(task.counts, counts.sort_by([(name, "ascending") for name in COUNT_KEYS]))
    write_table(task.samples, samples)


def write_table(path: Path, table: pa.Table) -> None:
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd")
    write_sealed(path, memoryview(content.getvalue()))


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


# The sketch of one shard.


def sketch_documents(task: SketchTask) -> tuple[pa.Table, pa.Table]:
    """(counts, samples) of a shard of kept documents, or of an annotated file."""
    with pq.ParquetFile(task.signals) as file:
        names = [*signal_names(file.schema_arrow), "doc_id", "detected_language"]
        signals = file.read([*names, "unreadable"] if task.is_annotated else names).combine_chunks()
    places, parts = np.arange(len(signals)), []
    if task.is_annotated:
        unreadable = signals.column("unreadable")
        places = np.flatnonzero(unreadable.is_null().to_numpy())
        signals, parts = signals.take(pa.array(places)), _read_counts(task, signals)
    languages = pc.fill_null(signals.column("detected_language"), "").combine_chunks().dictionary_encode()
    codes = languages.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    names = languages.dictionary.to_pylist()
    common = task.constants
    rows = _language_counts(codes, names, signals.column("num_bytes").to_numpy())
    parts.append(count_table({"kind": "documents", **common}, **rows))
    parts.append(_signal_counts(signals, codes, names, common))
    with pq.ParquetFile(task.table) as file:
        urls = file.read(["url"]).column("url").take(pa.array(places))
    parts += _host_counts(urls, common)
    return pa.concat_tables(parts), _kept_samples(task, signals, codes, places)


def _signal_counts(signals: pa.Table, codes: np.ndarray, languages: list[str], common: Constants) -> pa.Table:
    """Kept documents by signal, language and bin. codes: int64[], of each document's language."""
    names = signal_names(signals.schema)
    bins, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for name in names:
        values = signals.column(name)
        column = (pc.cast(values, pa.float64()) if values.null_count else values).to_numpy().astype(np.float64)
        known = np.isfinite(column)
        joint = (codes[known] << 32) | (bins_of(column[known]).astype(np.int64) + (1 << 31))
        ordered = np.sort(joint)
        starts = np.flatnonzero(np.diff(ordered, prepend=-1))
        bins.append(ordered[starts])
        counts.append(np.diff(starts, append=len(ordered)))
    joined = np.concatenate(bins)
    signal_of = np.repeat(np.arange(len(names)), [len(of_signal) for of_signal in bins[1:]])
    return count_table(
        {"kind": "signal", **common},
        name=pa.array(names, pa.string()).take(pa.array(signal_of)),
        language=pa.array(languages, pa.string()).take(pa.array(joined >> 32)),
        bin=(joined & 0xFFFFFFFF) - (1 << 31),
        documents=np.concatenate(counts),
    )


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
    return [field.name for field in schema if field.name not in UNSIGNALLED and _is_number(field.type)]


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


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


def _language_counts(codes: np.ndarray, names: list[str], num_bytes: np.ndarray) -> dict[str, pa.Array | np.ndarray]:
    documents = np.bincount(codes, minlength=len(names))
    totals = np.zeros(len(names), np.int64)
    np.add.at(totals, codes, num_bytes)
    return {"language": pa.array(names, pa.string()), "documents": documents, "bytes": totals}


def hosts_of(urls: pa.ChunkedArray) -> pa.Array:
    """The host of each URL in lower case, null where it has none."""
    matches = pc.extract_regex(urls.combine_chunks() if isinstance(urls, pa.ChunkedArray) else urls, HOST)
    hosts = matches.field("host") if len(matches) else pa.array([], pa.string())
    return pc.utf8_lower(pc.if_else(pc.is_valid(matches), hosts, pa.scalar(None, pa.string())))


def _host_counts(urls: pa.ChunkedArray, common: Constants) -> list[pa.Table]:
    counted = pc.value_counts(hosts_of(urls).drop_null())
    names, counts = counted.field("values"), counted.field("counts").to_numpy()
    if not len(names):
        return []
    order = np.lexsort((np.argsort(np.argsort(names.to_numpy(zero_copy_only=False))), -counts))
    listed, others = order[:LISTED_HOSTS], order[LISTED_HOSTS:]
    tables = [count_table({"kind": "host", **common}, name=names.take(pa.array(listed)), documents=counts[listed])]
    if len(others):
        rest = counts[others].sum(keepdims=True)
        tables.append(count_table({"kind": "host_rest", **common}, documents=rest))
    registers = hyperloglog(names.to_pylist())
    filled = np.flatnonzero(registers)
    tables.append(count_table({"kind": "host_register"}, bin=filled, documents=registers[filled]))
    return tables


def hyperloglog(names: Sequence[str]) -> np.ndarray:
    """int64[2**HLL_BITS]: the registers of these values (Flajolet et al. 2007), of which the maximum is a union's."""
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(name.encode()) for name in names), np.uint64, len(names))
    registers = np.zeros(1 << HLL_BITS, np.int64)
    rest = hashes << np.uint64(HLL_BITS) | np.uint64(1 << (HLL_BITS - 1))  # the bit ends the count of zeros
    ranks = 64 - np.floor(np.log2(rest.astype(np.float64))).astype(np.int64)
    np.maximum.at(registers, (hashes >> np.uint64(64 - HLL_BITS)).astype(np.int64), ranks)
    return registers


def distinct_estimate(registers: np.ndarray) -> int:
    """The number of different values behind these registers, with linear counting where most are empty."""
    size = len(registers)
    estimate = 0.7213 / (1 + 1.079 / size) * size * size / float((2.0 ** -registers.astype(np.float64)).sum())
    empty = int((registers == 0).sum())
    return round(size * np.log(size / empty)) if estimate <= 2.5 * size and empty else round(estimate)


def _kept_samples(task: SketchTask, signals: pa.Table, codes: np.ndarray, places: np.ndarray) -> pa.Table:
    """The documents of the shard with the smallest ids, of each language too, and those with the most placeholders.

    places: int64[], the row of each document in the table of texts."""
    order = pc.sort_indices(signals.column("doc_id").combine_chunks()).to_numpy().astype(np.int64)
    by_language = order[np.argsort(codes[order], kind="stable")]
    bounds = np.searchsorted(codes[by_language], np.arange(int(codes.max(initial=-1)) + 2))
    ranks = np.arange(len(order)) - bounds[codes[by_language]]
    chosen = [order[:SOURCE_SAMPLES], by_language[ranks < LANGUAGE_SAMPLES]]
    replaced = np.zeros(len(order), np.int64)
    if PII_FIELD.name in signals.schema.names:
        replaced = signals.column(PII_FIELD.name).to_numpy()
        most = np.lexsort((np.argsort(order), -replaced))[:PERSONAL_SAMPLES]
        chosen.append(most[replaced[most] > 0])
    rows = np.unique(np.concatenate(chosen))
    picked = signals.take(pa.array(rows))
    names = signal_names(signals.schema)
    values = np.stack([pc.cast(picked.column(name), pa.float64()).to_numpy() for name in names], axis=1)
    offsets = np.arange(0, (len(rows) + 1) * len(names), len(names), dtype=np.int32)
    keys = pa.array(np.tile(np.array(names, object), len(rows)), pa.string())
    columns = {
        "doc_id": picked.column("doc_id"),
        "language": pc.fill_null(picked.column("detected_language"), ""),
        "bytes": picked.column("num_bytes"),
        "replaced": pa.array(replaced[rows]),
        "excerpt": excerpts(read_rows(RowRange.of_rows(task.table, places[rows]), ["text"]).column("text")),
        "signals": pa.MapArray.from_arrays(pa.array(offsets), keys, pa.array(values.reshape(-1))),
    }
    return _sample_table(task.constants, len(rows), columns)


def excerpts(texts: pa.ChunkedArray) -> pa.Array:
    """The first characters of each text, as one line."""
    heads = pc.utf8_slice_codeunits(texts.combine_chunks(), 0, 4 * EXCERPT_CHARACTERS)
    return pa.array([" ".join(head.split())[:EXCERPT_CHARACTERS] for head in heads.to_pylist()], pa.string())


def _sample_table(constants: Constants, size: int, columns: dict[str, pa.Array]) -> pa.Table:
    arrays = [
        columns[field.name]
        if field.name in columns
        else pa.repeat(pa.scalar(constants[field.name], field.type), size)
        if field.name in constants
        else pa.nulls(size, field.type)
        for field in SAMPLE_SCHEMA
    ]
    return pa.table(arrays, schema=SAMPLE_SCHEMA).sort_by("doc_id")


def sketch_ledger(task: SketchTask) -> tuple[pa.Table, pa.Table]:
    """(counts, samples) of a shard of the ledger; the samples are of documents that were not kept."""
    names = ["doc_id", "outcome", "split", "step", "rule", "value", "threshold", "duplicate_of", "failed", "bytes"]
    with pq.ParquetFile(task.table) as file:
        rows = file.read(names).combine_chunks()
    is_alone = pc.and_(
        pc.equal(pc.list_value_length(rows.column("failed")), 1), pc.equal(rows.column("step"), "filters")
    )
    rows = rows.drop_columns("failed").append_column("alone", pc.fill_null(is_alone, False))
    sums = rows.group_by(["outcome", "split", "step", "rule"]).aggregate([("doc_id", "count"), ("bytes", "sum")])
    group = {name: sums.column(name).combine_chunks() for name in ("outcome", "split", "step", "rule")}
    totals = {"documents": sums.column("doc_id_count"), "bytes": sums.column("bytes_sum")}
    common = {"source": task.source}
    parts = [
        count_table({"kind": "outcome", **common}, **group, **{k: v.combine_chunks() for k, v in totals.items()}),
        *_alone_counts(rows.filter(rows.column("alone")), common),
    ]
    return pa.concat_tables(parts), _removed_samples(task, rows)


def _alone_counts(alone: pa.Table, common: dict[str, str]) -> Iterator[pa.Table]:
    values, rules = alone.column("value").to_numpy(), alone.column("rule").combine_chunks().dictionary_encode()
    codes = rules.indices.to_numpy(zero_copy_only=False)
    for code, rule in enumerate(rules.dictionary.to_pylist()):
        chosen = values[codes == code]
        bins, counts = np.unique(bins_of(chosen[np.isfinite(chosen)]), return_counts=True)
        yield count_table({"kind": "alone", "rule": rule, "outcome": "removed", **common}, bin=bins, documents=counts)


def _removed_samples(task: SketchTask, rows: pa.Table) -> pa.Table:
    """By rule (kind of unreadable record), the documents with the smallest ids, and as many that failed it alone."""
    numbered = rows.append_column("place", pa.array(np.arange(len(rows))))
    gone = numbered.filter(pc.not_equal(numbered.column("outcome"), "kept")).sort_by("doc_id")
    rules = pc.fill_null(gone.column("rule"), "").combine_chunks().dictionary_encode()
    codes = rules.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    codes = 2 * codes + gone.column("alone").to_numpy()
    chosen = np.zeros(len(gone), bool)
    for code in np.unique(codes).tolist():
        chosen[np.flatnonzero(codes == code)[:SOURCE_SAMPLES]] = True
    gone = gone.filter(pa.array(chosen))
    places = gone.column("place").to_numpy()
    columns = {field.name: gone.column(field.name) for field in SAMPLE_SCHEMA if field.name in gone.schema.names}
    if task.rows:
        columns["excerpt"] = _annotated_excerpts(task, places)
    return _sample_table({"source": task.source}, len(gone), columns)


def _annotated_excerpts(task: SketchTask, places: np.ndarray) -> pa.Array:
    """Excerpts of these rows of the shard, from the annotated files behind it, without the personal data that the
    corpus has not either."""
    order = np.argsort(places, kind="stable")
    ascending, first, texts = places[order], 0, []
    for rows in task.rows:
        last = first + rows.stop - rows.start
        inside = ascending[(ascending >= first) & (ascending < last)] - first + rows.start
        if len(inside):
            column = read_rows(RowRange.of_rows(rows.path, inside), ["text"]).column("text")
            heads = pc.utf8_slice_codeunits(pc.fill_null(column.combine_chunks(), ""), 0, 4 * EXCERPT_CHARACTERS)
            texts.append(heads if task.pii is None else replaced_texts(heads, task.pii)[0])
        first = last
    listed = excerpts(pa.chunked_array(texts, pa.string())) if texts else pa.array([], pa.string())
    return listed.take(pa.array(np.argsort(order)))

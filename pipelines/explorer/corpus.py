"""Read-only questions about a curated corpus, answered by DuckDB from the ledger, the signals and the documents."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb

from gristmill.data_pipeline.corpus.counts import COUNTS_NAME
from gristmill.data_pipeline.corpus.document_history import corpus_folder, open_corpus
from gristmill.data_pipeline.corpus.writer import DECONTAMINATION_FOLDER, REPORT_JSON
from gristmill.data_pipeline.filters.apply import WANTED_LANGUAGE
from gristmill.foundation.errors import InputError

ANNOTATED = Path("cache") / "annotated"  # in the work folder: the text of every document, also of those removed
QUERY_SECONDS = 20.0
MAX_MEMORY = "768MB"
MAX_ROWS = 200
PAGE_ROWS = 25
EXCERPT_CHARACTERS = 240
HISTOGRAM_BINS = 60
HOST = r"^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#@]*@)?([^/?#:]+)"  # RE2, which is linear


@dataclass(frozen=True)
class Filters:
    """Which documents of the ledger: each field is a value of its column, or "" for all. words: all of them are in the
    text of the kept document, in any case."""

    outcome: str = ""
    source: str = ""
    rule: str = ""
    split: str = ""
    language: str = ""
    host: str = ""
    words: str = ""

    def clauses(self) -> tuple[str, list[str]]:
        """(conditions on the view `ledger`, their parameters)."""
        columns = {"outcome": self.outcome, "source": self.source, "rule": self.rule, "split": self.split}
        conditions = [f"{name} = ?" for name, value in columns.items() if value]
        parameters = [value for value in columns.values() if value]
        if self.language:
            conditions.append("doc_id IN (SELECT doc_id FROM signals WHERE detected_language = ?)")
            parameters.append(self.language)
        texts = [f"lower(regexp_extract(url, '{HOST}', 1)) = ?"] if self.host else []
        texts += ["contains(lower(text), lower(?))"] * len(self.words.split())
        if texts:
            conditions.append(f"doc_id IN (SELECT doc_id FROM documents WHERE {' AND '.join(texts)})")
            parameters += [self.host] if self.host else []
            parameters += self.words.split()
        return " AND ".join(conditions) or "true", parameters


@dataclass(frozen=True)
class Threshold:
    """A rule of a source, with the value that is asked about. keep: the comparison that a kept document's signal
    passes, with the threshold on its right."""

    source: str
    rule: str
    signal: str
    keep: str
    threshold: float
    value: float


@dataclass(frozen=True)
class ThresholdEffect:
    """Effect of a threshold. kept: documents in the corpus. lost: of them, those that would fail. gained: removed
    documents that failed no other rule and would pass. bins: (low edge, kept, removed by this rule alone)."""

    kept: int
    lost: int
    gained: int
    bins: list[tuple[float, int, int]]
    low: float
    high: float
    passing: list[dict[str, Any]]
    failing: list[dict[str, Any]]


class ExploredCorpus:
    """The corpus in a folder. Its connection reads the corpus's files and the annotated texts beside them, and no other
    file; its configuration cannot be changed."""

    def __init__(self, folder: Path):
        self.folder = corpus_folder(folder)
        self.annotated = sorted((self.folder.parent / ANNOTATED).glob("*.parquet"))
        self._connection = open_corpus(self.folder)
        if self.annotated:
            names = ", ".join("'" + str(path).replace("'", "''") + "'" for path in self.annotated)
            self._connection.execute(
                f"CREATE VIEW annotated AS SELECT * FROM read_parquet([{names}], union_by_name = true)"
            )
        lock_down(self._connection, [self.folder, self.folder.parent / ANNOTATED])

    @cached_property
    def counts(self) -> dict[str, Any]:
        return json.loads((self.folder / COUNTS_NAME).read_bytes())

    @cached_property
    def contamination(self) -> dict[str, Any]:
        """Benchmark -> its matches; empty without decontamination."""
        path = self.folder / DECONTAMINATION_FOLDER / REPORT_JSON
        return json.loads(path.read_bytes()) if path.is_file() else {}

    @cached_property
    def schema(self) -> dict[str, list[tuple[str, str]]]:
        """View -> (column, type)."""
        rows = self.rows("SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal")
        columns: dict[str, list[tuple[str, str]]] = {}
        for row in rows:
            columns.setdefault(row["table_name"], []).append((row["column_name"], row["data_type"]))
        return columns

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of a query of ours. Raises InputError with DuckDB's message."""
        with self._cursor() as cursor:
            result = cursor.execute(sql, list(parameters))
            names = [column[0] for column in result.description]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]], bool]:
        """(columns, the first MAX_ROWS rows, whether there are more) of one SELECT of a user.

        Raises InputError for any other statement: COPY writes files, and EXPLAIN ANALYZE runs what it explains."""
        with self._cursor() as cursor:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise InputError("give one SELECT (or SUMMARIZE, DESCRIBE, SHOW TABLES): the corpus is read-only")
            result = cursor.execute(statements[0])
            names = [column[0] for column in result.description]
            rows = result.fetchmany(MAX_ROWS + 1)
            return names, rows[:MAX_ROWS], len(rows) > MAX_ROWS

    @contextmanager
    def _cursor(self) -> Iterator["duckdb.DuckDBPyConnection"]:
        """A cursor of this thread, interrupted after QUERY_SECONDS."""
        cursor = self._connection.cursor()
        timer = threading.Timer(QUERY_SECONDS, cursor.interrupt)
        timer.start()
        try:
            yield cursor
        except duckdb.InterruptException as error:
            raise InputError(f"the query took more than {QUERY_SECONDS:g} seconds; ask for less") from error
        except (duckdb.Error, UnicodeError) as error:
            raise InputError(str(error)) from error
        finally:
            timer.cancel()
            cursor.close()

    def languages(self) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT detected_language AS name, count(*) AS documents, sum(num_bytes) AS bytes FROM signals GROUP BY 1 "
            "ORDER BY 2 DESC, 1 LIMIT 50"
        )

    def hosts(self) -> list[dict[str, Any]]:
        return self.rows(
            f"SELECT lower(regexp_extract(url, '{HOST}', 1)) AS name, count(*) AS documents FROM documents "
            "WHERE url IS NOT NULL GROUP BY 1 HAVING name <> '' ORDER BY 2 DESC, 1 LIMIT 50"
        )

    def documents(self, filters: Filters, page: int) -> tuple[int, list[dict[str, Any]]]:
        """(number of documents, those of the page in the ledger's order)."""
        where, parameters = filters.clauses()
        (total,) = self.rows(f"SELECT count(*) AS n FROM ledger WHERE {where}", parameters)
        listed = self.rows(
            "SELECT doc_id, source, outcome, split, step, rule, value, threshold, duplicate_of, bytes FROM ledger "
            f"WHERE {where} LIMIT {PAGE_ROWS} OFFSET {PAGE_ROWS * page}",
            parameters,
        )
        return total["n"], self.with_excerpts(listed)

    def with_excerpts(self, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows, each with the first words of its document; "" where the text is not stored."""
        texts = self.texts([row["doc_id"] for row in listed], 4 * EXCERPT_CHARACTERS)
        return [
            row | {"excerpt": " ".join(texts.get(row["doc_id"], "").split())[:EXCERPT_CHARACTERS]} for row in listed
        ]

    def texts(self, doc_ids: Sequence[str], characters: int | None = None) -> dict[str, str]:
        """doc_id -> (the first characters of) its text: of a kept document as it is in the corpus, of another as it was
        annotated, where the work folder still has it."""
        start = "text" if characters is None else f"text[:{characters}]"
        texts: dict[str, str] = {}
        for view in ("documents", *(["annotated"] if self.annotated else [])):
            wanted = sorted(set(doc_ids) - texts.keys())
            if wanted:
                rows = self.rows(
                    f"SELECT doc_id, {start} AS text FROM {view} WHERE doc_id IN (SELECT unnest(?))", [wanted]
                )
                texts |= {row["doc_id"]: row["text"] or "" for row in rows}
        return texts

    def read_text(self, doc_id: str) -> str | None:
        """The text as it was read, before any edit; None where the work folder does not have it."""
        if not self.annotated:
            return None
        rows = self.rows("SELECT text FROM annotated WHERE doc_id = ? LIMIT 1", [doc_id])
        return rows[0]["text"] if rows else None

    def ledger_row(self, doc_id: str) -> dict[str, Any]:
        """The ledger's row. Raises InputError if there is none, as for a piece of a split document."""
        rows = self.rows("SELECT * FROM ledger WHERE doc_id = ? OR list_contains(pieces, ?)", [doc_id, doc_id])
        if not rows:
            raise InputError(f"no document {doc_id}; the ledger lists every document that was read")
        return rows[0]

    def clusters(self, page: int) -> list[dict[str, Any]]:
        """Groups of duplicates, the largest first: the kept document and how many were removed for it."""
        listed = self.rows(
            "SELECT duplicate_of AS doc_id, count(*) AS duplicates, min(similarity) AS similarity, "
            "any_value(step) AS step, any_value(source) AS source FROM ledger WHERE duplicate_of IS NOT NULL "
            f"GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {PAGE_ROWS} OFFSET {PAGE_ROWS * page}"
        )
        return self.with_excerpts(listed)

    def duplicates(self, doc_id: str) -> list[dict[str, Any]]:
        """The first documents that were removed as duplicates of this one, the most similar first."""
        return self.rows(
            "SELECT doc_id, source, similarity, step FROM ledger WHERE duplicate_of = ? "
            f"ORDER BY similarity DESC, doc_id LIMIT {PAGE_ROWS}",
            [doc_id],
        )

    def personal_data(self, page: int) -> list[dict[str, Any]]:
        """Kept documents with the most placeholders for personal data."""
        if ("pii_replaced", "BIGINT") not in self.schema["signals"]:
            return []
        listed = self.rows(
            "SELECT doc_id, split, pii_replaced AS replaced FROM signals WHERE pii_replaced > 0 "
            f"ORDER BY 3 DESC, 1 LIMIT {PAGE_ROWS} OFFSET {PAGE_ROWS * page}"
        )
        return self.with_excerpts(listed)

    def threshold(self, source: str, rule: str, value: str) -> Threshold:
        """value: a number, or "" for the recipe's. Raises InputError for a rule that the source does not have."""
        rules: Mapping[str, Any] = {entry["rule"]: entry for entry in self.counts["rules"].get(source, [])}
        if rule not in rules:
            raise InputError(f"source {source!r} has no rule {rule!r}; the page of rules lists them")
        entry = rules[rule]
        signal = "language_score" if entry["signal"] == WANTED_LANGUAGE else entry["signal"]
        try:
            asked = float(value) if value else entry["threshold"]
        except ValueError as error:
            raise InputError(f"{value!r} is no number; write it as 0.35") from error
        return Threshold(source, rule, signal, entry["keep"], entry["threshold"], asked)

    def sweep(self, asked: Threshold) -> ThresholdEffect:
        """Exact counts for the asked value, from the signals of kept documents and the ledger's values of removed ones.

        A document that failed several rules stays removed, and one that passes may yet be a duplicate. Signals of
        edited documents are those of the edited text. Raises InputError where the signal is not stored."""
        if asked.signal not in [name for name, _ in self.schema["signals"]]:
            raise InputError(f"the signal {asked.signal} of {asked.rule} is not stored with kept documents")
        if asked.keep not in ("<", "<=", ">", ">=", "=="):
            raise InputError(f"{asked.rule} keeps by {asked.keep!r}, which no threshold changes")
        common = (
            f'WITH kept AS (SELECT doc_id, CAST("{asked.signal}" AS DOUBLE) AS value, true AS kept FROM signals '
            "WHERE doc_id IN (SELECT doc_id FROM ledger WHERE source = $source AND outcome = 'kept')), "
            "alone AS (SELECT doc_id, failed[1].value AS value, false AS kept FROM ledger WHERE source = $source "
            "AND step = 'filters' AND len(failed) = 1 AND failed[1].rule = $rule), "
            "both_sides AS (SELECT * FROM kept UNION ALL SELECT * FROM alone), "
            "known AS (SELECT * FROM both_sides WHERE isfinite(value)) "
        )
        names = {"source": asked.source, "rule": asked.rule}
        passes = f"value {asked.keep} $asked"
        (total,) = self._named(
            common + f"SELECT count(*) FILTER (kept) AS kept, count(*) FILTER (kept AND NOT ({passes})) AS lost, "
            f"count(*) FILTER (NOT kept AND {passes}) AS gained, quantile_cont(value, 0.001) AS low, "
            "quantile_cont(value, 0.999) AS high FROM known",
            names | {"asked": asked.value},
        )
        low, high = bounds(total["low"], total["high"], asked)
        width = (high - low) / HISTOGRAM_BINS
        binned = self._named(
            common + "SELECT CAST(floor((value - $low) / $width) AS INTEGER) AS bin, count(*) FILTER (kept) AS kept, "
            "count(*) FILTER (NOT kept) AS removed FROM known WHERE value BETWEEN $low AND $high GROUP BY 1 ORDER BY 1",
            names | {"low": low, "width": width, "high": high},
        )
        bins = [(low + width * row["bin"], row["kept"], row["removed"]) for row in binned]
        nearest = "SELECT doc_id, value, kept FROM known WHERE {} ORDER BY abs(value - $asked), doc_id LIMIT 5"
        sides = [
            self.with_excerpts(self._named(common + nearest.format(side), names | {"asked": asked.value}))
            for side in (passes, f"NOT ({passes})")
        ]
        return ThresholdEffect(total["kept"], total["lost"], total["gained"], bins, low, high, *sides)

    def _named(self, sql: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
        with self._cursor() as cursor:
            result = cursor.execute(sql, dict(parameters))
            names = [column[0] for column in result.description]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def bounds(low: float | None, high: float | None, asked: Threshold) -> tuple[float, float]:
    """Ends of the slider: the signal's range, the recipe's threshold and the asked value."""
    numbers = [asked.threshold, asked.value, *(value for value in (low, high) if value is not None)]
    low, high = min(numbers), max(numbers)
    return (low, high) if high > low else (low - 1.0, high + 1.0)


def lock_down(connection: "duckdb.DuckDBPyConnection", folders: Sequence[Path]) -> None:
    """Lets queries read these folders and no other file, and keeps them from changing that. They could still write
    there by COPY, so the caller runs SELECT alone."""
    names = ", ".join("'" + str(folder.absolute()).replace("'", "''") + "/'" for folder in folders)
    for setting in (
        "temp_directory = ''",
        f"memory_limit = '{MAX_MEMORY}'",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        f"allowed_directories = [{names}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")

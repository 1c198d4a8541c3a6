"""Read-only questions about a curated corpus: from its sketches, its index of ids, and by DuckDB for a user's SQL."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.corpus_files import CorpusFiles, RemoteCorpusFiles
from gristmill.data_pipeline.corpus.counts import COUNTS_NAME
from gristmill.data_pipeline.corpus.document_history import (
    TABLES,
    Event,
    corpus_folder,
    document_history,
    open_address,
    open_incomplete,
)
from gristmill.data_pipeline.corpus.sketches import ANNOTATED_FOLDER
from gristmill.data_pipeline.decontamination.decontaminate import DECONTAMINATION_FOLDER, QUESTIONS_NAME, REPORT_JSON
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import is_temporary
from gristmill.foundation.manifest import CACHE_FOLDER
from gristmill.pipelines.explorer.rows import Cursor, DocumentRows, Filters, Search, StoredSignatures
from gristmill.pipelines.explorer.sketched import Sketches, Threshold, ThresholdEffect, Thresholds, threshold_of

OUTCOMES = ("kept", "removed", "quarantined", "annotated")  # annotated: of a run that has not decided on it yet
QUERY_SECONDS = 20.0
MAX_MEMORY = "768MB"
MAX_ROWS = 200
PAGE_ROWS = 25
EXCERPT_CHARACTERS = 240


class ExploredCorpus:
    """The corpus in a folder, complete or of a run that goes on, or behind an address. Its connection reads the
    corpus's files and the annotated texts beside them, and no other file; its configuration cannot be changed."""

    def __init__(self, source: Path | RemoteCorpusFiles):
        self.annotated: list[Path] = []
        if isinstance(source, RemoteCorpusFiles):
            self.files: CorpusFiles = source
            self.is_complete = True
        else:
            folder, self.is_complete = explored_folder(source)
            self.files = CorpusFiles(folder, checked=False, is_complete=self.is_complete)
            self.annotated = annotated_files(folder if folder.name == CACHE_FOLDER else folder.parent / CACHE_FOLDER)
        self.sketches = self._read_sketches()
        self.document_rows = DocumentRows(self.files, self.annotated)
        self.signatures = StoredSignatures(self.files)
        self.thresholds = Thresholds(self.files, self.sketches)
        self._connecting = threading.Lock()

    def _read_sketches(self) -> Sketches:
        """Raises InputError for a corpus of an older version behind an address: all of it would be read."""
        sketches = Sketches.read(self.files) if self.is_complete else None
        if sketches is not None and (self.files.folder is not None or self.files.index is not None):
            return sketches
        if self.files.folder is None:
            raise InputError(
                f"{self.files.place}: has no sketches or no index of ids, since an older version wrote it; run "
                "`gristmill curate` again"
            )
        if self.files.folder.name == CACHE_FOLDER:
            return Sketches.of_annotated(self.files.folder, self.annotated)
        return Sketches.of_shards(self.files.folder)

    @cached_property
    def _connection(self) -> "duckdb.DuckDBPyConnection":
        """Opened by the first query: it reads one footer of each source."""
        if self.files.folder is None:
            connection = open_address(self.files.place)
            lock_down(connection, [self.files.place])
            return connection
        connection = open_incomplete(self.files.folder)
        if self.annotated:
            names = ", ".join("'" + str(path).replace("'", "''") + "'" for path in self.annotated)
            connection.execute(f"CREATE VIEW annotated AS SELECT * FROM read_parquet([{names}], union_by_name = true)")
        cache = self.files.folder.parent / CACHE_FOLDER  # in it the corpus is annotated files alone
        folders = {self.files.folder, cache / ANNOTATED_FOLDER} - {cache}
        lock_down(connection, sorted(str(folder.absolute()) for folder in folders))
        return connection

    @cached_property
    def counts(self) -> dict[str, Any]:
        """counts.json; of a run that goes on what the sketches count, without rules."""
        if self.is_complete:
            return dict(json.loads(self.files.read(COUNTS_NAME)))
        return {"sources": counts_of_outcomes(self.sketches.outcomes()), "rules": {}}

    @cached_property
    def contamination(self) -> dict[str, Any]:
        """Benchmark -> its matches; empty without decontamination."""
        name = f"{DECONTAMINATION_FOLDER}/{REPORT_JSON}"
        return json.loads(self.files.read(name)) if self.files.exists(name) else {}

    def contaminated(self, page: int) -> list[dict[str, Any]]:
        """Questions of benchmarks that were found, each with its documents; the file grows with the benchmarks."""
        name = f"{DECONTAMINATION_FOLDER}/{QUESTIONS_NAME}"
        lines = self.files.read(name).splitlines() if self.files.exists(name) else []
        return [json.loads(line) for line in lines[PAGE_ROWS * page : PAGE_ROWS * (page + 1)]]

    def history(self, doc_id: str) -> list[Event]:
        """Results of each step for the document; empty while the run goes on."""
        if not self.is_complete:
            return []
        try:
            return document_history(doc_id, self.files)
        except (ValueError, KeyError, IndexError, TypeError, pa.ArrowException, OSError) as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            raise InputError(f"{self.files.place}: a file is damaged ({said}); run `gristmill verify` on it") from error

    @cached_property
    def schema(self) -> dict[str, list[tuple[str, str]]]:
        """View -> (column, type), from the footer of one shard of each source."""
        paths = {name: _one_of_each_source(self.files.tables(name)) for name in TABLES}
        schemas = {name: [self.files.parquet(path).schema_arrow for path in of_view] for name, of_view in paths.items()}
        annotated = _one_of_each_source([str(path) for path in self.annotated])
        schemas["annotated"] = [pq.read_schema(path) for path in annotated]
        views: dict[str, list[tuple[str, str]]] = {}
        for name, of_view in schemas.items():
            if of_view:
                empty = duckdb.from_arrow(pa.unify_schemas(of_view, promote_options="permissive").empty_table())
                views[name] = list(zip(empty.columns, map(str, empty.types), strict=True))
                views[name] += [("split", "VARCHAR")] if name in ("documents", "signals") else []
        return views

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
        with self._connecting:
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

    def sampled(self, filters: Filters) -> list[dict[str, Any]]:
        """Documents that pass, of those that were drawn into the sketches: a random sample, or all of few."""
        table = self.sketches.sampled(**filters.of_ledger, language=filters.language)
        return list(table.slice(0, PAGE_ROWS).drop_columns("signals").to_pylist())

    def num_documents(self, filters: Filters) -> int | None:
        """How many documents pass, exactly; None where only a search can tell."""
        if filters.reads_text:
            alone = Filters(host=filters.host) == filters
            return self.sketches.host_documents(filters.host.lower()) if alone else None
        if filters.language and (filters.rule or filters.outcome not in ("", "kept")):
            return 0
        return self.sketches.num_documents(
            filters.language, **{name: value for name, value in filters.of_ledger.items() if value}
        )

    def search(self, filters: Filters, cursor: Cursor) -> Search:
        search = self.document_rows.search(filters, cursor, PAGE_ROWS)
        listed = [row for row in search.rows if "excerpt" not in row]
        return Search(self.with_excerpts(listed), search.after, search.searched) if listed else search

    def with_excerpts(self, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows, each with the first words of its document; "" where the text is not stored."""
        texts = self.texts([row["doc_id"] for row in listed])
        return [
            row
            | {"excerpt": " ".join(texts.get(row["doc_id"], "")[: 4 * EXCERPT_CHARACTERS].split())[:EXCERPT_CHARACTERS]}
            for row in listed
        ]

    def texts(self, doc_ids: Sequence[str]) -> dict[str, str]:
        """doc_id -> its text: of a kept document as it is in the corpus, of another as it was annotated, where the work
        folder still has it."""
        if self.files.index is not None:
            return self.document_rows.texts(doc_ids)
        texts: dict[str, str] = {}
        for view in [name for name in ("documents", "annotated") if name in self.schema]:
            wanted = sorted(set(doc_ids) - texts.keys())
            rows = self.rows(f"SELECT doc_id, text FROM {view} WHERE doc_id IN (SELECT unnest(?))", [wanted])
            texts |= {row["doc_id"]: row["text"] or "" for row in rows}
        return texts

    def read_text(self, doc_id: str) -> str | None:
        """The text as it was read, before any edit; None where the work folder does not have it."""
        if self.files.index is not None:
            return self.document_rows.text_as_read(doc_id)
        if not self.annotated:
            return None
        rows = self.rows("SELECT text FROM annotated WHERE doc_id = ? LIMIT 1", [doc_id])
        return rows[0]["text"] if rows else None

    def ledger_row(self, doc_id: str) -> dict[str, Any]:
        """The ledger's row, of a piece that of the split document. Raises InputError if there is none."""
        if self.files.index is not None:
            place = self.files.row_place(doc_id, "ledger")
            rows = [] if place is None else [self.files.rows({doc_id: place})[doc_id]]
        else:
            sql = "SELECT * FROM ledger WHERE doc_id = ? OR list_contains(pieces, ?)"
            rows = self.rows(sql, [doc_id, doc_id]) if "ledger" in self.schema else []
        if not rows and not self.is_complete and self.texts([doc_id]):
            return {"doc_id": doc_id, "removed_spans": None, "duplicate_of": None}  # no decision yet
        if not rows:
            raise InputError(f"no document {doc_id}; the ledger lists every document that was read")
        return rows[0]

    def clusters(self, page: int) -> list[dict[str, Any]]:
        """Groups of duplicates, the largest first: the kept document and how many were removed for it."""
        return self.with_excerpts(self.sketches.clusters(PAGE_ROWS * page, PAGE_ROWS * (page + 1)))

    def duplicates(self, doc_id: str) -> list[dict[str, Any]]:
        """The first documents that were removed as duplicates of this one, the most similar first."""
        columns = ["doc_id", "source", "similarity", "step"]
        if self.files.index is not None:
            places = [place for place in self.files.index.places(doc_id) if place.is_duplicate]
            rows = self.files.rows({str(n): place for n, place in enumerate(places[: 4 * PAGE_ROWS])}, columns).values()
            return sorted(rows, key=lambda row: (-row["similarity"], row["doc_id"]))[:PAGE_ROWS]
        return self.rows(
            f"SELECT {', '.join(columns)} FROM ledger WHERE duplicate_of = ? "
            f"ORDER BY similarity DESC, doc_id LIMIT {PAGE_ROWS}",
            [doc_id],
        )

    def personal_data(self, page: int) -> list[dict[str, Any]]:
        """Kept documents with the most placeholders for personal data, of those in the sketches."""
        return self.sketches.most_placeholders(PAGE_ROWS * page, PAGE_ROWS * (page + 1))

    def threshold(self, source: str, rule: str, value: str) -> Threshold:
        return threshold_of(self.counts["rules"], source, rule, value)

    def sweep(self, asked: Threshold) -> ThresholdEffect:
        return self.thresholds.sweep(asked)


def explored_folder(folder: Path) -> tuple[Path, bool]:
    """(the folder of a corpus, whether it is complete): of a run that has not ended, the folder that it fills, or its
    cache while that has annotated files alone. Raises InputError where there is nothing yet."""
    try:
        return corpus_folder(folder), True
    except InputError:
        started = [path for path in folder.glob(".curate-*") if path.is_dir() and next(path.rglob("*.parquet"), None)]
        if started:
            return max(started, key=lambda path: path.stat().st_mtime), False
        if annotated_files(folder / CACHE_FOLDER):
            return folder / CACHE_FOLDER, False
        raise


def annotated_files(cache: Path) -> list[Path]:
    """The annotated files: the text of every document as it was read, also of those that were removed."""
    return [path for path in sorted((cache / ANNOTATED_FOLDER).glob("*.parquet")) if not is_temporary(path)]


def _one_of_each_source(paths: Sequence[str]) -> list[str]:
    """The first path of each source: ["documents/train/a-00000.parquet", "documents/train/a-00001.parquet"] -> the
    first."""
    return list({PurePath(path).stem.rpartition("-")[0]: path for path in reversed(paths)}.values())


def counts_of_outcomes(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The `sources` of counts.json as far as the ledger's shards that are there tell: outcomes and what removed."""
    sources: dict[str, Any] = {}
    for row in rows:
        empty: dict[str, Any] = {"read": {"documents": 0}, **{name: {} for name in OUTCOMES}}
        entry = sources.setdefault(row["source"], empty)
        name = row["split"] if row["outcome"] == "kept" else row["rule"] or row["step"] or row["outcome"]
        tally = entry[row["outcome"]].setdefault(name, {"documents": 0, "bytes": 0})
        for counted in (tally, entry["read"]):
            counted["documents"] += row["documents"]
        tally["bytes"] += row["bytes"] or 0
    return sources


def lock_down(connection: "duckdb.DuckDBPyConnection", folders: Sequence[str]) -> None:
    """Lets queries read these folders (or addresses) and no other file, and keeps them from changing that. They could
    still write there by COPY, so the caller runs SELECT alone."""
    names = ", ".join("'" + folder.replace("'", "''") + "/'" for folder in folders)
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

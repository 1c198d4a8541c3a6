"""The history of one document, step by step, from the ledger and the signals: why it is in the corpus, or is not."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.tombstones import request_of
from gristmill.data_pipeline.corpus.corpus_files import CorpusFiles
from gristmill.data_pipeline.corpus.counts import ANNOTATIONS, COUNTS_NAME
from gristmill.data_pipeline.corpus.id_index import RowPlace
from gristmill.data_pipeline.filters.profiles import WANTED_LANGUAGE
from gristmill.data_pipeline.ledger.ledger import QUARANTINE_NAME
from gristmill.data_pipeline.readers.document import excerpt
from gristmill.foundation.checksums import check_outputs, reading
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.lock import LOCK_NAME, read_lock
from gristmill.foundation.runtime.store.store import as_os_errors, filesystem_of

MAX_SHOWN = 10  # duplicates (removed spans, benchmark texts) listed one by one
REWRITING = ("paragraph_dedup", "line_dedup", "substring_dedup", "decontaminate")


@dataclass(frozen=True)
class Event:
    """Outcome of one step for a document. lines: what it found, with values and thresholds."""

    step: str
    outcome: str
    lines: tuple[str, ...] = ()


def why(doc_id: str, folder: Path) -> list[Event]:
    """The history of the document in the corpus in `folder` (a curate stage's folder, or the work folder above it).

    doc_id: of a document that was read, or of a piece of one.

    Raises RecipeError if `doc_id` is not 32 hex digits, InputError if there is no ledger or it does not know the id."""
    if not re.fullmatch(r"[0-9a-f]{32}", doc_id):
        raise RecipeError(f"{doc_id!r} is no document id; give its 32 hex digits, as in the column doc_id")
    corpus = CorpusFiles(corpus_folder(folder))
    corpus.check(lambda path: path.startswith("ledger/") or path in (COUNTS_NAME, QUARANTINE_NAME))
    with reading(corpus_folder(folder)):
        return document_history(doc_id, corpus)


def document_history(doc_id: str, corpus: CorpusFiles) -> list[Event]:
    """As `why`, of a complete corpus that is open. Without an index of ids its files must be in a folder."""
    row = _ledger_row(doc_id, corpus)
    rules = orjson.loads(corpus.read(COUNTS_NAME))["rules"][row["source"]]
    events = [_piece_of(doc_id, row)] if doc_id != row["doc_id"] else []
    events.append(_read(row, corpus))
    if row["outcome"] == "quarantined":
        return events
    events.append(_filtered(row, rules, _signals(row, corpus)))
    if row["step"] != "filters":
        events += [*_deduplicated(row, corpus), *_removed_spans(row), *_contaminated(row), *_removed_by_rewriting(row)]
    if row["outcome"] == "kept":
        for kept in row["pieces"] if doc_id == row["doc_id"] and row["pieces"] else [doc_id]:
            events.append(_kept(kept, row, corpus))
    return events


def corpus_folder(folder: Path) -> Path:
    """The folder that holds the ledger: this one, or `curate` in it."""
    for candidate in (folder, folder / "curate"):
        if (candidate / "ledger").is_dir() and (candidate / COUNTS_NAME).is_file():
            return candidate
    raise InputError(f"{folder}: no ledger here; name the folder that the curate stage wrote")


def _ledger_row(doc_id: str, corpus: CorpusFiles) -> dict[str, Any]:
    """The ledger's row of the document, or of the one it is a piece of."""
    if (place := _place(doc_id, corpus, "ledger")) is not None:
        return corpus.rows({doc_id: place})[doc_id]
    rows = _scanned_ledger_rows(doc_id, corpus.folder / "ledger") if corpus.folder and corpus.index is None else []
    if not rows and corpus.folder and (number := request_of(doc_id, corpus.folder)) is not None:
        raise InputError(
            f"{corpus.place}: document {doc_id} was taken out by removal {number} of `gristmill forget`; "
            f"statements/forget-{number:04d}.json says where it had been"
        )
    if not rows:
        raise InputError(f"{corpus.place}/ledger: no document {doc_id}; it lists every document that was read")
    return rows[0]


def _scanned_ledger_rows(doc_id: str, ledger: Path) -> list[dict[str, Any]]:
    """The rows of the document, or of the one it is a piece of, by reading the ledger."""
    rows = pq.read_table(ledger, filters=pc.field("doc_id") == doc_id).to_pylist()
    if not rows:
        has_pieces = pc.list_value_length(pc.field("pieces")) > 0
        split = pq.read_table(ledger, columns=["doc_id", "pieces"], filters=has_pieces)
        parents = [row["doc_id"] for row in split.to_pylist() if doc_id in row["pieces"]]
        rows = pq.read_table(ledger, filters=pc.field("doc_id").isin(parents)).to_pylist() if parents else []
    return list(rows)


def _place(doc_id: str, corpus: CorpusFiles, folder: str) -> RowPlace | None:
    """The document's row in the ledger or the documents by the index of ids; None if it is not there or there is no
    index."""
    place = corpus.row_place(doc_id, folder)
    if place is not None:
        corpus.check(lambda path: path == place.table)
    return place


def _piece_of(doc_id: str, row: dict[str, Any]) -> Event:
    pieces = row["pieces"]
    return Event("piece", f"number {pieces.index(doc_id) + 1} of {len(pieces)} of {row['doc_id']}")


def _signals(row: dict[str, Any], corpus: CorpusFiles) -> dict[str, Any]:
    """The signals of a kept document; of a removed one the ledger has what it failed by.

    Of an edited document the signals are those of the edited text: none are shown."""
    if row["outcome"] != "kept" or row["removed_spans"] or row["pieces"]:
        return {}
    if (place := _place(row["doc_id"], corpus, "documents")) is not None:
        signals = RowPlace(place.table.replace("documents/", "signals/", 1), place.row)
        corpus.check(lambda path: path == signals.table)
        return corpus.rows({"signals": signals})["signals"]
    files = _shards("signals", row, corpus)
    return pq.read_table(files, filters=pc.field("doc_id") == row["doc_id"]).to_pylist()[0]


def _shards(kind: str, row: dict[str, Any], corpus: CorpusFiles) -> list[Path]:
    """The files of the row's source and split in a folder, held to the manifest."""
    assert corpus.folder is not None
    begin = f"{kind}/{row['split']}/{row['source']}-"
    corpus.check(lambda path: path.startswith(begin))
    return sorted((corpus.folder / kind / row["split"]).glob(f"{row['source']}-*.parquet"))


def _read(row: dict[str, Any], corpus: CorpusFiles) -> Event:
    names = _file_names(row, corpus)
    lines = [f"source {row['source']}, record {row['record']} of {names}", f"raw file sha256 {row['raw_digest']}"]
    if row["outcome"] == "quarantined":
        return Event("read", "quarantined", (*lines, _reason(row, corpus)))
    return Event("read", "read", (*lines, f"{row['bytes']} bytes of text"))


def _reason(row: dict[str, Any], corpus: CorpusFiles) -> str:
    for line in corpus.read(QUARANTINE_NAME).splitlines():
        entry = orjson.loads(line)
        if entry["doc_id"] == row["doc_id"]:
            return f"{entry['reason']}: {entry['excerpt']!r}"
    return row["rule"]


def _file_names(row: dict[str, Any], corpus: CorpusFiles) -> str:
    lock = read_lock(corpus.beside / LOCK_NAME)
    if lock is None:
        return "a raw file (its name is in the lock, which is not beside this folder)"
    return " or ".join(f.name for f in lock.source(row["source"]).files if f.sha256 == row["raw_digest"])


def _filtered(row: dict[str, Any], rules: Sequence[dict[str, Any]], signals: dict[str, Any]) -> Event:
    if row["failed"]:
        keep = {rule["rule"]: rule["keep"] for rule in rules}
        lines = [f"{f['rule']}: {f['value']:.6g}, wanted {keep[f['rule']]} {f['threshold']:g}" for f in row["failed"]]
        return Event("filters", f"removed by {row['rule']}", tuple(lines))
    lines = [f"language profile {signals['profile']}"] if signals.get("profile") else []
    for rule in rules:
        name = "language_score" if rule["signal"] == WANTED_LANGUAGE else rule["signal"]
        threshold = rule["profiles"].get(signals.get("profile"), rule["threshold"])
        if signals.get(name) is not None and threshold is not None:
            lines.append(f"{rule['rule']}: {signals[name]:.6g}, wanted {rule['keep']} {threshold:g}")
    return Event("filters", "passed", tuple(lines))


def _deduplicated(row: dict[str, Any], corpus: CorpusFiles) -> list[Event]:
    if row["step"] == "quality":
        return [Event("quality", "removed", (f"score {row['value']:.6g}, wanted {row['threshold']:.6g}",))]
    if row["duplicate_of"]:
        said = f"{row['duplicate_of']}, similarity {row['similarity']:.4f}, threshold {row['threshold']:g}"
        return [Event(row["step"], "removed as a duplicate", (said,))]
    copies = sorted(_copies(row["doc_id"], corpus), key=lambda copy: (-copy["similarity"], copy["doc_id"]))
    lines = [f"{c['doc_id']}, similarity {c['similarity']:.4f}, {c['step']}" for c in copies[:MAX_SHOWN]]
    if len(copies) > MAX_SHOWN:
        lines.append(f"and {len(copies) - MAX_SHOWN} more")
    said = f"kept instead of {len(copies)} duplicates" if copies else "no duplicate of a kept document"
    return [Event("deduplication", said, tuple(lines))]


def _copies(doc_id: str, corpus: CorpusFiles) -> list[dict[str, Any]]:
    """Ledger rows of the documents that were removed as duplicates of this one."""
    columns = ["doc_id", "similarity", "step"]
    if corpus.index is None:
        of_this = pc.field("duplicate_of") == doc_id
        return list(pq.read_table(f"{corpus.folder}/ledger", columns=columns, filters=of_this).to_pylist())
    places = [place for place in corpus.index.places(doc_id) if place.is_duplicate]
    return list(corpus.rows({str(n): place for n, place in enumerate(places)}, columns).values())


def _removed_spans(row: dict[str, Any]) -> list[Event]:
    """The spans removed from the document, by step."""
    events = []
    for rule in dict.fromkeys(span["rule"] for span in row["removed_spans"]):
        spans = [span for span in row["removed_spans"] if span["rule"] == rule]
        lines = [_span_line(span) for span in spans[:MAX_SHOWN]]
        if len(spans) > MAX_SHOWN:
            lines.append(f"and {len(spans) - MAX_SHOWN} more")
        characters = sum(span["length"] for span in spans)
        outcome = "found" if rule.endswith(ANNOTATIONS) else "removed"
        events.append(Event(rule, f"{outcome} {len(spans)} spans, {characters} characters", tuple(lines)))
    return events


def _span_line(span: dict[str, Any]) -> str:
    why = f"kept in {span['kept_in']}" if span["kept_in"] else f"{span['benchmark']} {span['example']}"
    return f"characters {span['start']} to {span['start'] + span['length']}, {why}: {span['excerpt']!r}"


def _contaminated(row: dict[str, Any]) -> list[Event]:
    """Which benchmark texts were found in the document."""
    matches = row["contamination"]
    if not matches:
        return []
    lines = [
        f"{match['benchmark']} {match['example']} ({match['field']}): {match['kind']}, {match['matched']} of "
        f"{match['of']} {'words' if match['kind'] in ('short', 'edited') else 'n-grams'}"
        for match in matches[:MAX_SHOWN]
    ]
    if len(matches) > MAX_SHOWN:
        lines.append(f"and {len(matches) - MAX_SHOWN} more")
    return [Event("decontamination", f"{len(matches)} benchmark texts found", tuple(lines))]


def _removed_by_rewriting(row: dict[str, Any]) -> list[Event]:
    """A document of which too little was left, or none was wanted."""
    if row["step"] not in REWRITING:
        return []
    said = f"{row['rule']}: {row['value']:.6g}, threshold {row['threshold']:.6g}"
    return [Event(row["step"], "removed", (said,))]


def _kept(doc_id: str, row: dict[str, Any], corpus: CorpusFiles) -> Event:
    if (place := _place(doc_id, corpus, "documents")) is not None:
        text = corpus.rows({doc_id: place}, ["text"])[doc_id]["text"]
        return _kept_event(doc_id, row, place.table, text)
    for path in _shards("documents", row, corpus):
        rows = pq.read_table(path, columns=["text"], filters=pc.field("doc_id") == doc_id).to_pylist()
        if rows:
            return _kept_event(doc_id, row, f"documents/{row['split']}/{path.name}", rows[0]["text"])
    raise InputError(f"{corpus.place}: {doc_id} is in the ledger and in no shard; run gristmill verify on the folder")


def _kept_event(doc_id: str, row: dict[str, Any], where: str, text: str) -> Event:
    name = () if doc_id == row["doc_id"] else (f"piece {doc_id}",)
    return Event("split", row["split"], (*name, where, excerpt(text, 300)))


# The ledger and the signals of a corpus as DuckDB tables, for questions in SQL.

if TYPE_CHECKING:
    import duckdb

TABLES = ("documents", "signals", "ledger")


def open_corpus(folder: Path) -> "duckdb.DuckDBPyConnection":
    """A connection with the views documents, signals and ledger over the corpus's Parquet files, read only as asked.

    documents and signals have a column `split` besides; signals of sources whose filters edit have more columns than
    others, null where a source has them not. Raises InputError if there is no corpus in the folder."""
    import duckdb  # loaded here: no other command needs it

    corpus = corpus_folder(folder)
    check_outputs(corpus, lambda path: path.startswith("ledger/"))
    connection = duckdb.connect()
    create_views(connection, glob.escape(str(corpus)), str(corpus))
    return connection


def open_address(corpus: str, tables: Sequence[str] = TABLES) -> "duckdb.DuckDBPyConnection":
    """As `open_corpus`, of the folder at an address. DuckDB reads the columns and row groups that a query needs,
    through fsspec and so with the credentials of the environment."""
    import duckdb  # as above

    connection = duckdb.connect()
    connection.register_filesystem(filesystem_of(corpus)[0])
    with as_os_errors():
        create_views(connection, corpus, corpus, tables)
    return connection


def open_incomplete(folder: Path, tables: Sequence[str] = TABLES) -> "duckdb.DuckDBPyConnection":
    """As `open_corpus`, of the folder of a run that has not ended: the tables of which it has a file."""
    import duckdb  # as above

    connection = duckdb.connect()
    tables = [name for name in tables if next((folder / name).rglob("*.parquet"), None) is not None]
    create_views(connection, glob.escape(str(folder)), str(folder), tables)
    return connection


def create_views(
    connection: "duckdb.DuckDBPyConnection", root: str, corpus: str, tables: Sequence[str] = TABLES
) -> None:
    """root: the corpus as a glob pattern. One footer of each source is read: its files have equal columns."""
    import duckdb  # as above

    for name in tables:
        try:
            if name == "signals":
                selects = [_select(name, patterns) for patterns in _patterns_by_schema(connection, root)]
            else:
                selects = [_select(name, [f"{root}/{name}/{'' if name == 'ledger' else '*/'}*.parquet"])]
            connection.execute(f"CREATE VIEW {name} AS {' UNION ALL BY NAME '.join(selects)}")
        except duckdb.Error as error:
            said = str(error).splitlines()[0]
            raise InputError(f"{corpus}/{name}: {said}; `gristmill verify {corpus}` lists what is damaged") from error


def _select(table: str, patterns: Sequence[str]) -> str:
    """The rows of the files that patterns name, which have equal columns: `union_by_name` would keep all footers."""
    listed = ", ".join("'" + pattern.replace("'", "''") + "'" for pattern in patterns)
    if table == "ledger":
        return f"SELECT * FROM read_parquet([{listed}])"
    split = "split_part(filename, '/', -2) AS split"
    return f"SELECT * EXCLUDE (filename), {split} FROM read_parquet([{listed}], filename = true)"


def _patterns_by_schema(connection: "duckdb.DuckDBPyConnection", root: str) -> list[list[str]]:
    """Patterns of the files of signals, those of sources with equal columns together: sources' columns differ."""
    listed = connection.execute("SELECT file FROM glob(?)", [f"{root}/signals/*/*.parquet"]).fetchall()
    first: dict[str, str] = {}
    patterns: dict[str, dict[str, None]] = {}
    for (path,) in sorted(listed):
        source, _, number = PurePath(path).stem.rpartition("-")
        first.setdefault(source, path)
        pattern = f"{root}/signals/*/{glob.escape(source)}-{'[0-9]' * len(number)}.parquet"
        patterns.setdefault(source, {})[pattern] = None
    by_schema: dict[tuple, list[str]] = {}
    for source, path in first.items():
        schema = connection.execute("SELECT name, type FROM parquet_schema(?)", [path]).fetchall()
        by_schema.setdefault(tuple(schema), []).extend(patterns[source])
    return list(by_schema.values()) or [[f"{root}/signals/*/*.parquet"]]

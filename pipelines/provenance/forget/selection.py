"""Documents to forget: those asked for, and every copy of them among all documents that were read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.tombstones import read_tombstones
from gristmill.data_pipeline.corpus.document_history import open_corpus
from gristmill.data_pipeline.corpus.small_sources import is_batch_file, rows_by_source, source_in_name
from gristmill.data_pipeline.dedup.folding import (
    KnownValues,
    bytes_of_words,
    document_keys,
    fold_texts,
    folded_keys,
)
from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.dedup.near_copies import SignedTexts, near_copies
from gristmill.data_pipeline.dedup.signature_cache import SIGNATURE_CACHE, SignatureCache
from gristmill.data_pipeline.dedup.signatures import sign_corpus
from gristmill.data_pipeline.filters.apply import KEPT, FilterTask, apply_filters
from gristmill.data_pipeline.ledger.document_file import (
    DocumentFile,
    RowRange,
    packed_ids,
    read_rows,
    unpacked_ids,
)
from gristmill.data_pipeline.readers.document import hosts_of
from gristmill.data_pipeline.run_curation import annotated
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import remove_tree
from gristmill.foundation.lock import Lock
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.provenance.forget.places import open_index
from gristmill.pipelines.recipes.config import Recipe

ASKED, EXACT, NEAR = "asked for", "exact copy", "near copy"
MAX_NAMED = 5
ScannedRow = tuple[int, int, str, bytes | None]  # file, row, doc_id, text key


@dataclass(frozen=True)
class Selector:
    """Subject of a request; one of these. ids: document ids. host: with its subdomains. text: copies of it. rule: SQL
    whose result has a column doc_id."""

    ids: Sequence[str] | None = None
    host: str | None = None
    text: str | None = None
    rule: str | None = None

    @property
    def kind(self) -> str:
        return next(name for name in ("ids", "host", "text", "rule") if getattr(self, name) is not None)


@dataclass(frozen=True)
class Selected:
    """A document to forget. text_key: None if it has no text. reason: ASKED, EXACT or NEAR. similarity: of a near
    copy."""

    doc_id: str
    source: str
    text_key: bytes | None
    reason: str
    similarity: float = 1.0


@dataclass(frozen=True)
class ReadDocuments:
    """All documents that were read, as annotated files. tasks: of the files. sources: of each file the source, or the
    batch of sources, that it is of."""

    recipe: Recipe
    workdir: Path
    tasks: Sequence[FilterTask]
    sources: Sequence[str]
    engine: Engine

    @classmethod
    def of(cls, recipe: Recipe, workdir: Path, lock: Lock, engine: Engine) -> "ReadDocuments":
        """Files that the cache does not hold are annotated."""
        tombstones = read_tombstones(workdir)
        groups = annotated(recipe.sources, recipe.curate, lock, workdir / "cache", engine, tombstones)
        tasks = {task.path: replace(task, source="") for _, group in groups for task in group}
        return cls(recipe, workdir, list(tasks.values()), [source_in_name(path) for path in tasks], engine)

    def source_of(self, file: int, row: int) -> str:
        """The source of the document in this row of a file."""
        path = self.tasks[file].path
        if not is_batch_file(path):
            return self.sources[file]
        return next(source for source, start, stop in rows_by_source(path) if start <= row < stop)

    def scan(self, wanted: "Wanted", label: str) -> list[ScannedRow]:
        """Rows of every document that is wanted."""
        if not (wanted.ids or wanted.keys or wanted.host):
            return []
        tasks = [(task.path, wanted) for task in self.tasks]
        rows = self.engine.map(_scan_file, tasks, label, unit="files")
        return [(file, *row) for file, of_file in enumerate(rows) for row in of_file]


@dataclass(frozen=True)
class Wanted:
    """Documents with one of these ids or text keys, or of this host."""

    ids: frozenset[str] = frozenset()
    keys: frozenset[bytes] = frozenset()
    host: str | None = None

    @cached_property
    def known_ids(self) -> KnownValues:
        return _known_values(map(bytes.fromhex, self.ids))

    @cached_property
    def known_keys(self) -> KnownValues:
        return _known_values(self.keys)


def _known_values(values: Iterable[bytes]) -> KnownValues:
    return KnownValues.of(np.frombuffer(b"".join(values), ">u8").astype(np.uint64).reshape(-1, 2))


def select(selector: Selector, documents: ReadDocuments, threshold: float | None) -> list[Selected]:
    """Documents asked for and their copies, by id. threshold: of near copies; None: the recipe's, else 0.8.

    Raises RecipeError or InputError if the request names no document."""
    near = documents.recipe.curate.near_dedup or NearDedupConfig()
    asked = _asked(selector, documents)
    texts = [selector.text] if selector.text is not None else _texts(documents, asked)
    keys = frozenset(key for *_, key in asked if key is not None)
    if selector.text is not None:
        keys = frozenset([text_key(selector.text)])
    selected: dict[str, Selected] = {}

    def add(rows: Sequence[ScannedRow], reason: str, similarities: Mapping[str, float] = MappingProxyType({})) -> None:
        for file, row, doc_id, key in rows:
            source = documents.source_of(file, row)
            document = Selected(doc_id, source, key, reason, similarities.get(doc_id, 1.0))
            selected.setdefault(doc_id, document)

    add(asked, ASKED)
    add(documents.scan(Wanted(keys=keys), "exact copies"), EXACT)
    copies = _near_copies(texts, documents, near, near.threshold if threshold is None else threshold)
    add(documents.scan(Wanted(ids=frozenset(copies)), "near copies: texts"), NEAR, copies)
    near_keys = {document.text_key: document.similarity for document in selected.values() if document.reason == NEAR}
    of_near = documents.scan(Wanted(keys=frozenset(key for key in near_keys if key)), "copies of near copies")
    add(of_near, NEAR, {doc_id: near_keys[key] for *_, doc_id, key in of_near})
    add(documents.scan(Wanted(ids=_recorded_copies(documents.workdir, frozenset(selected))), "recorded copies"), EXACT)
    if not selected:
        raise InputError(f"{documents.workdir}: no document that was read has this text or a near copy of it")
    return [selected[doc_id] for doc_id in sorted(selected)]


def _recorded_copies(workdir: Path, selected: frozenset[str]) -> frozenset[str]:
    """Documents that the ledger has as exact duplicates of selected ones, or as what these are duplicates of."""
    ids: set[str] = set()
    corpus = workdir / "curate"
    index = open_index(corpus)
    records = index.records_of(packed_ids(pa.array(sorted(selected), pa.string()), corpus))
    for name, rows in index.rows_by_table(records).items():
        if name.startswith("ledger/"):
            for row in read_rows(RowRange.of_rows(corpus / name, rows), ["doc_id", "step", "duplicate_of"]).to_pylist():
                if row["step"] == "exact_dedup" and not selected.isdisjoint((row["doc_id"], row["duplicate_of"])):
                    ids |= {row["doc_id"], row["duplicate_of"]}
    return frozenset(ids.difference(selected))


def text_key(text: str) -> bytes:
    """Key of a text, as the column TEXT_KEY has it."""
    data = np.frombuffer(text.encode() or b"\0", np.uint8)
    return folded_keys(*fold_texts(data, np.array([0, len(text.encode())], np.int64), "space"))


def _asked(selector: Selector, documents: ReadDocuments) -> list[ScannedRow]:
    if selector.text is not None:
        return []
    if selector.host is not None:
        rows = documents.scan(Wanted(host=selector.host.lower()), "documents of the host")
        if not rows:
            raise InputError(f"--host {selector.host}: no document that was read has a URL of this host")
        return rows
    ids = _ids_of_rule(selector.rule, documents.workdir) if selector.rule is not None else list(selector.ids or ())
    if not ids:
        raise InputError("the request names no document")
    rows = documents.scan(Wanted(ids=frozenset(ids)), "documents asked for")
    missing = sorted(set(ids) - {doc_id for *_, doc_id, _ in rows})
    if missing:
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise InputError(
            f"{documents.workdir}: no document that was read has the id {', '.join(missing[:MAX_NAMED])}{more}; ids "
            "are in the column doc_id of the ledger (pieces of a document: name the document)"
        )
    return rows


def _ids_of_rule(rule: str, workdir: Path) -> list[str]:
    try:
        result = open_corpus(workdir).sql(rule)
    except Exception as error:  # duckdb.Error is made at run time and has no static name
        raise RecipeError(f"--rule: {error}") from error
    if result is None or "doc_id" not in result.columns:
        raise RecipeError(f"--rule {rule}: write a SELECT whose result has the column doc_id")
    ids = [row[0] for row in result.project("doc_id").distinct().fetchall()]
    if not ids:
        raise InputError(f"--rule {rule}: selects no document")
    return ids


def parse_ids(content: str, name: str) -> list[str]:
    """Ids of a file, one a line; blank lines are ignored. Raises RecipeError that names the line of a wrong one."""
    ids = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not (doc_id := line.strip()):
            continue
        if not re.fullmatch(r"[0-9a-f]{32}", doc_id):
            raise RecipeError(f"{name}: line {number}: {doc_id[:40]!r} is no document id; write 32 hex digits a line")
        ids.append(doc_id)
    if not ids:
        raise RecipeError(f"{name}: no document id in it; write 32 hex digits a line")
    return ids


def _scan_file(task: tuple[Path, Wanted]) -> list[tuple[int, str, bytes | None]]:
    path, wanted = task
    keys = document_keys(path)
    rows = _wanted_rows(keys, path, wanted)
    chosen = keys[rows]
    text_keys = [
        key.tobytes() if size else None
        for key, size in zip(bytes_of_words(chosen["key"]), chosen["bytes"].tolist(), strict=True)
    ]
    return list(zip(rows.tolist(), unpacked_ids(chosen["id"]).to_pylist(), text_keys, strict=True))


def _wanted_rows(keys: np.ndarray, path: Path, wanted: Wanted) -> np.ndarray:
    """int64[], ascending."""
    of_keys = wanted.known_keys.among(keys["key"])
    rows = np.union1d(wanted.known_ids.among(keys["id"]), of_keys[keys["bytes"][of_keys] > 0])
    if wanted.host is not None:
        with pq.ParquetFile(path) as file:
            rows = np.union1d(rows, np.flatnonzero(_of_host(file.read(["url"]).column(0), wanted.host)))
    return rows


def _of_host(urls: pa.ChunkedArray, host: str) -> np.ndarray:
    """bool[rows]: the URL's host is this one or below it."""
    hosts = hosts_of(urls)
    is_below = pc.or_(pc.equal(hosts, host), pc.ends_with(hosts, f".{host}"))
    return pc.fill_null(is_below, False).to_numpy(zero_copy_only=False)


def _texts(documents: ReadDocuments, asked: Sequence[ScannedRow]) -> list[str]:
    """Texts of these documents, one for each text key."""
    first: dict[bytes, tuple[int, int]] = {}
    for file, row, _, key in asked:
        if key is not None:
            first.setdefault(key, (file, row))
    by_file: dict[int, list[int]] = {}
    for file, row in first.values():
        by_file.setdefault(file, []).append(row)
    texts: list[str] = []
    for file, rows in sorted(by_file.items()):
        document_file = DocumentFile(documents.tasks[file].path, documents.sources[file], 1)
        wanted = np.zeros(len(document_file.kept_mask()), bool)
        wanted[rows] = True
        for _, _, batch in document_file.batches(wanted):
            texts += batch.to_pylist()
    return texts


def _near_copies(
    texts: Sequence[str], documents: ReadDocuments, config: NearDedupConfig, threshold: float
) -> dict[str, float]:
    """doc_id -> similarity of the near copies among documents that the filters keep."""
    cache = SignatureCache.of(documents.workdir / "cache" / SIGNATURE_CACHE, config.scheme)
    files = [
        DocumentFile(task.path, source, 1) for task, source in zip(documents.tasks, documents.sources, strict=True)
    ]
    unsigned = [place for place, file in enumerate(files) if not cache.has(file)]
    if unsigned:
        _sign([(documents.tasks[place], files[place]) for place in unsigned], documents, config, cache)
    copies = near_copies(SignedTexts.of(texts, config.scheme), files, cache, threshold, documents.engine)
    best: dict[str, float] = {}
    for copy in copies:
        best[copy.doc_id] = max(best.get(copy.doc_id, 0.0), copy.similarity)
    return best


def _sign(
    files: Sequence[tuple[FilterTask, DocumentFile]],
    documents: ReadDocuments,
    config: NearDedupConfig,
    cache: SignatureCache,
) -> None:
    """Puts the signatures of the documents that the filters keep into the cache."""
    kept = documents.engine.map(_kept_documents, files, "documents to compare", unit="files")
    work = documents.workdir / "cache" / "forget"
    remove_tree(work)
    sign_corpus(kept, config.scheme, documents.engine, work / "signatures", cache=cache)
    remove_tree(work)


def _kept_documents(task: tuple[FilterTask, DocumentFile]) -> DocumentFile:
    filter_task, file = task
    return DocumentFile(file.path, file.source, file.priority, apply_filters(filter_task).failed_rule == KEPT)


def ids_by_reason(selected: Sequence[Selected]) -> dict[str, int]:
    """Reason -> documents, of the reasons that occur."""
    counts = {reason: sum(document.reason == reason for document in selected) for reason in (ASKED, EXACT, NEAR)}
    return {reason: count for reason, count in counts.items() if count}

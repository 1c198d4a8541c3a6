"""Statements: what `gristmill forget` took out of a work folder, where it had been, and what was built without it.

`statements/forget-0001.json` belongs to the first request of `tombstones.json`, and so on; each holds the digest of its
request and of the statement before it. None holds text or ids: documents stand in it as keyed digests."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.annotate.tombstones import ForgetRequest, Tombstones, id_bytes, read_tombstones
from gristmill.data_pipeline.corpus.id_index import IDS_FOLDER, IDS_SUFFIX, id_blocks
from gristmill.data_pipeline.dedup.folding import KEY_BYTES, bytes_of_words, fold_texts, folded_keys
from gristmill.data_pipeline.ledger.document_file import unpacked_ids, utf8_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import DIGEST_FIELD, digested_json, read_digested_json
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.pipelines.provenance.forget.places import DocumentPlaces

STATEMENTS_FOLDER = "statements"
STATEMENT_VERSION = 1
STATEMENT_NAME = re.compile(r"forget-(\d{4,})\.json")
PENDING_NAME = "pending.json"
BATCH_DOCUMENTS = 4096
MAX_NAMED = 5


def statement_path(workdir: Path, number: int) -> Path:
    return workdir / STATEMENTS_FOLDER / f"forget-{number:04d}.json"


def read_statement(path: Path) -> dict[str, Any]:
    """The statement, with its digest. Raises InputError if any byte was changed."""
    try:
        content = path.read_bytes()
        return read_digested_json(content) | {DIGEST_FIELD: _digest_in(content)}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a statement ({error})") from error


def _digest_in(content: bytes) -> str:
    match = re.search(rb'"digest":"([0-9a-f]{64})"', content)
    return "" if match is None else match[1].decode()


def write_statement(workdir: Path, pending: Mapping[str, Any], results: Mapping[str, Any]) -> Path:
    """Writes the statement of a finished request: what was planned, and what came of it."""
    number = pending["number"]
    before = statement_path(workdir, number - 1)
    previous = read_statement(before)[DIGEST_FIELD] if number > 1 and before.is_file() else ""
    path = statement_path(workdir, number)
    content = {"version": STATEMENT_VERSION, **pending, **results, "previous": previous}
    write_atomic(path, digested_json(content))
    return path


def described_places(places: DocumentPlaces) -> dict[str, Any]:
    """The places as JSON."""
    return {
        "outcomes": [
            {"outcome": outcome, "at": place, "documents": count}
            for (outcome, place), count in sorted(places.outcomes.items())
        ],
        "shards": dict(sorted(places.shards.items())),
        "share_text_with": places.sharing,
        "index_ranges": [list(asdict(index_range).values()) for index_range in places.ranges],
        "in_tokenizer_sample": places.in_sample,
        "training": {**asdict(places.training), "seen": list(places.training.seen)},
    }


def fingerprints(workdir: Path) -> dict[str, str]:
    """Stage -> fingerprint of what stands in the work folder."""
    folders = sorted(path.parent for path in workdir.glob(f"*/{MANIFEST_NAME}"))
    return {folder.name: read_manifest(folder).fingerprint for folder in folders if "." not in folder.name}


# Checks of a work folder: no tombstone names a document in it, and the statements are whole.


def wrong_with_statements(workdir: Path, lines: list[str], reads_texts: bool = True) -> Iterator[str]:
    """Contradictions to the tombstones and statements of the work folder, one message each. A summary is appended to
    `lines`. reads_texts: every text of the corpus is compared with the tombstones too, not the ids alone."""
    try:
        tombstones = read_tombstones(workdir)
    except InputError as error:
        yield str(error)
        return
    if tombstones is None:
        if any(STATEMENT_NAME.fullmatch(path.name) for path in (workdir / STATEMENTS_FOLDER).glob("*")):
            yield f"{workdir}: statements without tombstones.json; restore it from {workdir / 'curate'}"
        return
    if (workdir / STATEMENTS_FOLDER / PENDING_NAME).is_file():
        yield f"{workdir}: a removal was interrupted; `gristmill forget {workdir} --resume` ends it"
    wrong = [*_wrong_chain(workdir, tombstones), *_wrong_corpus(workdir, tombstones, reads_texts)]
    documents = sum(len(request.ids) for request in tombstones.requests)
    state = "none is in the corpus" if not wrong else f"{len(wrong)} faults"
    lines.append(f"{workdir}: {len(tombstones.requests)} removals, {documents} documents: {state}")
    yield from wrong


def _wrong_chain(workdir: Path, tombstones: Tombstones) -> Iterator[str]:
    previous = ""
    for request in tombstones.requests:
        path = statement_path(workdir, request.number)
        try:
            statement = read_statement(path)
        except InputError as error:
            yield str(error)
            continue
        if statement["request"] != request.digest:
            yield f"{path}: of another request than number {request.number} of tombstones.json"
        if statement["previous"] != previous:
            yield f"{path}: the statement before it is another one"
        previous = statement[DIGEST_FIELD]


def _wrong_corpus(workdir: Path, tombstones: Tombstones, reads_texts: bool) -> Iterator[str]:
    """Documents of the corpus that have a tombstone."""
    corpus = workdir / "curate"
    if not (corpus / MANIFEST_NAME).is_file():
        return
    applied: tuple[ForgetRequest, ...] = ()
    if (made_with := read_tombstones(corpus)) is not None:
        applied = made_with.requests
    if applied != tombstones.requests:
        yield f"{corpus}: made with {len(applied)} of {len(tombstones.requests)} removals; `gristmill curate` again"
    tables = sorted(corpus.glob("ledger/*.parquet")) + sorted(corpus.glob("documents/*/*.parquet"))
    for path in tables if reads_texts else sorted(corpus.glob(f"{IDS_FOLDER}/*{IDS_SUFFIX}")):
        if doc_ids := _documents_of(path, tombstones) if reads_texts else _indexed_documents_of(path, tombstones):
            more = f" and {len(doc_ids) - MAX_NAMED} more" if len(doc_ids) > MAX_NAMED else ""
            named = f"{', '.join(doc_ids[:MAX_NAMED])}{more}"
            yield f"{path}: holds {named}, which have a tombstone; `gristmill curate` again"


def _indexed_documents_of(path: Path, tombstones: Tombstones) -> list[str]:
    """Ids in a file of the index of ids that have a tombstone."""
    matches = [ids[tombstones.matches(bytes_of_words(ids))[0]] for ids in id_blocks(path)]
    return unpacked_ids(np.unique(np.concatenate([np.empty((0, 2), np.uint64), *matches]), axis=0)).to_pylist()


def _documents_of(path: Path, tombstones: Tombstones) -> list[str]:
    """Ids of documents in the file that have a tombstone, by id or text."""
    has_text = path.parent.parent.name == "documents"
    ids: list[str] = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(BATCH_DOCUMENTS, columns=["doc_id", "text"] if has_text else ["doc_id"]):
            doc_ids, keys = batch.column("doc_id"), None
            if has_text:
                data, offsets = utf8_of(batch.column("text"))
                joined = folded_keys(*fold_texts(data, np.asarray(offsets), "space"))
                keys = np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
            rows, _ = tombstones.matches(id_bytes(doc_ids, path), keys)
            ids += doc_ids.take(pa.array(rows)).to_pylist()
    return ids

"""Why a document is in the corpus, or is not: its life, step by step, from the ledger and the signals."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow.compute as pc
import pyarrow.dataset as ds

from gristmill.data_pipeline.curation import COUNTS_NAME, QUARANTINE_NAME
from gristmill.data_pipeline.decide import WANTED_LANGUAGE
from gristmill.data_pipeline.document import excerpt
from gristmill.data_pipeline.errors import InputError, RecipeError
from gristmill.data_pipeline.provenance.lock import LOCK_NAME, read_lock

MOST_SHOWN = 10  # duplicates listed by name


@dataclass(frozen=True)
class Event:
    """One step of a document's way. lines: what was found there, with values and thresholds."""

    step: str
    outcome: str
    lines: tuple[str, ...] = ()


def why(doc_id: str, folder: Path) -> list[Event]:
    """The document's life in the corpus in `folder` (a curate stage's folder, or the work folder above it).

    Raises RecipeError if `doc_id` is not 32 hex digits, InputError if there is no ledger or it does not know the id."""
    if not re.fullmatch(r"[0-9a-f]{32}", doc_id):
        raise RecipeError(f"{doc_id!r} is no document id; give its 32 hex digits, as in the column doc_id")
    corpus = corpus_folder(folder)
    row = _ledger_row(doc_id, corpus)
    rules = orjson.loads((corpus / COUNTS_NAME).read_bytes())["rules"][row["source"]]
    events = [_read(row, corpus)]
    if row["fate"] == "quarantined":
        return events
    events.append(_filtered(row, rules, _signals(row, corpus)))
    if row["step"] != "filters":
        events += _deduplicated(row, corpus)
    if row["fate"] == "kept":
        events.append(_kept(row, corpus))
    return events


def corpus_folder(folder: Path) -> Path:
    """The folder that holds the ledger: this one, or `curate` in it."""
    for candidate in (folder, folder / "curate"):
        if (candidate / "ledger").is_dir() and (candidate / COUNTS_NAME).is_file():
            return candidate
    raise InputError(f"{folder}: no ledger here; name the folder that the curate stage wrote")


def _ledger_row(doc_id: str, corpus: Path) -> dict[str, Any]:
    rows = ds.dataset(corpus / "ledger").to_table(filter=pc.field("doc_id") == doc_id).to_pylist()
    if not rows:
        raise InputError(f"{corpus / 'ledger'}: no document {doc_id}; every document that was read stands there")
    return rows[0]


def _signals(row: dict[str, Any], corpus: Path) -> dict[str, Any]:
    """The signals of a kept document; of a removed one the ledger has what it failed by."""
    if row["fate"] != "kept":
        return {}
    files = sorted((corpus / "signals" / row["split"]).glob(f"{row['source']}-*.parquet"))
    return ds.dataset(files).to_table(filter=pc.field("doc_id") == row["doc_id"]).to_pylist()[0]


def _read(row: dict[str, Any], corpus: Path) -> Event:
    names = _file_names(row, corpus)
    lines = [f"source {row['source']}, record {row['record']} of {names}", f"raw file sha256 {row['raw_digest']}"]
    if row["fate"] == "quarantined":
        return Event("read", "quarantined", (*lines, _reason(row, corpus)))
    return Event("read", "read", (*lines, f"{row['bytes']} bytes of text"))


def _reason(row: dict[str, Any], corpus: Path) -> str:
    for line in (corpus / QUARANTINE_NAME).read_bytes().splitlines():
        entry = orjson.loads(line)
        if entry["doc_id"] == row["doc_id"]:
            return f"{entry['reason']}: {entry['excerpt']!r}"
    return row["rule"]


def _file_names(row: dict[str, Any], corpus: Path) -> str:
    lock = read_lock(corpus.parent / LOCK_NAME)
    if lock is None:
        return "a raw file (its name stands in the lock, which is not beside this folder)"
    return " or ".join(f.name for f in lock.source(row["source"]).files if f.sha256 == row["raw_digest"])


def _filtered(row: dict[str, Any], rules: Sequence[dict[str, Any]], signals: dict[str, Any]) -> Event:
    if row["failed"]:
        keep = {rule["rule"]: rule["keep"] for rule in rules}
        lines = [f"{f['rule']}: {f['value']:.6g}, wanted {keep[f['rule']]} {f['threshold']:g}" for f in row["failed"]]
        return Event("filters", f"removed by {row['rule']}", tuple(lines))
    lines = []
    for rule in rules:
        name = "language_score" if rule["signal"] == WANTED_LANGUAGE else rule["signal"]
        if signals.get(name) is not None:
            lines.append(f"{rule['rule']}: {signals[name]:.6g}, wanted {rule['keep']} {rule['threshold']:g}")
    return Event("filters", "passed", tuple(lines))


def _deduplicated(row: dict[str, Any], corpus: Path) -> list[Event]:
    if row["step"] == "quality":
        return [Event("quality", "removed", (f"score {row['value']:.6g}, wanted {row['threshold']:.6g}",))]
    if row["duplicate_of"]:
        said = f"{row['duplicate_of']}, similarity {row['similarity']:.4f}, threshold {row['threshold']:g}"
        return [Event(row["step"], "removed as a duplicate", (said,))]
    of_this = pc.field("duplicate_of") == row["doc_id"]
    table = ds.dataset(corpus / "ledger").to_table(columns=["doc_id", "similarity", "step"], filter=of_this)
    copies = sorted(table.to_pylist(), key=lambda copy: (-copy["similarity"], copy["doc_id"]))
    lines = [f"{c['doc_id']}, similarity {c['similarity']:.4f}, {c['step']}" for c in copies[:MOST_SHOWN]]
    if len(copies) > MOST_SHOWN:
        lines.append(f"and {len(copies) - MOST_SHOWN} more")
    said = f"kept in the stead of {len(copies)}" if copies else "no duplicate of a kept document"
    return [Event("deduplication", said, tuple(lines))]


def _kept(row: dict[str, Any], corpus: Path) -> Event:
    for path in sorted((corpus / "documents" / row["split"]).glob(f"{row['source']}-*.parquet")):
        found = ds.dataset(path).to_table(columns=["text"], filter=pc.field("doc_id") == row["doc_id"]).to_pylist()
        if found:
            where = path.relative_to(corpus).as_posix()
            return Event("split", row["split"], (where, excerpt(found[0]["text"], 300)))
    raise InputError(f"{corpus}: {row['doc_id']} is in the ledger and in no shard; run gristmill verify on the folder")

"""Parts with spans cut out of their texts: what the next step reads."""

import hashlib
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.dedup.arrays import claim, part_identity
from gristmill.data_pipeline.dedup.part import BATCH_ROWS, Part, open_part
from gristmill.data_pipeline.engine.local import LocalEngine
from gristmill.data_pipeline.provenance.files import atomic_path

REWRITTEN = pa.schema([("doc_id", pa.string()), ("text", pa.string())])


def rewrite_parts(
    parts: Sequence[Part], cuts: pa.Table, in_bytes: bool, engine: LocalEngine, folder: Path
) -> list[Part]:
    """Parts whose texts lack the cuts; row for row those given, with their sources, priorities and living rows.

    cuts: columns doc_id, start, stop (characters, or bytes of UTF-8 if in_bytes), as `duplicate_spans` and
    `repeated_substrings` give them; spans of a document are disjoint. Files stand in `folder`; called again with the
    same arguments after a kill, it goes on from them."""
    table = cuts.select(["doc_id", "start", "stop"]).sort_by([("doc_id", "ascending"), ("start", "ascending")])
    claim(folder, {"in_bytes": in_bytes, "parts": [part_identity(part) for part in parts], "cuts": _digest(table)})
    cuts_file = folder / "cuts.parquet"
    if not cuts_file.exists():
        with atomic_path(cuts_file) as temporary:
            pq.write_table(table, temporary, compression="zstd")
    paths = [folder / f"part-{number:05d}.parquet" for number in range(len(parts))]
    tasks = [(p, cuts_file, in_bytes, path) for p, path in zip(parts, paths, strict=True) if not path.exists()]
    engine.map(_rewrite_part, tasks, "cutting spans", [task[0].bytes for task in tasks], "B")
    return [Part(path, p.source, p.priority, p.alive) for p, path in zip(parts, paths, strict=True)]


def without(text: str, spans: Sequence[tuple[int, int]], in_bytes: bool) -> str:
    """The text without its (start, stop) characters (or bytes). "a\\nb\\nc" without (2, 4) is "a\\nc"."""
    whole = text.encode() if in_bytes else text
    bounds = [0, *(place for span in sorted(spans) for place in span), len(whole)]
    left = [whole[bounds[i] : bounds[i + 1]] for i in range(0, len(bounds), 2)]
    return b"".join(left).decode() if in_bytes else "".join(left)  # type: ignore[arg-type]


def _digest(table: pa.Table) -> str:
    """Of the values, not of their memory: written as Parquet they are the same bytes."""
    sink = pa.BufferOutputStream()
    pq.write_table(table.combine_chunks(), sink)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def _rewrite_part(task: tuple[Part, Path, bool, Path]) -> None:
    part, cuts_file, in_bytes, path = task
    source = open_part(part.path)
    ids = source.read(columns=["doc_id"]).column("doc_id")
    cuts = pq.read_table(cuts_file)
    mine = cuts.filter(pc.is_in(cuts.column("doc_id"), value_set=ids.combine_chunks())).to_pylist()
    spans = {
        doc_id: [(row["start"], row["stop"]) for row in rows]
        for doc_id, rows in groupby(mine, key=itemgetter("doc_id"))
    }
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, REWRITTEN, compression="zstd") as writer:
        for batch in source.iter_batches(BATCH_ROWS, columns=["doc_id", "text"]):
            doc_ids, texts = (column.to_pylist() for column in batch.columns)
            cut = [without(t, spans[i], in_bytes) if i in spans else t for i, t in zip(doc_ids, texts, strict=True)]
            writer.write_table(pa.table([pa.array(doc_ids), pa.array(cut, pa.string())], schema=REWRITTEN))

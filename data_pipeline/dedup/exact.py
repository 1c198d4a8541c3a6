"""Exact duplicates: documents whose normalised texts are the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.dedup.part import Part, keep_order
from gristmill.data_pipeline.engine.local import LocalEngine

DUPLICATES = pa.schema([("doc_id", pa.string()), ("duplicate_of", pa.string()), ("similarity", pa.float64())])


class ExactDedupConfig(Config):
    """scope: one pool for all sources, or each source by itself.

    normalise: what counts as the same text: `bytes` (every byte), or `whitespace` (runs of white space are one
    space, none at the ends). Case and punctuation always count: in code they are the meaning."""

    scope: Literal["all", "source"] = "all"
    normalise: Literal["bytes", "whitespace"] = "whitespace"


def exact_duplicates(parts: Sequence[Part], config: ExactDedupConfig, engine: LocalEngine, folder: Path) -> pa.Table:
    """Every living document that is not the first of its equals, with that first one.

    Columns doc_id, duplicate_of, similarity (1.0); sorted by doc_id. `duplicate_of` is never itself in `doc_id`.
    First means (source priority, longer first, doc_id), so the result does not depend on files, order or workers.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them."""
    tasks = [(part, config) for part in parts]
    hashed = engine.map(_hash_part, tasks, "exact duplicates", [float(p.path.stat().st_size) for p in parts], "B")
    ids = np.array([i for part in hashed for i in part[0]], dtype="U32")
    keys = np.array([k for part in hashed for k in part[1]], dtype="S16")
    lengths = np.array([n for part in hashed for n in part[2]], dtype=np.int64)
    priorities = np.repeat([p.priority for p in parts], [len(h[0]) for h in hashed])
    first: dict[bytes, str] = {}
    found = []
    for index in keep_order(priorities, lengths, ids):
        kept = first.setdefault(keys[index], str(ids[index]))
        if kept != ids[index]:
            found.append((str(ids[index]), kept, 1.0))
    return _table(found)


def _hash_part(task: tuple[Part, ExactDedupConfig]) -> tuple[list[str], list[bytes], list[int]]:
    part, config = task
    ids, keys, lengths = [], [], []
    salt = part.source.encode() if config.scope == "source" else b""
    for _, doc_ids, texts in part.batches():
        for doc_id, text in zip(doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            same = " ".join(text.split()) if config.normalise == "whitespace" else text
            ids.append(doc_id)
            keys.append(xxhash.xxh3_128_digest(salt + b"\0" + same.encode()))
            lengths.append(len(text.encode()))
    return ids, keys, lengths


def _table(found: list[tuple[str, str, float]]) -> pa.Table:
    found = sorted(found)
    columns = zip(*found, strict=True) if found else ([], [], [])
    return pa.table([pa.array(list(c), f.type) for c, f in zip(columns, DUPLICATES, strict=True)], schema=DUPLICATES)

"""Near duplicates: LSH proposes, exact Jaccard decides, and only a document that is kept removes another."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
import xxhash
from datasketch import MinHash
from pydantic import Field, model_validator

from gristmill.data_pipeline.config import Config
from gristmill.data_pipeline.dedup.exact import DUPLICATES
from gristmill.data_pipeline.dedup.part import Part, keep_order
from gristmill.data_pipeline.engine.local import LocalEngine


class NearDedupConfig(Config):
    """Two documents are near duplicates if the Jaccard similarity of their shingle sets is >= threshold.

    unit, ngram: a shingle is `ngram` words (or characters) in a row. bands, rows: two documents of similarity s are
    compared with probability 1 - (1 - s**rows)**bands. scope: across all sources, or within each source."""

    unit: Literal["word", "character"] = "word"
    ngram: int = Field(default=5, ge=1)
    bands: int = Field(default=16, ge=1)
    rows: int = Field(default=8, ge=1)
    threshold: float = Field(default=0.8, gt=0.0, le=1.0)
    scope: Literal["all", "source"] = "all"
    seed: int = Field(default=1, ge=0)

    @model_validator(mode="after")
    def signature_of_sane_length(self) -> Self:
        if self.bands * self.rows > 4096:
            raise ValueError(f"bands={self.bands} x rows={self.rows} is over 4096 hashes a document; try 16 x 8")
        return self


def near_duplicates(parts: Sequence[Part], config: NearDedupConfig, engine: LocalEngine, folder: Path) -> pa.Table:
    """Every living document that has exact Jaccard similarity >= threshold with a document that is itself kept.

    Columns doc_id, duplicate_of, similarity; sorted by doc_id. Documents are looked at in the order (source
    priority, longer first, doc_id); a removed document removes no other (star-only), so `duplicate_of` is never
    itself in `doc_id`. It names the most similar of the kept documents before it. The result depends neither on
    workers nor on the division into files nor on their order.
    `folder` takes intermediate files; called again with the same arguments after a kill, it goes on from them."""
    signed = engine.map(_sign_part, [(p, config) for p in parts], "signatures", [p.path.stat().st_size for p in parts])
    documents = [document for part in signed for document in part]
    priorities = np.repeat([p.priority for p in parts], [len(s) for s in signed])
    order = keep_order(priorities, np.array([d[1] for d in documents]), np.array([d[0] for d in documents], "U32"))
    buckets: dict[tuple, list[int]] = defaultdict(list)
    found = []
    for index in order.tolist():
        doc_id, _, keys, shingles = documents[index]
        best, keeper = -1.0, -1
        for other in sorted({k for key in keys for k in buckets[key]}):
            similarity = _jaccard(shingles, documents[other][3])
            if similarity >= config.threshold and (similarity > best):
                best, keeper = similarity, other
        if keeper >= 0:
            found.append((doc_id, documents[keeper][0], best))
            continue
        for key in keys:
            buckets[key].append(index)
    columns = zip(*sorted(found), strict=True) if found else ([], [], [])
    return pa.table([pa.array(list(c), f.type) for c, f in zip(columns, DUPLICATES, strict=True)], schema=DUPLICATES)


def _sign_part(task: tuple[Part, NearDedupConfig]) -> list[tuple]:
    part, config = task
    signed = []
    pool = part.source if config.scope == "source" else ""
    for _, doc_ids, texts in part.batches():
        for doc_id, text in zip(doc_ids.to_pylist(), texts.to_pylist(), strict=True):
            shingles = _shingles(text, config)
            minhash = MinHash(config.bands * config.rows, config.seed, hashfunc=lambda h: h & 0xFFFFFFFF)
            minhash.update_batch(shingles)
            keys = minhash.hashvalues.reshape(config.bands, config.rows)
            bands = [(pool, band, row.tobytes()) for band, row in enumerate(keys)] if shingles else []
            signed.append((doc_id, len(text.encode()), bands, shingles))
    return signed


def _shingles(text: str, config: NearDedupConfig) -> frozenset[int]:
    words = re.findall(r"\w+", text.lower())
    units = words if config.unit == "word" else list(" ".join(words))
    count = max(len(units) - config.ngram + 1, 1 if units else 0)
    return frozenset(xxhash.xxh3_64_intdigest(" ".join(units[i : i + config.ngram]).encode()) for i in range(count))


def _jaccard(left: frozenset[int], right: frozenset[int]) -> float:
    both = len(left & right)
    return both / (len(left) + len(right) - both)

"""Which questions of which benchmark were found in the corpus, one by one: what evaluation reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.data_pipeline.decontamination.benchmark import Example
from gristmill.data_pipeline.decontamination.matches import KINDS


def found_questions(matches: pa.Table, hits: pa.Table) -> list[dict[str, Any]]:
    """One entry a benchmark record of which a text was found, ordered by benchmark and example (numbers as numbers).

    {"benchmark": "rivers", "example": "7", "kind": "verbatim", "fields": {"question": "verbatim"},
     "documents": [{"doc_id": "00..1", "kind": "verbatim", "outcome": "split"}]}
    kind: the strongest of the record (of a field, of a document); outcome: as in HITS."""
    outcomes = dict(zip(hits.column("doc_id").to_pylist(), hits.column("outcome").to_pylist(), strict=True))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in matches.to_pylist():
        key = row["benchmark"], row["example"]
        entry = found.setdefault(key, {"kind": row["kind"], "fields": {}, "documents": {}})
        entry["kind"] = _stronger(entry["kind"], row["kind"])
        for held, name in ((entry["fields"], row["field"]), (entry["documents"], row["doc_id"])):
            held[name] = _stronger(held.get(name, row["kind"]), row["kind"])
    return [
        {
            "benchmark": benchmark,
            "example": example,
            "kind": entry["kind"],
            "fields": dict(sorted(entry["fields"].items())),
            "documents": [
                {"doc_id": doc_id, "kind": kind, "outcome": outcomes[doc_id]}
                for doc_id, kind in sorted(entry["documents"].items())
            ],
        }
        for (benchmark, example), entry in sorted(found.items(), key=lambda item: _in_order(*item[0]))
    ]


def question_order(examples: Sequence[Example]) -> np.ndarray:
    """int64[texts]: the place of each text's record in the order of `found_questions`."""
    keys = [(one.benchmark, one.example) for one in examples]
    place = {key: number for number, key in enumerate(sorted(set(keys), key=lambda key: _in_order(*key)))}
    return np.array([place[key] for key in keys], np.int64)


def _stronger(one: str, other: str) -> str:
    return min(one, other, key=KINDS.index)


def _in_order(benchmark: str, example: str) -> tuple[str, int, str]:
    return benchmark, int(example) if example.isdecimal() else -1, example

"""Schema of the text spans that the edits removed from kept documents."""

import pyarrow as pa

# start, length: characters of the text as it stood before the step; bytes: of the span in UTF-8. rule: STEP.RULE.
# kept_in: the document that keeps the same text. benchmark, example: what the span was part of.
REMOVED_SPANS = pa.schema(
    [
        ("doc_id", pa.string()),
        ("rule", pa.string()),
        ("start", pa.int64()),
        ("length", pa.int64()),
        ("bytes", pa.int64()),
        ("excerpt", pa.string()),
        ("kept_in", pa.string()),
        ("benchmark", pa.string()),
        ("example", pa.string()),
    ]
)
EXCERPT_CHARACTERS = 80


def removed_span_row(doc_id: str, rule: str, text: str, start: int, stop: int) -> dict:
    """A row of REMOVED_SPANS, without `kept_in`, `benchmark` and `example`."""
    span = text[start:stop]
    excerpt = " ".join(span[: 2 * EXCERPT_CHARACTERS].split())[:EXCERPT_CHARACTERS]
    return {
        "doc_id": doc_id,
        "rule": rule,
        "start": start,
        "length": stop - start,
        "bytes": len(span.encode()),
        "excerpt": excerpt,
    }


def sorted_spans(tables: list[pa.Table]) -> pa.Table:
    """The tables joined, sorted by doc_id and start."""
    joined = pa.concat_tables([REMOVED_SPANS.empty_table(), *tables])
    return joined.sort_by([("doc_id", "ascending"), ("start", "ascending")]).combine_chunks()


def complement(spans: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """What lies between disjoint ascending spans: [(2, 9)], 11 -> [(0, 2), (9, 11)]."""
    bounds = [0, *(place for span in spans for place in span), length]
    return [(bounds[i], bounds[i + 1]) for i in range(0, len(bounds), 2) if bounds[i] < bounds[i + 1]]

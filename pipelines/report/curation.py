"""What a report says of curation: what came in, what each rule took, duplicates, examples beside a threshold."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.filters.removal_by_language import heavy_removals
from gristmill.foundation.manifest import read_manifest
from gristmill.pipelines.report.blocks import Block, Excerpt, Figure, Heading, Paragraph, Table
from gristmill.pipelines.report.flow import flow_svg
from gristmill.pipelines.report.histograms import histogram_block
from gristmill.pipelines.report.steps import flow_of, rule_order
from gristmill.pipelines.report.text_edits import contamination_blocks, cut_blocks

CLUSTERS_SHOWN = 8
LANGUAGES_SHOWN = 60
QUARANTINED_SHOWN = 10
EXCERPT_CHARACTERS = 500
BEGIN_CHARACTERS = 60


def curation_blocks(folder: Path) -> list[Block]:
    counts = json.loads((folder / "counts.json").read_bytes())
    ledger = pa.concat_tables([pq.read_table(path) for path in sorted((folder / "ledger").glob("*.parquet"))])
    return [
        *flow_blocks(counts),
        *language_blocks(counts["sources"]),
        *rule_blocks(counts, ledger, folder),
        *duplicate_blocks(ledger, folder),
        *cut_blocks(counts["sources"]),
        *contamination_blocks(folder),
        *quarantine_blocks(folder, raw_names(folder)),
    ]


def flow_blocks(counts: Mapping[str, Any]) -> list[Block]:
    """read = kept + removed + quarantined, for each source and together."""
    sources = counts["sources"]
    flows = {name: flow(entry) for name, entry in sources.items()}
    together = tuple(sum(column) for column in zip(*flows.values(), strict=True))
    rows = [(name, *(f"{value:,}" for value in values)) for name, values in {**flows, "together": together}.items()]
    fates = ("train", "validation", "test", "removed", "quarantined")
    columns = ("source", "read", *fates, "MB read")
    pieces = sum(entry["pieces"] for entry in sources.values())
    added = f"read + {pieces:,} pieces of split ones" if pieces else "read"
    return [
        Heading("What came in, and what became of it"),
        Figure("flow", flow_svg(flow_of(counts)), "Documents through the steps, from the raw files to the splits"),
        Table(columns, tuple(rows), 7, f"Documents: {added} = kept (train, validation, test) + removed + quarantined."),
        *repair_blocks(sources),
    ]


def repair_blocks(sources: Mapping[str, Any]) -> list[Block]:
    """How many documents each repair of the text changed (data_pipeline/annotate/normalize.py)."""
    repairs = sorted({repair for entry in sources.values() for repair in entry["changed"]})
    if not repairs:
        return []
    rows = tuple(
        (name, *(f"{entry['changed'].get(repair, 0):,}" for repair in repairs)) for name, entry in sources.items()
    )
    columns = ("source", *(repair.replace("_", " ") for repair in repairs))
    return [Table(columns, rows, len(repairs), "Documents that a repair of the text changed.")]


def flow(entry: Mapping[str, Any]) -> tuple[int, ...]:
    kept = [entry["kept"].get(split, {"documents": 0})["documents"] for split in ("train", "validation", "test")]
    removed = sum(each["documents"] for each in entry["removed"].values())
    quarantined = sum(each["documents"] for each in entry["quarantined"].values())
    return (entry["read"]["documents"], *kept, removed, quarantined, round(entry["read"]["bytes"] / 1e6))


def language_blocks(sources: Mapping[str, Any]) -> list[Block]:
    """What the filters removed of each language of each source, and which rule took the most."""
    rows = []
    for source, entry in sources.items():
        for language, held in sorted(entry["languages"].items(), key=lambda item: (-item[1]["documents"], item[0])):
            removed = held["removed"]
            taken = sum(removed.values())
            most = min(removed, key=lambda rule: (-removed[rule], rule)) if removed else ""
            share = f"{100 * taken / held['documents']:.1f}"
            rule = f"{most} ({removed[most]:,})" if most else ""
            rows.append((source, language or "none", rule, f"{held['documents']:,}", f"{taken:,}", share))
    columns = ("source", "language", "rule that took most", "read", "removed", "%")
    return [
        Heading("What the filters removed, by language"),
        *(Paragraph(line) for line in heavy_removals(sources)),
        Table(columns, tuple(rows[:LANGUAGES_SHOWN]), 3, f"{len(rows):,} languages of sources; und: not told apart."),
    ]


def rule_blocks(counts: Mapping[str, Any], ledger: pa.Table, folder: Path) -> list[Block]:
    """What each rule took, then for each that took something its signal's histogram and examples on both sides."""
    took: dict[str, list[tuple[str, dict[str, int]]]] = {}
    for source, entry in counts["sources"].items():
        for rule, taken in entry["removed"].items():
            took.setdefault(rule, []).append((source, taken))
    rules = [rule for rule in rule_order(counts) if rule in took]
    rows = [
        (rule, source, f"{taken['documents']:,}", f"{taken['bytes']:,}")
        for rule in rules
        for source, taken in took[rule]
    ]
    columns = ("rule", "source", "documents", "bytes")
    blocks: list[Block] = [
        Heading("What was removed, by which rule"),
        Table(columns, tuple(rows), 2, "The rule that took the document; the ledger keeps every rule it failed."),
    ]
    if not rows:
        return [blocks[0], Paragraph("No rule took a document.")]
    examples = [json.loads(line) for line in (folder / "examples.jsonl").read_text("utf-8").splitlines()]
    for rule in rules:
        blocks += [Heading(rule, 3), *histogram_block(rule, counts["rules"], ledger, folder)]
        blocks += [example_block(each) for each in examples if each["rule"] == rule]
    return blocks


def example_block(example: Mapping[str, Any]) -> Excerpt:
    """Just past the threshold, or just inside it."""
    other = f", duplicate of {example['duplicate_of']}" if example.get("duplicate_of") else ""
    title = f"{example['side']}, {example['source']}: {example['value']:.4g} against {example['threshold']:g}{other}"
    begin = " ".join(example["excerpt"].split())[:BEGIN_CHARACTERS]
    return Excerpt(f"{title} ({example['doc_id']}): {begin}", example["excerpt"])


def duplicate_blocks(ledger: pa.Table, folder: Path) -> list[Block]:
    """The largest groups of documents of which one was kept in the stead of the others."""
    removed = ledger.filter(pc.is_valid(ledger.column("duplicate_of")))
    if not removed.num_rows:
        return [Heading("Duplicates"), Paragraph("None.")]
    groups = removed.group_by("duplicate_of").aggregate([("doc_id", "count"), ("similarity", "min"), ("bytes", "sum")])
    groups = groups.sort_by([("doc_id_count", "descending"), ("duplicate_of", "ascending")]).slice(0, CLUSTERS_SHOWN)
    found = groups.to_pylist()
    texts = kept_texts(folder, {group["duplicate_of"] for group in found})
    rows = tuple(
        (
            group["duplicate_of"],
            f"{group['doc_id_count']:,}",
            f"{group['similarity_min']:.3f}",
            f"{group['bytes_sum']:,}",
        )
        for group in found
    )
    similar = pc.value_counts(removed.column("step")).to_pylist()
    summary = ", ".join(f"{each['values']}: {each['counts']:,} documents" for each in similar)
    columns = ("kept document", "removed in its stead", "least similarity", "bytes removed")
    return [
        Heading("Duplicates"),
        Paragraph(f"{summary}. Each was compared with the very document that is kept: exact Jaccard decides."),
        Table(columns, rows, 3, f"The {len(rows)} largest groups."),
        *(
            Excerpt(f"{group['duplicate_of']}, kept for {group['doc_id_count']:,} others", text[:EXCERPT_CHARACTERS])
            for group in found
            if (text := texts.get(group["duplicate_of"]))
        ),
    ]


def kept_texts(folder: Path, wanted: set[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in sorted((folder / "documents").rglob("*.parquet")):
        table = pq.read_table(path, columns=["doc_id", "text"], filters=[("doc_id", "in", sorted(wanted))])
        texts |= dict(zip(table.column("doc_id").to_pylist(), table.column("text").to_pylist(), strict=True))
    return texts


def raw_names(folder: Path) -> dict[str, str]:
    """Digest of a raw file -> its name in the lock."""
    lock = read_manifest(folder).origin["lock"]
    return {file["sha256"]: file["name"] for source in lock["sources"] for file in source["files"]}


def quarantine_blocks(folder: Path, names: Mapping[str, str]) -> list[Block]:
    lines = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text("utf-8").splitlines()]
    if not lines:
        return [Heading("Quarantine"), Paragraph("Every record could be read.")]
    rows = tuple(
        (line["source"], names[line["raw_digest"]], str(line["record"]), line["reason"], line["excerpt"] or "")
        for line in lines[:QUARANTINED_SHOWN]
    )
    columns = ("source", "file", "record", "reason", "begins")
    kinds = Counter((line["source"], line["unreadable"]) for line in lines)
    by_kind = tuple((source, kind, f"{count:,}") for (source, kind), count in sorted(kinds.items()))
    return [
        Heading("Quarantine"),
        Table(("source", "why it could not be read", "records"), by_kind, 1),
        Table(columns, rows, caption=f"{len(lines):,} records; the first {len(rows)}."),
    ]

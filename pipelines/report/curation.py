"""The report's sections on curation: document counts, removals per rule, duplicates, borderline examples."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.counts import rule_order
from gristmill.data_pipeline.corpus.shards import PII_FIELD
from gristmill.data_pipeline.decontamination.decontaminate import DECONTAMINATION_FOLDER, REPORT_JSON
from gristmill.data_pipeline.filters.threshold_sweep import heavy_removals
from gristmill.data_pipeline.quality.config import QUALITY_FOLDER, REPORTS_NAME
from gristmill.foundation.manifest import read_manifest
from gristmill.pipelines.report.figures import curves, histogram_block
from gristmill.pipelines.report.flow import flow_of, flow_svg
from gristmill.pipelines.report.render import Block, Excerpt, Figure, Heading, Paragraph, Table

MAX_CLUSTERS = 8
MAX_LANGUAGES = 60
MAX_QUARANTINED = 10
EXCERPT_CHARACTERS = 500
TITLE_CHARACTERS = 60


def curation_blocks(folder: Path) -> list[Block]:
    counts = json.loads((folder / "counts.json").read_bytes())
    ledger = pa.concat_tables([pq.read_table(path) for path in sorted((folder / "ledger").glob("*.parquet"))])
    return [
        *flow_blocks(counts),
        *language_blocks(counts["sources"]),
        *rule_language_blocks(counts),
        *rule_blocks(counts, ledger, folder),
        *quality_blocks(folder),
        *duplicate_blocks(ledger, folder),
        *removed_span_blocks(counts["sources"]),
        *contamination_blocks(folder),
        *personal_data_blocks(folder, counts["sources"]),
        *kept_blocks(folder),
        *quarantine_blocks(folder, raw_names(folder)),
    ]


def flow_blocks(counts: Mapping[str, Any]) -> list[Block]:
    """read = kept + removed + quarantined, per source and in total."""
    sources = counts["sources"]
    flows = {name: flow(entry) for name, entry in sources.items()}
    total = tuple(sum(column) for column in zip(*flows.values(), strict=True))
    rows = [(name, *(f"{value:,}" for value in values)) for name, values in {**flows, "total": total}.items()]
    outcomes = ("train", "validation", "test", "removed", "quarantined")
    columns = ("source", "read", *outcomes, "MB read")
    pieces = sum(entry["pieces"] for entry in sources.values())
    added = f"read + {pieces:,} pieces of split documents" if pieces else "read"
    return [
        Heading("Documents read, kept and removed"),
        Figure("flow", flow_svg(flow_of(counts)), "Documents per curation step, from the raw files to the splits"),
        Table(columns, tuple(rows), 7, f"Documents: {added} = kept (train, validation, test) + removed + quarantined."),
        step_table(sources, rule_order(counts)),
        *repair_blocks(sources),
    ]


def step_table(sources: Mapping[str, Any], rules: Sequence[str]) -> Table:
    """Documents and bytes that are left after each step, from what was read to the splits, in the order of the steps.

    rules: in the order in which they are applied; a rule's step is what stands before its first full stop."""
    steps = dict.fromkeys(["quarantine", *(rule.partition(".")[0] for rule in rules)])
    removed: dict[str, Counter[str]] = {step: Counter() for step in steps}
    for entry in sources.values():
        for rule, tally in entry["removed"].items():
            removed[rule.partition(".")[0]].update(documents=tally["documents"], bytes=tally["bytes"])
        for tally in entry["quarantined"].values():
            removed["quarantine"].update(documents=tally["documents"])
    read = {name: sum(entry["read"][name] for entry in sources.values()) for name in ("documents", "bytes")}
    documents, num_bytes = read["documents"], read["bytes"]
    rows = [("read", "", "", f"{documents:,}", f"{num_bytes:,}")]
    for step, tally in removed.items():
        if tally["documents"]:
            documents, num_bytes = documents - tally["documents"], num_bytes - tally["bytes"]
            gone = (f"{tally['documents']:,}", f"{tally['bytes']:,}")
            rows.append((step, *gone, f"{documents:,}", f"{num_bytes:,}"))
    columns = ("step", "documents removed", "bytes removed", "documents left", "bytes left")
    return Table(columns, tuple(rows), 4, "Bytes of text as it was read.")


def repair_blocks(sources: Mapping[str, Any]) -> list[Block]:
    """Documents changed by each text normalization (data_pipeline/annotate/normalize.py)."""
    repairs = sorted({repair for entry in sources.values() for repair in entry["changed"]})
    if not repairs:
        return []
    rows = tuple(
        (name, *(f"{entry['changed'].get(repair, 0):,}" for repair in repairs)) for name, entry in sources.items()
    )
    columns = ("source", *(repair.replace("_", " ") for repair in repairs))
    return [Table(columns, rows, len(repairs), "Documents changed by text normalization.")]


def flow(entry: Mapping[str, Any]) -> tuple[int, ...]:
    kept = [entry["kept"].get(split, {"documents": 0})["documents"] for split in ("train", "validation", "test")]
    removed = sum(count["documents"] for count in entry["removed"].values())
    quarantined = sum(count["documents"] for count in entry["quarantined"].values())
    return (entry["read"]["documents"], *kept, removed, quarantined, round(entry["read"]["bytes"] / 1e6))


def language_blocks(sources: Mapping[str, Any]) -> list[Block]:
    """Documents removed by filters per language and source, and the rule that removed most."""
    rows = []
    for source, entry in sources.items():
        for language, documents in sorted(
            entry["languages"].items(), key=lambda item: (-item[1]["documents"], item[0])
        ):
            removed = documents["removed"]
            num_removed = sum(removed.values())
            top_rule = min(removed, key=lambda rule: (-removed[rule], rule)) if removed else ""
            share = f"{100 * num_removed / documents['documents']:.1f}"
            rule = f"{top_rule} ({removed[top_rule]:,})" if top_rule else ""
            rows.append((source, language or "none", rule, f"{documents['documents']:,}", f"{num_removed:,}", share))
    columns = ("source", "language", "rule that removed most", "read", "removed", "%")
    return [
        Heading("Removed by filters, per language"),
        *(Paragraph(line) for line in heavy_removals(sources)),
        Table(columns, tuple(rows[:MAX_LANGUAGES]), 3, f"{len(rows):,} languages of sources; und: undetermined."),
    ]


def rule_language_blocks(counts: Mapping[str, Any]) -> list[Block]:
    """Documents that each filter rule removed, by source and language, the most first."""
    rows = [
        (rule, source, language or "none", removed, documents["documents"])
        for source, entry in counts["sources"].items()
        for language, documents in entry["languages"].items()
        for rule, removed in documents["removed"].items()
    ]
    if not rows:
        return []
    rows.sort(key=lambda row: (-row[3], row[:3]))
    cells = tuple((*row[:3], f"{row[3]:,}", f"{100 * row[3] / row[4]:.1f}") for row in rows[:MAX_LANGUAGES])
    caption = f"{len(rows):,} rules of sources and languages; %: of the documents of that source and language."
    return [Table(("rule", "source", "language", "removed", "%"), cells, 2, caption)]


def rule_blocks(counts: Mapping[str, Any], ledger: pa.Table, folder: Path) -> list[Block]:
    """Removals per rule; for each rule the histogram of its signal and examples on both sides of the threshold."""
    removals: dict[str, list[tuple[str, dict[str, int]]]] = {}
    for source, entry in counts["sources"].items():
        for rule, removed in entry["removed"].items():
            removals.setdefault(rule, []).append((source, removed))
    rules = [rule for rule in rule_order(counts) if rule in removals]
    rows = [
        (rule, source, f"{removed['documents']:,}", f"{removed['bytes']:,}")
        for rule in rules
        for source, removed in removals[rule]
    ]
    columns = ("rule", "source", "documents", "bytes")
    blocks: list[Block] = [
        Heading("Removed documents per rule"),
        Table(
            columns,
            tuple(rows),
            2,
            "Each document counts for the first rule it failed; the ledger lists all rules it failed.",
        ),
    ]
    if not rows:
        return [blocks[0], Paragraph("No rule removed a document.")]
    examples = [json.loads(line) for line in (folder / "examples.jsonl").read_text("utf-8").splitlines()]
    for rule in rules:
        blocks += [Heading(rule, 3), *histogram_block(rule, counts["rules"], ledger, folder)]
        blocks += [example_block(example) for example in examples if example["rule"] == rule]
    return blocks


def example_block(example: Mapping[str, Any]) -> Excerpt:
    """A document just above or below the threshold."""
    other = f", duplicate of {example['duplicate_of']}" if example.get("duplicate_of") else ""
    title = (
        f"{example['side']}, {example['source']}: {example['value']:.4g} (threshold {example['threshold']:g}){other}"
    )
    start = " ".join(example["excerpt"].split())[:TITLE_CHARACTERS]
    return Excerpt(f"{title} ({example['doc_id']}): {start}", example["excerpt"])


def quality_blocks(folder: Path) -> list[Block]:
    """Linear models of quality: what they tell apart, and whether their scores are probabilities."""
    path = folder / QUALITY_FOLDER / REPORTS_NAME
    if not path.is_file():
        return []
    models = json.loads(path.read_bytes())
    rows = tuple(
        (
            name,
            " against ".join(model["labels"]),
            f"{model['auc']:.4f}",
            f"{model['calibration_error']:.4f}",
            f"{model['measured_documents']:,}",
        )
        for name, model in models.items()
    )
    points = {
        name: ([row["score"] for row in model["reliability"]], [row["positive"] for row in model["reliability"]])
        for name, model in models.items()
    }
    calibrated = ([0.0, 1.0], [0.0, 1.0])
    return [
        Heading("Models of quality"),
        Table(
            ("score", "labels", "AUC", "calibration error", "held-out documents"),
            rows,
            2,
            "Measured on labelled documents that the model was not fitted to.",
        ),
        Figure(
            "reliability",
            curves({**points, "calibrated": calibrated}, "mean score", "share of the first label"),
            "Reliability: of documents with a score of .7 seven in ten are of the first label where it is calibrated.",
        ),
    ]


def duplicate_blocks(ledger: pa.Table, folder: Path) -> list[Block]:
    """Groups of duplicates by size, and the largest, of which one document was kept."""
    removed = ledger.filter(pc.is_valid(ledger.column("duplicate_of")))
    if not removed.num_rows:
        return [Heading("Duplicates"), Paragraph("None.")]
    groups = removed.group_by("duplicate_of").aggregate([("doc_id", "count"), ("similarity", "min"), ("bytes", "sum")])
    groups = groups.sort_by([("doc_id_count", "descending"), ("duplicate_of", "ascending")])
    largest = groups.slice(0, MAX_CLUSTERS).to_pylist()
    texts = kept_texts(folder, {group["duplicate_of"] for group in largest})
    rows = tuple(
        (
            group["duplicate_of"],
            " ".join(texts.get(group["duplicate_of"], "").split())[:TITLE_CHARACTERS],
            f"{group['doc_id_count']:,}",
            f"{group['similarity_min']:.3f}",
            f"{group['bytes_sum']:,}",
        )
        for group in largest
    )
    by_step = pc.value_counts(removed.column("step")).to_pylist()
    summary = ", ".join(f"{entry['values']}: {entry['counts']:,} documents" for entry in by_step)
    columns = ("kept document", "first words", "duplicates removed", "min similarity", "bytes removed")
    return [
        Heading("Duplicates"),
        Paragraph(f"{summary}. Each was compared with the kept document by exact Jaccard similarity."),
        cluster_size_table(groups.column("doc_id_count").to_pylist()),
        Table(columns, rows, 3, f"The {len(rows)} largest groups."),
        *(
            Excerpt(
                f"{group['duplicate_of']}, kept; {group['doc_id_count']:,} duplicates removed",
                text[:EXCERPT_CHARACTERS],
            )
            for group in largest
            if (text := texts.get(group["duplicate_of"]))
        ),
    ]


def cluster_size_table(duplicates: Sequence[int]) -> Table:
    """Groups by size in powers of two. duplicates: removed from each group: [1, 2, 5] -> sizes 2 to 3: 2 groups of 3
    duplicates, 4 to 7: 1 of 5."""
    sizes: dict[int, list[int]] = {}
    for removed in duplicates:
        sizes.setdefault((removed + 1).bit_length() - 1, []).append(removed)
    rows = tuple(
        (f"{2**power:,} to {2 ** (power + 1) - 1:,}", f"{len(removed):,}", f"{sum(removed):,}")
        for power, removed in sorted(sizes.items())
    )
    caption = "Groups by number of documents, the kept one included."
    return Table(("documents in the group", "groups", "duplicates removed"), rows, 2, caption)


def kept_texts(folder: Path, doc_ids: set[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for path in sorted((folder / "documents").rglob("*.parquet")):
        table = pq.read_table(path, columns=["doc_id", "text"], filters=[("doc_id", "in", sorted(doc_ids))])
        texts |= dict(zip(table.column("doc_id").to_pylist(), table.column("text").to_pylist(), strict=True))
    return texts


def raw_names(folder: Path) -> dict[str, str]:
    """Digest of a raw file -> its name in the lock."""
    lock = read_manifest(folder).origin["lock"]
    return {file["sha256"]: file["name"] for source in lock["sources"] for file in source["files"]}


def quarantine_blocks(folder: Path, names: Mapping[str, str]) -> list[Block]:
    lines = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text("utf-8").splitlines()]
    if not lines:
        return [Heading("Quarantine"), Paragraph("All records were readable.")]
    rows = tuple(
        (line["source"], names[line["raw_digest"]], str(line["record"]), line["reason"], line["excerpt"] or "")
        for line in lines[:MAX_QUARANTINED]
    )
    columns = ("source", "file", "record", "reason", "excerpt")
    kinds = Counter((line["source"], line["unreadable"]) for line in lines)
    by_kind = tuple((source, kind, f"{count:,}") for (source, kind), count in sorted(kinds.items()))
    return [
        Heading("Quarantine"),
        Table(("source", "reason", "records"), by_kind, 1),
        Table(columns, rows, caption=f"{len(lines):,} records; the first {len(rows)}."),
    ]


# The report's sections on text edits: spans removed per step, and contamination per benchmark.

COLUMNS = {  # counts of a benchmark -> column heading
    "examples": "examples",
    "searched": "searched",
    "found": "found",
    "verbatim": "verbatim",
    "short": "short, with an answer",
    "edited": "edited",
    "partial": "in part",
    "documents": "documents hit",
    "dropped": "dropped",
    "characters": "characters removed",
}


def removed_span_blocks(sources: Mapping[str, Any]) -> list[Block]:
    """Spans removed from kept documents; empty if no step removes spans."""
    rows = [
        (step, source, f"{spans['documents']:,}", f"{spans['spans']:,}", f"{spans['bytes']:,}")
        for source, entry in sources.items()
        for step, spans in entry["removed_spans"].items()
    ]
    if not rows:
        return []
    pieces = sum(entry["pieces"] for entry in sources.values())
    note = f"Splitting adds {pieces:,} documents to those kept. The ledger lists every span."
    columns = ("step", "source", "documents", "spans", "bytes")
    return [Heading("Spans removed from kept documents"), Table(columns, tuple(rows), 2, note)]


def contamination_blocks(folder: Path) -> list[Block]:
    """Contamination per benchmark, with matches side by side; empty without decontamination."""
    path = folder / DECONTAMINATION_FOLDER / REPORT_JSON
    if not path.is_file():
        return []
    report = json.loads(path.read_bytes())
    rows = tuple((name, *(f"{numbers[key]:,}" for key in COLUMNS)) for name, numbers in report.items())
    note = (
        "Each example is counted once, by its strongest match. Verbatim: all n-grams of a text; short: a complete "
        "question shorter than an n-gram, followed by an answer; edited: most words in order; in part: at least one "
        "n-gram."
    )
    blocks: list[Block] = [
        Heading("Decontamination"),
        Table(("benchmark", *COLUMNS.values()), rows, len(COLUMNS), note),
    ]
    if not any(numbers["shown"] for numbers in report.values()):
        return [*blocks, Paragraph("No benchmark text was found.")]
    for name, numbers in report.items():
        if numbers["shown"]:
            match_rows = tuple(
                (
                    f"{row['example']} ({row['field']})",
                    f"{row['kind']}, {row['matched']} of {row['of']}",
                    " ".join(row["benchmark_text"].split()),
                    " ".join(row["excerpt"].split()),
                )
                for row in numbers["shown"]
            )
            blocks += [Heading(name, 3), Table(("example", "found", "benchmark", "document"), match_rows)]
    return blocks


# The report's sections on personal data, and on languages and hosts of the kept documents.

MAX_HOSTS = 20
HOST_PATTERN = r"^[a-zA-Z][a-zA-Z0-9+.-]*://(?:[^/?#@]*@)?(?P<host>[^/?#:]+)"  # of RE2, which is linear


def personal_data_blocks(folder: Path, sources: Mapping[str, Any]) -> list[Block]:
    """Placeholders written for personal data in kept documents, and documents removed for it, by source."""
    replaced: dict[str, Counter[str]] = {}
    for path in sorted((folder / "signals").rglob("*.parquet")):
        if PII_FIELD.name in pq.read_schema(path).names:
            values = pq.read_table(path, columns=[PII_FIELD.name]).column(0)
            counts = replaced.setdefault(source_of(path), Counter())
            counts.update(documents=pc.sum(pc.greater(values, 0)).as_py() or 0, replaced=pc.sum(values).as_py() or 0)
    dropped = {
        source: sum(tally["documents"] for rule, tally in entry["removed"].items() if rule.startswith("pii."))
        for source, entry in sources.items()
    }
    rows = tuple(
        (source, *(f"{replaced.get(source, Counter())[name]:,}" for name in ("documents", "replaced")), f"{gone:,}")
        for source, gone in dropped.items()
        if gone or source in replaced
    )
    if not rows:
        return []
    columns = ("source", "kept documents changed", "placeholders", "documents removed")
    return [Heading("Personal data"), Table(columns, rows, 3)]


def kept_blocks(folder: Path) -> list[Block]:
    """Kept documents and their text by detected language and by host, summed over shards."""
    languages: dict[tuple[str, str], Counter[str]] = {}
    hosts: dict[str, Counter[str]] = {}
    for path in sorted((folder / "signals").rglob("*.parquet")):
        signals = pq.read_table(path, columns=["detected_language", "num_bytes"])
        for language, count, num_bytes in counted(signals.column(0), signals.column(1)):
            key = (source_of(path), language or "none")
            languages.setdefault(key, Counter()).update(documents=count, bytes=num_bytes)
        documents = folder / "documents" / path.relative_to(folder / "signals")
        names = pc.extract_regex(pq.read_table(documents, columns=["url"]).column(0), HOST_PATTERN)
        for host, count, num_bytes in counted(pc.struct_field(names, "host"), signals.column(1)):
            if host is not None:
                hosts.setdefault(host.lower(), Counter()).update(documents=count, bytes=num_bytes)
    by_size = sorted(languages.items(), key=lambda item: (-item[1]["bytes"], item[0]))[:MAX_LANGUAGES]
    rows = tuple((*key, f"{tally['documents']:,}", f"{tally['bytes']:,}") for key, tally in by_size)
    blocks: list[Block] = [Heading("Kept documents by language and host")]
    blocks.append(Table(("source", "detected language", "documents", "bytes"), rows, 2))
    top = sorted(hosts.items(), key=lambda item: (-item[1]["documents"], item[0]))[:MAX_HOSTS]
    host_rows = tuple((host, f"{tally['documents']:,}", f"{tally['bytes']:,}") for host, tally in top)
    if not host_rows:
        return [*blocks, Paragraph("No kept document has an address with a host.")]
    caption = f"The {len(host_rows)} largest of {len(hosts):,} hosts."
    return [*blocks, Table(("host", "documents", "bytes"), host_rows, 2, caption)]


def counted(names: pa.ChunkedArray, num_bytes: pa.ChunkedArray) -> list[tuple[str | None, int, int]]:
    """(name, documents, bytes of text) of each name."""
    table = pa.table({"name": names, "bytes": num_bytes})
    groups = table.group_by("name").aggregate([("bytes", "count"), ("bytes", "sum")])
    return list(zip(*(groups.column(name).to_pylist() for name in ("name", "bytes_count", "bytes_sum")), strict=True))


def source_of(shard: Path) -> str:
    """signals/train/web-00003.parquet -> web."""
    return shard.stem.rpartition("-")[0]

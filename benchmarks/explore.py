"""Time of every page of `gristmill explore --web`, at 10^6 and at 10^9 documents, and the server's memory.

The documents are those of the shared data, curated by the program, then repeated in a shard under other ids (10^6 rows
of the ledger), and that shard is linked under a thousand names (10^9 rows). The index of ids is that of the distinct
rows. A page is asked for by one client, one request at a time; the clock and the server's processor seconds are both
shown, because a busy machine adds to the clock. The peer is DuckDB, which counts outcomes from the same ledger."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.corpus.merged_sketches import merge_files, sketch_tasks, write_sketches
from gristmill.data_pipeline.corpus.reused_files import ReusedFiles
from gristmill.data_pipeline.corpus.sketches import write_table
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.explorer.corpus import counts_of_outcomes

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parents[1] / "../shared/data") / "corpora"
SOURCE, RULE = "tldr", "gopher_quality.min_words"
ROWS, LINKS = 1_000_000, 1_000
TABLES = ("documents/train", "signals/train", "ledger")
REQUESTS = 20


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    data = options.data or SHARED / "tldr.jsonl.zst"
    rows, links = (100_000, 20) if options.quick else (ROWS, LINKS)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as temporary:
        curated = curate(data, Path(temporary, "curated"))
        repeated = repeat(curated, Path(temporary, "repeated", "curate"), rows)
        linked = link(repeated, Path(temporary, "linked", "curate"), links)
        for corpus, size in ((repeated, rows), (linked, rows * links)):
            figures += measured(corpus, size)
    print_figures(figures)


def curate(data: Path, folder: Path) -> Path:
    """The corpus of the documents, as the program makes it."""
    folder.mkdir(parents=True)
    source = {"name": SOURCE, "format": "jsonl", "paths": [str(data)]}
    recipe = {
        "name": "explore",
        "sources": [source],
        "curate": {"filters": ["gopher_quality"], "pii": {}, "near_dedup": {}},
    }
    (folder / "explore.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "curate", "explore.yaml", "--workdir", "work"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "work" / "curate"


def repeat(corpus: Path, folder: Path, rows: int) -> Path:
    """A corpus with the rows of this one again and again, in one shard of each kind, with other ids each time."""
    times = -(-rows // pq.read_metadata(corpus / "ledger" / f"{SOURCE}-00000.parquet").num_rows)
    for name in TABLES:
        (folder / name).mkdir(parents=True)
        file = pq.ParquetFile(corpus / name / f"{SOURCE}-00000.parquet")
        table = file.read()
        with pq.ParquetWriter(folder / name / f"{SOURCE}-00000.parquet", table.schema, compression="zstd") as writer:
            for number in range(times):
                for column in {"doc_id", "duplicate_of"} & set(table.schema.names):
                    place = table.schema.get_field_index(column)
                    table = table.set_column(place, column, other_ids(file.read([column]).column(0), number))
                writer.write_table(table, row_group_size=4_096)
    (folder / "quarantine.jsonl").touch()
    engine = LocalEngine(1, Reporter.silent())
    write_sketches(folder, [], None, folder.parent / "work", engine, ReusedFiles(folder.parent / "outputs", 0))
    write_counts(folder, corpus)
    return folder


def other_ids(ids: pa.ChunkedArray, number: int) -> pa.Array:
    return pa.array(
        [None if text is None else xxhash.xxh3_128_hexdigest(f"{text}/{number}".encode()) for text in ids.to_pylist()],
        pa.string(),
    )


def write_counts(folder: Path, corpus: Path) -> None:
    table = pq.read_table(folder / "sketches" / "counts.parquet")
    outcomes = table.filter(pc.equal(table.column("kind"), "outcome")).to_pylist()
    rules = json.loads((corpus / "counts.json").read_bytes())["rules"]
    (folder / "counts.json").write_text(json.dumps({"sources": counts_of_outcomes(outcomes), "rules": rules}))


def link(corpus: Path, folder: Path, times: int) -> Path:
    """A corpus of so many shards, each the same file, with the sketches merged from those of the shards."""
    for name in (*TABLES, "sketches/documents/train", "sketches/ledger"):
        (folder / name).mkdir(parents=True)
        for path in (corpus / name).iterdir():
            for number in range(times):
                os.link(path, folder / name / path.name.replace("00000", f"{number:05}"))
    os.symlink(corpus / "ids", folder / "ids")
    (folder / "quarantine.jsonl").touch()
    started = time.process_time()
    tasks = sketch_tasks(folder)
    for name, is_counts in (("counts.parquet", True), ("samples.parquet", False)):
        paths = [task.counts if is_counts else task.samples for task in tasks]
        write_table(folder / "sketches" / name, merge_files(paths, is_counts))
    print(f"sketches of {len(tasks):,} shards merged in {time.process_time() - started:.1f} processor seconds")
    write_counts(folder, corpus)
    return folder


def measured(corpus: Path, size: int) -> list[Figure]:
    """Every page REQUESTS times, from a server of its own."""
    opened = time.monotonic()
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "explore", str(corpus), "--web", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        address = next(match[1] for line in server.stdout if (match := re.search(r"(http://[0-9.:]+)/", line)))
        opened = time.monotonic() - opened
        slowest, shown = 0.0, Table("page", "p50 ms", "p95 ms", "CPU ms a request")
        for page, paths in pages(corpus).items():
            before, seconds = cpu_seconds(server.pid), []
            for path in paths:
                started = time.perf_counter()
                urllib.request.urlopen(address + path).read()
                seconds.append(time.perf_counter() - started)
            cpu = (cpu_seconds(server.pid) - before) / len(paths)
            p95 = float(np.quantile(seconds, 0.95))
            slowest = max(slowest, p95)
            print(f"{page}: {1000 * p95:.0f} ms, CPU {1000 * cpu:.0f} ms", flush=True)
            shown.add_row(page, *(f"{1000 * n:.0f}" for n in (statistics.median(seconds), p95, cpu)))
        memory = peak_megabytes(server.pid)
    finally:
        server.terminate()
        server.wait()
    Console(width=100).print(shown)
    print(f"{size:,} documents: opened in {opened:.1f} s, at most {memory:.0f} MB; load {os.getloadavg()[0]:.1f}")
    name = f"1e{round(np.log10(size))}"
    peer = duckdb_seconds(corpus)
    version = f"duckdb {duckdb.__version__}"
    return [
        Figure(f"explore_p95_{name}", 1000 * slowest, "ms", 1000 * peer, version, peer / slowest),
        Figure(f"explore_server_mb_{name}", memory, "MB"),
    ]


def pages(corpus: Path) -> dict[str, list[str]]:
    """Page -> the paths of its requests: other documents and other values each time."""
    rng = np.random.default_rng(0)
    path = corpus / "ledger" / f"{SOURCE}-00000.parquet"
    rows = pq.ParquetFile(path).read(["doc_id", "outcome", "duplicate_of"])
    chosen = rows.take(pa.array(rng.permutation(len(rows))[:10_000]))
    kept, removed = (
        chosen.filter(pc.equal(chosen.column("outcome"), outcome)).column("doc_id").to_pylist()[:REQUESTS]
        for outcome in ("kept", "removed")
    )
    originals = rows.column("duplicate_of").drop_null().to_pylist()[:REQUESTS]
    values = rng.uniform(1, 200, REQUESTS).round(2).tolist()
    rule = urllib.parse.urlencode({"source": SOURCE, "rule": RULE})
    same = {
        name: [path] * REQUESTS
        for name, path in {
            "overview": "/", "documents": "/documents", "removed documents": "/documents?outcome=removed",
            "documents of a rule": f"/documents?rule={RULE}", "documents in a language": "/documents?language=de",
            "documents in order": "/documents?outcome=removed&after=0-0-0",
            "search for words": "/documents?words=compress+archive", "search for absent words": "/documents?words=zqxj",
            "rules": "/rules", "duplicates": "/duplicates", "contamination": "/contamination",
            "personal data": "/personal",
        }.items()
    }  # fmt: skip
    return same | {
        "kept document": [f"/document/{doc_id}" for doc_id in kept],
        "removed document": [f"/document/{doc_id}" for doc_id in removed],
        "group of duplicates": [f"/duplicates/{doc_id}" for doc_id in originals],
        "threshold": [f"/rule?{rule}&value={value}" for value in values],
    }


def peak_megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def duckdb_seconds(corpus: Path) -> float:
    """A count of outcomes by source from the first shard, times the shards."""
    paths = sorted((corpus / "ledger").iterdir())
    started = time.perf_counter()
    duckdb.sql(f"SELECT source, outcome, count(*) FROM '{paths[0]}' GROUP BY ALL").fetchall()
    return (time.perf_counter() - started) * len(paths)


if __name__ == "__main__":
    main()

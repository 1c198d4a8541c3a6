"""Time of every page of `gristmill explore --web`, at 10^6 and at 10^9 documents, and the server's memory.

The documents are those of the shared data, each again and again with other words, in six sources with URLs, personal
data and questions of a benchmark, curated by the program (10^6 of them); the shards of that corpus are linked under a
thousand names (10^9 rows), where the index of ids and the signatures are those of the distinct rows. A page is asked
for by one client, one request at a time; the clock and the server's processor seconds are both shown, because a busy
machine adds to the clock. A query of SQL that reads a whole column is shown and is not in the figures. The peer is
DuckDB, which counts outcomes from the same ledger, and its counts must be equal."""

import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.corpus.sketches import write_table
from gristmill.pipelines.explorer.corpus import counts_of_outcomes

SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parents[1] / "../shared/data") / "corpora"
SOURCE, RULE, SIGNAL = "tldr", "gopher_quality.min_words", "num_plain_words"
ROWS, LINKS = 1_000_000, 1_000
SHARES = {  # of the documents, by shared file; tldr has the rest
    "kubernetes_community.jsonl": 0.01,
    "rust_book.jsonl": 0.01,
    "rust_by_example.jsonl": 0.02,
    "wikitext2_valid.txt": 0.02,
    "wikitext2_test.txt": 0.02,
    "tldr.jsonl": 0.92,
}
GOAL_MS, GOAL_MB = 300.0, 1000.0
GROWING = ("SQL's count",)  # pages that read what is asked for
REQUESTS = 20


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--work", type=Path, help="folder that keeps the corpus, so that a later call makes none")
    options = parser.parse_args()
    data = options.data or SHARED
    rows, links = (30_000, 20) if options.quick else (ROWS, LINKS)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(dir=options.work) as temporary:
        work = Path(temporary) if options.work is None else options.work
        corpus = curate(data, work / f"corpus-{rows}", rows)
        linked = link(corpus, work / f"linked-{rows * links}" / "curate", links)
        for folder, times in ((corpus, 1), (linked, links)):
            figures += measured(folder, corpus, rows * times, times)
    print_figures(figures)


def curate(data: Path, folder: Path, rows: int) -> Path:
    """The corpus of so many documents, as the program makes it, from the folder if it is there."""
    corpus = folder / "work" / "curate"
    if (corpus / "manifest.json").is_file():
        return corpus
    (folder / "raw").mkdir(parents=True, exist_ok=True)
    for number, (name, share) in enumerate(SHARES.items()):
        write_changed(data / f"{name}.zst", folder / "raw" / f"{Path(name).stem}.jsonl", round(share * rows), number)
    questions = data.parent / "benchmarks" / "arc_easy.jsonl.zst"
    sources = [
        {"name": Path(name).stem, "format": "jsonl", "paths": [f"raw/{Path(name).stem}.jsonl"]} for name in SHARES
    ]
    recipe = {
        "name": "explore",
        "sources": sources,
        "curate": {
            "filters": ["gopher_quality"],
            "pii": {},
            "near_dedup": {"keep_signatures": True},
            "decontaminate": {"benchmarks": [{"name": "arc_easy", "paths": [str(questions)], "fields": ["query"]}]},
        },
    }
    (folder / "explore.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "curate", "explore.yaml", "--workdir", "work"]
    before = cpu_seconds_of_children()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    print(f"{rows:,} documents curated in {cpu_seconds_of_children() - before:.0f} processor seconds")
    return corpus


def write_changed(path: Path, target: Path, rows: int, seed: int) -> None:
    """So many documents of a shared corpus: the documents again and again, each time with other words. Of every five
    rounds one changes a fiftieth of the words, which makes near duplicates, and the others a third of them. Some get a
    question of a benchmark or an address, and every one has a URL."""
    rng = np.random.default_rng(seed)
    documents = [text.split(" ") for text in texts_of(path)]
    vocabulary = np.array(sorted({word for words in documents for word in words if word.strip()}), object)
    questions = [record["query"] for record in records_of(path.parents[1] / "benchmarks" / "arc_easy.jsonl.zst")]
    with target.open("w", encoding="utf-8") as file:
        for row in range(rows):
            round_number, number = divmod(row, len(documents))
            words = documents[number].copy()
            share = 0.0 if not round_number else 0.02 if round_number % 5 == 1 else 0.33
            places = rng.integers(0, len(words), int(share * len(words)))
            for place, other in zip(places.tolist(), rng.integers(0, len(vocabulary), len(places)), strict=True):
                words[place] = vocabulary[other]
            if row % 100 == 7:
                words.append(f"\n\nWrite to reader{row}@mail.example.com.")
            if row % 1_000 == 11:
                words.append(f"\n\n{questions[int(rng.integers(len(questions)))]}")
            host = min(int(rng.zipf(1.3)), 100_000)
            record = {"text": " ".join(words), "url": f"https://www.site{host}.example/{target.stem}/{row}"}
            file.write(json.dumps(record) + "\n")


def texts_of(path: Path) -> list[str]:
    """The documents of a shared corpus, of plain text its paragraphs."""
    if ".jsonl" in path.name:
        return [record["text"] for record in records_of(path) if record["text"]]
    lines = zstandard.open(path, "rt", encoding="utf-8").read().splitlines()
    return [line for line in lines if len(line) > 200]


def records_of(path: Path) -> list[dict[str, Any]]:
    with zstandard.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def link(corpus: Path, folder: Path, times: int) -> Path:
    """A corpus with every shard so many times, each a link to the same file; from the folder if it is there. Its merged
    sketches are those of the corpus, with so many times the counts: what merging the shards' would give."""
    if (folder / "counts.json").is_file():
        return folder
    for name in ("documents", "signals", "ledger"):
        for path in sorted((corpus / name).rglob("*.parquet")):
            source, number, suffix = re.fullmatch(r"(.*)-(\d{5})(\..*)", path.name).groups()
            stride = len([*path.parent.glob(f"{source}-?????{suffix}")])
            target = folder / path.relative_to(corpus).parent
            target.mkdir(parents=True, exist_ok=True)
            for repetition in range(times):
                os.link(path, target / f"{source}-{int(number) + stride * repetition:05}{suffix}")
    for name in ("ids", "decontamination", "signatures"):
        os.symlink(corpus.absolute() / name, folder / name)
    (folder / "quarantine.jsonl").touch()
    (folder / "sketches").mkdir(exist_ok=True)
    os.link(corpus / "sketches" / "samples.parquet", folder / "sketches" / "samples.parquet")
    table = pq.read_table(corpus / "sketches" / "counts.parquet")
    is_register = pc.equal(table.column("kind"), "host_register")  # a maximum, not a count
    for name in ("documents", "bytes"):
        place, column = table.schema.get_field_index(name), table.column(name)
        table = table.set_column(place, name, pc.if_else(is_register, column, pc.multiply(column, times)))
    write_table(folder / "sketches" / "counts.parquet", table)
    outcomes = table.filter(pc.equal(table.column("kind"), "outcome")).to_pylist()
    rules = json.loads((corpus / "counts.json").read_bytes())["rules"]
    (folder / "counts.json").write_text(json.dumps({"sources": counts_of_outcomes(outcomes), "rules": rules}))
    return folder


def check_counts(address: str, corpus: Path, times: int) -> None:
    """Raises AssertionError unless the pages count as DuckDB does: documents by source and outcome, by rule, and at a
    threshold. corpus: with the distinct shards; the server's has each of them so many times."""
    ledger, signals = (f"{corpus}/{name}/*.parquet" for name in ("ledger", "signals/*"))
    for clause in ("source = 'tldr' AND outcome = 'kept'", "outcome = 'removed'", f"rule = '{RULE}'"):
        (count,) = duckdb.sql(f"SELECT count(*) FROM '{ledger}' WHERE {clause}").fetchall()[0]
        query = urllib.parse.urlencode(dict(re.findall(r"(\w+) = '([^']*)'", clause)))
        page = urllib.request.urlopen(f"{address}/documents?{query}").read().decode()
        assert f"<p>{times * count:,} documents; " in page, (clause, count)
    if times > 1:  # the exact counts are one scan of a column of all rows
        return
    value = 60.5
    (lost,) = duckdb.sql(
        f"SELECT count(*) FROM read_parquet('{signals}', filename = true) "
        f"WHERE {SIGNAL} < {value} AND filename LIKE '%/{SOURCE}-%'"
    ).fetchall()[0]
    (gained,) = duckdb.sql(
        f"SELECT count(*) FROM '{ledger}' WHERE source = '{SOURCE}' AND step = 'filters' AND len(failed) = 1 AND "
        f"failed[1].rule = '{RULE}' AND failed[1].value >= {value}"
    ).fetchall()[0]
    query, answer = urllib.parse.urlencode({"source": SOURCE, "rule": RULE, "value": value}), None
    started = time.perf_counter()
    while not answer:
        answer = json.load(urllib.request.urlopen(f"{address}/rule/exact?{query}"))["text"]
    print(f"exact counts of a threshold after {time.perf_counter() - started:.2f} s")
    assert f"{lost:,} would fail, {gained:,} more would pass" in answer, (lost, gained, answer)


def measured(corpus: Path, distinct: Path, size: int, times: int) -> list[Figure]:
    """Every page REQUESTS times, from a server of its own. distinct: the corpus whose shards are repeated."""
    opened = time.monotonic()
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "explore", str(corpus), "--web", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        address = next(match[1] for line in server.stdout if (match := re.search(r"(http://[0-9.:]+)/", line)))
        opened = time.monotonic() - opened
        check_counts(address, distinct, times)
        slowest, memory = 0.0, 0.0
        shown = Table("page", "p50 ms", "p95 ms", "CPU ms a request")
        for page, paths in pages(corpus).items():
            before, seconds = cpu_seconds(server.pid), []
            for path in paths:
                started = time.perf_counter()
                answered(address + path)
                seconds.append(time.perf_counter() - started)
            cpu = (cpu_seconds(server.pid) - before) / len(paths)
            p95 = float(np.quantile(seconds, 0.95))
            if not page.startswith(GROWING):
                slowest, memory = max(slowest, p95), peak_megabytes(server.pid)
            print(f"{page}: {1000 * p95:.0f} ms, CPU {1000 * cpu:.0f} ms", flush=True)
            shown.add_row(page, *(f"{1000 * n:.0f}" for n in (statistics.median(seconds), p95, cpu)))
        with_sql = peak_megabytes(server.pid)
    finally:
        server.terminate()
        server.wait()
    Console(width=100).print(shown)
    print(
        f"{size:,} documents: opened in {opened:.1f} s, at most {memory:.0f} MB, {with_sql:.0f} MB after SQL's count; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    name = f"1e{round(np.log10(size))}"
    peer = duckdb_seconds(corpus)
    version = f"duckdb {duckdb.__version__}"
    return [
        Figure(
            f"explore_p95_{name}", 1000 * slowest, "ms", GOAL_MS, "most that was asked for", GOAL_MS / 1000 / slowest, 1
        ),
        Figure(f"explore_p95_{name}_counts", 1000 * slowest, "ms", 1000 * peer, version, peer / slowest),
        Figure(
            "explore_server_mb" if times > 1 else f"explore_server_mb_{name}",
            memory,
            "MB",
            GOAL_MB,
            "most that was asked for",
            GOAL_MB / memory,
            1,
        ),
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
            "documents of a host": "/documents?host=www.site7.example",
            "search for words": "/documents?words=compress+archive", "search for absent words": "/documents?words=zqxj",
            "rules": "/rules", "duplicates": "/duplicates", "contamination": "/contamination",
            "personal data": "/personal",         }.items()
    }  # fmt: skip
    of_documents = {
        "kept document": [f"/document/{doc_id}" for doc_id in kept],
        "removed document": [f"/document/{doc_id}" for doc_id in removed],
        "group of duplicates": [f"/duplicates/{doc_id}" for doc_id in originals],
        "similar documents": [f"/similar?id={doc_id}" for doc_id in kept],
        "threshold": [f"/rule?{rule}&value={value}" for value in values],
    }
    count = "/sql?q=SELECT+outcome,count(*)+FROM+ledger+GROUP+BY+1"
    return same | of_documents | {"SQL's tables": ["/sql"] * REQUESTS, "SQL's count": [count] * 3}


def answered(url: str) -> bytes:
    """The page; of a query that took too long the page that says so."""
    try:
        return urllib.request.urlopen(url).read()
    except urllib.error.HTTPError as error:
        return error.read()


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

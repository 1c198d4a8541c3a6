"""How deduplication grows with the number of documents: memory of the driver and of a worker, bytes shuffled, seconds.

Made signatures (20 bands of 6) with planted clusters go through the steps that see all documents: keys, links and
groups. Each size runs in a process of its own (the driver) with a pool of workers. `driver_bytes_per_document` is the
slope of the driver's peak between the two largest sizes from a million documents on; below, the steps run in the driver
by intention. `--documents 1e7 1e8` takes 79 GB of disk; rehearsal.py takes 40. `--network MEGABYTES` curates so much
text instead, with the work folder in an S3 server of this process and Slurm's elements as other processes:
`driver_network_bytes_per_document` is what the driver's store sends and receives, the slope from half of the text on.
`--sources NUMBER` curates so many sources of one document each; `--files NUMBER` lists and pins so many files of a
line. The rates of text are measured in the same run and, with the rest, make the forecast. Prices: 0.045 dollars a
core-hour, 0.40 a million GET, 5 a million PUT (AWS, us-east-1)."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measure import Figure, arguments, print_figures, process_peak_bytes
from support.curation_inputs import made_texts, paragraphs, write_jsonl
from support.curation_runs import recipe, run_gristmill, timed
from support.planted import write_parquet

from gristmill.data_pipeline.dedup import candidates
from gristmill.data_pipeline.dedup.candidates import Banding, StoredDocuments, write_groups, write_keys, write_links
from gristmill.data_pipeline.dedup.near import BATCH_SHINGLES, NearDedupConfig, find_near_duplicates
from gristmill.data_pipeline.dedup.signatures import (
    SignatureScheme,
    SignatureStore,
    StoredFile,
    documents_file,
    signatures_file,
)
from gristmill.data_pipeline.ledger.document_file import DocumentFile, save_array, unpacked_ids
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.store.store import Store
from gristmill.foundation.runtime.tasks import slurm
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.task_files import RANGE_RECORDS, PartitionedFiles
from gristmill.pipelines.cli.main import main as gristmill
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.workdir.raw_files import lock_raw_files
from tests.support import fake_slurm
from tests.support.s3_server import s3_server

SIZES = (100_000, 1_000_000, 10_000_000)
PART_DOCUMENTS = 100_000
BANDING = Banding(20, 6, False, 5, "word")
CLUSTERED = 5  # one document of so many is a copy of the one before it, in each value with probability 0.9
GIANT = 1000  # one document of so many is in one cluster
SHINGLES = 700  # of a document of 5,000 bytes
BYTES = 5000  # of a document, for the forecast: about what FineWeb's have
CORE_HOUR, GETS, PUTS = 0.045, 0.40e-6, 5e-6  # dollars
MERGED_BYTES = 8e6  # of a block that one request reads, once parts are merged before the shuffle


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--documents", type=float, nargs="+", default=SIZES, help="sizes")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--run", type=int, help="one size, in the folder --work; used by this program itself")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--make", action="store_true", help="only make the signatures of --run")
    parser.add_argument("--text-megabytes", type=float, default=100)
    parser.add_argument("--network", type=float, help="megabytes of text; only what crosses the driver's network")
    parser.add_argument("--sources", type=int, help="only curation of so many sources of one document each")
    parser.add_argument("--files", type=float, help="only the pinning of so many tiny files")
    options = parser.parse_args()
    if options.files:
        return print_figures(file_figures(int(options.files)))
    if options.sources:
        return print_figures(source_figures(options.sources, options.data))
    if options.network:
        return print_figures(network_figures(options.network, options.data))
    if options.make:
        return make_store(options.run, options.work / "store")
    if options.run:
        return print(json.dumps(measured(options.run, options.workers, options.work)))
    sizes = (20_000, 100_000) if options.quick else sorted(int(size) for size in options.documents)
    runs = [in_own_process(size, options.workers) for size in sizes]
    for run in runs:
        print(json.dumps(run), file=sys.stderr)
    largest = [run for run in runs if run["documents"] >= 1_000_000][-2:]
    figures = [
        Figure("shuffle_bytes_per_document", runs[-1]["shuffled"], "bytes", 320, "most that was asked for"),
        Figure("scale_seconds_per_million", runs[-1]["seconds"] / runs[-1]["documents"] * 1e6, "CPU s"),
    ]
    if runs[-1]["worker_bytes"]:
        figures.append(Figure("scale_worker_megabytes", runs[-1]["worker_bytes"] / 1e6, "MB"))
    if len(largest) == 2:
        small, large = largest
        slope = (large["driver_bytes"] - small["driver_bytes"]) / (large["documents"] - small["documents"])
        figures.insert(0, Figure("driver_bytes_per_document", slope, "bytes", 1, "most that was asked for"))
    megabytes = 5 if options.quick else options.text_megabytes
    near, whole = text_core_hours(megabytes, options.data)
    figures += [
        Figure("near_dedup_core_hours_per_tb", near, "core-h", 10, "most that was asked for"),
        Figure("curation_core_hours_per_tb", whole, "core-h", 25, "most that was asked for"),
    ]
    print_figures(figures)
    for documents in (10**9, 10**12):
        print(forecast(documents, runs[-1], near, whole))


def network_figures(megabytes: float, data: Path | None) -> list[Figure]:
    """Bytes that the driver sends to and receives from the store: by document, which is the slope between half of the
    text and all of it, and those that do not grow with the documents, with the text of a document."""
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as client:
        client.create_bucket(Bucket="scale")
        half, whole = (curated_through_a_store(part, data) for part in (megabytes / 2, megabytes))
    documents = whole["documents"] - half["documents"]
    slopes = {kind: (whole[kind] - half[kind]) / documents for kind in ("sent", "received", "copied", "text")}
    fixed = whole["sent"] + whole["received"] - (slopes["sent"] + slopes["received"]) * whole["documents"]
    return [
        Figure("driver_network_bytes_per_document", slopes["sent"] + slopes["received"], "bytes"),
        Figure("driver_bytes_sent_per_document", slopes["sent"], "bytes"),
        Figure("driver_network_bytes_of_a_run", fixed, f"bytes, of {whole['documents']:,} documents in one file"),
        Figure("driver_bytes_copied_in_the_store_per_document", slopes["copied"], "bytes"),
        Figure("text_bytes_per_document", slopes["text"], "bytes"),
    ]


def curated_through_a_store(megabytes: float, data: Path | None) -> dict[str, int]:
    """documents, text (bytes), sent, received, copied. The steps that run in the driver for few documents run on nodes,
    as they do for many."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        (folder / "raw").mkdir()
        texts = list(made_texts(paragraphs(data), int(megabytes * 1e6), 4000))
        write_jsonl(folder / "raw", texts)
        (folder / "recipe.yaml").write_text(json.dumps(recipe(folder / "raw", "jsonl", None, ("en",), True)))
        patch.setenv("PATH", f"{fake_slurm.install(folder / 'slurm')}{os.pathsep}{os.environ['PATH']}")
        patch.setenv(fake_slurm.NODES, str(folder / "nodes"))
        patch.setenv("GRISTMILL_SCRATCH", str(folder / "driver"))
        patch.setattr(slurm, "NODE_OUTPUT", str(folder / "element-%A-%a.log"))
        patch.setattr(candidates, "POOL_DOCUMENTS", 0)
        moved = count_transfers(patch)
        options = ["--to", "curate", "--workdir", f"s3://scale/{folder.name}", "--engine", "slurm", "--workers", "2"]
        with suppress(SystemExit):  # by which every command ends
            gristmill(["run", str(folder / "recipe.yaml"), *options])
    return {**moved, "documents": len(texts), "text": sum(len(text.encode()) for text in texts)}


def source_figures(sources: int, data: Path | None) -> list[Figure]:
    """CPU time of `gristmill curate` with default settings, of all processes, for sources of one document each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "raw").mkdir()
        entries = []
        for number, text in enumerate(islice(made_texts(paragraphs(data), sources * 10_000, 4000), sources)):
            path = folder / "raw" / f"{number}.jsonl"
            path.write_text(json.dumps({"text": text}) + "\n")
            entries.append({"name": f"source{number}", "format": "jsonl", "paths": [str(path)]})
        (folder / "recipe.yaml").write_text(json.dumps({"name": "sources", "sources": entries}))
        program = Path(sys.executable).with_name("gristmill")
        command = [
            str(program),
            "curate",
            str(folder / "recipe.yaml"),
            "--workers",
            "1",
            "--workdir",
            str(folder / "run"),
        ]
        usage, _ = timed(command, 1, folder / "log")
    unit = f"CPU s, {sources:,} sources of a document"
    return [Figure("sources_cpu_seconds", usage.cpu_seconds, unit, 60, "most that was asked for")]


def file_figures(files: int) -> list[Figure]:
    """CPU time and memory of this process for listing, hashing and locking files of one line, twice: the second time
    they are compared with the lock. Memory: the growth of the peak from a third of the files to all."""
    for _ in range(2):  # the second time the first one's memory is in use again
        pin_files(files // 3)
    few = process_peak_bytes("self")
    seconds = pin_files(files)
    many = process_peak_bytes("self")
    unit = f"CPU s, {files:,} files"
    return [
        Figure("pin_files_cpu_seconds", seconds[0], unit, 300, "most that was asked for"),
        Figure("pin_files_again_cpu_seconds", seconds[1], unit),
        Figure("pin_bytes_per_file", (many - few) / (files - files // 3), "bytes"),
        Figure("pin_peak_megabytes", many / 1e6, "MB"),
    ]


def pin_files(files: int) -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(files):
            path = folder / "raw" / f"{number // 1000:04d}" / f"{number:07d}.txt"
            if number % 1000 == 0:
                path.parent.mkdir(parents=True)
            path.write_text(f"document {number}\n")
        source = {"name": "tiny", "format": "text", "paths": [str(folder / "raw/*/*.txt")]}
        tiny = Recipe.model_validate({"name": "tiny", "sources": [source]})
        seconds = []
        for _ in range(2):
            started = cpu_seconds()
            lock = lock_raw_files(tiny, folder / "work", LocalEngine(1, Reporter.silent()))
            seconds.append(cpu_seconds() - started)
        assert len(lock.sources[0].files) == files
        return seconds


def count_transfers(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that the stores of this process send, receive, and have copied from now on."""
    moved: Counter[str] = Counter()

    def counted(method: str, kind: str, size: Callable[..., int]) -> None:
        call = getattr(Store, method)

        def counting(store: Store, *arguments: Any) -> Any:
            result = call(store, *arguments)
            moved[kind] += size(store, result, *arguments)
            return result

        patch.setattr(Store, method, counting)

    counted("put", "sent", lambda store, result, name, path: path.stat().st_size)
    counted("put_bytes", "sent", lambda store, result, name, content: len(content))
    counted("read", "received", lambda store, result, name: len(result or b""))
    counted("read_range", "received", lambda store, result, name, start, stop: len(result))
    counted("download", "received", lambda store, result, name, path, expected: expected[0])
    counted("copy", "copied", lambda store, result, name, target: store.list(target).get(target, 0))
    return moved


def in_own_process(documents: int, workers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, __file__, "--run", str(documents), "--work", work, "--workers", str(workers)]
        subprocess.run([*command, "--make"], check=True)
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measured(documents: int, workers: int, folder: Path) -> dict[str, float]:
    """documents, shuffled (bytes a document), seconds (of all processors), peaks of driver and worker in bytes."""
    engine = LocalEngine(workers, Reporter.silent())
    before = cpu_seconds()
    stored = StoredDocuments.of([(made_store(documents, folder / "store"), False)])
    keys = write_keys(stored, BANDING, engine, folder)
    links = write_links(stored, keys, BANDING.bands, engine, folder)
    candidates, _ = write_groups(stored, links, BATCH_SHINGLES, engine, folder)
    children = [pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    peaks = [process_peak_bytes(pid) for pid in children]
    engine.close()
    return {
        "documents": documents,
        "candidates": candidates.num_records(),
        "shuffled": sum(file_bytes(each) for each in (keys, links, candidates)) / documents,
        "seconds": cpu_seconds() - before,
        "driver_bytes": process_peak_bytes("self"),
        "worker_bytes": max(peaks, default=0),  # none: all ran in the driver
    }


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def file_bytes(shuffle: PartitionedFiles) -> int:
    return sum(path.stat().st_size for path in shuffle.paths())


def part_sizes(documents: int) -> list[int]:
    return [min(PART_DOCUMENTS, documents - start) for start in range(0, documents, PART_DOCUMENTS)]


def made_store(documents: int, folder: Path) -> SignatureStore:
    files = [StoredFile(source="made", priority=1, documents=size) for size in part_sizes(documents)]
    return SignatureStore(folder, SignatureScheme(hashes=BANDING.bands * BANDING.rows), tuple(files))


def make_store(documents: int, folder: Path) -> None:
    shared = np.random.default_rng(0).integers(1 << 32, size=BANDING.bands * BANDING.rows, dtype=np.uint32)
    for number, size in enumerate(part_sizes(documents)):
        generator = np.random.default_rng(number)
        values = generator.integers(1 << 32, size=(size, BANDING.bands * BANDING.rows), dtype=np.uint32)
        giant = np.arange(GIANT - 1, size, GIANT)
        copies = np.arange(CLUSTERED - 1, size, CLUSTERED)
        for places, originals in ((copies, values[copies - 1]), (giant, shared[None])):
            same = generator.random((len(places), values.shape[1])) < 0.9
            values[places] = np.where(same, originals, values[places])
        save_array(signatures_file(folder, number), values)
        ids = generator.integers(1 << 64, size=(size, 2), dtype=np.uint64)
        rows = np.arange(size)
        columns = {"doc_id": unpacked_ids(ids), "row": rows, "length": np.full(size, BYTES)}
        table = pa.table({**columns, "shingles": np.full(size, SHINGLES)})
        pq.write_table(table, documents_file(folder, number), compression="zstd")


def text_core_hours(megabytes: float, data: Path | None) -> tuple[float, float]:
    """(verified near-deduplication, the whole of `gristmill run --to curate`) of English text, in core-hours a TB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = list(made_texts(paragraphs(data), int(megabytes * 1e6), 4000))
        num_bytes = sum(len(text.encode()) for text in texts)
        write_parquet(folder / "documents", texts)
        files = [DocumentFile(path, "s", 1) for path in sorted((folder / "documents").glob("*.parquet"))]
        engine = LocalEngine(1, Reporter.silent())
        find_near_duplicates(files[:1], NearDedupConfig(), engine, folder / "warm")  # kernels are loaded
        started = time.process_time()
        find_near_duplicates(files, NearDedupConfig(), engine, folder / "near")
        near = time.process_time() - started
        (folder / "raw").mkdir()
        write_jsonl(folder / "raw", texts)
        settings = recipe(folder / "raw", "jsonl", None, ("en",), True)
        settings["curate"]["exact_dedup"] = {"scope": "all"}
        run_gristmill(settings, folder / "run", 1)
        whole = run_gristmill(settings, folder / "run", 1).cpu_seconds
    return near / num_bytes * 1e12 / 3600, whole / num_bytes * 1e12 / 3600


def forecast(documents: int, run: dict[str, float], near: float, whole: float) -> str:
    terabytes = documents * BYTES / 1e12
    shuffled = documents * run["shuffled"]
    parts = documents // PART_DOCUMENTS
    single = parts * -(-documents // RANGE_RECORDS) * (BANDING.bands + 1)
    merged = 2 * shuffled / MERGED_BYTES  # each block is written and read once more
    requests = min(single, merged)
    dollars = near * terabytes * CORE_HOUR + requests * GETS + (requests if requests < single else parts) * PUTS
    memory = 45 * documents * run["candidates"] / run["documents"]
    return (
        f"{documents:.0e} documents of {BYTES} bytes ({terabytes:.0f} TB): near-deduplication "
        f"{near * terabytes:.0f} core-h, {shuffled / 1e12:.2f} TB of shuffled records, {requests:.1e} requests "
        f"({'parts merged first' if requests < single else 'one level'}), {dollars:.0f} dollars; union-find "
        f"{memory / 1e9:.0f} GB; curation {whole * terabytes:.0f} core-h, {whole * terabytes * CORE_HOUR:.0f} dollars"
    )


if __name__ == "__main__":
    main()

"""A rehearsal of the steps that see all documents, at 10^8 documents on one machine: decide, exact and near
deduplication, decontamination, and the bookkeeping of shards and ledgers.

The documents are made (support/sparse_corpus.py), of 55 bytes and without most signals, so that the cost by document is
measured; reading and annotating are not. Every step is curation's own, and so are the files between the steps, but for
one: the signatures, 480 bytes a document, are removed as soon as a part's band keys are made, and computed again for
the candidates. Each step is a line of --results when it ends, so a run that is stopped leaves its figures; the same
command with the same --work goes on with what is finished. When less than --min-free gigabytes of the disk are free,
the run ends itself and removes its folder.

CPU seconds are those of the driver and of all workers. Peaks are resident memory with mapped files, and, sampled five
times a second, anonymous memory alone. With --nodes NUMBER the tasks run on so many Ray nodes of one processor, each in
a network namespace of this machine (root, the extra `cluster`) and on its disk."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import Figure, arguments, print_figures
from support.sparse_corpus import (
    SignedAgain,
    SparseFile,
    count_kept,
    questions,
    sign_and_key,
    signed_again,
    unwritten,
    write_made_links,
    write_sparse_file,
)

from gristmill.data_pipeline.corpus.counts import count_files
from gristmill.data_pipeline.corpus.shards import SourceToWrite, plan_shards, training_shards
from gristmill.data_pipeline.corpus.splits import SPLITS, split_indices
from gristmill.data_pipeline.corpus.writer import ledger_key, shard_key
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.decontamination.config import DecontaminateConfig
from gristmill.data_pipeline.dedup.candidates import (
    StoredDocuments,
    find_links,
    key_runs,
    keys_shuffle,
    links_shuffle,
    write_groups,
)
from gristmill.data_pipeline.dedup.exact import DUPLICATE, ExactDedupConfig, find_exact_duplicates, reassign_copies
from gristmill.data_pipeline.dedup.near import BATCH_SHINGLES, BLOCK_SHINGLES, NearDedupConfig
from gristmill.data_pipeline.dedup.verify_candidates import verify_batches, write_candidate_sets
from gristmill.data_pipeline.filters.apply import FilterTask, apply_filters_to_files
from gristmill.data_pipeline.filters.presets import Rule
from gristmill.data_pipeline.filters.profiles import Rules
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.data_pipeline.ledger.ledger import ledger_tasks, write_ledger
from gristmill.data_pipeline.ledger.removal_step import SourceState, StoredRemovals, kept_document_files
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import annotate_config
from gristmill.data_pipeline.text_edits.edit_texts import EditSettings, TextEdits, edit_texts, reannotate
from gristmill.foundation.checksums import checksum_path, content_digest
from gristmill.foundation.fingerprint import fingerprint
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.engine import Engine, joined
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.runtime.tasks.ray import RayEngine
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles
from tests.support.net_namespaces import HOST, network
from tests.support.ray_machines import PORT, cluster

FILE_DOCUMENTS = 200_000
SOURCES = 4
RULES = Rules((Rule("gopher_quality", "min_words", "num_words", ">=", 5, "made"),), ())
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--documents", type=float, default=1e6)
    parser.add_argument("--file-documents", type=int, default=FILE_DOCUMENTS, help="documents of an annotated file")
    parser.add_argument("--groups", action="store_true", help="only the groups, from made links: 40 bytes a document")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=0, help="of Ray, in the place of local workers")
    parser.add_argument("--work", type=Path, help="a folder for the files; a temporary one if not given")
    parser.add_argument("--results", type=Path, help="takes a line of JSON a step")
    parser.add_argument("--min-free", type=float, default=15.0, help="gigabytes")
    options = parser.parse_args()
    documents = 100_000 if options.quick else int(options.documents)
    with tempfile.TemporaryDirectory() as name:
        folder = (options.work or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with engine_of(options.workers, options.nodes, folder) as engine:
            steps = Steps(folder, options.results, options.min_free * 1e9)
            try:
                rehearsal = Rehearsal(documents, options.file_documents, folder, engine, steps)
                rehearsal.groups_alone() if options.groups else rehearsal.run()
            finally:
                steps.is_over.set()
    print_figures(figures(documents, steps.lines))


@contextmanager
def engine_of(workers: int, nodes: int, folder: Path) -> Iterator[Engine]:
    if not nodes:
        local = LocalEngine(workers, Reporter.silent())
        local.start(())
        try:
            yield local
        finally:
            local.close()
        return
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join(
        map(str, (here, here.parent))
    )  # of the nodes, for the tasks below support
    os.environ["GRISTMILL_TASK_PACKAGES"] = "support"
    with network(nodes) as net, cluster(net, folder / "logs"):
        ray = RayEngine(f"{HOST}:{PORT}", Reporter.silent(), folder)
        try:
            yield ray
        finally:
            ray.close()
            ray.disconnect()


def figures(documents: int, lines: Sequence[dict[str, Any]]) -> list[Figure]:
    curation = [line for line in lines if line["step"] != "make the documents"]
    return [
        Figure(
            "rehearsal_cpu_seconds_per_million",
            sum(line["cpu_seconds"] for line in curation) / documents * 1e6,
            "CPU s",
        ),
        Figure("rehearsal_disk_bytes_per_document", max(line["disk_bytes"] for line in lines) / documents, "bytes"),
        Figure("rehearsal_driver_megabytes", max(line["driver_anonymous"] for line in lines) / 1e6, "MB"),
        Figure("rehearsal_worker_megabytes", max(line["worker_anonymous"] for line in lines) / 1e6, "MB"),
    ]


@dataclass
class Steps:
    """Runs steps and keeps a line about each. A thread samples anonymous memory, and the free disk."""

    folder: Path
    results: Path | None
    min_free: float
    lines: list[dict[str, Any]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        threading.Thread(target=self._sample, daemon=True).start()

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        for process in processes():
            with suppress(OSError):
                Path(f"/proc/{process}/clear_refs").write_text("5")  # VmHWM begins anew
        self.peaks = {"driver_anonymous": 0, "worker_anonymous": 0}
        started, cpu = time.perf_counter(), cpu_seconds()
        noted: dict[str, Any] = {}
        yield noted
        driver = str(os.getpid())
        line = {
            "step": name,
            "cpu_seconds": round(cpu_seconds() - cpu, 1),
            "seconds": round(time.perf_counter() - started, 1),
            **self.peaks,
            "driver_resident": status_bytes(driver, "VmHWM"),
            "worker_resident": max((status_bytes(process, "VmHWM") for process in workers()), default=0),
            "disk_bytes": disk_bytes(self.folder),
            **noted,
        }
        self.lines.append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)
        if self.results is not None:
            with self.results.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _sample(self) -> None:
        while not self.is_over.wait(0.2):
            anonymous = max((status_bytes(process, "RssAnon") for process in workers()), default=0)
            self.peaks["worker_anonymous"] = max(self.peaks.get("worker_anonymous", 0), anonymous)
            anonymous = status_bytes("self", "RssAnon")
            self.peaks["driver_anonymous"] = max(self.peaks.get("driver_anonymous", 0), anonymous)
            if shutil.disk_usage(self.folder).free < self.min_free:
                print(f"less than {self.min_free:.3g} bytes of the disk are free: ended", file=sys.stderr, flush=True)
                for process in workers():
                    with suppress(OSError):
                        os.kill(int(process), signal.SIGKILL)
                shutil.rmtree(self.folder, ignore_errors=True)
                os._exit(1)


def processes() -> list[str]:
    """This one, then its children and theirs, and so on."""
    found = [str(os.getpid())]
    for process in found:  # which grows
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                found += path.read_text().split()
    return found


def workers() -> list[str]:
    """The processes that run tasks: of a cluster those that Ray calls its workers."""
    named = [(process, _command(process)) for process in processes()[1:]]
    of_ray = [process for process, command in named if command.startswith("ray::")]
    return of_ray or [process for process, _ in named]


def _command(process: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace")
    return ""


def status_bytes(process: str, name: str) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
    return 0


def cpu_seconds() -> float:
    """Of this process, its children, and their children that have ended."""
    ticks = 0
    for process in processes():
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / TICK


def disk_bytes(folder: Path) -> int:
    """On the disk, each file once."""
    files = {}
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                status = os.stat(os.path.join(root, name), follow_symlinks=False)
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


@dataclass
class Rehearsal:
    documents: int
    file_documents: int
    folder: Path
    engine: Engine
    steps: Steps

    def run(self) -> None:
        files = self.made_files()
        states = self.decided(files)
        removals = self.deduplicated(states)
        edits = self.decontaminated(states, removals)
        self.bookkeeping(states, edits)

    def groups_alone(self) -> None:
        documents = unwritten(self.documents, self.file_documents)
        links = links_shuffle(documents, NearDedupConfig().bands, self.folder)
        with self.steps.step("make the links"):
            tasks = [(links, part, self.documents) for part in range(links.map_outputs) if not links.has(part)]
            self.engine.map(write_made_links, tasks, "make")
        with self.steps.step("near: groups"):
            candidates, batches = write_groups(documents, links, BATCH_SHINGLES, self.engine, self.folder)
        print(f"{links.num_records()} links, {candidates.num_records()} linked, {batches} batches", file=sys.stderr)

    def made_files(self) -> list[SparseFile]:
        rows = min(self.file_documents, max(self.documents // (2 * SOURCES), 1))
        sizes = [min(rows, self.documents - start) for start in range(0, self.documents, rows)]
        annotated = self.folder / "annotated"
        annotated.mkdir(exist_ok=True)
        files = [
            SparseFile(annotated / f"made-{number:05d}.parquet", number, size, self.documents)
            for number, size in enumerate(sizes)
        ]
        missing = [file for file in files if not checksum_path(file.path).exists()]
        with self.steps.step("make the documents"):
            self.engine.map(write_sparse_file, missing, "make")
        return files

    def decided(self, files: Sequence[SparseFile]) -> list[SourceState]:
        split_of = partial(split_indices, config=CurateConfig().splits, seed=1)
        with self.steps.step("decide"):
            tasks = [FilterTask(file.path, RULES, split_of) for file in files]
            results = apply_filters_to_files(tasks, self.engine, self.folder / "filters")
        states, of_source = [], -(-len(files) // SOURCES)
        for number, first in enumerate(range(0, len(files), of_source)):
            source = SourceConfig(name=f"source{number}", format="jsonl", paths=("made",), priority=number + 1)
            chosen = slice(first, first + of_source)
            paths = tuple(file.path for file in files[chosen])
            states.append(SourceState(source, RULES, paths, results[chosen], first))
        return states

    def deduplicated(self, states: Sequence[SourceState]) -> list[StoredRemovals]:
        work = self.folder / "exact"
        with self.steps.step("exact duplicates"):
            document_files = kept_document_files(states, [])
            exact = find_exact_duplicates(document_files, ExactDedupConfig(), self.engine, work)
        config = NearDedupConfig()
        near = self.near_duplicates(kept_document_files(states, [StoredRemovals("exact_dedup", 1.0, exact)]), config)
        with self.steps.step("copies of removed documents"):
            (self.folder / "reassigned").mkdir(exist_ok=True)
            exact, near = reassign_copies(exact, near, self.folder / "reassigned", self.engine)
        removals = [StoredRemovals("exact_dedup", 1.0, exact), StoredRemovals("near_dedup", config.threshold, near)]
        for removal in removals:
            print(f"{removal.step}: {removal.removed.num_records()} removed", file=sys.stderr)
        return removals

    def near_duplicates(self, document_files: Sequence[DocumentFile], config: NearDedupConfig) -> PartitionedFiles:
        """The steps of `find_near_duplicates`, with parts whose signatures are signed again."""
        folder = self.folder / "near"
        for name in (folder, folder / "signatures"):
            name.mkdir(exist_ok=True)
        with self.steps.step("near: count the kept documents"):
            counts = self.engine.map(count_kept, document_files, "count")
        parts = signed_again(document_files, counts, config.scheme, folder / "signatures")
        documents = _stored(parts)
        links_are_whole = (folder / "links-00000.rec").exists()
        if not links_are_whole:
            self._sign_and_key(parts, config, folder)
        with self.steps.step("near: links"):
            links = find_links(documents, config.banding, self.engine, folder)
        with self.steps.step("near: groups"):
            candidates = write_groups(documents, links, BATCH_SHINGLES, self.engine, folder)
        with self.steps.step("near: sets of candidates, signed again"):
            sets = write_candidate_sets(document_files, documents, candidates, config.banding, self.engine, folder)
        duplicates = PartitionedFiles(folder / "verified", DUPLICATE, sets.members.ranges, len(document_files))
        with self.steps.step("near: verify"):
            verify_batches(sets, config.threshold, BLOCK_SHINGLES, duplicates, self.engine)
        return duplicates

    def _sign_and_key(self, parts: Sequence[SignedAgain], config: NearDedupConfig, folder: Path) -> None:
        documents = _stored(parts)
        keys = keys_shuffle(documents, config.bands, folder)
        runs = [parts[first:last] for first, last in key_runs(documents)]
        tasks = [(run, config.banding, keys, number) for number, run in enumerate(runs) if not keys.has(number)]
        with self.steps.step("near: signatures and keys of bands") as line:
            seconds = self.engine.map(sign_and_key, tasks, "sign and key")
            line["signing_cpu_seconds"] = round(sum(seconds), 1)

    def decontaminated(self, states: Sequence[SourceState], removals: Sequence[StoredRemovals]) -> TextEdits:
        benchmark = self.folder / "benchmark.jsonl"
        benchmark.write_text("".join(json.dumps({"text": text}) + "\n" for text in questions()))
        named = [{"name": "made", "paths": [str(benchmark)], "fields": ["text"]}]
        config = DecontaminateConfig.model_validate({"benchmarks": named, "policy": "drop"})
        (self.folder / "edits").mkdir(exist_ok=True)
        with self.steps.step("decontaminate"):
            settings = EditSettings((), None, config)
            edits = edit_texts(states, removals, settings, self.folder / "edits", self.engine)
        dropped = sum(edits.removals[-1].in_file(number).rows.size for number in range(len(edits.document_files)))
        print(f"decontaminate: {dropped} removed", file=sys.stderr)
        return edits

    def bookkeeping(self, states: Sequence[SourceState], edits: TextEdits) -> None:
        config = CurateConfig()
        annotations = [annotate_config(state.source, config) for state in states]
        corpus, evidence = self.folder / "corpus", edits.evidence()
        with self.steps.step("shards: plan"):
            final, _ = reannotate(states, edits, {}, annotations, self.folder / "edits", self.engine)
            of_files = [(state.filter_results, config.shard_bytes) for state in final]
            plans = self.engine.map(plan_shards, of_files, "plan")
            shards = joined(
                [
                    training_shards(SourceToWrite(state, annotation, None), plan, None, corpus)
                    for state, annotation, plan in zip(final, annotations, plans, strict=True)
                ]
            )
            ledgers = ledger_tasks(states, edits.removals, evidence, corpus, SPLITS, self.engine)
        with self.steps.step("shards: keys of files"):
            self.engine.map(shard_key, shards, "keys")
            self.engine.map(ledger_key, ledgers, "keys")
        with self.steps.step("shards: counts"):
            counts = count_files(states, final, edits.removals, evidence, self.engine)
        with self.steps.step("shards: ledger"):
            self.engine.map(write_ledger, ledgers, "ledger")
        kept = sum(of_source.kept.total()["documents"] for of_source in counts.values())
        digest = fingerprint([content_digest(ledger.path) for ledger in ledgers])[:16]
        print(f"{len(shards)} shards, {kept} documents kept, {len(ledgers)} ledgers {digest}", file=sys.stderr)


def _stored(parts: Sequence[SignedAgain]) -> StoredDocuments:
    starts = np.cumsum([0, *(part.stored.documents for part in parts)])
    return StoredDocuments(tuple(parts), starts, np.zeros(len(parts), bool))


if __name__ == "__main__":
    main()

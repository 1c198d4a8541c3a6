"""Near-duplicate removal: signatures, LSH with clusters, and the whole stage, compared with peers in alternation."""

import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasketch import MinHash, MinHashLSH
from measure import Figure, arguments, cpu_seconds, in_turn, print_figures
from support.peers import PEER_PYTHON, peers_there, run_peer
from support.planted import corpus, write_parquet

from gristmill.data_pipeline.dedup.folding import fold_texts
from gristmill.data_pipeline.dedup.minhash import band_keys, buckets, find_roots, sign, union_pairs
from gristmill.data_pipeline.dedup.near import NearDedupConfig, near_duplicates
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

DATASKETCH = f"datasketch {version('datasketch')}"
PARTS = ("signatures", "clusters", "stage", "million")
BANDS, ROWS = 16, 8  # both sides alike: 128 hashes, as in the published comparisons


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON, help="where datatrove and text-dedup stand")
    parser.add_argument("--run-stage", type=Path, help="the stage over one folder; used by this program itself")
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    options = parser.parse_args()
    if options.run_stage:
        return run_stage(options.run_stage)
    figures: list[Figure] = []
    if options.only in (None, "signatures"):
        figures.append(signatures(options.data, 400 if options.quick else 2000))
    if options.only in (None, "clusters"):
        figures.append(clusters(20_000 if options.quick else 200_000))
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "stage") and not options.quick and peers_there(options.peer_python):
            figures += stage(Path(folder), options.peer_python, documents=1500, rounds=3)
        if options.only in (None, "million") and not options.quick:
            figures += million(Path(folder) / "million")
    print_figures(figures)


def signatures(data: Path | None, documents: int) -> Figure:
    """Speed of 128 hashes of word 5-grams of folded text. datasketch's default hashes the shingles with SHA-1."""
    texts = texts_of(data, documents) if data else list(corpus(1, documents))
    raw = [text.encode() for text in texts]
    offsets = np.cumsum([0, *map(len, raw)]).astype(np.int64)
    folded, ends = fold_texts(np.frombuffer(b"".join(raw), np.uint8), offsets)
    sample = max(len(texts) // 20, 1)  # the peer is slow: it gets every 20th text
    words = [bytes(folded[ends[i] : ends[i + 1]]).split() for i in range(0, len(texts), 20)][:sample]
    peer_bytes = sum(int(ends[i + 1] - ends[i]) for i in range(0, len(texts), 20)[:sample])

    def by_datasketch() -> None:
        for document in words:
            MinHash(128).update_batch([b" ".join(document[i : i + 5]) for i in range(max(len(document) - 4, 1))])

    own, other, ratio = in_turn(lambda: sign(folded, ends, 5, "word", 128, 1), by_datasketch, rounds=5)
    scale = int(ends[-1]) / peer_bytes
    return Figure(
        "minhash_signatures", ends[-1] / own / 1e6, "MB/s/core", peer_bytes / other / 1e6, DATASKETCH, ratio * scale, 50
    )


def texts_of(folder: Path, count: int) -> list[str]:
    texts: list[str] = []
    for path in sorted(folder.glob("**/*.parquet")):
        texts += pq.read_table(path, columns=["text"]).column("text").to_pylist()
    return texts[:count]


def planted_signatures(documents: int) -> np.ndarray:
    """Random signatures; every tenth agrees with the previous one in each value with probability 0.9."""
    generator = np.random.default_rng(2)
    found = generator.integers(1 << 32, size=(documents, BANDS * ROWS), dtype=np.uint32)
    copies = np.arange(9, documents, 10)
    same = generator.random((len(copies), BANDS * ROWS)) < 0.9
    found[copies] = np.where(same, found[copies - 1], found[copies])
    return found


def our_clusters(signed: np.ndarray) -> np.ndarray:
    parents = np.arange(len(signed))
    everyone = np.arange(len(signed))
    for keys in band_keys(signed, BANDS, ROWS, np.uint64(0)):
        bucket, member = buckets(keys, everyone)
        same = bucket[1:] == bucket[:-1]
        union_pairs(parents, member[:-1][same], member[1:][same])
    return find_roots(parents)


def clusters_by_datasketch(minhashes: list[MinHash]) -> np.ndarray:
    index = MinHashLSH(num_perm=BANDS * ROWS, params=(BANDS, ROWS))
    with index.insertion_session() as session:
        for number, minhash in enumerate(minhashes):
            session.insert(number, minhash)
    parents = np.arange(len(minhashes))
    for number, minhash in enumerate(minhashes):
        for other in index.query(minhash):
            union_pairs(parents, np.array([number]), np.array([other]))
    return find_roots(parents)


def clusters(documents: int) -> Figure:
    """Speed from signatures in memory to clusters, without the time in which datasketch creates its 200,000 objects."""
    signed = planted_signatures(documents)
    shared = MinHash(BANDS * ROWS)
    minhashes = [
        MinHash(hashvalues=row, permutations=shared.permutations, scheme="affine32", hashfunc=shared.hashfunc)
        for row in signed
    ]
    if not (our_clusters(signed[:2000]) == clusters_by_datasketch(minhashes[:2000])).all():
        sys.exit("the clusters differ from datasketch's")
    pairs = [
        (cpu_seconds(lambda: our_clusters(signed)), cpu_seconds(lambda: clusters_by_datasketch(minhashes)))
        for _ in range(3)
    ]
    own, other, ratio = medians(pairs)
    return Figure(
        "lsh_clusters", documents / own / 1e3, "k signatures/s", documents / other / 1e3, DATASKETCH, ratio, 20
    )


def medians(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Medians of our seconds, of the peer's, and of the ratios peer / ours."""
    ratios = [other / own for own, other in pairs]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs), statistics.median(ratios)


def run_stage(folder: Path) -> None:
    """Runs the whole stage on Parquet files and prints seconds, megabytes and counts.

    Libraries and compiled kernels are loaded before the clock starts, by a run over two documents."""
    with tempfile.TemporaryDirectory() as work:
        deduplicate_folder(folder / "warm", Path(work) / "warm")
        before = resident_megabytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (proc(5))
        seconds = cpu_seconds(lambda: deduplicate_folder(folder, Path(work) / "work"))
        removed = pq.read_table(Path(work) / "work" / "removed.parquet").num_rows
    print(seconds, resident_megabytes("VmHWM") - before, removed)


def deduplicate_folder(source: Path, work: Path) -> None:
    parts = [DocumentFile(path, "s", 1) for path in sorted(source.glob("*.parquet"))]
    config = NearDedupConfig(bands=BANDS, rows=ROWS)
    removed = near_duplicates(parts, config, LocalEngine(1, Reporter.silent()), work / "near")
    for part in parts:
        table = pq.read_table(part.path)
        kept = table.filter(pc.invert(pc.is_in(table.column("doc_id"), removed.column("doc_id"))))
        pq.write_table(kept, work / part.path.name, compression="zstd")
    pq.write_table(removed, work / "removed.parquet")


def resident_megabytes(field: str) -> float:
    """VmRSS (now) or VmHWM (the peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def stage_once(folder: Path) -> tuple[float, float, int]:
    """(CPU seconds, megabytes beyond the interpreter and its libraries, removed)."""
    write_parquet(folder / "warm", ["a b c d e f g"] * 2)
    command = [sys.executable, __file__, "--run-stage", str(folder)]
    seconds, megabytes, removed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(seconds), float(megabytes), int(removed)


def stage(folder: Path, python: Path, documents: int, rounds: int) -> list[Figure]:
    """The same Parquet through the whole of each, after their libraries are loaded: ours, the first peer and the
    second in turn, round after round."""
    source = folder / "corpus"
    corpus_bytes = sum(len(text.encode()) for text in corpus(3, documents))
    write_parquet(source, corpus(3, documents))
    peers = (
        ("near_dedup_stage", "datatrove_minhash.py", "datatrove 0.10.1", 50),
        ("near_dedup_stage_text_dedup", "text_dedup_minhash.py", "text-dedup 0.4.0", 1),
    )
    stage_once(source)  # compiles and warms the disk's cache
    pairs: dict[str, list[tuple[float, float]]] = {program: [] for _, program, _, _ in peers}
    for _ in range(rounds):
        own = stage_once(source)[0]
        for _, program, _, _ in peers:
            work = folder / program
            found = run_peer(python, program, str(source), str(work), str(BANDS), str(ROWS))
            shutil.rmtree(work)
            pairs[program].append((own, found["cpu_seconds"]))
    figures = []
    for figure, program, name, goal in peers:
        own, other, ratio = medians(pairs[program])
        rates = corpus_bytes / own / 1e6, corpus_bytes / other / 1e6
        figures.append(Figure(figure, rates[0], "MB/s/core", rates[1], name, ratio, goal))
    return figures


def million(folder: Path) -> list[Figure]:
    """A million documents of 60 words, of which 15 % are edited copies, in 20 files, by one process."""
    write_parquet(folder, corpus(4, 1_000_000, 40, 80))
    seconds, megabytes, removed = stage_once(folder)
    print(f"a million documents: {seconds:.1f} CPU s, {megabytes:.0f} MB beyond the interpreter, {removed} removed")
    return [
        Figure("near_dedup_million_seconds", seconds, "CPU s"),
        Figure("near_dedup_million_memory", megabytes, "MB", goal=1000),
    ]


if __name__ == "__main__":
    main()

"""CPU seconds of `gristmill forget` and `gristmill curate --add` in % of those of a whole run of curation.

A made corpus (documents of 2 kB, some of them copies) in 100 raw files is curated as a whole. Then
- `forget_work`: 0.1 % of the documents, neighbours in one raw file that no other is a duplicate of, are forgotten;
- `forget_work_scattered`: 0.1 % drawn at random from all files are forgotten, so every shard is written again;
- `add_work`: a source of lower priority with 1 % more documents is added;
- `row_groups`: a shard is written in row groups of 100 documents, most of which a removal at random would leave as they
  are: bytes and CPU seconds, times those of the usual row groups.
The steps of a removal are given in % of its seconds by its log.
CPU seconds are of all processes, without those of a run on a few documents (start-up, the median of 3).
`*_identical` is 1 if the bytes of all files are those of one whole build: of both inputs, or with the tombstones from
the beginning; `--no-proof` leaves these builds out. There is no peer: datatrove, dolma and NeMo Curator curate
everything again."""

import argparse
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from measure import Figure, arguments, cpu_seconds, print_figures
from support.curation_inputs import made_texts, paragraphs
from support.curation_runs import STEP, timed

from gristmill.data_pipeline.annotate.tombstones import TOMBSTONES_NAME
from gristmill.data_pipeline.ledger.document_file import IDENTITY_FILE
from gristmill.foundation.checksums import drop_damaged
from gristmill.foundation.files import file_digest

PROGRAM = str(Path(sys.executable).with_name("gristmill"))
MEAN_BYTES, NUM_FILES, START_DOCUMENTS = 2000, 100, 60
FORGET_GOAL, ADD_GOAL = 5.0, 5.0
PARTS = ["forget", "scattered", "add", "row_groups"]
SHOWN_STEPS = 6  # of a removal, which take longest
GROUP_ROWS, USUAL_ROWS = 100, 1900
RECIPE = {
    "name": "grown",
    "seed": 1,
    "curate": {
        "languages": ["en"],
        "filters": ["gopher_repetition", {"c4": {"line_terminal_punctuation": None}}, "fineweb_quality"],
        "pii": {"email": "replace", "ip": "replace"},
    },
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--only", choices=PARTS, default=PARTS, nargs="+", help="what is measured")
    parser.add_argument("--work", type=Path, default=None, help="a folder for the input and the corpora, which stay")
    parser.add_argument(
        "--proof", action=argparse.BooleanOptionalAction, default=True, help="compare with whole builds"
    )
    options = parser.parse_args()
    documents = 20_000 if options.quick else options.documents
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        print_figures(measure(folder, options.data, documents, options.only, options.proof))


def measure(folder: Path, data: Path | None, documents: int, parts: Sequence[str], proof: bool) -> list[Figure]:
    raw, new = folder / "raw", folder / "new"
    write_raw(raw, new, data, documents)
    start_up = statistics.median(start_ups(folder))
    whole = curate(folder / "work", recipe_for(raw, "whole")) - start_up
    figures = [Figure("start_up_cpu", start_up, "s"), Figure("curate_whole_cpu", whole, "s")]
    before = snapshot(folder / "work", folder / "before")
    if "forget" in parts:
        figures += removal(folder, "forget_work", neighbours(before, documents), (whole, start_up), proof)
    if "scattered" in parts:
        figures += removal(folder, "forget_work_scattered", some_ids(before, documents), (whole, start_up), proof)
    if "row_groups" in parts:
        figures += row_groups(before / "curate")
    if "add" in parts:
        both = recipe_for(raw, "both", new)
        seconds = curate(before, both, "--add") - start_up
        figures.append(Figure("add_work", 100 * seconds / whole, "% of a whole run", goal=ADD_GOAL))
        if proof:
            curate(folder / "both", both)
            figures.append(Figure("add_identical", float(outputs(before) == outputs(folder / "both")), "of 1"))
    return figures


def start_ups(folder: Path) -> Iterator[float]:
    """CPU seconds of whole runs on few documents; the first one may compile kernels."""
    for number in range(3):
        yield curate(folder / f"start_work-{number}", recipe_for(folder / "start", "s"))


def removal(folder: Path, name: str, ids: Sequence[str], seconds: tuple[float, float], proof: bool) -> Iterator[Figure]:
    """seconds: of a whole run, and of the start-up."""
    whole, start_up = seconds
    work = snapshot(folder / "before", folder / name)
    (folder / "ids.txt").write_text("\n".join(ids))
    taken = run(folder, "forget", work, "--ids", folder / "ids.txt", "--workers", 1) - start_up
    yield Figure(name, 100 * taken / whole, "% of a whole run", goal=FORGET_GOAL)
    yield from steps(name, (folder / "log").read_text())
    if not proof:
        return
    other = folder / "other"
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    shutil.copy(work / TOMBSTONES_NAME, other / TOMBSTONES_NAME)
    curate(other, recipe_for(folder / "raw", "whole"))
    yield Figure(f"{name}_identical", float(outputs(work) == outputs(other)), "of 1")


def steps(name: str, log: str) -> Iterator[Figure]:
    """Steps by their seconds in a log, in % of those of all."""
    seconds: dict[str, float] = {}
    for match in STEP.finditer(log):
        seconds[match["step"]] = seconds.get(match["step"], 0.0) + float(match["seconds"])
    total = max(sum(seconds.values()), 1e-9)
    for step in sorted(seconds, key=seconds.__getitem__, reverse=True)[:SHOWN_STEPS]:
        yield Figure(f"{name}: {step}", 100 * seconds[step] / total, "% of its seconds")


def row_groups(corpus: Path) -> Iterator[Figure]:
    """The first shard in row groups of GROUP_ROWS, as times of those of USUAL_ROWS."""
    path = min(corpus.glob("documents/train/*.parquet"))
    for kind in ("documents", "signals"):
        table = pq.read_table(corpus / kind / "train" / path.name)
        usual, small = (written_in_groups(table, corpus.parent / "groups.parquet", n) for n in (USUAL_ROWS, GROUP_ROWS))
        for unit, ours, before in zip(("bytes", "write seconds", "read seconds"), small, usual, strict=True):
            yield Figure(f"row_groups_{kind}", ours / before, f"times the {unit}")


def written_in_groups(table: pa.Table, path: Path, rows: int) -> tuple[float, float, float]:
    """(bytes, CPU seconds to write, to read) of the table in row groups of so many rows, the least of three."""
    write = min(cpu_seconds(lambda: pq.write_table(table, path, rows, compression="zstd")) for _ in range(3))
    read = min(cpu_seconds(lambda: pq.ParquetFile(path).read(use_threads=False)) for _ in range(3))
    return float(path.stat().st_size), write, read


def write_raw(raw: Path, new: Path, data: Path | None, documents: int) -> None:
    """NUM_FILES raw files, one with 1 % more documents, and a small one for the start-up."""
    pool = paragraphs(data)
    texts = list(itertools.islice(made_texts(pool, sys.maxsize, MEAN_BYTES), documents * 101 // 100))
    added = len(texts) // 101
    for folder, part in ((raw, texts[added:]), (new, texts[:added]), (raw.parent / "start", texts[:START_DOCUMENTS])):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        files = NUM_FILES if folder == raw else 1
        for number in range(files):
            lines = (json.dumps({"text": text}) for text in part[number::files])
            (folder / f"{folder.name}-{number:03d}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def recipe_for(raw: Path, name: str, new: Path | None = None) -> Path:
    """new: of a second source, whose documents are removed where they repeat the first one's."""
    path = raw.parent / f"{name}.yaml"
    folders = {"s": raw} if new is None else {"s": raw, "added": new}
    sources = [
        {"name": source, "format": "jsonl", "paths": [f"{folder}/*.jsonl"], "priority": place}
        for place, (source, folder) in enumerate(folders.items(), start=1)
    ]
    path.write_text(json.dumps(RECIPE | {"sources": sources}))
    return path


def curate(work: Path, recipe: Path, *options: str) -> float:
    return run(work.parent, "curate", recipe, "--workdir", work, "--workers", 1, "--overwrite", *options)


def run(folder: Path, *command: object) -> float:
    """CPU seconds of a command of gristmill on one core."""
    usage, _ = timed([PROGRAM, *map(str, command)], 1, folder / "log")
    return usage.cpu_seconds


def snapshot(work: Path, target: Path) -> Path:
    """A copy of a work folder, in which hard links stay links and checksum files are those of the new files: in a
    folder that is not copied, no file is read only to see that it is whole."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", str(work), str(target)], check=True)
    drop_damaged(target / "cache", sys.exit, without_checksum=(IDENTITY_FILE,))
    return target


def some_ids(work: Path, documents: int) -> list[str]:
    ids = pq.read_table(work / "curate" / "ledger", columns=["doc_id"]).column("doc_id").to_pylist()
    return random.Random(4).sample(sorted(ids), max(documents // 1000, 1))


def neighbours(work: Path, documents: int) -> list[str]:
    """Neighbouring records of one raw file that are kept and have no duplicates."""
    columns = ["doc_id", "raw_digest", "record", "outcome", "duplicate_of"]
    rows = pq.read_table(work / "curate" / "ledger", columns=columns).to_pylist()
    copied = {row["duplicate_of"] for row in rows}
    digest = min(row["raw_digest"] for row in rows)
    kept = [row for row in rows if row["outcome"] == "kept" and row["doc_id"] not in copied]
    chosen = sorted((row["record"], row["doc_id"]) for row in kept if row["raw_digest"] == digest)
    return [doc_id for _, doc_id in chosen[: max(documents // 1000, 1)]]


def outputs(work: Path) -> dict[str, str]:
    """Digest of every file of the corpus, its manifest and tombstones too."""
    corpus = work / "curate"
    return {path.relative_to(corpus).as_posix(): file_digest(path) for path in corpus.rglob("*") if path.is_file()}


if __name__ == "__main__":
    main()

"""CPU seconds of one process: applying a new threshold to an annotated corpus, compared with annotating it.

`decide`: what the filters keep, by source (what a sweep of one threshold does). `redo`: the whole stage again with
another threshold, corpus and ledger written anew, deduplication off. Input: the documents of --data (default: the
shared corpora), repeated with seeded edits up to --megabytes and kept under build/decide for the next run. Annotating
is timed on a tenth as much; the whole is annotated by two workers, which takes most of the five minutes."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import orjson
from measure import Figure, arguments, cpu_seconds, print_figures
from text import documents

from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters.apply import apply_filters, apply_filters_to_files
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, annotated, curate
from gristmill.foundation.files import atomic_path
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    megabytes = 20 if options.quick else options.megabytes
    path = input_file(options.data, megabytes)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        engine, two = LocalEngine(1, Reporter.silent()), LocalEngine(2, Reporter.silent())
        source = text_source("text", path)
        tenth = text_source("tenth", input_file(options.data, megabytes // 10))
        little = text_source("little", input_file(options.data, 1))
        lock, tenth_lock, little_lock = (Lock(sources=tuple(resolve([one], engine))) for one in (source, tenth, little))
        cache = folder / "cache"
        plain = {"exact_dedup": None, "near_dedup": None}
        config = CurateConfig(filters=["gopher_quality", "gopher_repetition", "fineweb_quality"], **plain)
        other = CurateConfig(filters=[{"gopher_quality": {"min_words": 40}}, "gopher_repetition"], **plain)
        annotated([little], config, little_lock, cache, engine)  # kernels and the language model are loaded
        measuring = cpu_seconds(lambda: annotated([tenth], config, tenth_lock, cache, engine))
        measuring *= raw_bytes(lock) / raw_bytes(tenth_lock)
        tasks = [task for _, group in annotated([source], other, lock, cache, two) for task in group]
        two.close()  # its workers' CPU seconds are counted when they end, which must not be below
        deciding = cpu_seconds(lambda: apply_filters_to_files(tasks, engine, folder / "decided"))
        again = cpu_seconds(lambda: curate(CurationInputs([source], other, 1, lock, folder / "corpus", cache, engine)))
        written = sum(int(apply_filters(task).bytes.sum()) for task in tasks)
    print(f"{written / 1e6:.0f} MB of text in {len(tasks)} annotated files", file=sys.stderr)
    gigabytes = written / 1e9
    print_figures(
        [
            Figure("decide", deciding / gigabytes, "s/GB", measuring / gigabytes, "annotate", measuring / deciding, 20),
            Figure("redo", again / gigabytes, "s/GB", measuring / gigabytes, "annotate", measuring / again),
        ]
    )


def text_source(name: str, path: Path) -> SourceConfig:
    return SourceConfig(name=name, format="jsonl", paths=(str(path),))


def raw_bytes(lock: Lock) -> int:
    return sum(file.bytes for source in lock.sources for file in source.files)


def input_file(data: Path | None, megabytes: int) -> Path:
    """JSON lines of so much text, made at the first run."""
    name = "shared" if data is None else data.name
    path = Path(__file__).parent.parent / "build" / "decide" / f"{name}-{megabytes}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            repeated(temporary, documents(data, 40_000_000), megabytes * 1_000_000)
    return path


def repeated(path: Path, texts: list[str], num_bytes: int) -> int:
    """Writes the texts over and over, a word in fifty exchanged for another of the same text; returns bytes of text."""
    rng = np.random.default_rng(0)
    written = 0
    with path.open("wb") as file:
        while written < num_bytes:
            for text in texts:
                words = text.split(" ")
                count = len(words) // 50
                for to, from_ in rng.integers(len(words), size=(count, 2)):
                    words[to] = words[from_]
                edited = " ".join(words)
                file.write(orjson.dumps({"text": edited}) + b"\n")
                written += len(edited.encode())
                if written >= num_bytes:
                    break
    return written


if __name__ == "__main__":
    main()

"""datatrove's FineWeb example pipeline over a folder, by its LocalPipelineExecutor: runs in datatrove's environment.

argv: a JSON object: source, work (folders), format (jsonl, parquet or warc), tasks, languages, language_model (a path),
stop_words (false leaves that rule out). Prints {"cpu_seconds", "seconds", "kept": [id], "removed": {id: reason}}.

As examples/fineweb.py of datatrove 0.10.1, with these differences: no URL filter and no token counter (gristmill is
compared without them too), documents of JSONL and Parquet are not extracted, and the language filter loads the model
file that it is given, because lid.176.bin is a download."""

import json
import os
import sys
import time
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    LanguageFilter,
)
from datatrove.pipeline.formatters import PIIFormatter
from datatrove.pipeline.readers import JsonlReader, ParquetReader, WarcReader
from datatrove.pipeline.writers.jsonl import JsonlWriter
from datatrove.utils import lid
from datatrove.utils.hashing import HashConfig

os.environ["HF_HUB_OFFLINE"] = "1"

READERS = {"jsonl": JsonlReader, "parquet": ParquetReader, "warc": WarcReader}
MINHASH = MinhashConfig(
    hash_config=HashConfig(hash_fc="sha1", precision=64), num_buckets=14, hashes_per_bucket=8, n_grams=5
)


def run(options: dict) -> None:
    work, tasks = Path(options["work"]), options["tasks"]
    first, second = work / "filtered", work / "minhash"

    def excluded(name: str) -> JsonlWriter:
        return JsonlWriter(str(work / "removed" / name))

    stop_words = {} if options["stop_words"] else {"min_stop_words": None}
    filtering = [
        READERS[options["format"]](options["source"]),
        *([Trafilatura(favour_precision=True)] if options["format"] == "warc" else []),
        LanguageFilter(options["languages"], exclusion_writer=excluded("language")),
        GopherRepetitionFilter(exclusion_writer=excluded("gopher_repetition")),
        GopherQualityFilter(exclusion_writer=excluded("gopher_quality"), **stop_words),
        C4QualityFilter(filter_no_terminal_punct=False, exclusion_writer=excluded("c4")),
        FineWebQualityFilter(exclusion_writer=excluded("fineweb_quality")),
        JsonlWriter(str(first)),
    ]
    stages = [
        (filtering, tasks),
        ([JsonlReader(str(first)), MinhashDedupSignature(str(second / "signatures"), config=MINHASH)], tasks),
        ([MinhashDedupBuckets(str(second / "signatures"), str(second / "buckets"), config=MINHASH)], 14),
        ([MinhashDedupCluster(str(second / "buckets"), str(second / "removed"), config=MINHASH)], 1),
        (
            [
                JsonlReader(str(first)),
                MinhashDedupFilter(str(second / "removed"), exclusion_writer=excluded("minhash")),
                PIIFormatter(),
                JsonlWriter(str(work / "kept")),
            ],
            tasks,
        ),
    ]
    for number, (pipeline, num_tasks) in enumerate(stages):
        workers = min(options["tasks"], num_tasks)
        logs = str(work / f"logs{number}")
        # fork: the workers inherit the language model's path
        LocalPipelineExecutor(pipeline, num_tasks, workers, logs, start_method="fork").run()


def documents(folder: Path) -> list[Document]:
    if not folder.is_dir():
        return []
    return list(JsonlReader(str(folder)).run())


def main() -> None:
    options = json.loads(sys.argv[1])
    lid.cached_asset_path_or_download = lambda *_, **__: options["language_model"]
    before, started = sum(os.times()[:4]), time.monotonic()
    run(options)
    seconds, cpu_seconds = time.monotonic() - started, sum(os.times()[:4]) - before
    removed = {}
    for folder in sorted((Path(options["work"]) / "removed").iterdir()):
        for document in documents(folder):
            reason = document.metadata.get("filter_reason")
            removed[document.id] = folder.name if reason is None else f"{folder.name}.{reason}"
    kept = [document.id for document in documents(Path(options["work"]) / "kept")]
    print(json.dumps({"cpu_seconds": cpu_seconds, "seconds": seconds, "kept": kept, "removed": removed}))


if __name__ == "__main__":
    main()

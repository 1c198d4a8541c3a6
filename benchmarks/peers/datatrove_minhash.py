"""datatrove's four MinHash stages over a folder of Parquet: input work bands rows -> {"cpu_seconds", "kept"}."""

import json
import os
import sys
from pathlib import Path

import pyarrow.parquet as pq
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import ParquetWriter
from datatrove.utils.word_tokenizers import load_word_tokenizer

os.environ["HF_HUB_OFFLINE"] = "1"


def run(source: Path, work: Path, bands: int, rows: int) -> None:
    config = MinhashConfig(n_grams=5, num_buckets=bands, hashes_per_bucket=rows)
    signatures, buckets, removed = str(work / "signatures"), str(work / "buckets"), str(work / "removed")
    reader = ParquetReader(str(source), id_key="id")
    stages = [
        [reader, MinhashDedupSignature(output_folder=signatures, config=config)],
        [MinhashDedupBuckets(input_folder=signatures, output_folder=buckets, config=config)],
        [MinhashDedupCluster(input_folder=buckets, output_folder=removed, config=config)],
        [reader, MinhashDedupFilter(input_folder=removed), ParquetWriter(str(work / "kept"))],
    ]
    for number, pipeline in enumerate(stages):
        tasks = bands if number == 1 else 1
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=str(work / f"logs{number}")).run()


def cpu() -> float:
    return sum(os.times()[:4])


def main() -> None:
    source, work, bands, rows = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    load_word_tokenizer("eng").word_tokenize("warm up")
    before = cpu()
    run(source, work, bands, rows)
    seconds = cpu() - before
    kept = sum(pq.read_metadata(path).num_rows for path in (work / "kept").glob("*.parquet"))
    print(json.dumps({"cpu_seconds": seconds, "kept": kept}))


if __name__ == "__main__":
    main()

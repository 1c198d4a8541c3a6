"""text-dedup's MinHash over a folder of Parquet: input work bands rows -> {"cpu_seconds", "kept"}."""

import json
import os
import sys
from pathlib import Path

import datasets
from text_dedup.minhash import main as deduplicate

os.environ["HF_HUB_OFFLINE"] = "1"


def cpu() -> float:
    return sum(os.times()[:4])


def main() -> None:
    source, work, bands, rows = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    files = sorted(str(path) for path in Path(source).glob("*.parquet"))
    arguments = ["--path", "parquet", "--data_files", *files[:1], "--split", "train", "--column", "text"]
    arguments += ["--cache_dir", str(work / "cache"), "--output", str(work / "kept"), "--ngram", "5", "--num_proc", "1"]
    arguments += ["--num_perm", str(bands * rows), "--b", str(bands), "--r", str(rows)]
    before = cpu()
    deduplicate(arguments, standalone_mode=False)
    seconds = cpu() - before
    print(json.dumps({"cpu_seconds": seconds, "kept": len(datasets.load_from_disk(str(work / "kept")))}))


if __name__ == "__main__":
    main()

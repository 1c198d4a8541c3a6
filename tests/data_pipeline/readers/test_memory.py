"""What a worker takes beyond its libraries, as a function of max_record_bytes (docs/curation.md has the formula)."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from reader_memory import COMPRESSORS, RECORDS

from tests.support.held_memory import kinds_of_records

# Blocks, and bytes for a byte of a batch: objects of one field in metadata, the worst, are Python's at 29 a byte.
FIXED_BYTES, BYTES_PER_BYTE = 100_000_000, 30
BATCH_BYTES = 8_000_000  # a batch goes on until it has that many characters: up to that and one record more
IN_CI = {200_000: ("jsonl.lz4", "objects.gz", "parquet"), 1_000_000: ("jsonl.zst",)}
SLOW_LIMITS = (200_000, 1_000_000, 4_000_000, 16_000_000)
ROOT = Path(__file__).parents[3]


def check(folder: Path, kinds: dict[int, tuple[str, ...]]) -> None:
    command = [sys.executable, "-m", "tests.support.reader_memory", str(folder), json.dumps(kinds)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert run.returncode == 0, run.stderr[-3000:]
    for text, found in json.loads(run.stdout.splitlines()[-1]).items():
        limit, bound = int(text), FIXED_BYTES + BYTES_PER_BYTE * (BATCH_BYTES + int(text))
        assert {kind: grown for kind, grown in found.items() if grown > bound} == {}, bound
        assert min(found.values()) > limit  # the records were held: the measurement measures


def test_peak_memory_is_bounded_by_the_limit(tmp_path):
    check(tmp_path / "files", IN_CI)


@pytest.mark.slow
@pytest.mark.parametrize("limit", SLOW_LIMITS)
def test_peak_memory_of_every_kind_is_bounded_by_the_limit(limit, tmp_path):
    check(tmp_path / "files", {limit: tuple(RECORDS)})


def damaged_files(folder: Path, suffix: str) -> list[Path]:
    compressor, rng = COMPRESSORS[suffix](), random.Random(1)
    lines = b"".join(b'{"text": "%x"}\n' % rng.getrandbits(200) for _ in range(1000))
    packed = compressor.compress(lines) + compressor.flush()
    paths = [folder / f"{name}.jsonl{suffix}" for name in ("truncated", "damaged")]
    paths[0].write_bytes(packed[: len(packed) // 2])
    paths[1].write_bytes(packed + b"\xff" * 20)
    return paths


def test_reading_damaged_files_leaks_nothing(tmp_path):
    """pyarrow's `read` of lz4 never freed the 64 KiB of a read that failed."""
    paths = [path for suffix in COMPRESSORS if suffix for path in damaged_files(tmp_path, suffix)]
    assert [kinds_of_records(path)[-1] for path in paths] == ["truncated", "damaged"] * (len(paths) // 2)
    command = [sys.executable, "-m", "tests.support.held_memory", *map(str, paths)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for path, held in json.loads(run.stdout).items():
        # a leak grows in each round (lz4: 0.8 MB), the allocator's reserve only in some
        assert min(after - before for before, after in pairwise(held)) < 400_000, path

"""What a worker takes beyond its libraries, as a function of max_record_bytes (docs/curation.md has the formula)."""

import json
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from reader_memory import COMPRESSORS, RECORDS

from gristmill.data_pipeline.readers.document import Unreadable
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

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


def kinds_of_records(path: Path) -> list[str]:
    source = SourceConfig(name="s", format="jsonl", paths=(str(path),))
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    found = read_range(FileRange(file, str(path)), source)
    return [one.kind if isinstance(one, Unreadable) else "read" for one in found]


@pytest.mark.parametrize("suffix", [suffix for suffix in COMPRESSORS if suffix])
def test_reading_damaged_files_leaks_nothing(suffix, tmp_path):
    """pyarrow's `read` of lz4 never freed the 64 KiB of a read that failed."""
    compressor, rng = COMPRESSORS[suffix](), random.Random(1)
    lines = b"".join(b'{"text": "%x"}\n' % rng.getrandbits(200) for _ in range(3000))
    packed = compressor.compress(lines) + compressor.flush()
    paths = [tmp_path / f"{name}.jsonl{suffix}" for name in ("truncated", "damaged")]
    paths[0].write_bytes(packed[: len(packed) // 2])
    paths[1].write_bytes(packed + b"\xff" * 20)
    assert [kinds_of_records(path)[-1] for path in paths] == ["truncated", "damaged"]

    def read_often(times: int) -> int:
        for _ in range(times):
            for path in paths:
                kinds_of_records(path)
        return psutil.Process().memory_info().rss

    held = [read_often(12) for _ in range(4)]
    # a leak grows in each round (lz4: 1.4 MB), the allocator's reserve only in some
    assert min(after - before for before, after in pairwise(held)) < 500_000

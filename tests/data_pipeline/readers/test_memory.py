"""What reading and annotating takes, in a process of its own."""

import subprocess
import sys
import textwrap

import zstandard

# What a worker takes beyond its libraries (docs/curation.md has the formula): blocks, and 30 bytes for a byte
# of a batch of ASCII text, where one record of 16 MB took 306 MB, 19 bytes for a byte.
FIXED_BYTES, BYTES_PER_BYTE = 100_000_000, 30

SCRIPT = """
import resource, sys
from gristmill.data_pipeline.annotate.annotate import AnnotateConfig, annotate_all, annotation_tasks
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.progress import Reporter
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.annotate.normalize import NormalizeConfig
from pathlib import Path

def annotate(path, limit):
    source = SourceConfig(name="s", format="jsonl", paths=(path,), max_record_bytes=limit)
    engine = LocalEngine(1, Reporter.silent())
    config = AnnotateConfig(normalize=NormalizeConfig(), words="unicode", language_id=None, edits=())
    annotate_all(annotation_tasks(source, resolve(source, engine), config, Path(path).parent / "cache", engine), engine)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

folder, limit = sys.argv[1], int(sys.argv[2])
annotate(folder + "/small.jsonl", limit)
before = peak()
annotate(folder + "/bomb.jsonl.zst", limit)
annotate(folder + "/large.jsonl", limit)
print(peak() - before)
"""


def test_a_bomb_and_records_of_the_limit_take_what_the_limit_allows(tmp_path):
    limit = 2_000_000
    (tmp_path / "small.jsonl").write_bytes(b'{"text": "a few words"}\n')
    bomb = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(10_000_000)
    packed = [bomb.compress(b'{"text": "first"}\n'), *(bomb.compress(zeros) for _ in range(150))]
    packed += [bomb.compress(b'\n{"text": "last"}\n'), bomb.flush()]
    (tmp_path / "bomb.jsonl.zst").write_bytes(b"".join(packed))
    assert sum(map(len, packed)) < 200_000
    words = b"the mill stands by the river "
    line = b'{"text": "' + words * (limit // len(words) - 1) + b'"}\n'
    (tmp_path / "large.jsonl").write_bytes(line * 20)
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(limit)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    # a batch goes on until it has 8 million characters: up to that and one record more
    assert int(run.stdout) < FIXED_BYTES + BYTES_PER_BYTE * (8_000_000 + limit)

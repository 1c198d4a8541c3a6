"""Memory that a process of its own holds after rounds of reading files, damaged ones among them. As a program: PATH...

Prints {PATH: [bytes after each round]}. In the process of other tests the allocator's reserve grows in every round."""

import json
import sys
from pathlib import Path

import psutil

from gristmill.data_pipeline.readers.document import Unreadable
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

ROUNDS, READS = 10, 12


def kinds_of_records(path: Path) -> list[str]:
    source = SourceConfig(name="s", format="jsonl", paths=(str(path),))
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    found = read_range(FileRange(file, str(path)), source)
    return [one.kind if isinstance(one, Unreadable) else "read" for one in found]


def held_after_rounds(path: Path) -> list[int]:
    held = []
    for _ in range(ROUNDS):
        for _ in range(READS):
            kinds_of_records(path)
        held.append(psutil.Process().memory_info().rss)
    return held


if __name__ == "__main__":
    print(json.dumps({path: held_after_rounds(Path(path)) for path in sys.argv[1:]}))

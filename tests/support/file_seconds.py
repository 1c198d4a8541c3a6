"""Seconds of each test file, recorded from `pytest --durations=0`, so that long files start first.

.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=0 tests > LOG
.venv/bin/python tests/support/file_seconds.py LOG"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

RECORDED = Path(__file__).with_name("file_seconds.json")
DURATION = re.compile(r"^(?P<seconds>[\d.]+)s (?:setup|call|teardown) +(?P<file>tests/[^:]+)::", re.M)
Test = TypeVar("Test")


def seconds_of_files(log: str) -> dict[str, int]:
    """'1.60s call tests/test_a.py::test_x' -> {'tests/test_a.py': 2}: whole seconds; files under one are left out."""
    found: dict[str, float] = defaultdict(float)
    for line in DURATION.finditer(log):
        found[line["file"]] += float(line["seconds"])
    return {file: round(seconds) for file, seconds in sorted(found.items()) if round(seconds)}


def longest_first(
    tests: Sequence[Test],
    file_of: Callable[[Test], str],
    is_parallel: Callable[[Test], bool],
    seconds: Mapping[str, int],
) -> list[Test]:
    """The tests of a file together, files by falling seconds. Files whose tests run in many processes alternate with
    the others, because two of them at once would compete for the same cores."""
    files: dict[str, list[Test]] = defaultdict(list)
    for test in tests:
        files[file_of(test)].append(test)
    groups = sorted(files.items(), key=lambda group: -seconds.get(group[0], 0))
    parallel = [group for _, group in groups if any(map(is_parallel, group))]
    others = [group for _, group in groups if not any(map(is_parallel, group))]
    alternating = chain.from_iterable(zip_longest(parallel, others, fillvalue=[]))
    return list(chain.from_iterable(alternating))


if __name__ == "__main__":
    recorded = seconds_of_files(Path(sys.argv[1]).read_text())
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{RECORDED}: {len(recorded)} files, {sum(recorded.values())} s")

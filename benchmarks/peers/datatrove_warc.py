"""datatrove's WARC reader and Trafilatura extractor over one file: runs in datatrove's environment.

argv: the WARC file. Prints {"cpu_seconds", "pages"}; the seconds are without the imports, and with the process that
datatrove extracts in."""

import json
import resource
import sys
from pathlib import Path

from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.readers import WarcReader


def cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    path = Path(sys.argv[1])
    import trafilatura  # noqa: F401  (datatrove imports it at the first page)

    started = cpu_seconds()
    reader = WarcReader(str(path.parent), glob_pattern=path.name)
    pages = sum(1 for _ in Trafilatura().run(reader.run()))
    print(json.dumps({"cpu_seconds": cpu_seconds() - started, "pages": pages}))


if __name__ == "__main__":
    main()

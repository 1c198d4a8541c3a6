"""robots.txt files of hosts as dated inputs: whether a crawler may fetch a document's address, applied after the crawl.

A file is WARC (the responses of robots.txt addresses, as Common Crawl publishes them) or JSON lines with `host`, `date`
(2025-01-31) and `robots`, the text; `status`, the HTTP status, is 200 where it is left out. Of a host the newest record
counts. Rules are those of RFC 9309 as Protego reads them: status 4xx allows everything, other failures say nothing."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from io import BytesIO
from typing import NamedTuple

import orjson
from protego import Protego
from pydantic import Field

from gristmill.data_pipeline.readers.compression import Damaged, Malformed, blocks
from gristmill.data_pipeline.readers.document import excerpt, split_url
from gristmill.data_pipeline.readers.files import open_raw
from gristmill.data_pipeline.readers.warc import read_responses
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError

# Crawlers whose operators say that they collect training data; a document is disallowed if one of them is.
AI_AGENTS = (
    "GPTBot", "CCBot", "ClaudeBot", "anthropic-ai", "Google-Extended", "Applebot-Extended", "Bytespider",
    "Meta-ExternalAgent", "Amazonbot", "cohere-ai", "Diffbot",
)  # fmt: skip
DAY = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
MAX_BYTES = 512_000  # of a robots.txt file; RFC 9309 asks crawlers to read 500 KiB
PARSED_HOSTS = 4_096  # kept in memory; documents of a host mostly follow each other


class PinnedRobots(Config):
    """digests: of the files, sorted; they identify the rules. paths: of the files, not part of the fingerprint."""

    digests: tuple[str, ...]
    agents: tuple[str, ...]
    paths: tuple[str, ...] = Field(exclude=True)


class RobotsRecord(NamedTuple):
    """A robots.txt file on a day, YYYY-MM-DD. status: of HTTP."""

    host: str
    day: str
    status: int
    text: str


class RobotsRules:
    """The newest robots.txt of each host, asked for some crawlers."""

    def __init__(self, records: Sequence[RobotsRecord], agents: Sequence[str]):
        self.agents = tuple(agents)
        newest: dict[str, RobotsRecord] = {}
        for record in records:
            known = newest.get(record.host)
            if known is None or (record.day, record.status, record.text) > (known.day, known.status, known.text):
                newest[record.host] = record
        self._newest = newest
        self._parsed = lru_cache(PARSED_HOSTS)(self._parse)

    def disallows(self, url: str) -> bool | None:
        """Whether one of the crawlers may not fetch the address; None where no robots.txt of its host is known."""
        host, _ = split_url(url)
        record = self._newest.get(host)
        if record is None or not (record.status == 200 or 400 <= record.status < 500):
            return None
        if record.status != 200:
            return False
        rules = self._parsed(host)
        return not all(rules.can_fetch(url, agent) for agent in self.agents)

    def _parse(self, host: str) -> Protego:
        return Protego.parse(self._newest[host].text)


def read_robots(path: str) -> tuple[str, list[RobotsRecord]]:
    """(SHA-256 of the stored file, its records). Raises InputError naming the record of what cannot be read, and for a
    file without records."""
    with open_raw(path) as file:
        raw = file.read()
    try:
        head = next(iter(blocks(BytesIO(raw), path)), b"")
        records = list(_of_warc(raw, path) if head.startswith(b"WARC/") else _of_lines(raw, path))
    except (Damaged, Malformed) as damage:
        raise InputError(f"{path}: {damage}; get the file again") from damage
    if not records:
        raise InputError(
            f"{path}: no robots.txt in it; name WARC files of them, or JSON lines of host, date and robots"
        )
    return hashlib.sha256(raw).hexdigest(), records


def rules_of_robots(pinned: PinnedRobots) -> RobotsRules:
    """Raises InputError if a file is not the one in the lock."""
    records: list[RobotsRecord] = []
    for path in pinned.paths:
        digest, of_file = read_robots(path)
        if digest not in pinned.digests:
            raise InputError(f"{path}: the robots.txt files changed during the run; run again")
        records += of_file
    return RobotsRules(records, pinned.agents)


def _of_lines(raw: bytes, path: str) -> Iterator[RobotsRecord]:
    for number, line in enumerate(b"".join(blocks(BytesIO(raw), path)).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = orjson.loads(line)
            host, day, text, status = (fields.get(name, 200) for name in ("host", "date", "robots", "status"))
            if not (isinstance(host, str) and host and isinstance(text, str) and isinstance(status, int)):
                raise ValueError("host and robots are text, status a number")
            yield RobotsRecord(split_url(host)[0], _day(day), status, text)
        except (ValueError, AttributeError) as error:
            raise InputError(
                f'{path}: line {number}: {error}: {excerpt(line, 60)!r}; write {{"host": "mill.org", "date": '
                '"2025-01-31", "robots": "User-agent: ..."}'
            ) from error


def _of_warc(raw: bytes, path: str) -> Iterator[RobotsRecord]:
    for header, status, body in read_responses(BytesIO(raw), path, MAX_BYTES):
        host, address = split_url(header.get("warc-target-uri", "").strip("<>"))
        if host and address.partition("?")[0].rstrip("/") == "/robots.txt":
            try:
                day = _day(header.get("warc-date", ""))
            except ValueError as error:
                raise InputError(
                    f"{path}: robots.txt of {host}: {error} in its WARC-Date; get the file again"
                ) from error
            yield RobotsRecord(host, day, status, body.decode("utf-8", "replace"))


def _day(value: object) -> str:
    """The day of a date or time. Raises ValueError if there is none."""
    match = DAY.match(value) if isinstance(value, str) else None
    if match is None or not (1 <= int(match[2]) <= 12 and 1 <= int(match[3]) <= 31):
        raise ValueError(f"no date such as 2025-01-31 but {excerpt(str(value), 30)!r}")
    return match[0]

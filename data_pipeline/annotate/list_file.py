"""Word lists, URL lists and robots.txt files that a recipe names: read, checked and locked by digest like raw files.

UTF-8 text with one entry per line; blank lines and lines that begin with `#` are ignored, white space at both ends of a
line is stripped. A compressed file is read by its suffix (.gz .zst .bz2 .xz)."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from io import BytesIO
from typing import NamedTuple

import orjson
from protego import Protego
from pydantic import Field

from gristmill.data_pipeline.readers.compression import Damaged, Malformed, blocks
from gristmill.data_pipeline.readers.document import excerpt, split_url
from gristmill.data_pipeline.readers.files import matching, open_raw
from gristmill.data_pipeline.readers.warc import read_responses
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, character_table
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import LockedSource, RawFile, in_canonical_order

# robots.txt files of hosts as dated inputs: whether a crawler may fetch a document's address, applied after the crawl.
#
# A file is WARC (the responses of robots.txt addresses, as Common Crawl publishes them) or JSON lines with `host`,
# `date` (2025-01-31) and `robots`, the text; `status`, the HTTP status, is 200 where it is left out. Of a host the
# newest record counts. Rules are those of RFC 9309 as Protego reads them: status 4xx allows everything, other failures
# say nothing.


# Crawlers whose operators say that they collect training data; a document is disallowed if one of them is.
AI_AGENTS = (
    "GPTBot", "CCBot", "ClaudeBot", "anthropic-ai", "Google-Extended", "Applebot-Extended", "Bytespider",
    "Meta-ExternalAgent", "Amazonbot", "cohere-ai", "Diffbot",
)  # fmt: skip
DAY = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
MAX_BYTES = 512_000  # of a robots.txt file; RFC 9309 asks crawlers to read 500 KiB
PARSED_HOSTS = 4_096  # kept in memory; documents of a host mostly follow each other


class LockedRobots(Config):
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


def rules_of_robots(locked: LockedRobots) -> RobotsRules:
    """Raises InputError if a file is not the one in the lock."""
    records: list[RobotsRecord] = []
    for path in locked.paths:
        digest, of_file = read_robots(path)
        if digest not in locked.digests:
            raise InputError(f"{path}: the robots.txt files changed during the run; run again")
        records += of_file
    return RobotsRules(records, locked.agents)


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


DATE_COMMENT = re.compile(rb"^[ \t]*#[ \t]*date:[ \t]*(\d{4}-\d{2}-\d{2})[ \t\r]*$", re.MULTILINE)


class ListsConfig(Config):
    """Files or globs of each list. badwords: words and phrases; blocked_urls, opt_outs: hosts and URL prefixes; robots:
    robots.txt files of hosts.

    Paths are not part of the fingerprint: the lock holds the files' digests, under names such as `lists.badwords` and
    `lists.blocked_urls`."""

    badwords: tuple[str, ...] = Field(default=(), json_schema_extra={"execution": True})
    blocked_urls: tuple[str, ...] = Field(default=(), json_schema_extra={"execution": True})
    opt_outs: tuple[str, ...] = Field(
        default=(),
        description="hosts and URL prefixes whose owners reserve their rights; a comment `# date: 2025-01-31` dates it",
        json_schema_extra={"execution": True, "omit_default": True},
        exclude_if=lambda paths: not paths,
    )
    robots: tuple[str, ...] = Field(
        default=(),
        description="robots.txt files of hosts, in WARC or in JSON lines of host, date and robots",
        json_schema_extra={"execution": True, "omit_default": True},
        exclude_if=lambda paths: not paths,
    )
    robots_agents: tuple[str, ...] = Field(
        default=AI_AGENTS,
        min_length=1,
        description="crawlers that robots.txt is asked for; a document is disallowed if one of them is",
        json_schema_extra={"omit_default": True},
        exclude_if=lambda agents: agents == AI_AGENTS,
    )

    def paths(self) -> dict[str, tuple[str, ...]]:
        """The files or globs of each list that the recipe has."""
        names = ("badwords", "blocked_urls", "opt_outs", "robots")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class LockedList(Config):
    """digests: of the files, sorted; they identify the list. paths: of the files, not part of the fingerprint."""

    digests: tuple[str, ...]
    paths: tuple[str, ...] = Field(exclude=True)


def lock_lists(lists: ListsConfig) -> tuple[LockedSource, ...]:
    """Pin each list of the recipe as a source of the lock.

    Raises InputError for a glob that matches nothing, a file that cannot be read or has no entries."""
    locked_lists = []
    for name, patterns in lists.paths().items():
        files = [_raw_file(base, location, name) for base, location in _located(patterns)]
        request = {"format": "list", "paths": list(patterns)}
        locked_lists.append(LockedSource(name=f"lists.{name}", request=request, files=in_canonical_order(files)))
    return tuple(locked_lists)


def list_days(lists: ListsConfig, name: str) -> list[tuple[str, str, str]]:
    """(SHA-256, first day, last day) of each file of `opt_outs` or `robots`. Raises InputError as `lock_lists` does."""
    days = []
    for _, location in _located(lists.paths().get(name, ())):
        if name == "robots":
            digest, records = read_robots(location)
            days.append((digest, min(record.day for record in records), max(record.day for record in records)))
        else:
            day = list_day(location)
            days.append((_digest(_raw(location)), day, day))
    return days


def list_day(path: str) -> str:
    """The day of a list, from its comment `# date: 2025-01-31`. Raises InputError if it has none."""
    match = DATE_COMMENT.search(b"".join(blocks(BytesIO(_raw(path)), path)))
    if match is None:
        raise InputError(
            f"{path}: no date; add a comment such as `# date: 2025-01-31`, the day on which the list was made"
        )
    return match[1].decode()


def list_digests(patterns: Sequence[str]) -> LockedList:
    """The list with its files' current digests; their content is not parsed."""
    paths = tuple(location for _, location in _located(patterns))
    return LockedList(digests=tuple(sorted(_digest(_raw(path)) for path in paths)), paths=paths)


def read_locked_list(locked: LockedList) -> tuple[str, ...]:
    """The sorted unique entries of the list's files. Raises InputError if a file is not the one in the lock."""
    values: set[str] = set()
    for path in locked.paths:
        digest, listed = read_list(path)
        if digest not in locked.digests:
            raise InputError(f"{path}: the list changed during the run; run again")
        values.update(listed)
    return tuple(sorted(values))


def read_list(path: str) -> tuple[str, tuple[str, ...]]:
    """Return (SHA-256 of the stored file, its entries in order).

    Raises InputError that names file and line for invalid UTF-8, and for a file without entries."""
    raw = _raw(path)
    try:
        lines = b"".join(blocks(BytesIO(raw), path)).split(b"\n")
    except Damaged as damage:
        raise InputError(f"{path}: {damage}; get the list again") from damage
    listed = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: line {number} is not UTF-8; a list is plain text, one entry per line") from error
        if entry and not entry.startswith("#"):
            listed.append(entry)
    if not listed:
        raise InputError(f"{path}: the list is empty; write one entry per line, or remove the file from curate.lists")
    return _digest(raw), tuple(listed)


def _located(patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, location) of every file, each location once."""
    locations = {location: name for pattern in patterns for name, location in sorted(matching(pattern))}
    return [(name, location) for location, name in locations.items()]


def _raw_file(name: str, location: str, list_name: str) -> RawFile:
    """Reads and checks the file."""
    digest = read_robots(location)[0] if list_name == "robots" else read_list(location)[0]
    if list_name == "opt_outs":
        list_day(location)
    return RawFile(name=name, bytes=len(_raw(location)), sha256=digest)


def _raw(path: str) -> bytes:
    with open_raw(path) as file:
        return file.read()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


# Counts of listed words and phrases in a text; C4 drops a page with one of them.
#
# A phrase matches case-insensitively, any white space for white space, if no letter, digit or `_` directly precedes
# or follows it: `ass` does not match in `class`. There is no such condition on a side where the phrase has a
# character of a script written without spaces (Han, kana, Thai ...) or a character that is not part of a word.

_WORD = re.compile(r"\w+")


class BadWords:
    """A compiled list of phrases. A text is split into words once, whatever the length of the list."""

    def __init__(self, phrases: Iterable[str]):
        lowered = sorted({" ".join(phrase.lower().split()) for phrase in phrases})
        self._single: set[str] = set()
        self._by_first: dict[str, list[re.Pattern[str]]] = {}
        self._anywhere: list[re.Pattern[str]] = []
        for phrase in lowered:
            first = _WORD.match(phrase)
            if first is None or _is_free(phrase[0]) or _is_free(phrase[first.end() - 1]):
                self._anywhere.append(_pattern(phrase))
            elif first.end() == len(phrase):
                self._single.add(phrase)
            else:
                self._by_first.setdefault(first[0], []).append(_pattern(phrase))

    def count(self, text: str) -> int:
        """Number of matches; two phrases that start at the same position count twice.

        ["red", "red mill"]: "Red mill, red door" -> 3."""
        lowered = text.lower()
        num_hits = sum(1 for pattern in self._anywhere for _ in pattern.finditer(lowered))
        single, by_first = self._single, self._by_first
        if not by_first:
            return num_hits + sum(word in single for word in _WORD.findall(lowered))
        for match in _WORD.finditer(lowered):
            word = match[0]
            num_hits += word in single
            for pattern in by_first.get(word, ()):
                num_hits += pattern.match(lowered, match.start()) is not None
        return num_hits


def _pattern(phrase: str) -> re.Pattern[str]:
    body = r"\s+".join(map(re.escape, phrase.split(" ")))
    before = "" if _is_free(phrase[0]) else r"(?<!\w)"
    after = "" if _is_free(phrase[-1]) else r"(?!\w)"
    return re.compile(before + body + after)


def _is_free(character: str) -> bool:
    """Whether no word boundary is needed at this character: it is not a word character, or its script has no spaces."""
    return not re.match(r"\w", character) or bool(character_table()[ord(character)] & IDEOGRAPH)


# Matching of URLs against a list of blocked hosts and URL prefixes.
#
# An entry without a slash is a host: it blocks the host and every host below it (`example.com` blocks
# `www.example.com`, not `badexample.com`). An entry with a slash is a URL prefix (`example.com/forum/` blocks
# everything below that folder, on that host only). The scheme, `user@`, the port and the case of the host are
# ignored.


class BlockedUrls:
    def __init__(self, entries: Iterable[str]):
        self._hosts: set[str] = set()
        self._prefixes: dict[str, list[str]] = {}
        for entry in entries:
            host, path = split_url(entry)
            if path:
                self._prefixes.setdefault(host, []).append(path)
            else:
                self._hosts.add(host)

    def blocks(self, url: str) -> bool:
        """Whether the URL is on the list; False for an empty URL."""
        host, path = split_url(url)
        if not host:
            return False
        if any(path.startswith(prefix) for prefix in self._prefixes.get(host, ())):
            return True
        labels = host.split(".")
        return any(".".join(labels[first:]) in self._hosts for first in range(len(labels)))

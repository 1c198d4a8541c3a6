"""robots.txt files as dated inputs: the newest one counts, and a curation removes by language what it disallows."""

import gzip
import json

import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.annotate.list_file import (
    ListsConfig,
    RobotsRecord,
    RobotsRules,
    list_days,
    lock_lists,
    read_robots,
)
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from tests.support.corpora import prose, write_jsonl

GERMAN = "Der Fluss treibt die Mühle, und der Müller mahlt das Korn für das ganze Dorf.\n" * 12


def record(text: str, day: str = "2025-01-31", status: int = 200, host: str = "mill.org") -> RobotsRecord:
    return RobotsRecord(host, day, status, text)


@pytest.mark.parametrize(
    ("text", "path", "disallowed"),
    [
        ("User-agent: *\nDisallow: /", "/a", True),
        ("User-agent: GPTBot\nDisallow: /private/\n", "/private/a", True),
        ("User-agent: GPTBot\nDisallow: /private/\n", "/a", False),
        ("User-agent: Other\nDisallow: /", "/a", False),
        ("User-agent: *\nDisallow: /\nAllow: /open/", "/open/a", False),  # the longest rule (RFC 9309, 2.2.2)
        ("User-agent: *\nDisallow: /*.pdf$", "/a.pdf", True),
        ("User-agent: *\nDisallow: /\n\nUser-agent: GPTBot\nUser-agent: CCBot\nAllow: /", "/a", False),
        ("User-agent: CCBot\nDisallow: /", "/a", True),  # one of the crawlers is enough
        ("", "/a", False),
    ],
)
def test_rules_of_rfc_9309(text, path, disallowed):
    rules = RobotsRules([record(text)], ["GPTBot", "CCBot"])
    assert rules.disallows(f"https://MILL.org:443{path}") is disallowed
    assert rules.disallows(f"https://www.mill.org{path}") is None  # another host: nothing is known


def test_the_newest_record_of_a_host_counts():
    closed, opened = record("User-agent: *\nDisallow: /", "2025-01-31"), record("", "2013-05-01")
    for records in ([closed, opened], [opened, closed]):
        assert RobotsRules(records, ["GPTBot"]).disallows("https://mill.org/a") is True
    assert RobotsRules([record("User-agent: *\nDisallow: /", status=404)], ["GPTBot"]).disallows("mill.org/a") is False
    assert RobotsRules([record("", status=503)], ["GPTBot"]).disallows("https://mill.org/a") is None


def test_the_same_rules_from_warc_and_from_lines(tmp_path):
    text = "User-agent: GPTBot\nDisallow: /\n"
    line = json.dumps({"host": "mill.org", "date": "2025-01-31T10:00:00Z", "robots": text})
    (tmp_path / "robots.jsonl").write_text(f"{line}\n\n")
    body = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n{text}"
    parts = [warc_record(address, body) for address in ("https://mill.org/robots.txt", "https://mill.org/other.txt")]
    (tmp_path / "robots.warc.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    expected = [record(text)]
    assert read_robots(str(tmp_path / "robots.jsonl"))[1] == expected
    assert read_robots(str(tmp_path / "robots.warc.gz"))[1] == expected


def warc_record(address: str, body: str) -> bytes:
    header = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {address}\r\nWARC-Date: 2025-01-31T10:00:00Z\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return f"{header}{body}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"host": "a.b", "robots": ""}', r"line 1: no date such as 2025-01-31 but '200'"),
        ('{"host": "a.b", "date": "2025-13-01", "robots": ""}', r"line 1: no date such as 2025-01-31 but '2025-13-01'"),
        ('{"host": "", "date": "2025-01-31", "robots": ""}', "line 1: host and robots are text"),
        ("[1]", "line 1: 'list' object"),
        ("User-agent: *", "line 1: "),
        ("\n", "no robots.txt in it; name WARC files of them, or JSON lines of host, date and robots"),
        ("WARC/1.0\r\nContent-Length: x\r\n\r\n", "a record with Content-Length 'x'; get the file again"),
    ],
)
def test_bad_files_say_what_to_mend(tmp_path, content, said):
    (tmp_path / "robots.jsonl").write_text(content)
    with pytest.raises(InputError, match=rf"robots\.jsonl: {said}"):
        read_robots(str(tmp_path / "robots.jsonl"))


def test_both_kinds_of_reservation_remove_documents_and_are_counted_by_language(tmp_path):
    urls = [f"https://{host}/{number}" for number in range(4) for host in ("open.org", "closed.org", "out.org")]
    texts = [GERMAN + prose(0)[:20] * number if number % 2 else prose(number) for number in range(12)]
    write_jsonl(tmp_path / "s.jsonl", [{"text": text, "url": url} for text, url in zip(texts, urls, strict=True)])
    robots = [("open.org", ""), ("closed.org", "User-agent: CCBot\nDisallow: /")]
    lines = [json.dumps({"host": host, "date": "2025-01-31", "robots": text}) for host, text in robots]
    (tmp_path / "robots.jsonl").write_text("\n".join(lines))
    (tmp_path / "out.txt").write_text("# date: 2025-03-01\nout.org\n")
    lists = ListsConfig(robots=(str(tmp_path / "robots.jsonl"),), opt_outs=(str(tmp_path / "out.txt"),))
    config = CurateConfig(filters=["robots", "opt_outs"], near_dedup=None, exact_dedup=None, lists=lists)
    source = SourceConfig(name="s", format="jsonl", paths=(str(tmp_path / "s.jsonl"),))
    engine = LocalEngine(1, Reporter.silent())
    lock = Lock(sources=(*resolve([source], engine), *lock_lists(lists)))
    counts = curate(CurationInputs([source], config, 1, lock, tmp_path / "curate", tmp_path / "cache", engine))
    ledger = pq.read_table(tmp_path / "curate/ledger/s-00000.parquet").to_pylist()
    rules = {"closed.org": "robots.max_disallowed", "out.org": "opt_outs.max_opted_out", "open.org": None}
    assert [row["rule"] for row in sorted(ledger, key=lambda row: row["record"])] == [
        rules[url.split("/")[2]] for url in urls
    ]
    removed = {name: entry["removed"] for name, entry in counts["sources"]["s"]["languages"].items()}
    assert removed == {
        language: {"opt_outs.max_opted_out": 2, "robots.max_disallowed": 2} for language in ("de_Latn", "en_Latn")
    }
    assert {source.name for source in lock.sources} == {"s", "lists.robots", "lists.opt_outs"}
    assert [days[1:] for name in ("robots", "opt_outs") for days in list_days(lists, name)] == [
        ("2025-01-31", "2025-01-31"),
        ("2025-03-01", "2025-03-01"),
    ]


def test_lists_without_a_day_and_rules_without_a_list_are_refused(tmp_path):
    (tmp_path / "out.txt").write_text("out.org\n")
    with pytest.raises(InputError, match=r"out\.txt: no date; add a comment such as `# date: 2025-01-31`"):
        lock_lists(ListsConfig(opt_outs=(str(tmp_path / "out.txt"),)))
    source = SourceConfig(name="s", format="jsonl", paths=("a.jsonl",))
    engine = LocalEngine(1, Reporter.silent())
    for name in ("robots", "opt_outs"):
        with pytest.raises(
            RecipeError, match=f"filter {name}: nothing is measured for it; name .* in curate.lists.{name}"
        ):
            inputs = CurationInputs(
                [source], CurateConfig(filters=[name]), 1, Lock(sources=()), tmp_path / "c", tmp_path / "k", engine
            )
            curate(inputs)

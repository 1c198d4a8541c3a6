"""Mutated files of every format: every run ends with records and quarantine or with an InputError, nothing else is
raised, and what stands before the damage is read as it was.

A failing mutant is mutate(content, numpy.random.default_rng([SEED, number])), alone."""

import bz2
import gzip
import lzma
import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from mutations import mutate, mutations
from record_rows import rows_of_columns, rows_one_by_one

from gristmill.data_pipeline.readers.document import Record, Unreadable, metadata_json
from gristmill.data_pipeline.readers.read import FileRange, file_ranges, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

SEED = 20261122
IN_CI, SLOW = 105, 20_000  # mutants of each file
MAX_RECORD_BYTES = 100_000
MAX_GROWTH_BYTES = 400_000_000  # of the process, over all mutants of a file

WORDS = "the mill stands by the river and the wheel turns all day long "
HTML = f"<html><head><title>Mill</title></head><body><p>{WORDS * 4}</p><p>{WORDS * 3}</p></body></html>".encode()
LINES = b"".join(b'{"text": "%s%d", "n": %d, "tags": ["a", {"b": null}]}\n' % (WORDS.encode(), k, k) for k in range(30))


def warc_record(kind: str, content: bytes, content_type: str) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a.b/\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content + b"\r\n\r\n"


def http(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in ("Content-Type: text/html; charset=utf-8", *headers))
    return f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode() + body


def response(body: bytes, *headers: str) -> bytes:
    return warc_record("response", http(body, *headers), "application/http; msgtype=response")


def arc_record(body: bytes) -> bytes:
    content = http(body)
    return f"http://a.b/ 1.2.3.4 20140216050221 text/html {len(content)}\n".encode() + content + b"\n"


def parquet(**settings) -> bytes:
    held = pa.BufferOutputStream()
    rows = range(60)
    columns = {"text": [f"{WORDS}{k}" for k in rows], "n": list(rows), "tags": [["a", str(k)] for k in rows]}
    pq.write_table(pa.table(columns), held, row_group_size=20, **settings)
    return held.getvalue().to_pybytes()


def lz4(raw: bytes) -> bytes:
    held = pa.BufferOutputStream()
    with pa.CompressedOutputStream(held, "lz4") as file:
        file.write(raw)
    return held.getvalue().to_pybytes()


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(HTML), HTML)
WARC = (
    response(HTML)
    + response(gzip.compress(HTML), "Content-Encoding: gzip")
    + response(CHUNKED, "Transfer-Encoding: chunked")
)
WET = b"".join(warc_record("conversion", f"{WORDS}{k}".encode(), "text/plain") for k in range(10))
FILES: dict[str, tuple[str, bytes, dict]] = {  # name -> format, content, settings of the source
    "a.jsonl": ("jsonl", LINES, {}),
    "utf16.jsonl": ("jsonl", LINES.decode().encode("utf-16"), {}),
    "html.jsonl": ("jsonl", b'{"html": "%b"}\n' % HTML * 3, {"html_field": "html"}),
    "a.jsonl.gz": ("jsonl", gzip.compress(LINES[:900]) + gzip.compress(LINES[900:]), {}),
    "a.jsonl.zst": ("jsonl", zstandard.compress(LINES), {}),
    "a.jsonl.bz2": ("jsonl", bz2.compress(LINES), {}),
    "a.jsonl.xz": ("jsonl", lzma.compress(LINES), {}),
    "a.jsonl.lz4": ("jsonl", lz4(LINES), {}),
    "a.txt": ("text", "Grüße\n\nzwei\r\n\r\n  drei\n".encode() * 10, {"record": "paragraph"}),
    "lines.txt": ("text", "Grüße\nzwei\r\n".encode("utf-16") * 10, {"record": "line"}),
    "a.md": ("markdown", b"# Mill\n\n" + WORDS.encode() * 5, {}),
    "a.html": ("html", HTML, {}),
    "a.warc": ("warc", WARC, {}),
    "a.warc.gz": ("warc", b"".join(map(gzip.compress, (response(HTML), response(HTML)))), {}),
    "a.wet": ("wet", WET, {}),
    "a.arc": ("arc", arc_record(HTML) * 3, {}),
    "a.parquet": ("parquet", parquet(), {}),
    "zstd.parquet": ("parquet", parquet(compression="zstd", use_dictionary=False, data_page_version="2.0"), {}),
    "a.py": ("python_docs", b'"""A module of a mill."""\n# ' + WORDS.encode() * 3 + b"\nx = (1, [2])\n" * 5, {}),
}


def source_of(name: str) -> SourceConfig:
    kind, _, settings = FILES[name]
    paths = {"part": "prose"} if kind == "python_docs" else {"paths": (name,)}
    limits = {"max_record_bytes": MAX_RECORD_BYTES, "extractor": "resiliparse"}
    return SourceConfig(name="s", format=kind, **paths, **limits, **settings)


def read(path, source: SourceConfig, part_bytes: int = 1 << 30) -> list[Record | Unreadable]:
    return [one for part in ranges_of(path, source, part_bytes) for one in read_range(part, source)]


def ranges_of(path, source: SourceConfig, part_bytes: int) -> list[FileRange]:
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    return file_ranges(file, str(path), source, part_bytes)


def check(found: list[Record | Unreadable]) -> None:
    """Numbers rise, texts and metadata can be stored, reasons are short."""
    numbers = [one.number for one in found]
    assert numbers == sorted(numbers)
    for one in found:
        if isinstance(one, Record):
            one.text.encode()
            metadata_json(one.metadata).encode()
            one.url.encode()
        else:
            assert one.kind and len(one.reason) < 1000
            (one.reason + one.excerpt).encode()


def fuzz(name: str, count: int, tmp_path) -> None:
    _, content, _ = FILES[name]
    source, path = source_of(name), tmp_path / name
    path.write_bytes(content)
    whole = read(path, source)
    assert any(isinstance(one, Record) for one in whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, mutant in mutations(content, count, SEED):
        path.write_bytes(mutant)
        try:
            for part_bytes in (1 << 30, 1000):
                found = read(path, source, part_bytes)
                check(found)
                if source.format in ("jsonl", "parquet"):
                    ranges = ranges_of(path, source, part_bytes)
                    assert rows_of_columns(ranges, source) == rows_one_by_one(ranges, source)
        except InputError as error:
            assert path.name in str(error), number
        except Exception as error:
            raise AssertionError(f"{name}, mutant {number} of seed {SEED}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MAX_GROWTH_BYTES


@pytest.mark.parametrize("name", FILES)
def test_a_mutant_is_read_or_refused(name, tmp_path):
    fuzz(name, IN_CI, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_many_mutants_are_read_or_refused(name, tmp_path):
    fuzz(name, SLOW, tmp_path)


BY_BYTES = ("a.jsonl", "a.wet", "a.warc", "a.arc")


@pytest.mark.parametrize("name", BY_BYTES)
def test_what_stands_before_the_damage_is_read_as_it_was(name, tmp_path):
    """The first record ends in the first half of the file; damage to the second half leaves it as it was."""
    _, content, _ = FILES[name]
    source, path = source_of(name), tmp_path / name
    path.write_bytes(content)
    first = read(path, source)[0]
    half = len(content) // 2 + 10
    for number, mutant in mutations(content[half:], 50, SEED):
        path.write_bytes(content[:half] + mutant)
        assert read(path, source)[0] == first, number


def test_a_row_group_of_fewer_than_no_rows_repeats_no_number(tmp_path):
    """Mutant 1110 had -2443 rows in its second row group, and the third was numbered from -2423."""
    path = tmp_path / "a.parquet"
    path.write_bytes(mutate(FILES["a.parquet"][1], np.random.default_rng([SEED, 1110])))
    found = read(path, source_of("a.parquet"))
    check(found)
    assert [one.kind for one in found] == ["unreadable_file"] and "fewer than 0 rows" in found[0].reason


HISTOGRAM, POSITIONS = "histogram size mismatch", "lacks the positions of column chunks"


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [("a.parquet", 2936, HISTOGRAM), ("a.parquet", 3554, HISTOGRAM), ("zstd.parquet", 3361, POSITIONS)],
)
def test_a_damaged_footer_does_not_end_the_process(name, number, reason, tmp_path):
    """The level histograms of a column do not fit its schema; pyarrow's `RowGroupMetaData.column` called abort()."""
    path = tmp_path / name
    path.write_bytes(mutate(FILES[name][1], np.random.default_rng([SEED, number])))
    found = read(path, source_of(name))
    check(found)
    damaged = [one for one in found if isinstance(one, Unreadable)]
    assert damaged and all(reason in one.reason for one in damaged)


def test_the_parts_of_a_mutant_are_the_mutant(tmp_path):
    for name in ("a.jsonl", "a.parquet"):
        _, content, _ = FILES[name]
        source, path = source_of(name), tmp_path / name
        for number, mutant in mutations(content, 50, SEED + 1):
            path.write_bytes(mutant)
            whole, parts = read(path, source), read(path, source, 1000)
            records = [[one for one in found if isinstance(one, Record)] for found in (whole, parts)]
            assert records[0] == records[1], (name, number)

"""Records over max_record_bytes are passed over in bounded memory, in every format and every compression."""

import gzip
import io
import zlib

import brotli
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.readers.compression import ByteStream, Malformed, TooLong, blocks, whole_lines
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.parquet import column_chunks, page_sizes
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile
from tests.support.compressors import COMPRESSORS

LIMIT = 1000
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"
STORY = "<html><body><p>" + "A short page with a sentence in it. " * 5 + "</p></body></html>"


COMPRESSED = {"": bytes} | {f".{ending}": compress for ending, compress in COMPRESSORS.items()}


def read(path, kind: str, limit: int = LIMIT, **settings) -> list[Record | Unreadable]:
    settings = {"extractor": "resiliparse", "max_record_bytes": limit, **settings}
    source = SourceConfig(name="s", format=kind, paths=(str(path),), **settings)
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    return list(read_range(FileRange(file, str(path)), source))


def outcomes(found) -> list[tuple[int, str]]:
    return [(one.number, one.kind if isinstance(one, Unreadable) else "read") for one in found]


def warc(content: bytes, kind: str, http: bytes = b"") -> bytes:
    fields = {"response": "application/http; msgtype=response", "conversion": "text/plain"}
    body = http + b"\r\n" + content if http else content
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {fields[kind]}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body + b"\r\n\r\n"


def arc(content: bytes) -> bytes:
    body = HTTP + b"\r\n" + content
    return b"http://a.b/ 1.2.3.4 20140216050221 text/html %d\n" % len(body) + body + b"\n"


LARGE = b"x" * 3 * LIMIT
SMALL = STORY.encode()
FILES = {  # format -> a small record, one over the limit, a small one
    "jsonl": b'{"text": "a"}\n{"text": "' + LARGE + b'"}\n{"text": "b"}\n',
    "warc": warc(SMALL, "response", HTTP) + warc(LARGE, "response", HTTP) + warc(SMALL, "response", HTTP),
    "wet": warc(b"a", "conversion") + warc(LARGE, "conversion") + warc(b"b", "conversion"),
    "arc": arc(SMALL) + arc(LARGE) + arc(SMALL),
}


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("kind", FILES)
def test_the_records_beside_a_large_one_are_read(kind, suffix, tmp_path):
    path = tmp_path / f"a.{kind}{suffix}"
    path.write_bytes(COMPRESSED[suffix](FILES[kind]))
    found = read(path, kind)
    assert outcomes(found) == [(0, "read"), (1, "record_too_large"), (2, "read")]
    assert f"over the limit of {LIMIT}" in found[1].reason and "max_record_bytes" in found[1].reason
    assert outcomes(read(path, kind, 10**6))[1][1] in ("read", "no_text")


@pytest.mark.parametrize("suffix", COMPRESSED)
@pytest.mark.parametrize("record", ["file", "paragraph", "line"])
def test_pieces_of_text(record, suffix, tmp_path):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESSED[suffix](b"small\n\n" + LARGE + b"\n\nlast"))
    expected = {
        "file": [(0, "record_too_large")],
        "paragraph": [(0, "read"), (1, "record_too_large"), (2, "read")],
        "line": [(0, "read"), (2, "record_too_large"), (4, "read")],
    }
    assert outcomes(read(path, "text", record=record)) == expected[record]


def test_a_record_of_the_limit_is_read_and_one_of_a_byte_more_is_not(tmp_path):
    path = tmp_path / "a.txt"
    for end in (b"\n", b"\r\n", b""):
        for size, kind in ((LIMIT, "read"), (LIMIT + 1, "record_too_large")):
            path.write_bytes(b"x" * size + end)
            assert outcomes(read(path, "text", record="line")) == [(0, kind)]
            line = b'{"text": "' + b"x" * (size - 12) + b'"}'
            path.write_bytes(line + end)
            assert outcomes(read(path, "jsonl")) == [(0, kind)]


def test_an_html_file_and_the_html_of_a_field(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes(SMALL + LARGE)
    assert outcomes(read(path, "html")) == [(0, "record_too_large")]
    assert outcomes(read(path, "html", 10**6)) == [(0, "read")]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"html": "' + SMALL + b'"}\n{"html": "' + LARGE + b'"}\n')
    assert outcomes(read(path, "jsonl", html_field="html")) == [(0, "read"), (1, "record_too_large")]


def test_cells_of_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    texts = ["a", LARGE.decode(), "b", "c" * 600, "d" * 600]
    for columns in ({"text": texts}, {"text": ["t"] * 5, "other": texts}):
        pq.write_table(pa.table(columns), path)
        assert [kind for _, kind in outcomes(read(path, "parquet"))] == ["read", "record_too_large", *["read"] * 3]
    categories = pa.array(texts).dictionary_encode()  # of a slice of which nbytes is that of all its values
    pq.write_table(pa.table({"text": ["t"] * 5, "other": categories}), path)
    assert [kind for _, kind in outcomes(read(path, "parquet"))] == ["read", "record_too_large", *["read"] * 3]


def test_page_sizes_are_those_of_the_values(tmp_path):
    path = tmp_path / "a.parquet"
    cell = "x" * 100_000
    table = pa.table({"text": [cell, cell]})

    def sizes(**settings) -> tuple[int, int]:
        pq.write_table(table, path, compression="zstd", **settings)
        with path.open("rb") as file:
            return page_sizes(file, column_chunks(file)[0])

    # plain encoding: 4 bytes of length, then the characters; 6 bytes say that none is null
    assert sizes(use_dictionary=False) == (2 * 100_004 + 6, 0)
    assert sizes(use_dictionary=True) == (100_004, 100_004)


def test_column_chunks_are_those_of_pyarrow(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"text": [str(k) for k in range(90)], "n": [1] * 90, "tags": [["a", str(k)] for k in range(90)]}
    for settings in ({}, {"use_dictionary": False}, {"compression": "zstd", "data_page_version": "2.0"}):
        pq.write_table(pa.table(columns), path, row_group_size=40, **settings)
        metadata = pq.read_metadata(path)
        with path.open("rb") as file:
            groups = column_chunks(file)
        assert [len(group) for group in groups] == [3, 3, 3]
        for number, group in enumerate(groups):
            for index, chunk in enumerate(group):
                theirs = metadata.row_group(number).column(index)
                start = theirs.dictionary_page_offset or theirs.data_page_offset
                assert chunk == (start, start + theirs.total_compressed_size)


def test_a_row_group_with_a_page_beyond_memory_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    texts = [str(k) * 200 for k in range(100, 200)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=50, use_dictionary=False)
    # 50 cells of 600 characters with 4 bytes of length, and 6 bytes that say none is null
    monkeypatch.setattr("gristmill.data_pipeline.readers.parquet.MAX_PAGE_BYTES", 10_000)
    found = read(path, "parquet")
    assert outcomes(found) == [(0, "record_too_large"), (50, "record_too_large")]
    assert "row group 1, 50 rows lost: a page of 30206 bytes" in found[1].reason


BOMBS = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
}


@pytest.mark.parametrize("coding", BOMBS)
def test_a_page_that_unpacks_beyond_the_limit(coding, tmp_path):
    path = tmp_path / "a.warc"
    http = HTTP + b"Content-Encoding: " + coding.encode() + b"\r\n"
    path.write_bytes(warc(BOMBS[coding](bytes(10**6)), "response", http) + warc(BOMBS[coding](SMALL), "response", http))
    assert outcomes(read(path, "warc")) == [(0, "record_too_large"), (1, "read")]


@pytest.mark.parametrize("length", [10**6, 10**12])
@pytest.mark.parametrize("kind", ["warc", "arc"])
def test_a_length_that_lies_holds_no_memory(kind, length, tmp_path):
    path = tmp_path / f"a.{kind}"
    lying = FILES[kind].replace(b"Content-Length: 3", b"Content-Length: %d" % length)
    lying = lying.replace(b"text/html 3", b"text/html %d" % length)
    path.write_bytes(lying)
    assert outcomes(read(path, kind)) == [(0, "read"), (1, "truncated")]


@pytest.mark.parametrize("length", ["9" * 5000, "²", "1e3", "-1", "0x10", ""])
def test_a_length_that_is_no_number(length, tmp_path):
    path = tmp_path / "a.warc"
    bad = f"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: {length}\r\n\r\nbody\r\n\r\n".encode()
    path.write_bytes(warc(SMALL, "response", HTTP) + bad + warc(SMALL, "response", HTTP))
    found = read(path, "warc")
    assert outcomes(found) == [(0, "read"), (1, "no_warc"), (2, "read")] and len(found[1].reason) < 200
    path = tmp_path / "a.arc"
    path.write_bytes(arc(SMALL) + f"http://a.b/ 1.2.3.4 20140216050221 text/html {length}\n".encode() + arc(SMALL))
    assert outcomes(read(path, "arc")) == [(0, "read"), (1, "no_arc"), (2, "read")]


@pytest.mark.parametrize("size", [b"-2", b"+5", b"0x5", b"1_0"])
def test_a_chunk_of_no_size_ends_the_chunks(size, tmp_path):
    """A negative length made the reader go back and forth without end."""
    path = tmp_path / "a.warc"
    http = HTTP + b"Transfer-Encoding: chunked\r\n"
    path.write_bytes(warc(b"%x\r\n%s\r\n" % (len(SMALL), SMALL) + size + b"\r\nxxxxx\r\n", "response", http))
    assert outcomes(read(path, "warc")) == [(0, "read")]


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_blocks_are_bounded_however_well_a_file_is_packed(suffix):
    num_bytes = 200_000_000 if suffix == ".zst" else 5_000_000
    packed = io.BytesIO(COMPRESSED[suffix](bytes(num_bytes)))
    sizes = [len(block) for block in blocks(packed, f"a{suffix}")]
    assert sum(sizes) == num_bytes and max(sizes) <= 16 << 20


def test_many_small_streams_are_not_as_many_blocks():
    packed = io.BytesIO(gzip.compress(b"x") * 50_000)
    assert [len(block) for block in blocks(packed, "a.gz")] == [50_000]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_lines_in_pieces_of_any_size(size):
    raw = b"a\nbb\n" + b"c" * 50 + b"\n\nd" * 3
    pieces = (raw[start : start + size] for start in range(0, len(raw), size))
    assert b"".join(whole_lines(pieces, 100)) == raw
    found = list(whole_lines(iter([raw[k : k + 1] for k in range(len(raw))]), 20))
    assert found[2] == TooLong(51) and b"".join(one for one in found if isinstance(one, bytes)) == raw.replace(
        b"c" * 50 + b"\n", b""
    )


def test_a_header_line_without_end_is_passed_over_in_one_go():
    """It was dropped byte by byte, each time searching the whole MiB again: 40 MiB never ended."""
    source = (b"x" * (1 << 17) for _ in range(40 << 3))
    stream = ByteStream(source)
    with pytest.raises(Malformed, match="over 1 MiB"):
        stream.line()
    stream.skip_line()
    assert stream.offset == 40 << 20 and stream.line() == b""


def test_records_behind_a_header_line_without_end_are_read(tmp_path):
    path = tmp_path / "a.warc"
    good = warc(SMALL, "response", HTTP)
    path.write_bytes(good + b"x" * (20 << 20) + b"\n" + good + b"WARC/1.0\r\n" + b"y" * (3 << 20) + b"\n" + good)
    assert outcomes(read(path, "warc")) == [(0, "read"), (1, "no_warc"), (2, "read"), (3, "no_warc"), (4, "read")]
    path = tmp_path / "a.arc"
    path.write_bytes(arc(SMALL) + b"x" * (20 << 20) + b"\n" + arc(SMALL))
    assert outcomes(read(path, "arc")) == [(0, "read"), (1, "no_arc"), (2, "read")]


def test_a_header_of_many_lines_or_folds_is_bounded(tmp_path):
    path = tmp_path / "a.warc"
    good = warc(SMALL, "response", HTTP)
    for lines in (b"a\n" * 10**6, b"a: b\n" + b" c\n" * 500_000):
        path.write_bytes(good + b"WARC/1.0\r\n" + lines + b"\n" + good)
        assert outcomes(read(path, "warc")) == [(0, "read"), (1, "no_warc"), (2, "read")]

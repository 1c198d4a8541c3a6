import gzip
from io import BytesIO

import pytest

from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.warc import read_warc

PAGE = b"<html><body><p>Hello</p></body></html>"


def record(kind: str, content: bytes, **fields) -> bytes:
    names = {"WARC-Type": kind, "WARC-Target-URI": "http://a.b/", "Content-Length": str(len(content)), **fields}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in names.items())
    return b"WARC/1.0\r\n" + head.encode() + b"\r\n" + content + b"\r\n\r\n"


def response(body: bytes = PAGE, status: str = "200 OK", content_type: str = "text/html", **headers) -> bytes:
    names = {"Content-Type": content_type, **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in names.items())
    http = f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body
    return record("response", http, Content_Type="application/http; msgtype=response")


def read(raw: bytes, name: str = "a.warc", kind: str = "warc") -> list[Record | Unreadable]:
    return list(read_warc(BytesIO(raw), name, SourceConfig(name="s", format=kind, paths=("x",))))


def test_pages_are_numbered_among_all_records():
    raw = (
        record("warcinfo", b"software: x") + record("request", b"GET /") + response(content_type="text/html; charset=x")
    )
    assert read(raw) == [Record(2, "", url="http://a.b/", html=PAGE, charset="x")]


def test_one_gzip_member_a_record_or_one_for_all():
    raw = response() * 3
    assert read(b"".join(gzip.compress(response()) for _ in range(3)), "a.warc.gz") == read(raw)
    assert read(gzip.compress(raw), "a.warc.gz") == read(raw)


def test_bodies_are_decoded():
    chunked = b"5\r\n" + PAGE[:5] + b"\r\n" + f"{len(PAGE) - 5:x}\r\n".encode() + PAGE[5:] + b"\r\n0\r\n\r\n"
    assert read(response(chunked, Transfer_Encoding="chunked"))[0].html == PAGE
    assert read(response(PAGE, Transfer_Encoding="chunked"))[0].html == PAGE  # it only says so
    assert read(response(gzip.compress(PAGE), Content_Encoding="gzip"))[0].html == PAGE
    [found] = read(response(gzip.compress(PAGE)[:12] + b"xxxxxxxx", Content_Encoding="gzip"))
    assert found.kind == "bad_response" and "damaged gzip body" in found.reason


def test_what_is_no_page_is_counted():
    raw = response(content_type="image/png") + response(status="404 Not Found") + response(b"", content_type="")
    assert [(found.number, found.kind) for found in read(raw)] == [(0, "not_html"), (1, "not_found"), (2, "not_html")]


def test_a_cut_off_file_is_read_as_far_as_it_goes():
    found = read(response() + response()[:-30])
    assert [type(one) for one in found] == [Record, Unreadable] and found[1].kind == "truncated"
    packed = gzip.compress(response()) + gzip.compress(response())[:-20]
    found = read(packed, "a.warc.gz")
    assert [type(one) for one in found] == [Record, Unreadable] and found[1].kind == "truncated"


def test_behind_what_is_no_record_the_next_is_found():
    found = read(response() + b"garbage\r\nmore garbage\r\n" + response() + b"WARC/1.0\r\nContent-Length: x\r\n\r\n")
    assert [getattr(one, "kind", "page") for one in found] == ["page", "no_warc", "page", "no_warc"]


def test_wet_texts():
    raw = record("conversion", "Grüße".encode(), WARC_Identified_Content_Language="deu,eng", WARC_Date="2026-01-01")
    [found] = read(raw + record("warcinfo", b""), kind="wet")
    assert found == Record(0, "Grüße", url="http://a.b/", language="deu", metadata={"warc_date": "2026-01-01"})


BROKEN = {
    "resiliparse/tests/data/clipped.warc.gz": ["truncated"],
    "warcio/test/data/example-trunc.warc": ["page", "no_warc"],
    "warcio/test/data/example-wrong-chunks.warc.gz": ["page"],
    "warcio/test/data/example-bad-non-chunked.warc.gz": ["page"],
    "warcio/test/data/example-bad.warc.gz.bad": ["no_warc"],
    "warcio/test/data/bad.arc": ["no_warc"],
    "warcio/test/data/example-iana.org-chunked.warc": ["page"],
    "warcio/test/data/example-wget-bad-target-uri.warc.gz": ["page", "not_html", "not_html"],
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_broken_on_purpose(name, shared_data):
    path = shared_data(f"warc/{name}")
    assert [getattr(one, "kind", "page") for one in read(path.read_bytes(), path.name)] == BROKEN[name]


@pytest.mark.parametrize("suffix", ["gz", "lz4"])
def test_compressed_files_hold_the_same_records(suffix, shared_data):
    folder = shared_data("warc/resiliparse/tests/data")
    packed, plain = folder / f"warcfile.warc.{suffix}", folder / "warcfile.warc"
    found = read(packed.read_bytes(), packed.name)
    assert len(found) > 3 and found == read(plain.read_bytes(), plain.name)


def test_every_shared_file_is_read_without_a_crash(shared_data):
    folder = shared_data("warc")
    found = {p.name: read(p.read_bytes(), p.name) for p in sorted(folder.rglob("*")) if p.is_file()}
    assert sum(isinstance(one, Record) for records in found.values() for one in records) > 70

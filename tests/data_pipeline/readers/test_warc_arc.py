import gzip
from io import BytesIO

import pytest

from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.warc import read_arc, read_warc

PAGE = b"<html><body><p>Hello</p></body></html>"
HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=x\r\n\r\n" + PAGE
FILEDESC = b"1 0 Mill\nURL IP-address Archive-date Content-type Archive-length\n"


def record(content: bytes, url: str = "http://a.b/", kind: str = "text/html", length: object = None) -> bytes:
    return (
        f"{url} 1.2.3.4 20140216050221 {kind} {len(content) if length is None else length}\n".encode() + content + b"\n"
    )


def first(content: bytes = FILEDESC) -> bytes:
    return record(content, "filedesc://a.arc", "text/plain")


def read(raw: bytes, name: str = "a.arc") -> list[Record | Unreadable]:
    return list(read_arc(BytesIO(raw), name, 10**7))


def kinds(raw: bytes, name: str = "a.arc") -> list[str]:
    return [getattr(one, "kind", "page") for one in read(raw, name)]


def test_a_page_with_its_address_and_date():
    [found] = read(first() + record(HTTP))
    assert found == Record(
        1, "", url="http://a.b/", html=PAGE, charset="x", metadata={"warc_date": "2014-02-16T05:02:21Z"}
    )


def test_one_gzip_member_a_record_or_one_for_all():
    members = [first(), record(HTTP), record(HTTP)]
    plain = read(b"".join(members))
    assert len(plain) == 2
    assert read(b"".join(map(gzip.compress, members)), "a.arc.gz") == plain
    assert read(gzip.compress(b"".join(members)), "a.arc.gz") == plain


def test_version_2_has_its_length_in_the_tenth_field():
    line = f"http://a.b/ 1.2.3.4 20140216050221 text/html 200 - - 99 a.arc {len(HTTP)}\n".encode()
    assert kinds(first(b"2 0 Mill\n") + line + HTTP + b"\n") == ["page"]


def test_an_address_may_hold_spaces_and_a_page_may_lack_headers():
    found = read(first() + record(PAGE, url="http://a.b/two words"))
    assert isinstance(found[0], Record) and (found[0].url, found[0].html) == ("http://a.b/two words", PAGE)


def test_the_offset_of_a_damaged_record_is_where_it_begins():
    page = record(HTTP)
    found = read(first() + page + b"no header at all\n" + page)
    (damaged,) = [entry for entry in found if isinstance(entry, Unreadable)]
    assert (damaged.kind, damaged.number, damaged.offset) == ("no_arc", 2, len(first() + page))
    assert [type(entry) for entry in found] == [Record, Unreadable, Record]


def test_what_is_no_page_is_counted():
    missing = HTTP.replace(b"200 OK", b"404 Not Found")
    assert kinds(first() + record(b"x", kind="image/png") + record(missing)) == ["not_html", "not_found"]


def test_behind_a_bad_record_the_next_is_found():
    raw = first() + record(HTTP, length=-1) + record(HTTP) + b"garbage\nmore\n" + record(HTTP)
    assert kinds(raw) == ["no_arc", "page", "no_arc", "page"]
    assert kinds(b"no arc at all") == ["no_arc"] and kinds(b"") == []


def test_a_cut_off_file_is_read_as_far_as_it_goes():
    raw = first() + record(HTTP) + record(HTTP)
    assert kinds(raw[:-30]) == ["page", "truncated"]
    packed = gzip.compress(first()) + gzip.compress(record(HTTP)) + gzip.compress(record(HTTP))[:-20]
    assert kinds(packed, "a.arc.gz") == ["page", "truncated"]


def test_a_file_of_the_other_format_says_so():
    [found] = read(b"WARC/1.0\r\nWARC-Type: warcinfo\r\n")
    assert found.reason.endswith("this is a WARC file, set format: warc")
    source = SourceConfig(name="s", format="warc", paths=("x",))
    [found] = read_warc(BytesIO(first()), "a.arc", source)
    assert found.reason.endswith("this is an ARC file, set format: arc")


SHARED = {
    "example.arc": ["page"],
    "example.arc.gz": ["page"],
    "example-space-in-url.arc": ["truncated"],  # its line ends were changed, and its length was not
    "bad.arc": ["no_arc", "no_arc", "not_html", "no_arc"],
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_files(name, shared_data):
    path = shared_data(f"warc/warcio/test/data/{name}")
    assert kinds(path.read_bytes(), name) == SHARED[name]

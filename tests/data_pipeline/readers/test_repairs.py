"""What other programs write and the standards do not allow is read as it was meant, and the repair is counted."""

import codecs

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.readers.compression import repaired
from gristmill.data_pipeline.readers.document import Record, Unreadable, metadata_json
from gristmill.data_pipeline.readers.read import file_ranges, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile


def read(path, kind: str = "jsonl", part_bytes: int = 1 << 30, **settings) -> list[Record | Unreadable]:
    source = SourceConfig(name="s", format=kind, paths=(str(path),), **settings)
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    return [one for part in file_ranges(file, str(path), source, part_bytes) for one in read_range(part, source)]


def summary(found) -> list[tuple[str, tuple[str, ...]]]:
    return [(one.text, one.repairs) if isinstance(one, Record) else (one.kind, ()) for one in found]


def test_a_byte_order_mark_costs_no_record(tmp_path):
    path = tmp_path / "a.jsonl"
    line = b'{"text": "a"}\n'
    path.write_bytes(codecs.BOM_UTF8 + line + line + codecs.BOM_UTF8 + line + codecs.BOM_UTF8 + b"\n")
    assert summary(read(path)) == [("a", ("byte_order_mark",)), ("a", ()), ("a", ("byte_order_mark",))]
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF8 + b"a\nb")
    assert summary(read(path, "text", record="line")) == [("a", ("byte_order_mark",)), ("b", ())]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_text_in_utf_16(encoding, tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["the mill", "Mühle 磨坊 \U0001f600", "by the river"] * 30
    path.write_bytes("".join(f'{{"text": "{text}"}}\n' for text in texts).encode(encoding))
    found = read(path)
    assert summary(found) == [(text, ("utf_16",)) for text in texts]
    assert read(path, part_bytes=100) == found  # its line ends are no single bytes: it is read whole
    path = tmp_path / "a.txt"
    path.write_bytes("\n".join(["the mill", "by the river"] * 30).encode(encoding))
    assert summary(read(path, "text", record="line")) == [("the mill", ("utf_16",)), ("by the river", ("utf_16",))] * 30
    assert summary(read(path, "text", record="line", encoding=encoding))[1] == ("by the river", ())


def test_half_a_surrogate_pair_in_utf_16(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(codecs.BOM_UTF16_LE + "a\nb".encode("utf-16-le") + b"\x3d\xd8" + "c\n".encode("utf-16-le") + b"d")
    assert summary(read(path, "text", record="line")) == [
        ("a", ("utf_16",)),
        ("b\ufffdc", ("utf_16",)),
        ("\ufffd", ("utf_16",)),
    ]


def test_nan_and_infinity_become_null():
    line = b'{"text": "a", "x": NaN, "y": [1, -Infinity, 1e999], "z": 1.5, "n": 12345678901234567890123}'
    value, repairs = repaired(line)
    assert value == {"text": "a", "x": None, "y": [1, None, None], "z": 1.5, "n": 1.2345678901234568e22}
    assert repairs == ("json_constants",)


def test_surrogates_that_stand_alone():
    assert repaired(rb'{"text": "a\ud83db", "t": ["\udc00"]}') == (
        {"text": "a\ufffdb", "t": ["\ufffd"]},
        ("lone_surrogates",),
    )
    assert repaired(b'{"text": "\xed\xa0\xbd\xed\xb8\x80"}') == ({"text": "\U0001f600"}, ("lone_surrogates",))
    assert repaired(rb'{"\ud800": 1}') == ({"\ufffd": 1}, ("lone_surrogates",))
    assert repaired(rb'{"text": "\ud83d\ude00"}') == ({"text": "\U0001f600"}, ())


@pytest.mark.parametrize("field", [rb'"x": NaN', rb'"x": "\ud800"', rb'"x": {"\udfff": [Infinity]}', b'"x": 1e400'])
def test_a_bad_value_in_any_field_costs_no_record(field, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a", ' + field + b'}\n{"text": "b"}\n')
    found = read(path)
    assert [one.text for one in found] == ["a", "b"] and found[0].repairs and not found[1].repairs
    metadata_json(found[0].metadata).encode()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text": "a\xff"}', "invalid_encoding"),
        (b'{"text": "a\xed\xa0\x80\xff"}', "invalid_encoding"),
        (b'{"text": NaN}', "text_not_string"),
        (b"NaN", "no_object"),
        (b'{"text": "a"', "invalid_json"),
        (b'{"text": "a", "x": ' + b"[" * 100_000, "invalid_json"),
        (b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}", "text_not_string"),
        (b'{"text": "a"} {"text": "b"}', "invalid_json"),
        (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "a"),
        (b'{"text": "a", "n": ' + b"[" * 900 + b"]" * 900 + b"}", "a"),
    ],
)
def test_what_cannot_be_meant_is_quarantined(line, kind, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b'\n{"text": "b"}\n')
    first, second = read(path)
    assert summary([first])[0][0] == kind and second.text == "b"
    if isinstance(first, Record):
        metadata_json(first.metadata).encode()


def test_strings_of_parquet_that_are_no_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    raw = [b"a", b"\xed\xa0\x80b", b"c\xff", b"d"]
    texts = pa.Array.from_buffers(pa.string(), 4, pa.array(raw, pa.binary()).buffers())
    pq.write_table(pa.table({"text": texts}), path)
    assert summary(read(path, "parquet")) == [
        ("a", ()),
        ("\ufffdb", ("lone_surrogates",)),
        ("invalid_encoding", ()),
        ("d", ()),
    ]


def test_dates_that_python_has_no_value_for(tmp_path):
    path = tmp_path / "a.parquet"
    days = pa.array([0, 2**60], pa.int64()).cast(pa.timestamp("ms"))
    pq.write_table(pa.table({"text": ["a", "b"], "day": days}), path)
    found = read(path, "parquet")
    assert [one.text for one in found] == ["a", "b"]
    assert all(metadata_json(one.metadata).encode() for one in found)

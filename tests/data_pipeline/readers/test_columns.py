"""Records as columns against the same records one by one."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from record_rows import rows_of_columns, rows_one_by_one

from gristmill.data_pipeline.readers.document import Unreadable
from gristmill.data_pipeline.readers.read import FileRange, file_ranges, read_columns
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

LINES = (
    b'{"text": "the mill"}',
    b'{"text":"a\\nb\\t\\"c\\" \\\\ \\/ \\u00e9 \\ud83d\\ude00 \\u0000","url":"http://a.b/","language":"de"}',
    b'\t{ "id" : "7/1" , "text" : "x" , "z" : 1, "a" : [1, {"b": "}"}], "n": null }\r',
    b'{"text": "x", "id": 12, "b": -0, "c": 1.50, "d": 1e400, "e": 123456789012345678901234567890}',
    b'{"text": "x", "id": 0, "b": -7, "c": 00, "k": tru}',
    b'{"text": "x", "a": true, "A": false, "b": NaN}',
    b'{"text": "x", "a": 1, "a": 2}', b'{"text": "x", "text": "y"}', b'{"a": [1}, "text": "x"}',
    b'{"text": "x", "a\\u0062": 1, "ab": 2}', b'{"text": "x", "id": "caf\xc3\xa9 \\u00e9"}',
    b'{"text": "lone \\ud800"}', b'{"text": "\\udc00\\ud800"}', b'{"text": "\xed\xa0\x80"}', b'{"text": "\xff"}',
    b'{"text": "\xc0\xaf"}', b'{"text": "\xf4\x90\x80\x80"}', b'{"text": "x", "a": "\xc3"}', b'{"text": "\xe2\x80"}',
    b'{"text": "tab\tinside"}', b'{"text": "bad \\x"}', b'{"text": "open', b'{"text": "x"} x', b'{"text": "x",}', b"{}",
    b"[1]", b'"text"', b"null", b"", b"  ", b"\x0b", b"\x0c ", b'{"text": null}', b'{"text": 3}', b'{"body": "x"}',
    b'\xef\xbb\xbf{"text": "mark"}', b'{"text": "x", "url": null, "language": null}',
    b'{"text": "x", "url": 5, "language": ["de"]}', b'{"text": "x", "language": ""}', b'{"text": ""}',
    b'{"text": "' + b"long " * 200 + b'"}', b'{"text": "' + "мельница ".encode() * 90 + b'", "k": "v"}',
    b'{"text": "x", "deep": ' + b"[" * 300 + b"]" * 300 + b"}", b'{"text": "\\u00", "a": 1}',
    b'{"text": "x", "del": "\x7f", "sep": "\xe2\x80\xa8"}',
    b"{" + b", ".join(b'"k%d": %d' % (k, k) for k in range(70)) + b', "text": "many"}',
)  # fmt: skip
SETTINGS = (
    {},
    {"metadata_fields": "none", "language": "en"},
    {"metadata_fields": ("id", "a", "missing"), "url_field": None},
    {"text_field": "id", "language_field": None},
    {"url_field": "text"},
    {"max_record_bytes": 60},
)


def write(path: Path, content: bytes) -> FileRange:
    path.write_bytes(content)
    file = RawFile(name=path.name, bytes=len(content), sha256=file_digest(path))
    return FileRange(file, str(path))


def assert_equal(ranges: list[FileRange], source: SourceConfig) -> list[tuple]:
    wanted = rows_one_by_one(ranges, source)
    assert rows_of_columns(ranges, source) == wanted
    return wanted


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("end", [b"\n", b""])
def test_lines_of_every_kind(tmp_path, settings, end):
    source = SourceConfig(name="s", format="jsonl", paths=("x",), **settings)
    ranges = [write(tmp_path / "a.jsonl", b"\n".join(LINES) + end), write(tmp_path / "b.jsonl", LINES[0] + end)]
    assert_equal(ranges, source)
    for k, line in enumerate(LINES):
        assert_equal([write(tmp_path / f"{k}.jsonl", line + end)], source)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["text", "url", "language", "id", "a", "ä", "zz"]) | st.text()


@st.composite
def lines(draw) -> bytes:
    fields = draw(st.dictionaries(names, values, max_size=6)) | {"text": draw(values | st.text())}
    text = json.dumps(fields, ensure_ascii=draw(st.booleans()), indent=None, separators=draw(
        st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :\t")])))  # fmt: skip
    line = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 2)) if draw(st.booleans()) else 0):
        line[draw(st.integers(0, len(line) - 1))] = draw(st.integers(0, 255))
    return bytes(line)


@given(st.lists(lines() | st.sampled_from(LINES), max_size=6), st.sampled_from(SETTINGS))
@example([b'{"text": "0", "0": [""\xff]}'], {})
def test_any_lines(tmp_path_factory, given_lines, settings):
    source = SourceConfig(name="s", format="jsonl", paths=("x",), **settings)
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    assert_equal([write(path, b"\n".join(given_lines))], source)


def test_batches_end_at_the_same_rows_whatever_the_pieces(tmp_path):
    source = SourceConfig(name="s", format="jsonl", paths=("x",))
    content = b"".join(b'{"text": "%s", "id": %d}\n' % (b"word " * (k % 90), k) for k in range(5000))
    whole = write(tmp_path / "a.jsonl", content)
    ranges = file_ranges(whole.file, whole.location, source, 100_000)
    assert len(ranges) > 5
    assert_equal(ranges, source)
    assert [len(batch) for batch in read_columns(ranges, source)] == [1024, 1024, 1024, 1024, 904]
    assert [len(batch) for batch in read_columns([whole], source)] == [1024, 1024, 1024, 1024, 904]


def test_a_batch_of_long_texts_has_fewer_records(tmp_path):
    source = SourceConfig(name="s", format="jsonl", paths=("x",))
    line = b'{"text": "%s"}\n' % (b"x" * 3_000_000)
    batches = list(read_columns([write(tmp_path / "a.jsonl", line * 7)], source))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [len(text) for batch in batches for text in batch.texts.texts()] == [3_000_000] * 7


def test_a_file_in_utf_16(tmp_path):
    source = SourceConfig(name="s", format="jsonl", paths=("x",))
    content = '{"text": "Mühle"}\n{"text": 3}\n'.encode("utf-16")
    rows = assert_equal([write(tmp_path / "a.jsonl", content)], source)
    assert rows[1] == ("utf_16",) and rows[3].kind == "text_not_string"


@pytest.mark.parametrize("settings", SETTINGS[:5])
def test_parquet(tmp_path, settings):
    texts = ["the mill", None, "a\x00b", "", "мельница", "x" * 90]
    table = pa.table(
        {
            "text": texts,
            "id": list(range(6)),
            "url": ["u", None, "v", "", "w", "x"],
            "language": ["de", "", None, "fr", "en", "en"],
            "score": [1.0, 0.1, None, 1e300, float("nan"), 2.5],
            "tags": [["a"], [], None, ["b", "c"], ["d"], ["e"]],
        }
    )
    source = SourceConfig(name="s", format="parquet", paths=("x",), **settings)
    kinds = {"plain": table, "readable": table.filter(pa.compute.is_valid(table["text"]))}
    kinds["large"] = kinds["readable"].set_column(0, "text", kinds["readable"]["text"].cast(pa.large_string()))
    kinds["dictionary"] = kinds["readable"].set_column(2, "url", kinds["readable"]["url"].dictionary_encode())
    kinds["many"] = pa.concat_tables([kinds["readable"]] * 500)
    bad = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"ab\xff"))
    kinds["invalid"] = pa.table({"text": bad, "id": [1, 2]})
    for name, each in kinds.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(each, path, row_group_size=700)
        file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
        assert_equal([FileRange(file, str(path))], source)
        assert_equal(file_ranges(file, str(path), source, 2000), source)


def test_other_formats_and_failures_keep_their_order(tmp_path):
    source = SourceConfig(name="s", format="text", paths=("x",), record="line")
    rows = assert_equal([write(tmp_path / f"{k}.txt", b"one\ntwo\xff\n\nthree") for k in range(3)], source)
    assert any(isinstance(row, Unreadable) for row in rows)

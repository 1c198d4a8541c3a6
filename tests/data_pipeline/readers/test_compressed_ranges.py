"""Compressed JSON lines read by ranges are the records of the whole file, each once, with its number and offset."""

import gzip
import io
import itertools
import json

import pytest

from gristmill.data_pipeline.readers.jsonl import json_lines
from gristmill.data_pipeline.readers.read import FileRange, file_ranges, read_columns, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile
from tests.support.compressors import COMPRESSORS

SOURCE = SourceConfig(name="s", format="jsonl", paths=("x",), max_record_bytes=3000)


LINES = [
    b"",
    b"not JSON",
    b"[1]",
    b'{"text": "%s"}' % (b"too long " * 900),
    *(json.dumps({"text": "word " * (k % 40), "id": k}).encode() for k in range(600)),
    b"\xff",
]
CONTENT = b"\n".join(LINES)


def written(path, content) -> RawFile:
    path.write_bytes(content)
    return RawFile(name=path.name, bytes=len(content), sha256=file_digest(path))


def joined(ranges) -> list:
    return [record for one in ranges for record in read_range(one, SOURCE)]


def as_columns(ranges) -> list:
    return [
        row
        for batch in read_columns(ranges, SOURCE)
        for row in zip(batch.numbers.tolist(), batch.texts.texts(), batch.metadata.to_pylist(), strict=True)
    ]


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("content", [CONTENT, CONTENT + b"\n", CONTENT.decode("latin-1").encode("utf-16")])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_ranges_are_the_whole_file(tmp_path, suffix, content, count):
    path = tmp_path / f"a.jsonl.{suffix}"
    file = written(path, COMPRESSORS[suffix](content))
    ranges = file_ranges(file, str(path), SOURCE, 1, count)
    assert len(ranges) == count and sum(one.share for one in ranges) == pytest.approx(1)
    assert joined(ranges) == joined([FileRange(file, str(path))])
    assert as_columns(ranges) == as_columns([FileRange(file, str(path))])
    assert len(joined(ranges)) > 600


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("cut", [0.05, 0.4, 0.7, 0.98])
def test_damage_is_reported_once_by_the_range_that_meets_it(tmp_path, suffix, cut):
    content = COMPRESSORS[suffix](CONTENT * 3)
    path = tmp_path / f"a.jsonl.{suffix}"
    file = written(path, content[: int(cut * len(content))])
    whole = joined([FileRange(file, str(path))])
    assert whole[-1].kind in ("truncated", "damaged")
    for count in (2, 5):
        assert joined(file_ranges(file, str(path), SOURCE, 1, count)) == whole


def test_lines_belong_to_the_range_they_begin_in():
    content = b"a\n\nbcd\ne\n\n\nfghij\nk"
    packed = gzip.compress(content)

    def lines(start, end):
        found = json_lines(io.BytesIO(packed), "a.jsonl.gz", 0, start, end)
        return found.number, found.offset, b"".join(found.stream)

    for first, second in itertools.combinations_with_replacement(range(1, len(content) + 5), 2):
        parts = [lines(0, first), lines(first, second), lines(second, None)]
        assert b"".join(piece for _, _, piece in parts) == content
        for number, offset, piece in parts:
            assert not piece or content[offset:].startswith(piece)
            assert not piece or content.count(b"\n", 0, offset) == number

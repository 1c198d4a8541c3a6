"""Readers on good and on broken files: all that can be read is read, the rest is named."""

import bz2
import gzip
import lzma

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pydantic import ValidationError

from gristmill.data_pipeline.readers.compression import Damaged, blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.python_docs import prose
from gristmill.data_pipeline.readers.read import file_ranges, located_files, read_range
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

LINES = b"".join(b'{"text": "line %d"}\n' % k for k in range(1000))
PACKED = {
    "gz": lambda raw: gzip.compress(raw[:5000]) + gzip.compress(raw[5000:]),
    "zst": lambda raw: zstandard.compress(raw[:5000]) + zstandard.compress(raw[5000:]),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lz4": lambda raw: lz4_frame(raw[:5000]) + lz4_frame(raw[5000:]),
}


def lz4_frame(raw: bytes) -> bytes:
    held = pa.BufferOutputStream()
    with pa.CompressedOutputStream(held, "lz4") as file:
        file.write(raw)
    return held.getvalue().to_pybytes()


def read(source: SourceConfig, part_bytes: int = 1 << 30) -> list[Record | Unreadable]:
    [locked] = resolve([source], LocalEngine(1, Reporter.silent()))
    return [
        record
        for file, location in located_files(source, locked)
        for part in file_ranges(file, location, source, part_bytes)
        for record in read_range(part, source)
    ]


def jsonl(path, **settings) -> SourceConfig:
    return SourceConfig(name="s", format="jsonl", paths=(str(path),), **settings)


@pytest.mark.parametrize("suffix", PACKED)
def test_a_compressed_file_is_read_through(suffix, tmp_path):
    path = tmp_path / f"lines.jsonl.{suffix}"
    path.write_bytes(PACKED[suffix](LINES))
    assert [record.text for record in read(jsonl(path))] == [f"line {k}" for k in range(1000)]


@pytest.mark.parametrize("suffix", PACKED)
def test_a_truncated_file_is_read_as_far_as_it_goes(suffix, tmp_path):
    path = tmp_path / f"lines.jsonl.{suffix}"
    path.write_bytes(PACKED[suffix](LINES)[:-40])
    *whole, last = read(jsonl(path))
    assert last.kind == "truncated" and last.number == len(whole)
    assert [record.text for record in whole] == [f"line {k}" for k in range(len(whole))]
    assert len(whole) > 200 or suffix in ("bz2", "xz")  # one block there: nothing can be read of half of it


@pytest.mark.parametrize("suffix", PACKED)
def test_damaged_bytes_are_named(suffix, tmp_path):
    path = tmp_path / f"lines.{suffix}"
    packed = bytearray(PACKED[suffix](LINES))
    packed[30:60] = b"x" * 30
    path.write_bytes(packed)
    with path.open("rb") as file, pytest.raises(Damaged, match=r"damaged|truncated"):
        list(blocks(file, path.name))


def test_parts_of_a_file_are_the_file(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(LINES + b"\n\nno json\n" + LINES + b'{"text": "no line end"}')
    whole = read(jsonl(path))
    for part_bytes in (100, 777, 5000):
        assert read(jsonl(path), part_bytes) == whole
    assert whole[-1].number == 2003 and whole[1000].number == 1002


def test_row_groups_of_a_parquet_file_are_the_file(tmp_path):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"text": [f"row {k}" for k in range(100)], "n": range(100)}), path, row_group_size=7)
    source = SourceConfig(name="s", format="parquet", paths=(str(path),))
    whole = read(source)
    assert whole[42] == Record(42, "row 42", metadata={"n": 42})
    assert read(source, part_bytes=100) == whole


def test_a_parquet_file_without_its_end_is_one_unreadable(tmp_path):
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"text": ["row"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    [found] = read(SourceConfig(name="s", format="parquet", paths=(str(path),)))
    assert found.kind == "unreadable_file"


def test_a_damaged_row_group_costs_its_own_rows(tmp_path):
    path = tmp_path / "table.parquet"
    texts = [f"row {k} {hash((k, 7)) % 10**9}" for k in range(300)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, compression="zstd", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    raw = bytearray(path.read_bytes())
    raw[start + 40 : start + 80] = b"\xff" * 40
    path.write_bytes(raw)
    found = read(SourceConfig(name="s", format="parquet", paths=(str(path),)))
    assert [record.number for record in found if isinstance(record, Record)] == [*range(100), *range(200, 300)]
    [lost] = [record for record in found if isinstance(record, Unreadable)]
    assert (lost.kind, lost.number) == ("damaged", 100) and "100 of 100 rows lost" in lost.reason


def test_text_by_file_paragraph_and_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\ntwo\r\n\r\n\nthree".encode())

    def texts(record):
        source = SourceConfig(name="s", format="text", paths=(str(tmp_path),), record=record)
        return [(found.number, found.text) for found in read(source)]

    assert texts("file") == [(0, "one\ntwo\r\n\r\n\nthree")]
    assert texts("paragraph") == [(0, "one\ntwo"), (1, "three")]
    assert texts("line") == [(0, "one"), (1, "two"), (4, "three")]


def test_a_bad_byte_spoils_its_own_line_alone(tmp_path):
    (tmp_path / "a.txt").write_bytes("good\nEl niño comió piñas en la montaña.\ngood".encode("latin-1"))
    found = read(SourceConfig(name="s", format="text", paths=(str(tmp_path),), record="line"))
    assert [type(record) for record in found] == [Record, Unreadable, Record]
    assert found[1].reason == "invalid utf-8 at byte 10; set encoding of source s, its bytes look like cp1252"
    latin = SourceConfig(name="s", format="text", paths=(str(tmp_path),), record="line", encoding="latin-1")
    assert read(latin)[1].text == "El niño comió piñas en la montaña."


def test_fields_are_mapped_and_the_rest_is_metadata(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "b", "link": "u", "lang": "de", "id": 7, "none": null}\n{"body": 3}\n')
    fields = {"text_field": "body", "url_field": "link", "language_field": "lang"}
    good, bad = read(jsonl(path, **fields))
    assert good == Record(0, "b", url="u", language="de", metadata={"id": 7})
    assert (bad.kind, bad.reason) == ("text_not_string", "field 'body' is int, not a string")
    assert read(jsonl(path, **fields, metadata_fields=("id",)))[0].metadata == {"id": 7}
    assert read(jsonl(path, **fields, metadata_fields="none"))[0].metadata == {}


def test_an_address_is_read_like_a_path(tmp_path):
    filesystem = fsspec.filesystem("memory")
    for name in ("a", "b"):
        with filesystem.open(f"/corpus/{name}.jsonl", "wb") as file:
            file.write(b'{"text": "%s"}\n' % name.encode())
    found = read(SourceConfig(name="s", format="jsonl", paths=("memory://corpus/*.jsonl",)))
    assert sorted(record.text for record in found) == ["a", "b"]
    with pytest.raises(InputError, match="memory://corpus/none: no file matches"):
        read(SourceConfig(name="s", format="jsonl", paths=("memory://corpus/none",)))


def test_names_are_below_the_fixed_folder(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    source = SourceConfig(name="s", format="text", paths=(f"{tmp_path}/*/a.txt",))
    [locked] = resolve([source], LocalEngine(1, Reporter.silent()))
    assert sorted(file.name for file in locked.files) == ["x/a.txt", "y/a.txt"]


def test_a_folder_that_datasets_saved(tmp_path):
    datasets.Dataset.from_dict({"text": ["one", "two"], "n": [1, 2]}).save_to_disk(tmp_path / "saved")
    found = read(SourceConfig(name="s", format="datasets", paths=(str(tmp_path / "saved"),)))
    assert found == [Record(0, "one", metadata={"n": 1}), Record(1, "two", metadata={"n": 2})]


def test_a_dataset_on_the_hub_needs_its_commit():
    with pytest.raises(InputError, match="set revision to its 40 hex digits"):
        read(SourceConfig(name="s", format="datasets", paths=("someone/something",)))


def test_docstrings_and_comments_in_their_order():
    module = '''"""What the module is."""
# A comment block of some length that says why the thing below is done
# in the way it is done, over two lines.
x = "# no comment"  # an aside behind code
def f():
    """What f gives."""
    y = """
# no comment either, though it stands at the begin of a line inside a string
"""
    # short
    return y
'''
    assert prose(module) == (
        "What the module is.\n\nA comment block of some length that says why the thing below is done\n"
        "in the way it is done, over two lines.\n\nWhat f gives."
    )


def test_a_source_says_what_it_lacks():
    with pytest.raises(ValidationError, match="no paths; give globs"):
        SourceConfig(name="s", format="jsonl")
    with pytest.raises(ValidationError, match="needs part: prose or part: code"):
        SourceConfig(name="s", format="python_docs")
    with pytest.raises(InputError, match="no package 'nonesuch' is installed"):
        read(SourceConfig(name="s", format="python_docs", part="prose", packages=("nonesuch",)))

"""The bytes of the format, written out by hand, and every way a file can be wrong."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.indexed import format as tables
from gristmill.data_pipeline.indexed.dataset import merge, slice_documents
from gristmill.data_pipeline.indexed.format import CODES, IndexedReader, bin_path, dtype_for, idx_path, indexed_writer
from gristmill.data_pipeline.indexed.inspect import inspect
from gristmill.foundation.errors import InputError
from tests.support.indexed_files import write_documents


def test_two_documents_byte_by_byte(tmp_path):
    write_documents(tmp_path / "d", [[5, 6], [7]], np.uint16)
    assert (tmp_path / "d.bin").read_bytes() == bytes([5, 0, 6, 0, 7, 0])
    assert (tmp_path / "d.idx").read_bytes() == b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<Q", 1),  # version
            struct.pack("<B", 8),  # uint16
            struct.pack("<QQ", 2, 3),  # two sequences, three document bounds
            struct.pack("<2i", 2, 1),  # lengths in tokens
            struct.pack("<2q", 0, 4),  # pointers in bytes
            struct.pack("<3q", 0, 1, 2),  # document bounds in sequences
        ]
    )


@pytest.mark.parametrize("dtype", CODES.values(), ids=str)
def test_every_dtype_comes_back(tmp_path, dtype):
    write_documents(tmp_path / "d", [[1, 2, 3], [4]], dtype)
    reader = IndexedReader(tmp_path / "d")
    assert reader.dtype == dtype
    assert [document.tolist() for document in reader.documents()] == [[1, 2, 3], [4]]


def test_reading_copies_nothing(tmp_path):
    write_documents(tmp_path / "d", [[1, 2, 3], [4]], np.int32)
    reader = IndexedReader(tmp_path / "d")
    assert np.shares_memory(reader.document(0), reader.tokens)


def test_two_bytes_a_token_where_the_vocabulary_allows():
    assert dtype_for(65499) == np.uint16
    assert dtype_for(65500) == np.int32


@given(documents=st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), max_size=9))
def test_what_was_written_is_read(tmp_path_factory, documents):
    prefix = tmp_path_factory.mktemp("d") / "name.with.dots"
    write_documents(prefix, documents, np.uint16)
    reader = IndexedReader(prefix)
    assert [document.tolist() for document in reader.documents()] == documents


def test_a_document_may_have_several_sequences(tmp_path):
    prefix = tmp_path / "d"
    write_documents(prefix, [[1, 2], [3], [4, 5]], np.uint16)
    content = bytearray(idx_path(prefix).read_bytes())
    content[26:34] = struct.pack("<Q", 3)  # three bounds: 0, 2, 3
    idx_path(prefix).write_bytes(bytes(content[:-32]) + struct.pack("<3q", 0, 2, 3))
    reader = IndexedReader(prefix)
    assert [document.tolist() for document in reader.documents()] == [[1, 2, 3], [4, 5]]


def damaged(prefix: Path, at: int, replacement: bytes) -> None:
    content = bytearray(idx_path(prefix).read_bytes())
    content[at : at + len(replacement)] = replacement
    idx_path(prefix).write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("at", "replacement", "message"),
    [
        (0, b"TNTIDX\0\0\0", "no Megatron .idx"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x09", "dtype code 9"),
        (18, struct.pack("<Q", 1 << 40), "cannot hold"),
        (18, struct.pack("<Q", 1), "header promises"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path, at, replacement, message):
    write_documents(tmp_path / "d", [[5, 6], [7]], np.uint16)
    damaged(tmp_path / "d", at, replacement)
    with pytest.raises(InputError, match=message) as error:
        IndexedReader(tmp_path / "d")
    assert "d.idx" in str(error.value)


@pytest.mark.parametrize(
    ("at", "replacement", "message"),
    [
        (42, struct.pack("<q", 100), "sequence 0 points at byte 100, the sequences before it end at byte 0"),
        (42, struct.pack("<q", -2), "sequence 0 points at byte -2"),
        (50, struct.pack("<q", 3), "index needs 5"),
        (34, struct.pack("<i", -5), "sequence 0 has length -5"),
        (34, struct.pack("<i", 2**31 - 1), "sequence 0 has length 2147483647 and ends at byte 4294967294, behind"),
        (34, struct.pack("<2i", 1, 1), "sequence 1 points at byte 4, the sequences before it end at byte 2"),
        (58, struct.pack("<3q", 1, 1, 2), "document 0 begins at sequence 1"),
        (58, struct.pack("<3q", 0, 3, 2), "document 0 is sequences 0 to 3 of 2"),
        (58, struct.pack("<3q", 0, 2, 1), "document 1 is sequences 2 to 1 of 2"),
        (58, struct.pack("<3q", 0, 1, 1), "the last document ends at sequence 1 of 2"),
        (58, struct.pack("<3q", 0, -(2**63), 2), "document 0 is sequences 0 to -9223372036854775808"),
    ],
)
def test_wrong_tables_are_named_with_entry_and_fix_on_every_path(tmp_path, at, replacement, message):
    prefix = tmp_path / "d"
    write_documents(prefix, [[5, 6], [7]], np.uint16)
    damaged(prefix, at, replacement)
    for opened in (
        lambda: IndexedReader(prefix),
        lambda: inspect(prefix),
        lambda: merge([prefix], tmp_path / "merged"),
        lambda: slice_documents(prefix, tmp_path / "part", 0, 1),
    ):
        with pytest.raises(InputError, match=message) as error:
            opened()
        assert re.search("again", str(error.value))


def test_every_chunk_of_the_tables_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK", 4)
    prefix = tmp_path / "d"
    write_documents(prefix, [[number] * 3 for number in range(11)], np.uint16)
    whole = idx_path(prefix).read_bytes()
    for sequence in range(10):  # the last one's is found by the size of the .bin
        damaged(prefix, 34 + 11 * 4 + 8 * sequence, struct.pack("<q", 1))
        with pytest.raises(InputError, match=f"sequence {sequence} points at byte 1,"):
            IndexedReader(prefix)
        idx_path(prefix).write_bytes(whole)
    for document in range(1, 11):
        damaged(prefix, 34 + 11 * 12 + 8 * document, struct.pack("<q", 99))
        with pytest.raises(InputError, match=f"document {document - 1} is sequences {document - 1} to 99 of 11"):
            IndexedReader(prefix)
        idx_path(prefix).write_bytes(whole)


def test_a_bin_cut_short_or_too_long_is_refused(tmp_path):
    write_documents(tmp_path / "d", [[5, 6], [7]], np.uint16)
    whole = bin_path(tmp_path / "d").read_bytes()
    for content, message in ((whole[:-1], "whole number"), (whole[:-2], "needs 6"), (whole + b"\0\0", "needs 6")):
        bin_path(tmp_path / "d").write_bytes(content)
        with pytest.raises(InputError, match=message) as error:
            IndexedReader(tmp_path / "d")
        assert "d.bin" in str(error.value)


def test_an_idx_cut_short_is_refused(tmp_path):
    write_documents(tmp_path / "d", [[5, 6], [7]], np.uint16)
    whole = idx_path(tmp_path / "d").read_bytes()
    for length in (0, 5, 20, 40, len(whole) - 1):
        idx_path(tmp_path / "d").write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"d\.idx"):
            IndexedReader(tmp_path / "d")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        IndexedReader(tmp_path / "absent")


def test_ids_outside_the_vocabulary_are_refused_both_ways(tmp_path):
    with pytest.raises(InputError, match="document 1 or later holds token id 100; ids run from 0 to 99"):
        write_documents(tmp_path / "d", [[5], [100]], np.uint16, vocab_size=100)
    with pytest.raises(InputError, match="token id -1"):
        write_documents(tmp_path / "d", [[-1]], np.int32, vocab_size=100)
    with pytest.raises(InputError, match="token id 65536"):
        write_documents(tmp_path / "d", [[65536]], np.uint16)
    write_documents(tmp_path / "d", [[5], [100]], np.uint16)
    reader = IndexedReader(tmp_path / "d")
    with pytest.raises(InputError, match=r"d\.bin \(source 'books'\): document 1, token 0 has id 100; .* ids 0 to 99"):
        reader.check_ids(100, "books")
    reader.check_ids(101)
    write_documents(tmp_path / "d", [[5, 6], [7, -3, 8]], np.int32)
    with pytest.raises(InputError, match="document 1, token 1 has id -3"):
        IndexedReader(tmp_path / "d").check_ids(100)
    write_documents(tmp_path / "d", [[0.5]], np.float32)
    with pytest.raises(InputError, match="holds float32, which are no token ids"):
        IndexedReader(tmp_path / "d").check_ids(100)


def test_an_empty_document_is_refused(tmp_path):
    with pytest.raises(InputError, match="document 1 is empty"):
        write_documents(tmp_path / "d", [[5], []], np.uint16)


def test_a_document_longer_than_the_format_holds_is_refused(tmp_path):
    endless = np.broadcast_to(np.uint16(7), 2**31)  # takes no memory
    with pytest.raises(InputError, match="2147483648 tokens, the format holds 2147483647"):
        write_documents(tmp_path / "d", [endless], np.uint16)


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(InputError), indexed_writer(tmp_path / "d", np.dtype(np.uint16)) as writer:
        writer.add([1])
        writer.add([])
    assert list(tmp_path.iterdir()) == []

"""The merges of a SentencePiece BPE model, in the kernel: worked examples, and sentencepiece's ids on any text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as schema

from gristmill.tokenizers.encoders import BYTE, MAX_MERGED_BYTES, NORMAL, UNKNOWN, merge_table
from gristmill.tokenizers.tokenizer import load_bulk_tokenizer

USER_DEFINED = 4
PIECES = {"a": -10, "b": -11, "c": -12, "▁": -13, "bc": -1, "ab": -2, "abc": -3, "▁a": -3, "aa": -4}
FIRST_PIECE = 257  # behind <unk> and the 256 bytes


def model(**further):
    proto = schema.ModelProto()
    proto.pieces.add(piece="<unk>", type=UNKNOWN)
    for byte in range(256):
        proto.pieces.add(piece=f"<0x{byte:02X}>", type=BYTE)
    for piece, score in PIECES.items():
        proto.pieces.add(piece=piece, score=score, type=NORMAL)
    for piece, kind in further.items():
        proto.pieces.add(piece=piece, type=kind)
    return proto


def encode(table, *texts):
    """The ids of each text, as pieces; a byte as <0xXX>, None for a text that is left out."""
    names = [piece.piece for piece in model().pieces]
    raw = [text.encode() for text in texts]
    ends = np.cumsum([len(each) for each in raw])
    buffer = np.frombuffer(b"".join(raw), dtype=np.uint8)
    ids = np.zeros(len(buffer), dtype=np.int32)
    starts = ends - [len(each) for each in raw]
    counts, written = table.encode(buffer, starts, ends - starts, ids)
    assert written == counts[counts > 0].sum()
    found = np.split(ids[:written], np.cumsum(np.maximum(counts, 0))[:-1])
    return [[names[place] for place in each] if count >= 0 else None for each, count in zip(found, counts, strict=True)]


def test_the_best_pair_is_joined_first_and_the_leftmost_of_equal_ones():
    table = merge_table(model())
    assert encode(table, "abc", "aaa", " abc") == [["abc"], ["aa", "a"], ["▁a", "bc"]]
    # "abb": ab is a piece, abb is none; "cab": ca is none
    assert encode(table, "abb", "cab") == [["ab", "b"], ["c", "ab"]]


def test_characters_without_a_piece_are_their_bytes():
    assert encode(merge_table(model()), "aé", "😀b") == [
        ["a", "<0xC3>", "<0xA9>"],
        ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b"],
    ]


def test_a_character_that_occurs_in_pieces_alone_can_be_joined():
    """x is no piece, but ax and axb are; left over, it is its byte."""
    table = merge_table(model(ax=NORMAL, axb=NORMAL))
    ids = np.zeros(4, dtype=np.int32)
    counts, _ = table.encode(np.frombuffer(b"axbx", np.uint8), np.array([0]), np.array([4]), ids)
    assert ids[: counts[0]].tolist() == [FIRST_PIECE + len(PIECES) + 1, 1 + ord("x")]


def test_a_long_segment_is_left_out():
    assert encode(merge_table(model()), "c" * MAX_MERGED_BYTES, "c" * (MAX_MERGED_BYTES + 1), "c") == [
        ["c"] * MAX_MERGED_BYTES,
        None,
        ["c"],
    ]


@pytest.mark.parametrize("without", ["<0x41>", "▁"])
def test_a_model_without_all_bytes_or_the_space_sign_has_no_table(without):
    proto = model()
    kept = [piece for piece in proto.pieces if piece.piece != without]
    assert merge_table(schema.ModelProto(pieces=kept)) is None


def test_a_model_with_user_defined_pieces_has_no_table():
    assert merge_table(model(**{"<br>": USER_DEFINED})) is None


@settings(max_examples=60)
@given(texts=st.lists(st.text(st.sampled_from("abcdest ▁\n\té0🙂中"), max_size=60), max_size=4))
def test_any_text_has_sentencepieces_ids(trained, texts):
    bulk = load_bulk_tokenizer(trained(), "segments by merges, sentencepiece")
    assert bulk.encode_batch(texts) == load_bulk_tokenizer(trained(), "sentencepiece").encode_batch(texts)


def test_ordinary_text_has_sentencepieces_ids(trained, held_out_texts):
    bulk = load_bulk_tokenizer(trained(), "segments by merges, sentencepiece")
    assert bulk.encode_batch(held_out_texts) == load_bulk_tokenizer(trained(), "sentencepiece").encode_batch(
        held_out_texts
    )

"""Segment-wise encoding gives the ids of encoding whole texts, also from the cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenizers import segments
from gristmill.tokenizers.encoders import adversarial_strings
from gristmill.tokenizers.segments import SegmentEncoder, adjacent_bytes
from gristmill.tokenizers.tokenizer import load_bulk_tokenizer, load_tokenizer


class Recording:
    """An encoder of one id a character that notes what it was asked for."""

    name = "recording"

    def __init__(self):
        self.asked: list[str] = []

    def encode_batch(self, texts):
        self.asked += texts
        return [[ord(character) for character in text] for text in texts]


def test_cuts_worked_by_hand():
    inner = Recording()
    encoder = SegmentEncoder(inner, adjacent_bytes(["ab", "bc", "▁a", "é"]))
    assert encoder.encode("abc ab abcé x▁a") == [ord(character) for character in "abc ab abcé x▁a"]
    # a-b, b-c and space-a are adjacent in a piece; c-space, c-é, é-space are not; no split next to a literal ▁
    assert inner.asked == ["abc", " ab", " abc", "é", " ", "x▁a"]
    encoder.encode("abc ab")
    assert len(inner.asked) == 6  # both were known


def test_neighbours_are_bytes_and_characters_stay_whole():
    adjacent = adjacent_bytes(["ab", "▁c"]).reshape(256, 256)
    assert adjacent[ord("a"), ord("b")] and adjacent[ord(" "), ord("c")]
    assert not adjacent[ord("b"), ord("a")]
    assert adjacent[:, 0x80:0xC0].all()


@pytest.mark.parametrize(
    ("fields", "encoder"),
    [
        ({"fim": True}, "segments by merges, kitoken"),
        ({"user_symbols": ("<br>", "  ", "\n", "a b"), "fim": True}, "segments of kitoken"),
    ],
    ids=str,
)
def test_the_ids_are_those_of_sentencepiece(trained, held_out_texts, fields, encoder, monkeypatch):
    monkeypatch.setattr(segments, "WINDOW_BYTES", 1000)  # many windows in a call
    folder = trained(**fields)
    bulk, reference = load_bulk_tokenizer(folder), load_bulk_tokenizer(folder, "sentencepiece")
    assert bulk.encoder == encoder
    strings = held_out_texts[-40:] + adversarial_strings([piece.replace("▁", " ") for piece in bulk.pieces])
    expected = reference.encode_batch(strings)
    for _ in range(2):  # new, then from memory
        ids, lengths = bulk.encode_flat(strings)
        assert lengths.tolist() == [len(each) for each in expected]
        assert np.array_equal(ids, np.concatenate([np.array(each, np.int32) for each in expected]))


@settings(max_examples=50)
@given(texts=st.lists(st.text(st.sampled_from("ab ▁\né<br>0"), max_size=30), max_size=4))
def test_any_batch_has_the_ids_of_its_texts(trained, texts):
    folder = trained(user_symbols=("<br>", "  ", "\n", "a b"), fim=True)
    bulk = load_bulk_tokenizer(folder, "segments of sentencepiece")
    reference = load_bulk_tokenizer(folder, "sentencepiece")
    assert bulk.encode_batch(texts) == reference.encode_batch(texts)


def test_a_full_memory_is_emptied(trained, held_out_texts, monkeypatch):
    monkeypatch.setattr(segments, "NUM_SLOTS", 1 << 8)
    monkeypatch.setattr(segments, "WINDOW_BYTES", 100)
    bulk = load_bulk_tokenizer(trained(), "segments of kitoken")
    assert bulk.encode_batch(held_out_texts[-20:]) == load_tokenizer(trained()).encode_batch(held_out_texts[-20:])


@pytest.mark.parametrize("fields", [{"algorithm": "unigram"}, {"preset": "case"}], ids=str)
def test_models_that_are_not_local_are_left_alone(trained, fields):
    assert load_bulk_tokenizer(trained(**fields)).encoder == "sentencepiece"


def test_one_endless_segment_takes_the_memory_of_its_text(trained, monkeypatch):
    monkeypatch.setattr(segments, "WINDOW_BYTES", 64)
    bulk = load_bulk_tokenizer(trained(), "segments of sentencepiece")
    text = "e" * 5000 + " the end " * 50
    assert bulk.encode(text) == load_bulk_tokenizer(trained(), "sentencepiece").encode(text)
    assert len(bulk._encoder._entries) < 1000

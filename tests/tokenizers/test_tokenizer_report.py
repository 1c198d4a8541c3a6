"""Tokenizer metrics by hand, for a tokenizer with one token per character."""

import pytest

from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.tokenizers.tokenizer_report import ReportText, byte_ids, tokenizer_report


def test_metrics_computed_by_hand(trained):
    characters = load_tokenizer(trained(preset="characters"))
    texts = [
        ReportText("en", "the cat", key="1"),  # 7 bytes, 7 tokens, 2 words
        ReportText("en", "dog", key="2"),  # 3, 3, 1
        ReportText("ru", "кот", key="1"),  # 6 bytes, 3 tokens, 1 word
        ReportText("ru", "да", key=""),  # 4, 2, 1: no English text says the same
    ]
    found = tokenizer_report("characters", characters, texts, reference="en")
    english, russian = found.groups
    assert (english.bytes, english.tokens, english.bytes_per_token, english.fertility) == (10, 10, 1.0, 10 / 3)
    assert english.parity == 1.0
    assert (russian.bytes, russian.tokens, russian.bytes_per_token, russian.fertility) == (10, 5, 2.0, 2.5)
    assert russian.parity == 3 / 7
    assert (found.total.documents, found.total.tokens) == (4, 15)
    used = set("the cat dog кот да".replace(" ", "▁"))
    pieces = [piece for piece in characters.pieces if len(piece) == 1]
    assert found.unused == len(pieces) - len(used & set(pieces))
    assert found.round_trip_failures == 0


def test_bytes_of_characters_without_a_piece_are_counted(trained):
    tokenizer = load_tokenizer(trained(preset="characters"))
    (found,) = tokenizer_report("c", tokenizer, [ReportText("x", "a\U00012000b")], "x").groups
    assert (found.tokens, found.byte_fallback, found.pieces) == (6, 4 / 6, 5)  # two of the four bytes are equal
    assert byte_ids(["<0x00>", "a", "é", "<0xFF>"]) == [0, 3]
    assert byte_ids(["a", "Ã", "Ġ", "Ãa", "©"]) == [1, 4]  # GPT-2's alphabet: bytes C3 and A9, and the space


def test_round_trip_failures_are_counted(trained):
    found = tokenizer_report("bpe", load_tokenizer(trained()), [ReportText("x", "a▁b"), ReportText("x", "a b")], "x")
    assert (found.round_trip_failures, found.first_failure) == (1, "a▁b")
    assert found.groups[0].parity is None


@pytest.mark.parametrize("fields", [{}, {"preset": "case"}])
def test_bytes_and_tokens_add_up(trained, held_out_texts, fields):
    texts = [ReportText(f"group{number % 3}", text) for number, text in enumerate(held_out_texts[-30:])]
    found = tokenizer_report("any", load_tokenizer(trained(**fields)), texts, "group0")
    assert sum(group.tokens for group in found.groups) == found.total.tokens
    assert sum(group.bytes for group in found.groups) == sum(len(each.text.encode()) for each in texts)

"""Hashed n-grams: equal to a plain reading of the rule in Python, and sums equal to those of the slots."""

import random

import numpy as np
import pytest

from gristmill.data_pipeline.signals.bits import GROUP_MIX, LENGTH_FACTOR, TextBuffer
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, SPACE, WORD, character_table
from gristmill.data_pipeline.signals.hashed_ngrams import NGRAM_MIX, TOKEN_MIX, linear_sums, ngram_slots

ALPHABET = "ab Zé  ,.漢字ไท\n\t_9’“\u2028\u0000😀\u0301ßжΑ"


def folded_product(left: int, right: int) -> int:
    product = left * right
    return product & (2**64 - 1) ^ product >> 64


def hash_of(token: bytes) -> int:
    value = len(token) * int(LENGTH_FACTOR) % 2**64
    while len(token) > 16:
        group, other = (int.from_bytes(token[start : start + 8], "little") for start in (0, 8))
        value, token = folded_product(group ^ int(GROUP_MIX), other ^ value), token[16:]
    group, other = (int.from_bytes(token[start : start + 8], "little") for start in (0, 8))
    return folded_product(group ^ int(GROUP_MIX), other ^ value)


def tokens_of(text: str) -> list[str]:
    tokens, word, table = [], "", character_table()
    for character in text:
        flags = int(table[ord(character)])
        if flags & WORD and not flags & IDEOGRAPH:
            word += character.lower() if character.isascii() else character
            continue
        tokens += [word] * bool(word) + [character] * (not flags & SPACE)
        word = ""
    return tokens + [word] * bool(word)


def slots_of(text: str, bits: int, ngram: int) -> list[int]:
    hashes, slots = [hash_of(token.encode()) for token in tokens_of(text)], []
    for first, value in enumerate(hashes):
        slots.append(value >> 64 - bits)
        for following in hashes[first + 1 : first + ngram]:
            value = folded_product(value ^ int(NGRAM_MIX), following ^ int(TOKEN_MIX))
            slots.append(value >> 64 - bits)
    return slots


def random_texts(count: int) -> list[str]:
    rng = random.Random(1)
    return ["".join(rng.choices(ALPHABET, k=rng.choice([0, 1, 5, 30, 63, 64, 65, 100, 200]))) for _ in range(count)]


def test_tokens_are_words_ideographs_and_punctuation_marks():
    assert tokens_of("The Mill's 2 漢字, ok_9!") == ["the", "mill", "'", "s", "2", "漢", "字", ",", "ok_9", "!"]


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_slots_follow_the_rule_at_every_offset(ngram):
    texts = random_texts(300)
    for text, slots in zip(texts, ngram_slots(TextBuffer.of(texts), 20, ngram), strict=True):
        assert slots.tolist() == slots_of(text, 20, ngram)


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_sums_are_those_of_the_slots(ngram):
    weights = np.random.default_rng(0).normal(size=2**12).astype(np.float32)
    texts = random_texts(50)
    sums, counts = linear_sums(TextBuffer.of(texts), weights, ngram)
    slots = [slots_of(text, 12, ngram) for text in texts]
    assert counts.tolist() == [len(row) for row in slots]
    assert sums.tolist() == [float(sum(weights[row].astype(np.float64), 0.0)) for row in slots]

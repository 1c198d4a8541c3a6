"""Cached words give the ids of tokenizers for every family; random tokenizers are encoded and decoded as by it."""

import json
import random

import numpy as np
import pytest

from gristmill.tokenizers import words
from gristmill.tokenizers.encoders import HuggingFaceEncoder, adversarial_strings
from gristmill.tokenizers.tokenizer import SETTINGS_NAME, load_bulk_tokenizer, load_tokenizer
from gristmill.tokenizers.words import fastest_by_words, splits_before_spaces, word_encoder
from tests.support.random_tokenizers import END, random_text, random_tokenizer
from tokenizers import Tokenizer

REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
LLAMA = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, REPLACED]}


def reference_of(content: dict) -> HuggingFaceEncoder:
    return HuggingFaceEncoder(Tokenizer.from_str(json.dumps(content)))


def toy(vocabulary: dict, merges: list, **fields) -> dict:
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "unk_token": "?", "fuse_unk": True}
    return {"added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": model, **fields}


def test_ids_worked_by_hand():
    content = toy({"?": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4, "ab": 5}, [["▁", "a"], ["a", "b"]], normalizer=LLAMA)
    encoder = word_encoder(content)
    assert encoder.encode("ab ab") == [4, 3, 4, 3] == reference_of(content).encode("ab ab")  # a space before each text
    assert encoder.encode("") == []
    buffer, ends = np.frombuffer(b"abb a", np.uint8), np.array([2, 2, 5])
    ids, lengths = encoder.encode_utf8(buffer, ends, end_of_document=9)
    assert ids.tolist() == [4, 3, 9, 9, 1, 3, 4, 9] and lengths.tolist() == [3, 1, 4]


def test_what_joins_words_is_refused():
    plain = {"?": 0, "▁": 1, "a": 2, "b": 3}
    assert splits_before_spaces(toy(plain, [], normalizer=REPLACED))
    assert not splits_before_spaces(toy(plain | {"a▁": 4}, [["a", "▁"]], normalizer=REPLACED))
    pattern = {"type": "Split", "pattern": {"Regex": "New York|."}, "behavior": "Isolated", "invert": False}
    assert not splits_before_spaces(toy(plain, [], pre_tokenizer=pattern))
    pair = {"type": "Replace", "pattern": {"String": "a b"}, "content": "c"}
    assert not splits_before_spaces(toy(plain, [], normalizer=pair))
    word = {"id": 4, "content": "x", "lstrip": False, "rstrip": False, "single_word": False, "special": False}
    assert splits_before_spaces(toy(plain, [], normalizer=LLAMA))
    assert not splits_before_spaces(toy(plain, [], normalizer=LLAMA, added_tokens=[word]))
    token = word | {"content": "x y"}
    assert not splits_before_spaces(toy(plain, [], normalizer=REPLACED, added_tokens=[token]))
    assert not splits_before_spaces(
        toy(plain, [], normalizer=REPLACED, added_tokens=[token | {"content": "x", "lstrip": True}])
    )
    assert splits_before_spaces(toy(plain, [], normalizer=REPLACED, added_tokens=[token | {"special": True}]))


def test_a_byte_level_bpe_with_a_normalizer_is_encoded_by_words(gpt2_like, tmp_path, held_out_texts):
    """As Qwen's: NFC before the merges."""
    content = json.loads(gpt2_like.read_text()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    bulk, reference = load_bulk_tokenizer(tmp_path), load_tokenizer(tmp_path)
    assert (bulk.encoder, reference.encoder) == ("segments of tokenizers", "tokenizers")
    texts = [*held_out_texts[-20:], *adversarial_strings(seed=4), "Å e\u0301 \u0301 e"]
    assert bulk.encode_batch(texts) == reference.encode_batch(texts)
    worker = load_bulk_tokenizer(tmp_path, bulk.encoder)
    assert worker.encode_batch(texts) == reference.encode_batch(texts)


def test_another_boundary_is_found_by_the_comparison(gpt2_like, monkeypatch):
    content = json.loads(gpt2_like.read_text()) | {"normalizer": {"type": "NFC"}}
    monkeypatch.setattr(words, "compared_characters", lambda: ["aé"])
    assert fastest_by_words(content, reference_of(content)) is not None
    wrong = words.boundaries_before_spaces().reshape(256, 256).copy()
    wrong[0x20, 0x20] = False  # splits a run of spaces
    monkeypatch.setattr(words, "boundaries_before_spaces", lambda: wrong.reshape(-1))
    assert fastest_by_words(content, reference_of(content)) is None


def check_random_tokenizers(gpt2_like, folder, configurations: int, strings: int, seed: int) -> int:
    """Compares load_tokenizer and cached words with tokenizers; returns how many files words encode."""
    rng, byte_level, by_words = random.Random(seed), json.loads(gpt2_like.read_text()), 0
    (folder / SETTINGS_NAME).write_text(json.dumps({"eos_token": END}))
    for number in range(configurations):
        content = random_tokenizer(rng, byte_level)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        theirs, ours = Tokenizer.from_file(str(folder / "tokenizer.json")), load_tokenizer(folder)
        theirs.no_truncation()
        theirs.encode_special_tokens = True
        texts = [random_text(rng, [piece.replace("▁", " ") for piece in ours.pieces]) for _ in range(strings)]
        try:
            expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
        except BaseException as error:  # tokenizers panics where added tokens take the same blanks
            if type(error).__name__ != "PanicException":
                raise
            continue
        place = f"seed {seed}, configuration {number}"
        assert ours.encode_batch(texts) == expected, place
        for ids in (*expected, *(rng.choices(range(ours.vocab_size), k=8) for _ in range(strings))):
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), (place, ids)
        encoder = word_encoder(content)
        if encoder is not None and encoder.encode_batch(COMPARED) == reference_of(content).encode_batch(COMPARED):
            by_words += 1
            for _ in range(2):  # the second time from the cache
                assert encoder.encode_batch(texts) == expected, (place, content)
    return by_words


COMPARED = adversarial_strings()[:600]


def test_random_tokenizers_encode_and_decode_as_by_tokenizers(gpt2_like, tmp_path):
    assert check_random_tokenizers(gpt2_like, tmp_path, configurations=60, strings=30, seed=1) > 15


@pytest.mark.slow
def test_a_hundred_thousand_random_configurations_and_strings(gpt2_like, tmp_path):
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    by_words = check_random_tokenizers(gpt2_like, tmp_path, configurations=2_500, strings=40, seed=seed)
    print(f"{by_words} of 2500 by words")
    assert by_words > 500

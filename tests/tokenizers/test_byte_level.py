"""gigatoken or tiktoken encodes a byte-level BPE only if it gives the ids of Hugging Face's tokenizers."""

import itertools
import json
import random
import sys
import unicodedata

import numpy as np
import orjson
import pytest
import tiktoken

from gristmill.tokenizers.byte_level import (
    BYTE_NAMES,
    GPT2_PATTERN,
    NUM_CODE_POINTS,
    GigatokenEncoder,
    TiktokenEncoder,
    bytes_to_unicode,
    encodes_identically,
    fastest_byte_level,
    gigatoken_encoder,
    mask_of,
    ranges_of,
    raw_without_added_tokens,
    tiktoken_encoder,
    without_added_tokens,
)
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.encoders import HuggingFaceEncoder, adversarial_strings
from gristmill.tokenizers.pretrained import copy_pretrained
from gristmill.tokenizers.tokenizer import load_bulk_tokenizer, load_encoder, load_tokenizer
from tokenizers import Tokenizer

# tiktoken's pattern of cl100k_base (tiktoken_ext/openai_public.py), which Llama 3 uses too.
CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)


def content_of(path) -> dict:
    return json.loads(path.read_text("utf-8"))


def reference_of(content: dict) -> HuggingFaceEncoder:
    return HuggingFaceEncoder(Tokenizer.from_str(json.dumps(content)))


def test_the_names_of_bytes_are_gpt2s(byte_names):
    assert byte_names == BYTE_NAMES
    assert bytes_to_unicode(b" a\n") == "ĠaĊ"


@pytest.mark.parametrize(("pattern", "encoder"), [(None, "gigatoken"), (CL100K_PATTERN, "tiktoken")])
def test_ranks_are_encoded_fast_with_the_ids_of_tokenizers(ranks, tmp_path, held_out_texts, pattern, encoder):
    copy_pretrained(TokenizerConfig(pretrained=str(ranks[0]), pattern=pattern), tmp_path)
    reference, bulk = load_tokenizer(tmp_path), load_bulk_tokenizer(tmp_path)
    assert (reference.encoder, bulk.encoder) == ("tokenizers", encoder)
    texts = held_out_texts[-30:] + adversarial_strings(seed=5)
    expected = reference.encode_batch(texts)
    assert bulk.encode_batch(texts) == expected
    assert [bulk.encode(text) for text in texts] == expected
    for name in (encoder, "tiktoken", "tokenizers"):
        worker = load_bulk_tokenizer(tmp_path, name)
        ids, lengths = worker.encode_flat(texts)
        assert (ids.dtype, lengths.dtype) == ("int32", "int64")
        assert ids.tolist() == [token for row in expected for token in row]
        assert lengths.tolist() == [len(row) for row in expected]


def test_a_tokenizer_json_like_gpt2s_is_encoded_by_gigatoken(gpt2_like, tmp_path, held_out_texts):
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    bulk = load_bulk_tokenizer(tmp_path)
    assert bulk.encoder == "gigatoken"
    assert bulk.encode_batch(held_out_texts) == load_tokenizer(tmp_path).encode_batch(held_out_texts)


def test_a_worker_gets_the_differing_characters_and_does_not_determine_them(gpt2_like, tmp_path, monkeypatch):
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    bulk = load_bulk_tokenizer(tmp_path)
    monkeypatch.delattr("gristmill.tokenizers.byte_level.differing_code_points")
    worker = load_bulk_tokenizer(tmp_path, bulk.encoder, bulk.differing)
    assert any(first <= 0xA7CE < stop for first, stop in worker.differing)  # assigned in Unicode 17
    text = "it \ua7ce it's"
    assert worker.encode(text) == bulk.encode(text) == load_tokenizer(tmp_path).encode(text)


def test_differing_characters_are_determined_once_for_the_vocabularies_of_a_pattern(gpt2_like, monkeypatch):
    content = content_of(gpt2_like)
    first = gigatoken_encoder(content, reference_of(content))
    monkeypatch.setattr("gristmill.tokenizers.byte_level.compared_characters", None)
    model = content["model"]
    *merges, (left, right) = model["merges"]
    vocabulary = {piece: number for piece, number in model["vocab"].items() if piece != left + right}
    smaller = content | {"model": model | {"vocab": vocabulary, "merges": merges}}
    assert gigatoken_encoder(smaller, reference_of(smaller)).differing == first.differing != ()


def test_ranges_of_code_points():
    ranges = ((0, 2), (5, 6), (NUM_CODE_POINTS - 1, NUM_CODE_POINTS))
    assert ranges_of(mask_of(ranges)) == ranges
    assert ranges_of(np.array([False, True, True, False, True])) == ((1, 3), (4, 5))


# Pre-tokenization patterns of published tokenizer.json files: None is GPT-2's, which ByteLevel has built in.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
)
PATTERNS = {
    "gpt2": None,
    "llama3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST,  # and cl100k
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST,
    "o200k": O200K_WORDS + r"|\p{N}{1,3}" + REST.replace(r"[\r\n]*|", r"[\r\n/]*|"),
}


def with_pattern(content: dict, pattern: str | None) -> dict:
    if pattern is None:
        return content
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return content | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]}}


def hostile_strings(content: dict, count: int, seed: int) -> list[str]:
    """Mixtures of characters of every class and block, line ends, contractions, and pieces of the vocabulary."""
    rng = random.Random(seed)
    by_class: dict[str, list[str]] = {}
    for character in map(chr, itertools.chain(range(0xD800), range(0xE000, 0x34000), range(0xE0000, 0xE0200))):
        by_class.setdefault(unicodedata.category(character), []).append(character)
    classes = list(by_class.values())
    words = [piece for piece in content["model"]["vocab"] if piece.isascii()]
    words += ["'s", "'S", "'ſ", "'ll", "'LL", " \n", "\r\n", "  ", "\t", "1234", "<|endoftext|>", "a\u0301", "\u00a0"]

    def part() -> str:
        return rng.choice(words) if rng.random() < 0.5 else rng.choice(rng.choice(classes))

    return ["".join(part() for _ in range(rng.randint(1, 12))) for _ in range(count)]


def check_hostile(content: dict, count: int, seed: int) -> None:
    reference = reference_of(content)
    strings = hostile_strings(content, count, seed)
    expected = reference.encode_batch(strings)
    for make in (gigatoken_encoder, tiktoken_encoder):
        ids = make(content, reference).encode_batch(strings)
        assert [text for text, ours, theirs in zip(strings, ids, expected, strict=True) if ours != theirs] == []


@pytest.mark.parametrize("name", PATTERNS)
def test_hostile_strings_have_the_ids_of_tokenizers(gpt2_like, name):
    check_hostile(with_pattern(content_of(gpt2_like), PATTERNS[name]), 2_500, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("seed", range(5))
def test_a_million_hostile_strings_have_the_ids_of_tokenizers(gpt2_like, name, seed):
    check_hostile(with_pattern(content_of(gpt2_like), PATTERNS[name]), 50_000, seed=100 + seed)


def test_texts_with_characters_of_a_newer_unicode_are_encoded_by_the_reference(gpt2_like):
    content = content_of(gpt2_like)
    reference = reference_of(content)
    fast = gigatoken_encoder(content, reference)
    assert fast._differing[0xA7CE]  # assigned in Unicode 17
    assert not fast._differing[:0x880].any()
    same = GigatokenEncoder(without_added_tokens(content), reference, np.zeros(NUM_CODE_POINTS, np.bool_))
    characters = [chr(code) for code in np.flatnonzero(fast._differing)]
    texts = [f"it {before}{character}" for character in characters for before in ("", " ", "a", "1", "é", "€a", "😀")]
    assert fast.encode_batch(texts) == reference.encode_batch(texts)
    assert not encodes_identically(content, reference, same)
    ids, lengths = fast.encode_utf8(*packed(["", "ab", "", "x \ua7ce", "é"]), end_of_document=7)
    assert ids.tolist() == [7, *fast.encode("ab"), 7, 7, *reference.encode("x \ua7ce"), 7, *fast.encode("é"), 7]
    assert lengths.sum() == len(ids)


@pytest.mark.parametrize(
    "content",
    [
        {"added_tokens": [{"id": 3}], "model": {"vocab": {"model": 1, '"model":': 2}}, "normalizer": None},
        {"added_tokens": [], "decoder": {"model": {}}, "model": {"vocab": {"a": 0}}},
        {"model": {"vocab": {"added_tokens": 1}}, "added_tokens": [{"id": 3}]},
        {"added_tokens": [{"content": '"model":'}], "model": {"vocab": {"added_tokens": 1}}},
        {"decoder": {"added_tokens": [1]}, "model": {"vocab": {}}},
    ],
)
def test_added_tokens_are_taken_out_of_the_bytes_of_a_file(content):
    expected = content | {"added_tokens": []}
    for raw in (orjson.dumps(content), json.dumps(content, indent=2).encode()):
        assert json.loads(raw_without_added_tokens(raw)) == expected


def test_added_tokens_that_stand_twice_in_a_file_are_taken_out():
    raw = b'{"added_tokens":[],"model":{},"added_tokens":[{"id":1}]}'
    assert json.loads(raw_without_added_tokens(raw))["added_tokens"] == []


def packed(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    raw = [text.encode() for text in texts]
    return np.frombuffer(b"".join(raw), np.uint8), np.cumsum([len(text) for text in raw])


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_the_cache_of_words_is_emptied_when_memory_has_grown(gpt2_like, held_out_texts, monkeypatch):
    content = content_of(gpt2_like)
    reference = reference_of(content)
    fast = gigatoken_encoder(content, reference)
    fast.encode_batch(held_out_texts)
    first = fast._backend
    fast.encode_batch(held_out_texts)
    assert fast._backend is first
    monkeypatch.setattr("gristmill.tokenizers.byte_level.MAX_CACHE_BYTES", -1)
    fast._limit_bytes = 0
    assert fast.encode_batch(held_out_texts) == reference.encode_batch(held_out_texts)
    assert fast._backend is not first


def test_a_text_that_tiktoken_rejects_is_encoded_by_the_reference(gpt2_like):
    content = content_of(gpt2_like)
    reference = reference_of(content)
    fast = tiktoken_encoder(content, reference)
    blanks = " " * 1_000_000 + "x"
    with pytest.raises(ValueError, match="stack"):
        fast._encoding.encode_to_numpy(blanks)
    assert fast.encode(blanks) == reference.encode(blanks)
    with pytest.raises(UnicodeEncodeError):
        fast.encode("a\ud800b")


def test_what_is_more_than_merges_of_bytes_stays_with_tokenizers(gpt2_like):
    def chosen(**changes) -> str:
        content = content_of(gpt2_like)
        for name, change in changes.items():
            content[name] = change(content[name])
        fast = fastest_byte_level(content, reference_of(content))
        return "tokenizers" if fast is None else fast.name

    def moved(model: dict) -> dict:
        merges = model["merges"]
        return model | {"merges": [*merges[:300], merges[301], merges[300], *merges[302:]]}

    def with_a_word(added: list) -> list:
        return [*added, {**added[0], "id": 1500, "content": "whole", "special": False}]

    assert chosen() == "gigatoken"
    assert chosen(normalizer=lambda _: {"type": "NFC"}) == "tokenizers"
    assert chosen(pre_tokenizer=lambda part: part | {"add_prefix_space": True}) == "tokenizers"
    assert chosen(pre_tokenizer=lambda part: part | {"use_regex": False}) == "tokenizers"
    assert chosen(model=moved) == "tokenizers"
    assert chosen(model=lambda model: model | {"merges": model["merges"][:-1]}) == "tokenizers"
    assert chosen(added_tokens=with_a_word) == "tokenizers"


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(CL100K_PATTERN, id="cl100k", marks=pytest.mark.slow),
        pytest.param(GPT2_PATTERN.replace(r"\p{N}+", r"\p{Nd}+"), id="digits alone", marks=pytest.mark.slow),
        pytest.param(GPT2_PATTERN.replace(r"\s+(?!\S)|", ""), id="no look-ahead"),
    ],
)
def test_another_pattern_is_found_by_the_proof(gpt2_like, pattern):
    content = content_of(gpt2_like)
    reference = reference_of(content)
    proper = tiktoken_encoder(content, reference)._encoding
    other = tiktoken.Encoding("other", pat_str=pattern, mergeable_ranks=proper._mergeable_ranks, special_tokens={})
    assert not encodes_identically(content, reference, TiktokenEncoder(other, reference))


def test_a_worker_loads_neither_the_reference_nor_the_library_before_it_needs_them(gpt2_like, tmp_path, monkeypatch):
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    chosen = load_bulk_tokenizer(tmp_path)
    monkeypatch.setattr("gristmill.tokenizers.byte_level._ranks", None)
    worker = load_encoder(tmp_path, chosen.encoder, chosen.differing)
    assert worker._backend is None
    plain, newer = "it's 12 mills", "it \ua7ce it's"  # U+A7CE: assigned in Unicode 17, encoded by the reference
    assert worker.encode(plain) == chosen.encode(plain)
    assert "_tokenizer" not in vars(worker._reference)
    assert worker.encode(newer) == chosen.encode(newer)
    assert "_tokenizer" in vars(worker._reference)

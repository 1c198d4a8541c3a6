"""tiktoken encodes a byte-level BPE only if it gives the ids of Hugging Face's tokenizers."""

import json

import pytest
import tiktoken

from gristmill.tokenizers.adversarial import adversarial_strings
from gristmill.tokenizers.byte_level import (
    BYTE_NAMES,
    GPT2_PATTERN,
    TiktokenEncoder,
    fastest_byte_level,
    same_ids,
    tiktoken_encoder,
    visible,
)
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.encoders import HuggingFaceEncoder
from gristmill.tokenizers.pretrained import copy_pretrained
from gristmill.tokenizers.tokenizer import load_bulk_tokenizer, load_tokenizer
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
    assert visible(b" a\n") == "ĠaĊ"


@pytest.mark.parametrize("pattern", [None, CL100K_PATTERN])
def test_ranks_are_encoded_by_tiktoken_with_the_ids_of_tokenizers(ranks, tmp_path, held_out_texts, pattern):
    copy_pretrained(TokenizerConfig(pretrained=str(ranks[0]), pattern=pattern), tmp_path)
    reference, bulk = load_tokenizer(tmp_path), load_bulk_tokenizer(tmp_path)
    assert (reference.encoder, bulk.encoder) == ("tokenizers", "tiktoken")
    texts = held_out_texts[-30:] + adversarial_strings(seed=5)
    expected = reference.encode_batch(texts)
    assert bulk.encode_batch(texts) == expected
    assert [bulk.encode(text) for text in texts] == expected
    for worker in (bulk, load_bulk_tokenizer(tmp_path, "tiktoken"), load_bulk_tokenizer(tmp_path, "tokenizers")):
        ids, lengths = worker.encode_flat(texts)
        assert (ids.dtype, lengths.dtype) == ("int32", "int64")
        assert ids.tolist() == [token for row in expected for token in row]
        assert lengths.tolist() == [len(row) for row in expected]


def test_a_tokenizer_json_like_gpt2s_is_encoded_by_tiktoken(gpt2_like, tmp_path, held_out_texts):
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    bulk = load_bulk_tokenizer(tmp_path)
    assert bulk.encoder == "tiktoken"
    assert bulk.encode_batch(held_out_texts) == load_tokenizer(tmp_path).encode_batch(held_out_texts)


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
        return fastest_byte_level(content, reference_of(content)).name

    def moved(model: dict) -> dict:
        merges = model["merges"]
        return model | {"merges": [*merges[:300], merges[301], merges[300], *merges[302:]]}

    def with_a_word(added: list) -> list:
        return [*added, {**added[0], "id": 1500, "content": "whole", "special": False}]

    assert chosen() == "tiktoken"
    assert chosen(normalizer=lambda _: {"type": "NFC"}) == "tokenizers"
    assert chosen(pre_tokenizer=lambda part: part | {"add_prefix_space": True}) == "tokenizers"
    assert chosen(pre_tokenizer=lambda part: part | {"use_regex": False}) == "tokenizers"
    assert chosen(model=moved) == "tokenizers"
    assert chosen(model=lambda model: model | {"merges": model["merges"][:-1]}) == "tokenizers"
    assert chosen(added_tokens=with_a_word) == "tokenizers"


@pytest.mark.parametrize(
    "pattern",
    [CL100K_PATTERN, GPT2_PATTERN.replace(r"\p{N}+", r"\p{Nd}+"), GPT2_PATTERN.replace(r"\s+(?!\S)|", "")],
    ids=["cl100k", "digits alone", "no look-ahead"],
)
def test_another_pattern_is_found_by_the_proof(gpt2_like, pattern):
    content = content_of(gpt2_like)
    reference = reference_of(content)
    proper = tiktoken_encoder(content, reference)._encoding
    other = tiktoken.Encoding("other", pat_str=pattern, mergeable_ranks=proper._mergeable_ranks, special_tokens={})
    assert not same_ids(content, reference, TiktokenEncoder(other, reference))

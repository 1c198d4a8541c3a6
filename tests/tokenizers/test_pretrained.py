"""Pretrained tokenizers give the ids of the library that they come from."""

import pytest
import sentencepiece
import tiktoken

from gristmill.foundation.errors import InputError
from gristmill.tokenizers.byte_level import GPT2_PATTERN
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.encoders import adversarial_strings
from gristmill.tokenizers.pretrained import copy_pretrained, last_merge, pretrained_digest
from gristmill.tokenizers.tokenizer import load_bulk_tokenizer, load_tokenizer
from tokenizers import Tokenizer


def test_a_tokenizer_json_is_used_as_it_is(gpt2_like, tmp_path, held_out_texts):
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    ours, theirs = load_tokenizer(tmp_path), Tokenizer.from_file(str(gpt2_like))
    assert (tmp_path / "tokenizer.json").read_bytes() == gpt2_like.read_bytes()
    assert ours.pieces[ours.end_of_document] == "<|endoftext|>"
    for text in held_out_texts[-30:]:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


def test_the_end_of_a_document_is_not_made_from_text(gpt2_like, tmp_path):
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    ours = load_tokenizer(tmp_path)
    ids = ours.encode("a<|endoftext|>b")
    assert ours.end_of_document not in ids
    assert ours.decode([*ids, ours.end_of_document]) == "a<|endoftext|>b"


def test_tiktoken_ranks_give_the_ids_of_tiktoken(ranks, tmp_path, held_out_texts):
    path, table = ranks
    theirs = tiktoken.Encoding("small", pat_str=GPT2_PATTERN, mergeable_ranks=table, special_tokens={})
    copy_pretrained(TokenizerConfig(pretrained=str(path)), tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.end_of_document == len(table)
    for text in held_out_texts[-30:] + adversarial_strings():
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text


def test_a_lone_surrogate_is_named(gpt2_like, tmp_path):
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    for tokenizer in (load_tokenizer(tmp_path), load_bulk_tokenizer(tmp_path)):
        with pytest.raises(InputError, match=r"lone surrogate U\+D800 at character 1"):
            tokenizer.encode("a\ud800b")


def test_the_last_merge_worked_by_hand():
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5}
    assert last_merge(b"abc", ranks) == (b"ab", b"c")
    with pytest.raises(InputError, match="is not built by merges"):
        last_merge(b"acb", ranks | {b"acb": 6})


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_a_model_of_others_is_used_as_it_is(training_texts, tmp_path, held_out_texts, add_dummy_prefix):
    """Like Llama's: BPE with byte fallback and identity, with and without the leading space."""
    with (tmp_path / "llama.model").open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(training_texts[:60]),
            model_writer=model,
            model_type="bpe",
            vocab_size=900,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=add_dummy_prefix,
            minloglevel=2,
        )
    (tmp_path / "out").mkdir()
    copy_pretrained(TokenizerConfig(pretrained=str(tmp_path / "llama.model")), tmp_path / "out")
    ours = load_tokenizer(tmp_path / "out")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "llama.model"))
    for text in held_out_texts[-30:] + adversarial_strings():
        assert ours.encode(text) == theirs.encode(text)


def test_the_digest_follows_the_content_not_the_path(gpt2_like, tmp_path):
    copy = tmp_path / "elsewhere.json"
    copy.write_bytes(gpt2_like.read_bytes())
    assert pretrained_digest(str(copy)) == pretrained_digest(str(gpt2_like))
    copy.write_bytes(copy.read_bytes() + b" ")
    assert pretrained_digest(str(copy)) != pretrained_digest(str(gpt2_like))


def test_invalid_tokenizers_are_refused_with_the_fix(tmp_path):
    def adopted(name: str, content: bytes = b"", **fields):
        (tmp_path / name).write_bytes(content)
        copy_pretrained(TokenizerConfig(pretrained=str(tmp_path / name), **fields), tmp_path / "out")

    with pytest.raises(InputError, match="the hub has none"):
        copy_pretrained(TokenizerConfig(pretrained="no/such-name"), tmp_path / "out")
    with pytest.raises(InputError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        copy_pretrained(TokenizerConfig(pretrained=str(tmp_path)), tmp_path / "out")
    with pytest.raises(InputError, match=r"this ends in '\.txt'"):
        adopted("a.txt")
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        adopted("a.json", b"[1, 2]")
    with pytest.raises(InputError, match=r"set tokenizer\.end_of_document"):
        adopted("b.json", b'{"added_tokens": []}')
    with pytest.raises(InputError, match=r"a\.tiktoken:1: not a line of base64 and rank"):
        adopted("a.tiktoken", b"???\n")
    with pytest.raises(InputError, match="no rank for 255 single bytes"):
        adopted("b.tiktoken", b"YQ== 0\n")
    adopted("c.json", b'{"added_tokens": []}', end_of_document="<e>")
    with pytest.raises(InputError, match=r"not a tokenizer\.json that Hugging Face's tokenizers reads"):
        load_tokenizer(tmp_path / "out")

"""Texts by a table of bytes are those of the library that a tokenizer comes from."""

import json
import random

import pytest
import sentencepiece

from gristmill.evaluation.inference.generate.sequence import TokenText
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.encoders import adversarial_strings
from gristmill.tokenizers.pretrained import copy_pretrained
from gristmill.tokenizers.tokenizer import MODEL_NAME, ByteTableDecoder, json_decoder, load_tokenizer
from tokenizers import Tokenizer


class Recording:
    def __init__(self):
        self.asked: list[list[int]] = []

    def decode(self, ids):
        self.asked.append(ids)
        return "?"


def test_texts_worked_by_hand():
    reference = Recording()
    decoder = ByteTableDecoder({0: b" a", 1: b"\xc3", 2: b"\xa9"}, reference, stripped_spaces=1)
    assert decoder.decode([0, 1, 2, 0]) == "aé a"
    assert decoder.decode([]) == ""
    assert [decoder.decode(ids) for ids in ([1], [2, 1], [7], [-1])] == ["?"] * 4
    assert reference.asked == [[1], [2, 1], [7], [-1]]  # no UTF-8; no token


def test_a_decoder_that_looks_at_neighbours_is_left_to_tokenizers():
    reference = Recording()
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "CTC"}, {"type": "Fuse"}):
        assert json_decoder({"decoder": decoder}, ["a"], set(), reference) is reference


@pytest.mark.parametrize("fields", [{}, {"algorithm": "unigram"}, {"user_symbols": ("<br>", "\n")}], ids=str)
def test_a_trained_model_decodes_as_sentencepiece(trained, held_out_texts, fields):
    """Of texts, and of any ids: parts of characters, control symbols and bytes in any order."""
    folder, rng = trained(**fields), random.Random(0)
    ours, theirs = load_tokenizer(folder), sentencepiece.SentencePieceProcessor(model_file=str(folder / MODEL_NAME))
    batches = ours.encode_batch(held_out_texts[-30:] + adversarial_strings())
    batches += [rng.choices(range(ours.vocab_size), k=rng.randint(1, 6)) for _ in range(5_000)]
    batches += [rng.choices(range(300), k=rng.randint(1, 6)) for _ in range(5_000)]
    assert [ours.decode(ids) for ids in batches] == [theirs.decode(ids) for ids in batches]


def test_a_byte_level_bpe_decodes_as_tokenizers(gpt2_like, tmp_path, held_out_texts):
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(gpt2_like.read_text())))
    ours, theirs, rng = load_tokenizer(tmp_path), Tokenizer.from_file(str(gpt2_like)), random.Random(0)
    batches = ours.encode_batch(held_out_texts[-30:] + adversarial_strings())
    batches += [rng.choices(range(ours.vocab_size), k=rng.randint(1, 6)) for _ in range(20_000)]
    assert [ours.decode(ids) for ids in batches] == [theirs.decode(ids) for ids in batches]
    assert ours.decode([ours.end_of_document]) == ""


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_of_tokens_is_the_decoded_text_so_far(gpt2_like, trained, tmp_path, seed):
    """Bytes of characters, invalid bytes and the replacement character itself, in any order."""
    copy_pretrained(TokenizerConfig(pretrained=str(gpt2_like)), tmp_path)
    rng = random.Random(seed)
    tokenizers = load_tokenizer(tmp_path), load_tokenizer(trained())
    for tokenizer in tokenizers:
        bytes_alone = [tokenizer.encode(chr(code))[0] for code in range(0x80, 0x800, 7)]
        ids = [*tokenizer.encode("naïve \ufffd 漢字 😀👍🏽\r\nx "), *rng.choices(bytes_alone, k=30)]
        ids += rng.choices(range(tokenizer.vocab_size), k=200)
        rng.shuffle(ids)
        stream = TokenText(tokenizer)
        for place, token in enumerate(ids):
            stream.add(token)
            assert tokenizer.decode(ids[: place + 1]).startswith(stream.text)
    for tokenizer in (*tokenizers, load_tokenizer(trained(preset="case"))):
        text = "naïve \ufffd 漢字 😀👍🏽\r\nx"
        stream = TokenText(tokenizer)
        for token in tokenizer.encode(text):
            stream.add(token)
        assert stream.text == stream.whole() == text

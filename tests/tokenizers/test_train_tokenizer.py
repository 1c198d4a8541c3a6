"""Tokenizer training: deterministic bytes, the effect of each setting, and errors with the fix."""

import json
import os
import subprocess
import sys

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.foundation.errors import InputError
from gristmill.tokenizers import train_tokenizer as training
from gristmill.tokenizers.config import FIM_SYMBOLS, TokenizerConfig
from gristmill.tokenizers.export import transforms_of
from gristmill.tokenizers.tokenizer import MODEL_NAME, SETTINGS_NAME, load_tokenizer
from gristmill.tokenizers.train_tokenizer import END_OF_DOCUMENT, train, train_on_words
from gristmill.tokenizers.word_counts import count_texts


def pieces_of(folder, text: str) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return processor.encode(text, out_type=str)


def model_of(folder):
    return sentencepiece_model_pb2.ModelProto.FromString((folder / MODEL_NAME).read_bytes())


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_the_same_input_gives_the_same_bytes_on_any_number_of_cores(training_texts, tmp_path, algorithm):
    config = TokenizerConfig(algorithm=algorithm, vocab_size=700)
    texts = training_texts[:40]
    here = train(texts, config)
    assert train(texts, config) == here
    (tmp_path / "texts").write_bytes("\0".join(texts).encode())
    script = (
        "import os, sys, hashlib; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from gristmill.tokenizers.config import TokenizerConfig\n"
        "from gristmill.tokenizers.train_tokenizer import train\n"
        f"texts = open({str(tmp_path / 'texts')!r}, 'rb').read().decode().split(chr(0))\n"
        f"sys.stdout.buffer.write(train(texts, TokenizerConfig(algorithm={algorithm!r}, vocab_size=700)))\n"
    )
    on_one_core = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, env=os.environ)
    assert on_one_core.stdout == here


def test_unigram_is_trained_on_a_bounded_number_of_words(training_texts, monkeypatch):
    """Of twenty times as many words, counts are divided and rare words drawn: nearly as good pieces."""
    words, config = count_texts(training_texts), TokenizerConfig(algorithm="unigram", vocab_size=700)
    text, total = "".join(training_texts), sum(words["count"].to_pylist())

    def num_tokens(model: bytes) -> int:
        return len(sentencepiece.SentencePieceProcessor(model_proto=model).encode(text))

    whole = train_on_words(words, config)
    monkeypatch.setattr(training, "MAX_UNIGRAM_WORDS", total // 20)
    trained_on = []
    lines = training._lines
    monkeypatch.setattr(training, "_lines", lambda table: (trained_on.append(table), lines(table))[1])
    bounded = train_on_words(words, config)
    assert bounded == train_on_words(words, config) != whole
    counts = trained_on[0]["count"].to_pylist()
    assert min(counts) == 1 and 0.9 < 20 * sum(counts) / total < 1.1
    assert num_tokens(bounded) < 1.05 * num_tokens(whole)


def test_digits_are_single_pieces_if_configured(trained):
    assert pieces_of(trained(), "in 2024") == [*pieces_of(trained(), "in "), "2", "0", "2", "4"]
    assert len(pieces_of(trained(preset="default"), "0123456789")) < 10


def test_user_symbols_are_one_piece_wherever_they_stand(trained):
    folder = trained(user_symbols=("<br>", "  ", "a b"))
    assert "<br>" in pieces_of(folder, "x<br>y")
    assert pieces_of(folder, "    ") == ["▁▁", "▁▁"]
    assert "a▁b" in pieces_of(folder, "xa by")


def test_case_marks_share_the_pieces_of_small_letters(trained):
    folder = trained(preset="case")
    small, capital = pieces_of(folder, "return"), pieces_of(folder, "Return")
    assert capital in (["\ue000", *small], ["\ue000" + small[0], *small[1:]])


def test_operators_and_digits_are_single_pieces(trained):
    pieces = pieces_of(trained(preset="arithmetic"), "x=12+345")
    assert pieces[-7:] == list("=12+345")


def test_combined_has_single_spaces_too(trained):
    pieces = pieces_of(trained(preset="combined"), "the  end of\nthe file")
    assert [piece for piece in pieces if "▁" in piece] == ["▁"] * 4


def test_the_model_says_which_transforms_it_has(trained):
    assert transforms_of(model_of(trained())) == ["split_digits"]
    assert transforms_of(model_of(trained(preset="default"))) == []
    combined = trained(preset="combined")
    names = ["case_marks", "split_digits", "split_operators", "split_spaces"]
    assert transforms_of(model_of(combined)) == names
    assert json.loads((combined / SETTINGS_NAME).read_bytes())["transforms"] == names


def test_characters_are_characters(trained):
    assert pieces_of(trained(preset="characters"), "the end") == list("the▁end")


def test_pieces_may_hold_line_ends(trained):
    assert any("\n" in piece and len(piece) > 1 for piece in load_tokenizer(trained()).pieces)


def test_control_symbols_are_never_made_from_text(trained):
    tokenizer = load_tokenizer(trained(fim=True))
    assert tokenizer.pieces[tokenizer.end_of_document] == END_OF_DOCUMENT
    control = {tokenizer.end_of_document, *tokenizer.fim_ids()}
    for symbol in (END_OF_DOCUMENT, *FIM_SYMBOLS):
        ids = tokenizer.encode(f"a{symbol}b")
        assert not control & set(ids)
        assert tokenizer.decode(ids) == f"a{symbol}b"
    assert load_tokenizer(trained()).fim_ids() is None


@pytest.mark.parametrize(
    ("texts", "vocab_size", "message"),
    [
        (["hello world"], 5000, r"is more than the corpus supports: its text gives at most \d+ pieces; set tokenizer"),
        (["".join(map(chr, range(0x4E00, 0x4F00)))] * 9, 300, "is too small: the characters, bytes and symbols alone"),
        ([], 1000, "the training split holds no text"),
        (["", ""], 1000, "the training split holds no text"),
    ],
)
def test_a_vocabulary_the_corpus_does_not_support_is_refused(texts, vocab_size, message):
    with pytest.raises(InputError, match=message):
        train(texts, TokenizerConfig(vocab_size=vocab_size))

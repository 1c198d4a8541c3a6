"""Inspection of tokenizers: the encoder of a corpus is the first that is equal."""

import pytest

from gristmill.foundation.errors import InputError
from gristmill.tokenizers import tokenizer_report as report
from gristmill.tokenizers import words
from gristmill.tokenizers.byte_level import GigatokenEncoder
from gristmill.tokenizers.tokenizer import load_bulk_tokenizer
from gristmill.tokenizers.tokenizer_report import inspect_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture(autouse=True)
def few_strings(monkeypatch):
    """Every hundredth string: all of them take seconds, and test_words.py and test_byte_level.py compare them."""
    texts, strings = report.comparison_texts, report.comparison_strings
    monkeypatch.setattr(report, "comparison_texts", lambda content: texts(content)[::100])
    for module in (report, words):
        monkeypatch.setattr(module, "comparison_strings", lambda content: strings(content)[::100])


def outcomes(folder) -> dict[str, str]:
    """Encoder -> outcome; the chosen one is that of a corpus."""
    inspected = inspect_tokenizer(folder)
    assert inspected.encoder == load_bulk_tokenizer(folder).encoder
    assert [check.encoder for check in inspected.checks if check.is_equal] == [inspected.encoder]
    return {check.encoder: check.outcome.split(" ")[0] for check in inspected.checks}


def test_a_sentencepiece_model(trained):
    folder = trained(vocab_size=600)
    assert outcomes(folder) == {
        "segments by merges, kitoken": "equal",
        "segments of kitoken": "slower,",
        "kitoken": "slower,",
        "sentencepiece": "slower,",
    }
    inspected = inspect_tokenizer(folder)
    assert (inspected.family, inspected.vocab_size) == ("SentencePiece BPE", 600)


def test_a_byte_level_tokenizer_json(gpt2_like):
    assert list(outcomes(gpt2_like.parent).items()) == [
        ("gigatoken", "equal"),
        ("tiktoken", "slower,"),
        ("segments of tokenizers", "slower,"),
        ("tokenizers", "slower,"),
    ]


def test_a_word_piece_tokenizer_is_no_byte_level_one(tmp_path):
    vocabulary = {piece: number for number, piece in enumerate(["[UNK]", "[SEP]", *"abcdefgh", "##a", "##b"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert list(outcomes(tmp_path).values()) == ["cannot", "cannot", "equal", "slower,"]
    assert inspect_tokenizer(tmp_path).family == "WordPiece (BertPreTokenizer)"


def test_an_encoder_with_other_ids_is_named_with_a_text(gpt2_like, monkeypatch):
    monkeypatch.setattr(GigatokenEncoder, "encode_batch", lambda _, texts: [[0]] * len(texts))
    inspected = inspect_tokenizer(gpt2_like.parent)
    assert inspected.checks[0].outcome.startswith("other ids of '")
    assert inspected.encoder == "tiktoken"


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(InputError, match=r"neither tokenizer\.model nor tokenizer\.json"):
        inspect_tokenizer(tmp_path)

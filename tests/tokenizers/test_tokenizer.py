"""Round trips, the choice of the encoder, and errors."""

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.foundation.errors import InputError
from gristmill.tokenizers import tokenizer
from gristmill.tokenizers.encoders import (
    KitokenEncoder,
    SentencePieceEncoder,
    adversarial_strings,
    fastest_verified_encoder,
    first_difference,
)
from gristmill.tokenizers.tokenizer import JSON_NAME, MODEL_NAME, load_bulk_tokenizer, load_tokenizer
from tokenizers import Tokenizer as HuggingFaceTokenizer

SETTINGS = [
    {},
    {"algorithm": "unigram"},
    {"preset": "default"},
    {"preset": "case"},
    {"preset": "arithmetic"},
    {"preset": "combined"},
    {"preset": "characters"},
    {"user_symbols": ("<br>", "\n"), "fim": True},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_what_is_encoded_decodes_to_itself(trained, held_out_texts, fields):
    tokenizer = load_tokenizer(trained(**fields))
    strings = held_out_texts + adversarial_strings([piece.replace("▁", " ") for piece in tokenizer.pieces])
    for text, ids in zip(strings, tokenizer.encode_batch(strings), strict=True):
        assert tokenizer.decode(ids) == text.replace("▁", " ")  # the one sign that SentencePiece keeps for itself


CASED = st.sampled_from("aAiIıİ\u0307ςσΣǅǄǆßẞſKkKåÅ\u030aÅᾳᾼ\ue000\ue001 .+-−7\u0301")


@settings(max_examples=20)
@given(text=st.text(CASED, max_size=12))
@pytest.mark.parametrize("preset", ["case", "arithmetic", "combined"])
def test_any_text_with_capitals_comes_back_from_model_and_json(trained, preset, text):
    folder = trained(preset=preset)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    exported = HuggingFaceTokenizer.from_file(str(folder / JSON_NAME))
    assert exported.encode(text, add_special_tokens=False).ids == ids
    assert exported.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(max_size=40))
def test_any_text_comes_back(trained, text):
    tokenizer = load_bulk_tokenizer(trained(), "kitoken")
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def test_kitoken_is_taken_where_it_is_proved_equal(trained, held_out_texts):
    folder = trained()
    assert load_tokenizer(folder).encoder == "kitoken"
    fast, reference = load_bulk_tokenizer(folder, "kitoken"), load_bulk_tokenizer(folder, "sentencepiece")
    assert fast.encode_batch(held_out_texts) == reference.encode_batch(held_out_texts)


@pytest.fixture
def no_comparison(monkeypatch):
    def compare(*_):
        raise AssertionError("compared")

    return lambda: monkeypatch.setattr(tokenizer, "_fastest_in_bulk", compare)


def test_the_choice_of_an_encoder_is_kept_for_equal_files(trained, tmp_path, monkeypatch, no_comparison):
    monkeypatch.setattr(tokenizer, "kernel_folder", lambda: tmp_path)
    chosen = load_bulk_tokenizer(trained())
    (path,) = tmp_path.glob("encoder-*.choice")
    no_comparison()
    kept = load_bulk_tokenizer(trained())
    assert (kept.encoder, kept.differing, kept.encode("a b")) == (
        chosen.encoder,
        chosen.differing,
        chosen.encode("a b"),
    )
    with pytest.raises(AssertionError, match="compared"):
        load_bulk_tokenizer(trained(algorithm="unigram"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AssertionError, match="compared"):
        load_bulk_tokenizer(trained())


@pytest.mark.parametrize("fields", [{"algorithm": "unigram"}, {"preset": "case"}], ids=str)
def test_sentencepiece_stays_where_kitoken_differs(trained, fields):
    assert load_tokenizer(trained(**fields)).encoder == "sentencepiece"


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()], ids=str)
def test_a_disk_or_memory_that_fails_decides_no_encoder(trained, monkeypatch, error):
    """A refused open of tokenizer.model chose sentencepiece instead of kitoken, in the manifest too."""
    path = trained() / MODEL_NAME
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def refuse(path):
        raise error

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with pytest.raises(type(error)):
        fastest_verified_encoder(path, processor, ["a"])


def test_ordinary_text_would_hide_what_the_adversarial_set_finds(tmp_path, training_texts):
    """A model with SentencePiece's default normalizer: the same ids on plain words, others on a lone space."""
    with (tmp_path / MODEL_NAME).open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(training_texts[:40]), model_writer=model, vocab_size=700, minloglevel=2
        )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / MODEL_NAME))
    reference, fast = SentencePieceEncoder(processor), KitokenEncoder(tmp_path / MODEL_NAME)
    plain, strings = ["plain words", "return the value"], adversarial_strings()
    assert first_difference(reference.encode_batch(plain), fast, plain) is None
    assert first_difference(reference.encode_batch(strings), fast, strings) is not None
    pieces = [processor.id_to_piece(piece) for piece in range(processor.get_piece_size())]
    assert fastest_verified_encoder(tmp_path / MODEL_NAME, processor, pieces).name == "sentencepiece"


def test_the_adversarial_set_is_the_same_every_time_and_holds_every_byte():
    strings = adversarial_strings(["ab", "c"])
    assert strings == adversarial_strings(["ab", "c"])
    assert {chr(code) for code in range(256)} <= set(strings)
    assert len(strings) > 2000


def test_a_lone_surrogate_is_named(trained):
    tokenizer = load_tokenizer(trained())
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["fine", text])):
        with pytest.raises(InputError, match=r"lone surrogate U\+D83D at character 2"):
            encode("ab\ud83dc")


def test_folders_that_hold_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(InputError, match="not a tokenizer folder"):
        load_tokenizer(tmp_path)
    (tmp_path / MODEL_NAME).write_bytes(b"not a model")
    with pytest.raises(InputError, match="not a SentencePiece model"):
        load_tokenizer(tmp_path)

"""tokenizer.json gives the ids of tokenizer.model, with Hugging Face's tokenizers and with transformers."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenizers.encoders import adversarial_strings
from gristmill.tokenizers.export import differences
from gristmill.tokenizers.tokenizer import JSON_NAME, MODEL_NAME, SETTINGS_NAME, load_tokenizer

SETTINGS = [
    {},
    {"algorithm": "unigram"},
    {"preset": "default"},
    {"preset": "case"},
    {"preset": "arithmetic"},
    {"preset": "combined"},
    {"preset": "characters"},
    {"user_symbols": ("<br>", "  ", "\n"), "fim": True},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_the_same_ids_on_held_out_documents_and_adversarial_strings(trained, held_out_texts, fields):
    folder = trained(**fields)
    pieces = [piece.replace("▁", " ") for piece in load_tokenizer(folder).pieces]
    assert differences(folder, held_out_texts[-40:] + adversarial_strings(pieces)) == []


@pytest.mark.parametrize("name", [MODEL_NAME, JSON_NAME])
def test_a_file_that_cannot_be_read_is_an_error_of_the_disk(trained, tmp_path, name):
    """The libraries' own reading raises a plain Exception, which was a traceback."""
    folder = shutil.copytree(trained(), tmp_path / "copy")
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError):
        differences(folder, ["a"])


@settings(max_examples=25)
@given(text=st.text(max_size=40))
def test_the_same_ids_on_any_text(trained, text):
    assert differences(trained(), [text]) == []


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_transformers_loads_the_folder(trained, fields):
    transformers = pytest.importorskip("transformers")
    folder = trained(**fields)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    assert theirs.eos_token_id == ours.end_of_document
    for text in adversarial_strings()[:150]:
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


def test_a_folder_with_the_json_alone_is_a_tokenizer_too(trained, tmp_path, held_out_texts):
    folder = trained()
    for name in (JSON_NAME, SETTINGS_NAME):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    ours, theirs = load_tokenizer(folder), load_tokenizer(tmp_path)
    assert theirs.encoder == "tokenizers"
    assert (theirs.vocab_size, theirs.end_of_document) == (ours.vocab_size, ours.end_of_document)
    for text in held_out_texts[:20]:
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode([*theirs.encode(text), theirs.end_of_document]) == text

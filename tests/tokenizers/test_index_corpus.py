"""Sentences of a text: worked examples in several languages, and that nothing but white space is lost."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenizers.index_corpus import _loaded_once, split_sentences


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Dr. No came. He left!", ["Dr. No came.", "He left!"]),
        ('"Who?" she said. Nobody spoke... Then all did.', ['"Who?" she said.', "Nobody spoke...", "Then all did."]),
        ("See e.g. Fig. 3 of J. Smith et al. It is 3.5 m.", ["See e.g. Fig. 3 of J. Smith et al. It is 3.5 m."]),
        ("One\nline goes on. Next", ["One\nline goes on.", "Next"]),
        ("Title\n\nBody one. (Two.) Three", ["Title", "Body one.", "(Two.)", "Three"]),
        ("今日は。元気？はい！", ["今日は。", "元気？", "はい！"]),
        ("Это раз. Это два.", ["Это раз.", "Это два."]),
        ("  ", ["  "]),
    ],
)
def test_sentences_by_hand(text, sentences):
    assert split_sentences(text) == sentences


@given(st.text(alphabet="aB .!?\n。\"'", min_size=1))
def test_only_white_space_is_lost(text):
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_a_tokenizer_trained_again_under_its_old_path_is_loaded_again(trained, tmp_path):
    """One process may index twice, as from Python: the ids are those of the files that are there."""
    folder, sizes = tmp_path / "tokenizer", []
    for preset in ("default", "characters"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(trained(preset=preset), folder)
        sizes.append([_loaded_once(folder, "sentencepiece").encode("The mill") for _ in range(2)])
    assert sizes[0][0] == sizes[0][1] != sizes[1][0] == sizes[1][1]

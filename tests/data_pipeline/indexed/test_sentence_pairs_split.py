"""Sentences of a text: worked examples in several languages, and that nothing but white space is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.indexed.sentence_pairs import split_sentences


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

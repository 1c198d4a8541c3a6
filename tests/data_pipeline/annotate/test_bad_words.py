import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.annotate.bad_words import BadWords


@pytest.mark.parametrize(
    ("phrases", "text", "count"),
    [
        (["darn"], "Darn it, DARN! darned", 2),
        (["ass"], "class, ass_, bass ass", 1),
        (["red mill"], "a Red\n mill, redmill, red mills", 1),
        (["red", "red mill"], "Red mill, red door", 3),
        (["f*ck", "a$$"], "F*ck! a$$ff*ck a$$", 3),  # a phrase that ends in no word character is free there
        (["磨坊"], "红磨坊在河边", 1),
        (["müller"], "MÜLLER Müllerin", 1),
        (["darn"], "", 0),
    ],
)
def test_worked_examples(phrases, text, count):
    assert BadWords(phrases).count(text) == count


PHRASES = ["a", "a b", "b-c", "*a", "c_", "坊", "坊a"]


@given(st.text(alphabet="abcA_* -\n坊é", max_size=40), st.sets(st.sampled_from(PHRASES), min_size=1))
def test_it_finds_what_c4_finds(text, phrases):
    """C4's own expression, (?:\\W|^)(words)(?:\\W|$), for phrases of word characters in scripts with spaces."""
    plain = sorted(phrase for phrase in phrases if re.fullmatch(r"[a-z_ -]+", phrase))
    if plain:
        wanted = re.compile(rf"(?:\W|^)({'|'.join(map(re.escape, plain))})(?:\W|$)")
        spaced = " ".join(text.split())
        assert (BadWords(plain).count(spaced) > 0) == (wanted.search(spaced.lower()) is not None)
    assert BadWords(phrases).count(text) == sum(BadWords([phrase]).count(text) for phrase in phrases)

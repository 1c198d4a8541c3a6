"""Cutting, on texts small enough to check by eye."""

from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.decontamination.matches import cut_spans, pieces
from gristmill.data_pipeline.dedup.folding import fold_text, word_spans
from gristmill.data_pipeline.ledger.removal_step import complement


def test_word_spans_by_hand():
    assert word_spans("Hey, you").T.tolist() == [[0, 3], [5, 8]]
    assert word_spans("中文 ab").T.tolist() == [[0, 1], [1, 2], [3, 5]]
    assert word_spans("co\u00adop").T.tolist() == [[0, 5]]
    assert word_spans("").T.tolist() == []


@given(st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" .a\u00ad中")))
def test_word_spans_fold_to_the_words(text: str):
    words = [fold_text(text[start:stop]) for start, stop in word_spans(text).T]
    assert words == fold_text(text).split()


def test_a_cut_reaches_from_sentence_end_to_sentence_end():
    text = "A. B c d. E"
    assert cut_spans(text, [(5, 6)], margin=0) == [(2, 9)]
    assert text[:2] + text[9:] == "A. E"


def test_no_sentence_end_cuts_to_the_ends_of_the_text():
    assert cut_spans("no end here at all", [(7, 11)], margin=2) == [(0, 18)]


def test_margins_and_cuts_that_meet_are_one():
    text = "One. Two two. Three. Four four. Five."
    assert cut_spans(text, [(5, 8)], margin=0) == [(4, 13)]
    assert cut_spans(text, [(5, 8), (21, 25)], margin=0) == [(4, 13), (20, 31)]
    assert cut_spans(text, [(5, 8), (21, 25)], margin=8) == [(0, 37)]


def test_pieces_are_what_is_left_without_white_space_at_the_ends():
    assert pieces("One. CUT  Two. CUT ", [(5, 8), (15, 18)]) == [(0, 4), (10, 14)]
    assert complement([(2, 9)], 11) == [(0, 2), (9, 11)]
    assert complement([(0, 3)], 3) == []

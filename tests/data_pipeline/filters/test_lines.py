import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.filters.lines import (
    C4_COUNTS,
    REFINEDWEB_COUNTS,
    edit_c4,
    edit_c4_texts,
    edit_refinedweb,
    edit_refinedweb_texts,
)
from gristmill.data_pipeline.filters.presets import FilterChoice
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.kernel import measure_edited

C4 = FilterChoice(preset="c4").line_options()
REFINEDWEB = FilterChoice(preset="refinedweb_lines").line_options()


def c4(text: str, **changed) -> tuple[str, dict[str, int]]:
    edited = edit_c4(text, C4 | changed)
    return edited.text, {name: count for name, count in edited.counts.items() if count and name != "lines"}


def refinedweb(text: str) -> tuple[str, dict[str, int]]:
    edited = edit_refinedweb(text, REFINEDWEB)
    return edited.text, {name: count for name, count in edited.counts.items() if count and name != "lines"}


def test_c4_lines_need_a_terminal_mark_and_three_words():
    assert c4("Three words here.\nTwo words.\nNo mark at all\nIt trails off...") == (
        "Three words here.",
        {"removed_no_terminal": 2, "removed_few_words": 1},
    )
    assert c4('He said "so it is"\n  And why not? ')[0] == 'He said "so it is"\nAnd why not?'
    assert c4("A line without a mark", line_terminal_punctuation=None)[0] == "A line without a mark"


def test_c4_words_of_a_thousand_characters_and_one_more():
    assert c4(f"It is {'x' * 999}.")[1] == {}
    assert c4(f"It is {'x' * 1000}.") == ("", {"removed_long_word": 1})


def test_c4_takes_citations_out_of_lines():
    assert c4("The mill[12] turned[citation needed] slowly [edit].") == ("The mill turned slowly .", {})
    # a citation at the end hides the terminal mark until it is gone
    assert c4("The mill turned slowly.[3]") == ("The mill turned slowly.", {})


def test_c4_phrases():
    text = "Please enable JavaScript now.\nRead our Privacy Policy first.\nThis site uses cookies daily."
    assert c4(text) == ("", {"removed_javascript": 1, "removed_policy": 2})
    assert c4("Some Lorem Ipsum stands here.")[1] == {"lorem_ipsum": 1}
    assert c4("Some {braces} stand here.")[1] == {"curly_brackets": 1}
    assert c4("{ short }")[1] == {"removed_no_terminal": 1}  # gone before its bracket is looked at


def test_refinedweb_lines():
    assert refinedweb("SHOUTING HERE\nHalf UPpe\n2024 10\n2024\nword\ntwo words\n\n3,141 Likes\n12k followers!") == (
        "Half UPpe\n2024 10\ntwo words",
        {"removed_uppercase": 1, "removed_digits": 1, "removed_few_words": 1, "removed_counter": 2},
    )


def test_refinedweb_half_upper_case_stays_and_one_more_goes():
    assert refinedweb("AB cd")[1] == {} and refinedweb("ABC d")[1] == {"removed_uppercase": 1}
    assert refinedweb("ABcd ef")[1] == {} and refinedweb("ABCD ef")[1] == {"removed_uppercase": 1}


def test_refinedweb_boilerplate_goes_out_of_short_lines():
    assert refinedweb("The story goes on. Read more...")[0] == "The story goes on."
    assert refinedweb("Sign-in to see it\n3 items in cart\nitems in cart")[0] == "to see it\n3"
    long = "one two three four five six seven eight nine Read more..."
    assert refinedweb(long)[0] == long


PIECES = (
    "the |mill. |\n|\n\n|...|.|\"|'|!|[1]|[edit]|[ ]|{|javascript|JavaScript |Lorem Ipsum|privacy policy|Terms of Use"
    "|of use|cookies|use cookies |coo|\u212a|é|中|\u2028|\x85|\x1c|\xa0|x|   |end.\n|a b c.|jv kf p"
)
MIXED = st.lists(st.sampled_from(PIECES.split("|")), max_size=60).map("".join)
CHANGED = st.sampled_from(
    [
        {},
        {"line_terminal_punctuation": None},
        {"line_max_word_length": 4},
        {"line_min_words": None},
        {"line_policy": None},
    ]
)


ANY = st.text(st.characters(exclude_categories=["Cs"]))


def assert_same(kernel, plain, names, texts, options):
    edited, counts, _ = kernel(TextBuffer.of(texts), options)
    wanted = [plain(text, options) for text in texts]
    assert edited.texts() == [one.text for one in wanted]
    assert counts.tolist() == [[one.counts[name] for name in names] for one in wanted]
    assert edited.text[edited.offsets[-1] - 1 :].tolist()[:1] == [10]  # a buffer again: each text ends in a newline


@given(texts=st.lists(st.one_of(MIXED, ANY), min_size=1, max_size=6), changed=CHANGED)
def test_the_compiled_c4_is_the_plain_one(texts, changed):
    assert_same(edit_c4_texts, edit_c4, C4_COUNTS, texts, C4 | changed)


@given(texts=st.lists(MIXED.map(lambda text: f"{text}\n\n  the mill, and a 3.5 {text} J. \n"), min_size=1, max_size=6))
@pytest.mark.parametrize("rule", ["unicode", "whitespace"])
@pytest.mark.parametrize(("edit", "options"), [(edit_c4_texts, C4), (edit_refinedweb_texts, REFINEDWEB)])
def test_words_that_an_edit_keeps_are_those_of_the_edited_text(edit, options, rule, texts):
    on = {**options, "line_terminal_punctuation": None, "line_min_words": 1}
    before = measure_edited(TextBuffer.of(texts), rule, None)
    edited = edit(TextBuffer.of(texts), on)
    after = measure_edited(edited.texts, rule, (before.word_signals, edited.same_words))
    fresh = measure_edited(edited.texts, rule, None)
    assert str(after.signals.to_pydict()) == str(fresh.signals.to_pydict())  # strings: NaN is NaN there


def test_which_edits_keep_all_words():
    texts = ["One two three.\n\n \tFour five six.", "One two [1] three.", "One two three.\nFour", "é\u2028é", ""]
    assert edit_c4_texts(TextBuffer.of(texts), C4).same_words.tolist() == [True, False, False, False, True]
    web = ["Some words\n\n of text ", "Some words\n12 likes"]
    assert edit_refinedweb_texts(TextBuffer.of(web), REFINEDWEB).same_words.tolist() == [True, False]


WEB_PIECES = (
    "the |mill |\n|\n\n|Likes|12 likes\n|\n3,141 Views.|\n12k followers!\n|bookmar\u212as|5 |7|SHOUT|É|é|Read more...|"
    "sign-in|Sign-\u0131n|items in cart|ITEMS |in |cart|\u0663|\u00bd|_|\xa0|\u2028|中|\U0001f600|\u0301|.|,| |\t|s|k"
)
WEB = st.lists(st.sampled_from(WEB_PIECES.split("|")), max_size=40).map("".join)
WEB_CHANGED = st.sampled_from(
    [
        {},
        {"line_boilerplate_words": None},
        {"line_counters": None, "line_min_words": None},
        {"line_uppercase_ratio": None, "line_digit_ratio": 0.3},
    ]
)


@given(texts=st.lists(st.one_of(WEB, ANY), min_size=1, max_size=6), changed=WEB_CHANGED)
def test_the_compiled_refinedweb_is_the_plain_one(texts, changed):
    assert_same(edit_refinedweb_texts, edit_refinedweb, REFINEDWEB_COUNTS, texts, REFINEDWEB | changed)

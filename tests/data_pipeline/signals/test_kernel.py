"""The compiled kernels against the plain-Python definition, and that definition against values counted by hand."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.data_pipeline.signals.kernel import measure
from gristmill.data_pipeline.signals.reference import count_sentences, signals, split_words
from gristmill.data_pipeline.signals.signal_names import SIGNALS

# What the kernels treat apart: white space, line ends, joiners, closers, scripts, addresses, stop words.
BARRED = (
    "the|be|to| |\n|\n\n|...|…|.|a|foo|’|'|http://x|a@b.c|1.2.3.4|10.0.0.255|中|文。|é|É|\u2028|\x85|\r\n|\x0c|-|• |#|{"
    "|_|\u200d|ก|1|٣|\U0001f600|\ufeff|\t|--|-a|Mr.|@|J. |e.g. |\xa0|”|!|)|\x00|\x1c|abcdefghijklmnop|/|:|@|http|s://y|A"
)
PIECES = BARRED.split("|")
MIXED = st.lists(st.sampled_from(PIECES), max_size=120).map("".join)
FEW_WORDS = st.lists(st.sampled_from(["a", "b", " ", "\n", ".", " c "]), max_size=80).map("".join)
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


def assert_equal(texts: list[str], rule: str) -> None:
    measured = measure(texts, rule).to_pydict()
    for index, text in enumerate(texts):
        wanted = signals(text, rule)
        for name in SIGNALS:
            found = measured[name][index]
            assert found == wanted[name] or (math.isnan(found) and math.isnan(wanted[name])), (name, text)


@settings(max_examples=150)
@given(texts=st.lists(st.one_of(MIXED, FEW_WORDS, ANY), min_size=1, max_size=8))
@example(texts=["", "\n", " ", "a", "\x00", "the\x00 the"])
@example(texts=["\u2028J. the", "a\u2029J. the", "\x85J. the", "\u3028J. the"])
@pytest.mark.parametrize("rule", ["unicode", "whitespace"])
def test_kernels_give_what_the_definition_gives(rule, texts):
    assert_equal(texts, rule)


@pytest.mark.parametrize("rule", ["unicode", "whitespace"])
def test_a_huge_document_and_its_neighbours(rule):
    assert_equal(["the mill\n", "a bc ab c \n\n" * 3000 + "the end…", "", "x" * 100_000, "ab " * 5000], rule)


def test_unicode_words():
    assert split_words("Don't panic (42)! a/b 3.14 …", "unicode") == [
        "Don't",
        "panic",
        "(",
        "42",
        ")",
        "!",
        "a/b",
        "3.14",
        "…",
    ]
    assert split_words("end. 'quoted' x@y.z", "unicode") == ["end", ".", "'", "quoted", "'", "x@y.z"]
    assert split_words("well-known --flag a -- b- ---", "unicode") == [
        "well",
        "-known",
        "--flag",
        "a",
        "--",
        "b",
        "-",
        "---",
    ]
    assert split_words("漢字kana हिन्दी", "unicode") == ["漢", "字", "kana", "हिन्दी"]


def test_sentences():
    assert count_sentences('He said "no." Then\nhe left') == 3
    assert count_sentences("mr. x (why?) ... - !") == 2
    assert count_sentences("Dr. J. Doe (e.g. of St. Ives) is in. So is B2. And A.B.") == 3
    assert count_sentences("") == count_sentences("-- ** --") == 0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("今天下雨。我们走吧！好吗？", 3),  # no white space behind them
        ("「走吧！」他说。", 2),
        ("雨が降る｡行こう", 2),
        ("。！？", 0),
        ("如何？？好。 行", 3),
        ("كيف حالك؟ أنا بخير.", 2),
        ("یہ گھر ہے۔ وہ دور ہے۔", 2),
        ("वह घर है। यह नदी है॥", 2),
        ("वह घर है।यह नदी है", 1),  # a script with spaces needs one
        ("Տուն է։ Գետ է։", 2),
        ("ቤት ነው። ወንዝ ነው።", 2),
    ],
)
def test_sentences_in_other_scripts(text, sentences):
    assert count_sentences(text) == sentences
    assert measure([text], "unicode").column("num_sentences")[0].as_py() == sentences


def test_gopher_quality_by_hand():
    found = signals("- the mill...\n# of stone\n• and 12 … ", "whitespace")
    assert found["num_words"] == 10 and found["num_stop_words"] == 3
    assert found["num_plain_words"] == 7  # the mill... of stone • and 12: datatrove's punctuation lacks the bullet
    assert found["mean_word_length"] == (3 + 7 + 2 + 5 + 1 + 3 + 2) / 7
    assert found["hash_word_ratio"] == 1 / 10 and found["ellipsis_word_ratio"] == 2 / 10
    assert found["bullet_line_ratio"] == 2 / 3 and found["ellipsis_line_ratio"] == 2 / 3
    assert found["alpha_word_ratio"] == 5 / 10


def test_gopher_repetition_by_hand():
    text = "aa bb\n\naa bb\n\ncc\naa bb"  # 22 characters
    found = signals(text, "whitespace")
    assert (found["dup_line_ratio"], found["dup_line_char_ratio"]) == (2 / 4, 10 / 22)
    assert (found["dup_paragraph_ratio"], found["dup_paragraph_char_ratio"]) == (1 / 3, 5 / 22)
    assert found["top_2gram_char_ratio"] == 3 * 5 / 22  # "aa bb" three times
    assert found["top_3gram_char_ratio"] == 8 / 22  # none stands twice: the first, "aa bb aa"
    repeated = signals("a b c d e " * 2 + "f", "whitespace")
    assert repeated["dup_5gram_char_ratio"] == 5 / 21


def test_fineweb_by_hand():
    text = "A line that is longer than thirty characters.\nshort\nshort\n \nend!"
    found = signals(text, "unicode")
    assert found["line_punctuation_ratio"] == 2 / 4
    assert found["short_line_ratio"] == 3 / 4
    assert found["repeated_line_char_ratio"] == 5 / (len(text) - 4)
    assert found["newline_word_ratio"] == 4 / 13


def test_addresses():
    text = "see https://a.b/c, http:// x and ftp://q; mail me@x.org or a@b@c; hosts 1.2.3.4, 1.2.3.4.5 and 12.345.6.7."
    found = signals(text, "unicode")
    assert (found["num_urls"], found["num_emails"], found["num_ip_addresses"]) == (1, 2, 1)


def test_a_text_is_measured_alike_wherever_it_stands():
    """Stamps begin anew after 4,096 texts, and only as much of the tables is cleared as was used: nothing is left over
    of a long text before a short one."""
    short, long = "one two one two one two\nline\nline\n", " ".join(f"w{i % 700}" for i in range(3000)) + "\n"
    texts = [long if k % 1500 == 0 else short for k in range(9000)]
    rows = measure(texts, "unicode").to_pylist()
    assert {str(row) for row in rows[1:]} == {str(rows[1]), str(rows[0])}
    assert rows[1]["dup_5gram_char_ratio"] == measure([short], "unicode").to_pylist()[0]["dup_5gram_char_ratio"]

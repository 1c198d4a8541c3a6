"""The order of words and the script of a text: worked by hand, and the kernels against plain Python on any text."""

import math
import random
from collections import Counter

import pytest
from fontTools.unicodedata import script
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table
from gristmill.data_pipeline.signals.language import (
    HAN,
    HEAD_CHARS,
    JAPANESE,
    KANA,
    KANA_SHARE,
    NO_LETTERS,
    NO_SCRIPT,
    text_scripts,
)
from gristmill.data_pipeline.signals.stop_words import (
    FULL_TOKENS,
    MIN_LINE_TOKENS,
    order_score,
    order_tokens,
    word_order,
    word_order_columns,
)
from tests.support.corpora import WORDS

PIECES = [
    "the",
    " ",
    "\n",
    ".",
    "。",
    "mill’s",
    "“a”",
    "水",
    "车",
    "ก",
    "-",
    "x-y",
    "\u2028",
    "!",
    "é",
    "Ж",
    "3.5",
    "\x85",
    "",
]
ANY = st.lists(st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=60)


def text_script(text: str) -> str:
    """text_scripts in plain Python, of one text."""
    flags = character_table()
    scripts = Counter(script(c) for c in text[:HEAD_CHARS] if flags[ord(c)] & (WORD | IDEOGRAPH))
    kana = sum(scripts.pop(name, 0) for name in KANA)
    scripts[HAN] += kana
    for name in NO_SCRIPT:
        scripts.pop(name, None)
    best = min(scripts, key=lambda name: (-scripts[name], name))
    if not scripts[best]:
        return NO_LETTERS
    return JAPANESE if best == HAN and kana and kana >= KANA_SHARE * scripts[HAN] else best


def assert_equal(texts: list[str]) -> None:
    found = [column.to_pylist() for column in word_order_columns(TextBuffer.of(texts), [True] * len(texts))]
    for place, text in enumerate(texts):
        wanted = word_order(text)
        for column, value in zip(found, wanted, strict=True):
            assert (column[place] is None and math.isnan(value)) or column[place] == pytest.approx(value), text


@given(st.lists(ANY.map("".join), min_size=1, max_size=4))
@example(["", " ", "a b\n\nc", "İ ı"])
def test_the_kernels_equal_plain_python(texts):
    assert_equal(texts)
    assert text_scripts(TextBuffer.of(texts)) == [text_script(text) for text in texts]


def test_long_texts_of_all_shapes():
    rng = random.Random(5)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(1, 12))) for _ in range(300)]
    assert_equal(["\n".join(lines), " ".join(lines), "".join(rng.choices("水车河面粉磨坊", k=900)), "mill " * 700])


def test_tokens_by_hand():
    assert order_tokens("he said: “no-one, 3.5”") == (["he", "said", "no-one", "3.5"], 2)  # 3. and the end
    assert order_tokens("下雨。走吧！") == (["下", "雨", "走", "吧"], 2)
    assert order_tokens(" ... ") == ([], 0)


def test_the_score_by_hand():
    # 1,000 places, 10 words of 100 places each: p = 10 * 100 * 99 / (1000 * 999); near 2000 p, pairs 500,000 p p
    p = 10 * 100 * 99 / (1000 * 999)
    near, pairs = 2000 * p, 500_000 * p * p
    assert order_score(1000, 99_000, near, 2 * pairs) == pytest.approx(0)
    assert order_score(1000, 99_000, 0, 2 * pairs) == pytest.approx(near / math.sqrt(near + 0.5))
    assert order_score(1000, 99_000, near, 10**9) == pytest.approx(20)  # its most
    assert order_score(300, 0, 0, 0) == 0 and FULL_TOKENS == 600


def test_a_text_shuffled_loses_its_order():
    """A written text has no seed; a Markov chain on 40 words stands for one: each word is followed by three others."""
    rng = random.Random(3)
    followers = {word: rng.sample([other for other in WORDS if other != word], 3) for word in WORDS}
    words = [WORDS[0]]
    while len(words) < 600:
        words.append(rng.choice(followers[words[-1]]))
    shuffled = rng.sample(words, len(words))
    ordered, mixed = (word_order(" ".join(held))[0] for held in (words, shuffled))
    assert ordered > 10 and abs(mixed) < 3


def test_short_lines_and_short_texts_have_no_order():
    assert math.isnan(word_order("mill river " * 99)[0])
    assert math.isnan(word_order("\n".join(["a b c d"] * 100))[0]) and MIN_LINE_TOKENS == 5
    assert word_order("One two. Three four\nfive")[1] == 5 / 3


def test_scripts_by_hand():
    texts = ["Мельница mill", "水車と川", "漢字", "3.14 !", "", "ไทย", "한국어 中", "नदी", "ミル"]
    assert text_scripts(TextBuffer.of(texts)) == [
        "Cyrl",
        "Jpan",
        "Hani",
        "Zyyy",
        "Zyyy",
        "Thai",
        "Hang",
        "Deva",
        "Jpan",
    ]

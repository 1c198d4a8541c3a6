"""Lower case against str.lower."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.data_pipeline.signals.buffer import TextBuffer
from gristmill.data_pipeline.signals.lower_case import lowered

text = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("ABCXYZ@[`{ÀİΣςßȺᏰⰀꙀ𐐀ǅ"))


@given(st.lists(st.tuples(text, st.booleans()), max_size=5))
@example([("ΟΔΥΣΣΕΥΣ. " * 9, True), ("A" * 63 + "É", True), ("B" * 64 + "ÀA" * 60, True), ("C" * 130, False)])
@example([("Ⱥ" * 200, True)])
def test_every_text_is_that_of_python(pairs):
    wanted = [one.lower() if want else "" for one, want in pairs]
    found = lowered(TextBuffer.of([one for one, _ in pairs]), np.array([want for _, want in pairs], bool))
    assert found.texts() == wanted


def test_every_code_point_is_that_of_python():
    codes = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    texts = ["".join(codes[start : start + 999]) for start in range(0, len(codes), 999)]
    assert lowered(TextBuffer.of(texts), np.ones(len(texts), bool)).texts() == [text.lower() for text in texts]

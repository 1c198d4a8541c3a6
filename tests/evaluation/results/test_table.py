"""Rows of the score table, chance levels, and the rendering as Markdown and HTML."""

import pytest

from gristmill.evaluation.results.statistics import MARK
from gristmill.evaluation.results.table import ScoreRow, against_chance, html, markdown, rows_of

ROW = ScoreRow("<b>quiz</b> | one", 0, 100, "acc", 0.5, 0.05, True, 0.25)
CONFIGS = {"quiz": {"output_type": "multiple_choice"}, "words": {"metadata": {"chance": 0.0}}}


def answered(rights, choices=4, task="quiz", metric="acc"):
    return [
        (
            task,
            {metric: float(right), "target": 0, "arguments": [["", ""]] * choices, "doc_id": number, "filter": "none"},
        )
        for number, right in enumerate(rights)
    ]


def test_a_verdict_is_an_exact_test_of_the_number_right():
    chance, verdict = against_chance("acc", answered([1] * 128 + [0] * 272), CONFIGS, {})
    assert chance == 0.25 and str(verdict) == "better than chance (p = 0.0019)"
    assert str(against_chance("acc", answered([0] * 60), CONFIGS, {})[1]).startswith("worse than chance (p = ")
    assert str(against_chance("acc", answered([1] * 4), CONFIGS, {})[1]) == "better than chance (p = 0.0078)"
    assert str(against_chance("acc", answered([1]), CONFIGS, {})[1]) == "like chance (p = 0.5)"
    words = answered([0] * 90, task="words")
    assert str(against_chance("acc", words, CONFIGS, {})[1]) == "like chance (p = 1)"


def test_the_chance_of_each_question_is_its_own():
    """A question of three choices and one of four; two right choices of four are guessed half the time."""
    found = [*answered([1], choices=3), *answered([0], choices=4)]
    assert against_chance("acc", found, CONFIGS, {})[0] == pytest.approx((1 / 3 + 1 / 4) / 2)
    found[1][1]["target"] = [0, 2]
    assert against_chance("acc", found, CONFIGS, {})[0] == pytest.approx((1 / 3 + 1 / 2) / 2)


def test_bits_per_byte_have_a_sign_test_over_documents():
    documents = [("text", {"bits_per_byte": (-10.0, 10), "doc_id": number, "filter": "none"}) for number in range(9)]
    chance, verdict = against_chance("bits_per_byte", documents, CONFIGS, {"text": [30.0] * 9})
    assert chance == 3.0 and str(verdict) == "better than chance (p = 0.0039)"
    assert (
        str(against_chance("bits_per_byte", documents[:3], CONFIGS, {"text": [1.0] * 3})[1]) == "like chance (p = 0.25)"
    )
    assert against_chance("bits_per_byte", documents, CONFIGS, {}) == (None, None)


def test_scores_that_are_not_right_or_wrong_have_no_verdict():
    assert against_chance("perplexity", answered([30.0], metric="perplexity"), CONFIGS, {}) == (None, None)
    assert against_chance("acc", answered([0.5, 0.7]), CONFIGS, {}) == (0.25, None)


def test_questions_that_were_not_evaluated_are_counted_beside_those_that_were():
    summary = {"n-shot": {}, "higher_is_better": {"quiz": {"acc": True}}, "configs": CONFIGS}
    samples = {"quiz": [sample for _, sample in answered([1, 0])] + [{"doc_id": 7, MARK: "too long"}]}
    (row,) = rows_of("quiz", {"acc,none": 0.5}, summary, samples, {})
    assert (row.count, row.num_skipped, row.score) == (2, 1, 0.5)
    (row,) = rows_of("quiz", {}, summary, {"quiz": samples["quiz"][2:]}, {})
    assert (row.count, row.num_skipped, row.score) == (0, 1, None)
    assert "|             1 | acc    |       |        |        | not evaluated |" in markdown([row])


def test_texts_are_escaped():
    assert "&lt;b&gt;quiz&lt;/b&gt; | one" in html([ROW], ["a <note>"], "Scores")
    assert "<script" not in html([ROW], ["<script>"], "Scores")
    assert r"<b>quiz</b> \| one" in markdown([ROW])

from gristmill.evaluation.table import ScoreRow, html, markdown

ROW = ScoreRow("<b>quiz</b> | one", 0, 100, "acc", 0.5, 0.05, True, 0.25)


def test_a_verdict_counts_standard_errors():
    assert ROW.verdict == "better than chance (+5.0 s.e.)"
    assert ScoreRow("q", 0, 9, "bits_per_byte", 2.0, 0.1, False, 3.0).verdict == "better than chance (+10.0 s.e.)"
    assert ScoreRow("q", 0, 9, "acc", 0.3, 0.05, True, 0.25).verdict == "like chance (+1.0 s.e.)"
    assert ScoreRow("q", 0, 9, "perplexity", 30.0, 2.0, False, None).verdict == ""
    assert ScoreRow("q", 0, 1, "acc", 1.0, None, True, 0.25).verdict == ""


def test_texts_are_escaped():
    assert "&lt;b&gt;quiz&lt;/b&gt; | one" in html([ROW], ["a <note>"], "Scores")
    assert "<script" not in html([ROW], ["<script>"], "Scores")
    assert r"<b>quiz</b> \| one" in markdown([ROW])

import pytest

from benchmarks.support.article_extraction import score, score_extractor
from gristmill.data_pipeline.readers.html_extraction import MOST_HTML_BYTES, NotExtracted, extract, summed_depth

STORY = " ".join(f"Sentence number {k} tells of the mill and of the river behind it." for k in range(20))
PAGE = f"<html><body><nav><a href='/'>Home</a> <a>Contact</a></nav><article><p>{STORY}</p></article></body></html>"


@pytest.mark.parametrize("extractor", ["trafilatura", "resiliparse"])
def test_the_story_without_the_menu(extractor):
    assert extract(PAGE.encode(), None, extractor).strip() == STORY


def test_a_page_without_text_and_one_too_large_say_so():
    with pytest.raises(NotExtracted, match="no text") as empty:
        extract(b"<html><body></body></html>", None, "resiliparse")
    assert empty.value.kind == "no_text"
    with pytest.raises(NotExtracted) as large:
        extract(b" " * (MOST_HTML_BYTES + 1), None, "trafilatura")
    assert large.value.kind == "page_too_large"


def test_a_page_that_would_stall_the_extractor_says_so():
    with pytest.raises(NotExtracted) as deep:
        extract(b"<div>" * 20_000 + STORY.encode(), None, "resiliparse")
    assert deep.value.kind == "nested_too_deep"
    assert summed_depth("<html><head></head><body><p></p></body></html>") == 1 + 2 + 2 + 3
    wide = f"<div><p>{STORY}</p></div>" + "<div><a><b></b></a></div>" * 20_000
    assert STORY in extract(wide.encode(), None, "resiliparse")


def test_the_measure_of_the_benchmark():
    five, other = "a b c d e", "a b c d x"
    assert score([(five, other)]) == (0.5, 0.5, 0.5)
    # what is not extracted costs recall alone; a text of fewer than four words is one shingle
    assert score([(five, five), (five, "")]) == pytest.approx((2 / 3, 1.0, 0.5))
    assert score([("Two, words", "two words"), (five, five)]).precision == 0.5
    assert score([("Two, words!", "Two words")]).f1 == 1.0


@pytest.mark.parametrize(
    ("extractor", "least"), [pytest.param("trafilatura", 0.958, marks=pytest.mark.slow), ("resiliparse", 0.92)]
)
def test_f1_on_pages_with_ground_truth(extractor, least, shared_data):
    found = score_extractor(lambda html: extract(html, None, extractor), shared_data("html/article_extraction"))
    assert found.f1 >= least

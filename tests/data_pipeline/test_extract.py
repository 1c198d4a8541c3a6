import gzip
import json
import re
from collections import Counter

import pytest

from gristmill.data_pipeline.extract import MOST_HTML_BYTES, NotExtracted, decode_html, extract

STORY = " ".join(f"Sentence number {k} tells of the mill and of the river behind it." for k in range(20))
PAGE = f"<html><body><nav><a href='/'>Home</a> <a>Contact</a></nav><article><p>{STORY}</p></article></body></html>"


@pytest.mark.parametrize("extractor", ["trafilatura", "resiliparse"])
def test_the_story_without_the_menu(extractor):
    assert extract(PAGE.encode(), None, extractor).strip() == STORY


def test_the_charset_comes_from_mark_header_meta_or_the_bytes():
    assert decode_html("\ufeffé".encode(), "latin-1") == "é"
    assert decode_html("é".encode("latin-1"), "latin-1") == "é"
    assert decode_html("<meta charset='windows-1251'>Ж".encode("cp1251"), None).endswith("Ж")
    assert decode_html("<meta charset='no-such-set'>é".encode(), None).endswith("é")
    assert decode_html("é".encode(), None) == "é"
    assert decode_html(b"caf\xe9 " * 40, None).startswith("café")


def test_a_page_without_text_and_one_too_large_say_so():
    with pytest.raises(NotExtracted, match="no text") as empty:
        extract(b"<html><body></body></html>", None, "resiliparse")
    assert empty.value.kind == "no_text"
    with pytest.raises(NotExtracted) as large:
        extract(b" " * (MOST_HTML_BYTES + 1), None, "trafilatura")
    assert large.value.kind == "page_too_large"


def four_grams(text: str) -> Counter:
    words = re.findall(r"\w+", text)
    return Counter(tuple(words[i : i + 4]) for i in range(max(1, len(words) - 3)))


def f1(folder, extractor: str) -> float:
    """The measure of article-extraction-benchmark: precision and recall of word 4-grams, averaged over the pages."""
    precisions, recalls = [], []
    for name, truth in json.loads((folder / "ground-truth.json").read_bytes()).items():
        try:
            text = extract(gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes()), None, extractor)
        except NotExtracted:
            text = ""
        wanted, found = four_grams(truth["articleBody"]), four_grams(text)
        common = (wanted & found).total()
        precisions.append(common / found.total())
        recalls.append(common / wanted.total())
    precision, recall = sum(precisions) / len(precisions), sum(recalls) / len(recalls)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("extractor", "least"), [pytest.param("trafilatura", 0.958, marks=pytest.mark.slow), ("resiliparse", 0.92)]
)
def test_f1_on_pages_with_ground_truth(extractor, least, shared_data):
    assert f1(shared_data("html/article_extraction"), extractor) >= least

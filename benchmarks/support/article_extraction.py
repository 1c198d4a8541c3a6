"""The metric of scrapinghub/article-extraction-benchmark (evaluate.py at 11b407d), reimplemented, and its 181 pages.

A text is the multiset of its word 4-grams, words being `\\w+`; one of fewer than 4 words is one shorter gram, one of
none has none. A page's precision counts where something was extracted, its recall where there was something to
extract; F1 is of the means of the two over the pages."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

WORDS_OF_A_SHINGLE = 4


class Score(NamedTuple):
    f1: float
    precision: float
    recall: float


def pages(folder: Path) -> Iterator[tuple[bytes, str]]:
    """(HTML, the article's text) of every page of the benchmark's folder."""
    for name, truth in json.loads((folder / "ground-truth.json").read_bytes()).items():
        yield gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes()), truth["articleBody"]


def addresses(folder: Path) -> list[str]:
    """Addresses of the pages, in their order."""
    return [truth["url"] for truth in json.loads((folder / "ground-truth.json").read_bytes()).values()]


def score_extractor(extractor: Callable[[bytes], str], folder: Path) -> Score:
    return score((truth, extractor(html)) for html, truth in pages(folder))


def score(pairs: Iterable[tuple[str, str]]) -> Score:
    """pairs: (the article's text, the extracted one). ("a b c d e", "a b c d x") -> one of two shingles: 0.5."""
    precisions, recalls = [], []
    for truth, found in pairs:
        wanted, given = shingles(truth), shingles(found)
        common = (wanted & given).total()
        if given:
            precisions.append(common / given.total())
        if wanted:
            recalls.append(common / wanted.total())
    precision, recall = fmean(precisions or [0.0]), fmean(recalls or [0.0])
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return Score(f1, precision, recall)


def shingles(text: str) -> Counter[tuple[str, ...]]:
    words = re.findall(r"\w+", text)
    starts = range(max(1, len(words) - WORDS_OF_A_SHINGLE + 1)) if words else ()
    return Counter(tuple(words[start : start + WORDS_OF_A_SHINGLE]) for start in starts)

"""Labels and weights of a page's text blocks: gold chunks and bodies first, else what trafilatura extracts."""

import re
from collections.abc import Sequence

import numpy as np

from gristmill.data_pipeline.extraction.labelled_pages import LabelledPage

# Ideographs, kana and hangul syllables are words of their own.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]+")
NGRAM = 4
GOLD_WEIGHT, BODY_WEIGHT, TEACHER_WEIGHT, SHORT_WEIGHT = 8.0, 2.0, 1.0, 0.3


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def block_labels(page: LabelledPage, texts: Sequence[str], teacher: str) -> tuple[np.ndarray, np.ndarray]:
    """(labels bool[B], weights float32[B]) of the blocks' texts. teacher: what trafilatura extracts from the page."""
    if page.body is not None:
        return labels_of_body(texts, page.body, BODY_WEIGHT)
    labels, weights = labels_of_body(texts, teacher, TEACHER_WEIGHT)
    for chunk in page.unwanted:
        for k in blocks_of(chunk, texts):
            labels[k], weights[k] = False, GOLD_WEIGHT
    for chunk in page.wanted:
        found = blocks_of(chunk, texts)
        kept = [k for k in found if labels[k]] or found
        labels[kept], weights[kept] = True, GOLD_WEIGHT
    return labels, weights


def labels_of_body(texts: Sequence[str], body: str, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """A block is main text if at least half of its word 4-grams are in the body; one of fewer than four words, if its
    words are a line of the body (or, with little weight, anywhere in it)."""
    of_body = words(body)
    grams = [set(zip(*(of_body[k:] for k in range(size)), strict=False)) for size in range(1, NGRAM + 1)]
    lines = {tuple(words(line)) for line in body.split("\n")}
    labels, weights = np.zeros(len(texts), np.bool_), np.full(len(texts), weight, np.float32)
    for k, text in enumerate(texts):
        held = words(text)
        if not held:
            weights[k] = 0
        elif len(held) >= NGRAM:
            found = [gram in grams[-1] for gram in zip(*(held[j:] for j in range(NGRAM)), strict=False)]
            labels[k] = 2 * sum(found) >= len(found)
        elif tuple(held) in lines:
            labels[k] = True
        elif tuple(held) in grams[len(held) - 1]:
            labels[k], weights[k] = True, weight * SHORT_WEIGHT
    return labels, weights


def blocks_of(chunk: str, texts: Sequence[str]) -> list[int]:
    """The blocks that hold a part of an occurrence of the chunk, white space normalized."""
    normal = [" ".join(text.split()) for text in texts]
    wanted = " ".join(chunk.split())
    if not wanted:
        return []
    starts = np.cumsum([0, *(len(text) + 1 for text in normal)])
    found: list[int] = []
    page, at = " ".join(normal), -1
    while (at := page.find(wanted, at + 1)) >= 0:
        first = int(np.searchsorted(starts, at, side="right")) - 1
        last = int(np.searchsorted(starts, at + len(wanted) - 1, side="right")) - 1
        found += range(first, last + 1)
    return sorted(set(found))

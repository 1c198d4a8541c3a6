"""Text in the data of pages (JSON-LD, other JSON, Discourse's topics) against their annotations: which strings are main
text, where they stand in for a page's own text, and whether text that the tokenizer does not see is in the HTML."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import numpy as np
from measure import Figure
from rich.console import Console
from rich.table import Table
from support import extraction_folds
from support.extraction_kinds import MIN_CEILING, WORD, word_counts, word_f1

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.embedded_text import MIN_CHARACTERS, embedded_text
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract
from gristmill.data_pipeline.extraction.labelled_pages import LabelledPage, labelled_pages
from gristmill.data_pipeline.extraction.layout import LayoutOptions
from gristmill.data_pipeline.extraction.page import NO_TOKENS, block_texts, read_page

_SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script", re.DOTALL | re.IGNORECASE)
_STRING = re.compile(r'"([A-Za-z_]{2,30})"\s*:\s*"((?:[^"\\]|\\.){100,})"', re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
NAMES = ("articleBody", "text", "description", "content", "body", "html")
MIN_WORDS = 12


def print_embedded(folder: Path) -> list[Figure]:
    """Prints the three tables; returns `extract_embedded`, the share of words of embedded text that are annotated."""
    pages = {name: labelled_pages(folder / name) for name in (extraction_folds.KINDS, extraction_folds.CHUNKS)}
    _print_names(pages[extraction_folds.KINDS])
    _print_unseen(pages[extraction_folds.KINDS])
    _print_stand_ins([page for of_set in pages.values() for page in of_set])
    precisions = []
    for page in pages[extraction_folds.KINDS]:
        truth, embedded = word_counts(page.body or ""), embedded_text(page.html, LayoutOptions())
        if truth and embedded is not None:
            counts = word_counts(embedded[0])
            precisions.append((counts & truth).total() / counts.total())
    unit = f"share of words that are annotated, {len(precisions)} pages"
    return [Figure("extract_embedded", float(np.mean(precisions)), unit)]


def strings_of_scripts(html: str) -> dict[tuple[str, str], Counter[str]]:
    """Words of the long strings in scripts, by (JSON-LD or other scripts, name of the string)."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for attributes, content in _SCRIPT.findall(html):
        sort = "JSON-LD" if "ld+json" in attributes else "other scripts"
        for name, value in _STRING.findall(content):
            try:
                text = unescape(_TAG.sub(" ", unescape(json.loads(f'"{value}"', strict=False))))
            except ValueError:
                continue
            if name in NAMES and len(WORD.findall(text)) > MIN_WORDS:
                counts.setdefault((sort, name), Counter()).update(word_counts(text))
    return counts


def _print_names(pages: Sequence[LabelledPage]) -> None:
    shares: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for page in pages:
        truth = word_counts(page.body or "")
        for key, counts in strings_of_scripts(page.html.decode("utf-8", "replace")).items():
            common = (counts & truth).total()
            if truth:
                shares.setdefault(key, []).append((common / counts.total(), common / truth.total()))
    table = Table("strings", "pages", "of their words annotated", "of the annotated words in them")
    for (sort, name), values in sorted(shares.items(), key=lambda item: -len(item[1])):
        precision, recall = np.mean(values, axis=0)
        table.add_row(f"{name} in {sort}", str(len(values)), f"{precision:.2f}", f"{recall:.2f}")
    Console(width=120).print(table)


def _print_unseen(pages: Sequence[LabelledPage]) -> None:
    """Pages whose blocks hold less than MIN_CEILING of the annotated words: are those in scripts or attributes?"""
    table = Table("page", "kind", "words annotated", "of them in blocks", "in all of the HTML")
    for page in pages:
        truth = word_counts(page.body or "")
        shown = word_counts(" ".join(block_texts(read_page(page.html, NO_TOKENS))))
        if truth and (in_blocks := (shown & truth).total() / truth.total()) < MIN_CEILING:
            source = unescape(page.html.decode("utf-8", "replace")).replace("\\n", " ").replace("\\u003c", "<")
            in_source = (word_counts(source) & truth).total() / truth.total()
            table.add_row(page.name, page.kind, str(truth.total()), f"{in_blocks:.2f}", f"{in_source:.2f}")
    Console(width=120).print(table)


def _print_stand_ins(pages: Sequence[LabelledPage]) -> None:
    """Pages that show fewer than MIN_CHARACTERS of main text, with the embedded text that stands in for it."""
    table = Table("page", "characters", "with embedded text", "score", "with embedded text")
    num_short = 0
    for page in pages:
        shown = _text(page, BlocksConfig(embedded_text=False))
        if len(shown) < MIN_CHARACTERS:
            num_short += 1
            text = _text(page, BlocksConfig())
            if text != shown:
                table.add_row(page.name, str(len(shown)), str(len(text)), _score(page, shown), _score(page, text))
    Console(width=160).print(f"{num_short} of {len(pages)} pages show fewer than {MIN_CHARACTERS} characters", table)


def _text(page: LabelledPage, config: BlocksConfig) -> str:
    try:
        return extract(page.html, "utf-8", "blocks", config)
    except NotExtracted:
        return ""


def _score(page: LabelledPage, text: str) -> str:
    if page.body is not None:
        return f"{word_f1(word_counts(text), word_counts(page.body)):.3f}"
    wanted, unwanted = (sum(chunk in text for chunk in chunks) for chunks in (page.wanted, page.unwanted))
    return f"{wanted} of {len(page.wanted)} chunks, {unwanted} of {len(page.unwanted)} unwanted"

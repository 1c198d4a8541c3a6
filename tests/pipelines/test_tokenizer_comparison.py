"""Tokenizer comparison: one held-out set for all, translations in the same split, a deterministic proxy model."""

import json

import pytest

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.proxy_model_config import ProxyConfig
from gristmill.pipelines.tokenizer_comparison import (
    TokenizerComparison,
    compare_tokenizers,
    group_rows,
    read_texts,
    rows,
)

PROXY = ProxyConfig(layers=1, width=16, heads=1, sequence_length=16, batch=4, text_bytes=20_000, held_out_bytes=2_000)


def options(folder, strategies, pretrained, vocab_size, proxy=None):
    return TokenizerComparison(folder, strategies, pretrained, vocab_size, "en", proxy)


@pytest.fixture(scope="module")
def texts(small_corpus, tmp_path_factory):
    """Paragraphs of docstrings as "pages" in two languages: de is en in capitals."""
    path = tmp_path_factory.mktemp("texts") / "pages.jsonl"
    paragraphs = [text for file in sorted(small_corpus.glob("[a-d]*.txt")) for text in file.read_text().split("\n\n")]
    with path.open("w") as file:
        for number, text in enumerate(filter(None, paragraphs)):
            for language, words in (("en", text), ("de", text.upper())):
                page = f"pages.{language}/common/{number}.md"
                file.write(json.dumps({"text": words, "language": language, "path": page}) + "\n")
    return path


def test_tokenizers_are_compared_on_the_same_held_out_texts(texts, tmp_path):
    pages = read_texts(texts)
    strategies = ("default", "case")
    found = compare_tokenizers(pages, options(tmp_path, strategies, [], 600, PROXY), Reporter.silent())
    plain, marked = found
    assert [group.group for group in plain.groups] == ["de", "en"]
    assert plain.total.bytes == marked.total.bytes < sum(len(page.text.encode()) for page in pages) / 5
    assert plain.groups[0].documents == plain.groups[1].documents  # a text and its translation are in the same split
    assert plain.groups[1].parity == 1.0
    assert plain.groups[0].parity == plain.groups[0].tokens / plain.groups[1].tokens
    assert all(0.5 < each.bits_per_byte < 8 for each in found)
    again = compare_tokenizers(pages, options(tmp_path, [], [tmp_path / "default"], 600, PROXY), Reporter.silent())[0]
    assert again.bits_per_byte == plain.bits_per_byte
    assert len(rows(found)) == 3
    parity = group_rows(found, "parity")
    assert parity[0] == ["parity", "documents", "default", "case"]
    assert [row[0] for row in parity[1:]] == ["de", "en"]
    assert parity[2][2:] == ["1.00", "1.00"]


def test_invalid_comparisons_are_refused(texts, tmp_path):
    pages = read_texts(texts)
    with pytest.raises(RecipeError, match="no strategy 'defualt'; choose from default, case"):
        compare_tokenizers(pages, options(tmp_path, ["defualt"], [], 600), Reporter.silent())
    with pytest.raises(InputError, match="more than the corpus supports"):
        compare_tokenizers(pages[:40], options(tmp_path, ["default"], [], 50_000), Reporter.silent())
    with pytest.raises(InputError, match="no such file"):
        read_texts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="no texts"):
        read_texts(tmp_path)

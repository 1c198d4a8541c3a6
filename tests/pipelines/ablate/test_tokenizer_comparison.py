"""Tokenizer comparison: one held-out set for all, translations in the same split, a deterministic proxy model."""

import json

import pytest

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.ablate.tokenizer_comparison import (
    TokenizerComparison,
    compare_tokenizers,
    group_rows,
    interval,
    ranking_by_group,
    ranking_rows,
    read_texts,
    rows,
)
from gristmill.tokenizers.config import ProxyConfig
from gristmill.tokenizers.tokenizer_report import TokenizerReport

PROXY = ProxyConfig(
    layers=1, width=16, heads=1, sequence_length=16, batch=4, text_bytes=5_000, held_out_bytes=1_000, seeds=2
)


def options(folder, presets, pretrained, vocab_size, proxy=None):
    return TokenizerComparison(folder, presets, pretrained, vocab_size, "en", proxy)


@pytest.fixture(scope="module")
def texts(small_corpus, tmp_path_factory):
    """Paragraphs of docstrings as "pages" in two languages: de is en in capitals."""
    path = tmp_path_factory.mktemp("texts") / "pages.jsonl"
    paragraphs = [text for file in sorted(small_corpus.glob("[ab]*.txt")) for text in file.read_text().split("\n\n")]
    with path.open("w") as file:
        for number, text in enumerate(filter(None, paragraphs)):
            for language, words in (("en", text), ("de", text.upper())):
                page = f"pages.{language}/common/{number}.md"
                file.write(json.dumps({"text": words, "language": language, "path": page}) + "\n")
    return path


def test_tokenizers_are_compared_on_the_same_held_out_texts(texts, tmp_path):
    pages = read_texts(texts)
    presets = ("default", "case")
    found = compare_tokenizers(pages, options(tmp_path, presets, [], 600, PROXY), Reporter.silent())
    plain, marked = found
    assert [group.group for group in plain.groups] == ["de", "en"]
    assert plain.total.bytes == marked.total.bytes < sum(len(page.text.encode()) for page in pages) / 5
    assert plain.groups[0].documents == plain.groups[1].documents  # a text and its translation are in the same split
    assert plain.groups[1].parity == 1.0
    assert plain.groups[0].parity == plain.groups[0].tokens / plain.groups[1].tokens
    for each in found:
        assert len(each.bits_per_byte.total) == 2 and set(each.bits_per_byte.groups) == {"de", "en"}
        assert all(0.5 < bits < 8 for bits in each.bits_per_byte.total)
        for seed, total in enumerate(each.bits_per_byte.total):
            by_group = [bits[seed] for bits in each.bits_per_byte.groups.values()]
            assert min(by_group) < total < max(by_group)
    again = compare_tokenizers(pages, options(tmp_path, [], [tmp_path / "default"], 600, PROXY), Reporter.silent())[0]
    assert again.bits_per_byte == plain.bits_per_byte  # read: the model of the same tokens and seed was trained before
    elsewhere = options(tmp_path / "elsewhere", [], [tmp_path / "default"], 600, PROXY)
    (anew,) = compare_tokenizers(pages, elsewhere, Reporter.silent())
    assert anew.bits_per_byte == plain.bits_per_byte
    assert len(rows(found)) == 3
    parity = group_rows(found, "parity")
    assert parity[0] == ["parity", "documents", "default", "case"]
    assert [row[0] for row in parity[1:]] == ["de", "en"]
    assert parity[2][2:] == ["1.00", "1.00"]


def report_of(name, total, **groups):
    empty = {"documents": 1, "bytes": 1, "tokens": 1, "bytes_per_token": 1, "fertility": 1, "parity": None}
    group = {"group": "all", **empty, "byte_fallback": 0, "pieces": 1}
    bits = {"total": total, "groups": groups}
    return TokenizerReport(
        name=name, vocab_size=1, encoder="", total=group, groups=(), unused=0, round_trip_failures=0,
        first_failure=None, bits_per_byte=bits,
    )  # fmt: skip


def test_a_ranking_worked_by_hand():
    """The interval of three values is 4.303 standard deviations over the root of 3; differences are paired by seed."""
    reports = [
        report_of("b", (2.0, 2.1, 2.2), de=(3.0, 3.0, 3.0), en=(1.0, 1.2, 1.4)),
        report_of("a", (1.9, 2.0, 2.1), de=(3.5, 3.5, 3.5), en=(0.9, 0.9, 0.9)),
    ]
    assert interval([2.0, 2.1, 2.2]) == pytest.approx((2.1, 4.30265 * 0.1 / 3**0.5), abs=1e-5)
    assert ranking_rows(reports)[1:] == [
        ["1", "a", "2.0000 ± 0.2484", "3", ""],
        ["2", "b", "2.1000 ± 0.2484", "3", "0.1000 ± 0.0000"],
    ]
    assert ranking_by_group(reports)[1:] == [
        ["de", "3.0000 ± 0.0000*", "3.5000 ± 0.0000"],
        ["en", "1.2000 ± 0.4968", "0.9000 ± 0.0000*"],
    ]
    assert interval([2.0])[0] == 2.0 and ranking_rows([report_of("a", (2.0,))])[1][2] == "2.0000"


def test_invalid_comparisons_are_refused(texts, tmp_path):
    pages = read_texts(texts)
    with pytest.raises(RecipeError, match="no preset 'defualt'; choose from default, case"):
        compare_tokenizers(pages, options(tmp_path, ["defualt"], [], 600), Reporter.silent())
    with pytest.raises(InputError, match="more than the corpus supports"):
        compare_tokenizers(pages[:40], options(tmp_path, ["default"], [], 50_000), Reporter.silent())
    with pytest.raises(InputError, match="no such file"):
        read_texts(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="no texts"):
        read_texts(tmp_path)

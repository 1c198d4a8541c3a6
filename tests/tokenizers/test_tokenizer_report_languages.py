"""Fourteen languages of the tldr pages, 446 of the UDHR: equal ids from every encoder, and exact round trips."""

import io
import json

import pytest
import zstandard

from gristmill.foundation.files import write_atomic
from gristmill.pipelines.report.content import tokenizer_blocks
from gristmill.pipelines.report.render import Table
from gristmill.tokenizers.config import PRESETS, TokenizerConfig, TokenizerRequirements
from gristmill.tokenizers.export import differences, write_huggingface
from gristmill.tokenizers.tokenizer import MODEL_NAME, load_bulk_tokenizer, load_tokenizer
from gristmill.tokenizers.tokenizer_report import GroupReport, missed_requirements, translation_key
from gristmill.tokenizers.train_tokenizer import train


@pytest.fixture(scope="module")
def pages(shared_data) -> list[str]:
    """Every twentieth page, of each language some."""
    with shared_data("corpora/tldr.jsonl.zst").open("rb") as raw:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8")
        records = [json.loads(line) for number, line in enumerate(lines) if number % 20 == 0]
    assert len({record["language"] for record in records}) >= 14
    return [record["text"] for record in records]


@pytest.fixture(scope="module")
def declarations(shared_data) -> list[str]:
    """The first 600 characters of the Universal Declaration of Human Rights in every language."""
    with shared_data("corpora/udhr.jsonl.zst").open("rb") as raw:
        lines = io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8")
        texts = [json.loads(line)["text"][:600] for line in lines]
    assert len(texts) > 446
    return texts


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_every_encoder_gives_the_same_ids(pages, tmp_path, algorithm):
    config = TokenizerConfig(algorithm=algorithm, vocab_size=3000, character_coverage=0.999)
    write_atomic(tmp_path / MODEL_NAME, train(pages[::2], config))
    write_huggingface(tmp_path)
    held_out = pages[1::2]
    assert differences(tmp_path, held_out) == []
    reference = load_bulk_tokenizer(tmp_path, "sentencepiece")
    expected = reference.encode_batch(held_out)
    assert load_tokenizer(tmp_path).encode_batch(held_out) == expected
    assert load_bulk_tokenizer(tmp_path).encode_batch(held_out) == expected
    assert [reference.decode(ids) for ids in expected] == held_out


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_declarations_in_446_languages_come_back(declarations, trained, preset):
    """Most of their scripts have no piece in these vocabularies, so bytes and marks of capitals alternate."""
    folder = trained(preset=preset)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_batch(declarations)
    assert [tokenizer.decode(each) for each in ids] == declarations
    assert differences(folder, declarations[::20]) == []


# Goals by language, keys of translations, and the report's section on the tokenizer, by hand.

GERMAN = GroupReport(
    group="de", documents=2, bytes=300, tokens=100, bytes_per_token=3.0, fertility=1.5, parity=1.25,
    byte_fallback=0.02, pieces=40,
)  # fmt: skip


def test_goals_for_all_languages_and_for_one():
    assert (
        missed_requirements(
            GERMAN, TokenizerRequirements(max_parity=1.25, max_fertility={"fr": 1.0}, min_bytes_per_token=3)
        )
        == []
    )
    missed = missed_requirements(GERMAN, TokenizerRequirements(max_parity=1.2, max_byte_fallback={"de": 0.01, "fr": 1}))
    assert missed == ["de: parity 1.2500, at most 1.2000", "de: byte_fallback 0.0200, at most 0.0100"]
    assert TokenizerRequirements(max_parity=2, max_byte_fallback={"de": 0.01, "fr": 1}).languages() == {"de", "fr"}


def test_translations_share_the_last_two_parts_of_their_path():
    assert translation_key('{"path": "pages.de/linux/cat.md"}') == translation_key('{"path": "pages/linux/cat.md"}')
    assert [translation_key(text) for text in (None, "", "{}", "[1]", '{"path": 3}')] == [""] * 5


def test_the_section_of_the_report(tmp_path):
    assert tokenizer_blocks(tmp_path) == []
    content = {"reference": "en", "languages": [GERMAN.model_dump()], "vocabulary": {"Latn": 300, "single bytes": 100}}
    (tmp_path / "languages.json").write_text(json.dumps(content))
    languages, budget = (block for block in tokenizer_blocks(tmp_path) if isinstance(block, Table))
    assert languages.rows == (("German (de)", "2", "3.00", "1.50", "1.25", "2.00%", "40"),)
    assert budget.rows == (("Latn", "300", "75.0%"), ("single bytes", "100", "25.0%"))

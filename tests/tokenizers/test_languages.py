"""Fourteen languages of the tldr pages, 446 of the UDHR: equal ids from every encoder, and exact round trips."""

import io
import json

import pytest
import zstandard

from gristmill.foundation.files import write_atomic
from gristmill.tokenizers.config import STRATEGIES, TokenizerConfig
from gristmill.tokenizers.export import differences, write_huggingface
from gristmill.tokenizers.tokenizer import MODEL_NAME, load_bulk_tokenizer, load_tokenizer
from gristmill.tokenizers.train import train


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


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_declarations_in_446_languages_come_back(declarations, trained, strategy):
    """Most of their scripts have no piece in these vocabularies, so bytes and marks of capitals alternate."""
    folder = trained(strategy=strategy)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_batch(declarations)
    assert [tokenizer.decode(each) for each in ids] == declarations
    assert differences(folder, declarations[::20]) == []

"""The special tokens around texts are those that transformers' AutoTokenizer adds, for several kinds of tokenizers."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece

from gristmill.evaluation.convert.model_tokenizer import load_model_tokenizer
from gristmill.foundation.errors import InputError
from tests.support.bos_models import KINDS, write_tokenizer

transformers = pytest.importorskip("transformers")
TEXTS = ["The mill", "turns all day. ", "", "  two", "é"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_bounded_as_by_transformers(kind: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, kind)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_model_tokenizer(tmp_path)
    assert ours.encode_bounded(TEXTS) == [theirs.encode(text) for text in TEXTS]
    assert ours.bounds.bos == theirs.bos_token_id and ours.end_of_document == theirs.eos_token_id
    for text in TEXTS[:2]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_a_sentencepiece_model_follows_its_flags(flags: dict, tmp_path: Path) -> None:
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the mill turns all day and at night it stands"] * 50),
        model_writer=content,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
    )
    (tmp_path / "tokenizer.model").write_bytes(content.getvalue())
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | flags))
    ours = load_model_tokenizer(tmp_path)
    before, after = flags.get("add_bos_token", False), flags.get("add_eos_token", False)
    expected = [*[1] * before, *ours.encode("the mill"), *[2] * after]
    assert ours.encode_bounded(["the mill"]) == [expected]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode("the mill") == expected


def test_a_damaged_tokenizer_config_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "llama")
    (tmp_path / "special_tokens_map.json").write_text("[")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["bos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"special_tokens_map.json: not JSON"):
        load_model_tokenizer(tmp_path)

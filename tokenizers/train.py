"""Trains a SentencePiece model: same words, same settings, same bytes."""

import io
import re
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.foundation.errors import InputError
from gristmill.tokenizers.config import FIM_SYMBOLS, TokenizerConfig
from gristmill.tokenizers.transforms import marked, write_rules
from gristmill.tokenizers.word_counts import count_texts, words_and_counts

UNKNOWN = "<unk>"
END_OF_DOCUMENT = "<|endofdocument|>"

# The sums of unigram training depend on how sentences are dealt to threads, so their number is part of the algorithm
# and never that of the machine's cores: 8k pieces on 4 MB gave other pieces with 1, 2, 4 and 16 threads. BPE does not
# depend on it, but the number is written into the model.
TRAINING_THREADS = 8

# Unigram scores are rounded to so many parts of one. Sums of them are then exact in float32 up to 2^18 = 262144 in
# size, so float32 (sentencepiece) and float64 (Hugging Face) find the same best path.
SCORE_PARTS = 64

MAX_WORD_BYTES = 32_000
# Stands for a tab in the lines `word TAB count` that sentencepiece reads; a code point that no character has.
TAB, TAB_SIGN = "\t", "\U0010fffe"

MODEL_TYPES = {"bpe": "bpe", "unigram": "unigram", "characters": "char"}


def train(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """The bytes of a .model. Raises InputError if the text cannot support the vocabulary the config asks for."""
    return train_on_words(count_texts(texts), config)


def train_on_words(words: pa.Table, config: TokenizerConfig) -> bytes:
    """The bytes of a .model trained on counted words (word_counts.py). Raises InputError if they cannot support the
    vocabulary the config asks for.

    BPE gets the pieces that it gets from the sentences themselves; unigram's first candidates are the substrings of
    distinct words, not of the text: 1.6 % fewer tokens on held-out text (8k pieces of 4 MB, 2026-11-26)."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(words), model_writer=model, **_settings(config, Path(folder))
            )
        except RuntimeError as error:
            raise InputError(_training_error(str(error), config)) from error
    return _canonical(model.getvalue(), config)


def _lines(words: pa.Table) -> Iterator[str]:
    """Words and counts as sentencepiece reads them, with TAB_SIGN for the tab that separates the two."""
    for word, count in words_and_counts(words):
        yield f"{word.replace(TAB_SIGN, '').replace(TAB, TAB_SIGN)}\t{count}"


def _settings(config: TokenizerConfig, folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model_type": MODEL_TYPES[config.algorithm],
        "vocab_size": config.vocab_size,
        "character_coverage": config.character_coverage,
        "max_sentencepiece_length": config.max_piece_length,
        "split_digits": config.split_digits,
        "user_defined_symbols": [symbol.replace(" ", "▁") for symbol in config.symbols],
        "control_symbols": list(FIM_SYMBOLS) if config.fim else [],
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "byte_fallback": True,
        "unk_id": 0,
        "unk_piece": UNKNOWN,
        "eos_id": 1,
        "eos_piece": END_OF_DOCUMENT,
        "bos_id": -1,
        "pad_id": -1,
        "num_threads": TRAINING_THREADS,
        "max_sentence_length": MAX_WORD_BYTES,
        "input_format": "tsv",
        "input_sentence_size": 0,
        "hard_vocab_limit": config.algorithm != "characters",
        "minloglevel": 2,
    }
    return settings | write_rules(folder, marked() if config.case_marks else [], [(TAB_SIGN, TAB)])


def _canonical(model: bytes, config: TokenizerConfig) -> bytes:
    """The model without temporary paths and the rule of the tab, and with unigram scores rounded so that their sums are
    exact."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.trainer_spec.ClearField("input_format")
    proto.normalizer_spec.CopyFrom(_normalizers(config.case_marks)[0])
    proto.denormalizer_spec.CopyFrom(_normalizers(config.case_marks)[1])
    if config.algorithm == "unigram":
        for piece in proto.pieces:
            piece.score = round(piece.score * SCORE_PARTS) / SCORE_PARTS
    return proto.SerializeToString(deterministic=True)


@cache
def _normalizers(case_marks: bool) -> tuple[Any, Any]:
    """The normalizer_spec and the denormalizer_spec of a model, without temporary paths."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(TokenizerConfig(algorithm="characters", vocab_size=300), Path(folder))
        settings |= {"input_format": "", "normalization_rule_tsv": "", "denormalization_rule_tsv": ""}
        if case_marks:
            settings |= write_rules(Path(folder), marked())
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["a"]), model_writer=model, **settings)
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    proto.normalizer_spec.normalization_rule_tsv = ""
    proto.denormalizer_spec.normalization_rule_tsv = ""
    return proto.normalizer_spec, proto.denormalizer_spec


def _training_error(reason: str, config: TokenizerConfig) -> str:
    setting = f"tokenizer.vocab_size={config.vocab_size}"
    if too_high := re.search(r"Vocabulary size too high .*<= (\d+)", reason, re.DOTALL):
        return (
            f"{setting} is more than the corpus supports: its text gives at most {too_high[1]} pieces; "
            f"set tokenizer.vocab_size to {too_high[1]} or less, or give it more text (tokenizer.sample_bytes)"
        )
    if too_low := re.search(r"smaller than required_chars\D*(\d+) vs (\d+)", reason):
        return (
            f"{setting} is too small: the characters, bytes and symbols alone need {too_low[2]} pieces; "
            f"set tokenizer.vocab_size above {too_low[2]}, or lower tokenizer.character_coverage"
        )
    if "sentences.empty" in reason or "!sentences_" in reason or "Input corpus is empty" in reason:
        return "the training split holds no text, so no tokenizer can be trained; look at what curate kept"
    return f"sentencepiece could not train {setting}: {reason}; give it more text or a smaller vocabulary"

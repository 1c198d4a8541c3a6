"""Trains a SentencePiece model: same sentences, same settings, same bytes."""

import io
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.foundation.errors import InputError
from gristmill.tokenizers.config import FIM_SYMBOLS, TokenizerConfig
from gristmill.tokenizers.transforms import write_rules

UNKNOWN = "<unk>"
END_OF_DOCUMENT = "<|endofdocument|>"

# The sums of unigram training depend on how sentences are dealt to threads, so their number is part of the algorithm
# and never that of the machine's cores: 8k pieces on 4 MB gave other pieces with 1, 2, 4 and 16 threads. BPE does not
# depend on it, but the number is written into the model.
TRAINING_THREADS = 8

# A sentence is some lines together, so that pieces may hold line ends (":\n", ".\n\n"): 0.270 tokens a byte on held-out
# Markdown (kubernetes_community, 8k pieces of 4 MB, 2026-11-20) against 0.286 line by line, where sentencepiece never
# sees what follows a line end.
SENTENCE_BYTES = 2000
MAX_SENTENCE_BYTES = 4 * SENTENCE_BYTES

# Unigram scores are rounded to so many parts of one. Sums of them are then exact in float32 up to 2^18 = 262144 in
# size, so float32 (sentencepiece) and float64 (Hugging Face) find the same best path.
SCORE_PARTS = 64

MODEL_TYPES = {"bpe": "bpe", "unigram": "unigram", "characters": "char"}


def train(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """The bytes of a .model. Raises InputError if the text cannot support the vocabulary the config asks for."""
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=sentences(texts), model_writer=model, **_settings(config, Path(folder))
            )
        except RuntimeError as error:
            raise InputError(_training_error(str(error), config)) from error
    return _canonical(model.getvalue(), config)


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Groups of complete lines of about SENTENCE_BYTES; longer lines are split. Drops only empty sentences."""
    for text in texts:
        pending: list[str] = []
        size = 0
        for line in text.splitlines(keepends=True):
            for start in range(0, len(line), SENTENCE_BYTES):
                pending.append(line[start : start + SENTENCE_BYTES])
                size += len(pending[-1])
                if size >= SENTENCE_BYTES:
                    yield "".join(pending)
                    pending, size = [], 0
        if pending:
            yield "".join(pending)


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
        "max_sentence_length": MAX_SENTENCE_BYTES * 4,
        "input_sentence_size": 0,
        "hard_vocab_limit": config.algorithm != "characters",
        "minloglevel": 2,
    }
    if config.case_marks:
        settings |= write_rules(folder)
    return settings


def _canonical(model: bytes, config: TokenizerConfig) -> bytes:
    """The model without temporary paths, and with unigram scores rounded so that their sums are exact."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.normalization_rule_tsv = ""
    proto.denormalizer_spec.normalization_rule_tsv = ""
    if config.algorithm == "unigram":
        for piece in proto.pieces:
            piece.score = round(piece.score * SCORE_PARTS) / SCORE_PARTS
    return proto.SerializeToString(deterministic=True)


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

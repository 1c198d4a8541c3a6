"""Trains a SentencePiece model or a byte-level BPE: same words, same settings, same bytes."""

import io
import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.foundation.errors import InputError
from gristmill.tokenizers.byte_level import BYTE_OF, bytes_to_unicode
from gristmill.tokenizers.byte_merges import MergeTrainer
from gristmill.tokenizers.config import FIM_SYMBOLS, TokenizerConfig
from gristmill.tokenizers.export import capital_letter_rules, write_rules
from gristmill.tokenizers.pretrained import byte_level_json
from gristmill.tokenizers.word_counts import count_texts, with_least_count, words_and_counts
from tokenizers import Tokenizer

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
# Words, counted with repetition, that unigram is trained on: sentencepiece 0.2.3 needs 170 bytes for each, however few
# are distinct. Counts of more words are divided.
MAX_UNIGRAM_WORDS = 12_000_000
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
    if config.algorithm == "unigram":
        words = _divided(words, -(-pc.sum(words["count"]).as_py() // MAX_UNIGRAM_WORDS))
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(words), model_writer=model, **_settings(config, Path(folder))
            )
        except RuntimeError as error:
            raise InputError(_training_error(str(error), config)) from error
    return _canonical(model.getvalue(), config)


def _divided(words: pa.Table, divisor: int) -> pa.Table:
    """The words with their counts divided, rounded; of rarer ones as many as give the same expected total."""
    if divisor <= 1:
        return words
    words = with_least_count(words, divisor)
    counts = pc.cast(pc.round(pc.divide(pc.cast(words["count"], pa.float64()), divisor)), pa.int64())
    return words.set_column(1, "count", counts)


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
    return settings | write_rules(folder, capital_letter_rules() if config.case_marks else [], [(TAB_SIGN, TAB)])


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
            settings |= write_rules(Path(folder), capital_letter_rules())
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


# Trains a byte-level BPE on counted words, and merges across spaces after them (SuperBPE, Liu et al. 2025,
# arXiv:2503.13423).


# Llama 3's pre-tokenization pattern (Qwen's with single digits); DIGITS is \p{N}{1,3} or \p{N}.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Strings that merges across spaces see: digits, runs of punctuation, blanks before a line end, and what is between them
# on a line, with its line ends.
RUN = r" ?[^\s\p{L}\p{N}]{2,}"
LINE_PATTERN = rf"DIGITS|{RUN}[\r\n]*|(?:(?!DIGITS|{RUN}|\s*[\r\n]|\s+(?!\S))[\s\S])+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Initial ids of Hugging Face's trainer: the bytes in the order of their characters.
ALPHABET = [bytes([BYTE_OF[character]]) for character in sorted(BYTE_OF)]
SUPERWORD_BYTES = 16_000_000  # of text that merges across spaces are learned from, which is held in memory
Words = Counter[tuple[int, ...]]


def train_byte_level(words: pa.Table, texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """The bytes of a tokenizer.json. words: counted with `byte_level`. texts: for merges across spaces; not read where
    the config asks for none.

    The merges inside words are those of Hugging Face's trainer on the same words. Raises InputError if the text gives
    fewer tokens than the config asks for."""
    special = [END_OF_DOCUMENT, *(FIM_SYMBOLS if config.fim else ())]
    num_tokens = config.vocab_size - len(special)
    inside = num_tokens - int(config.superwords * (num_tokens - len(ALPHABET)))
    pattern = WORD_PATTERN.replace("DIGITS", _digits(config))
    merges, tokens = trained_merges(_split_words(words, pattern), ALPHABET, inside)
    _check_size(tokens, inside, config)
    if config.superwords:
        pattern = LINE_PATTERN.replace("DIGITS", _digits(config))
        lines = _split_lines(texts, byte_level_json(pattern, _vocabulary(tokens), merges, special))
        more, tokens = trained_merges(lines, tokens, num_tokens)
        merges += more
        _check_size(tokens, num_tokens, config)
    return byte_level_json(pattern, _vocabulary(tokens), merges, special)


def trained_merges(words: Words, tokens: Sequence[bytes], num_tokens: int) -> tuple[list[list[str]], list[bytes]]:
    """(merges as a tokenizer.json lists them, all tokens). words: ids of tokens, with their counts."""
    ordered = sorted(words)
    lengths = [len(word) for word in ordered]
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    symbols = np.fromiter(itertools.chain.from_iterable(ordered), np.int32, int(starts[-1]))
    counts = np.array([words[word] for word in ordered], np.int64)
    merged = list(tokens)
    merges = []
    for left, right, token in MergeTrainer(symbols, starts, counts, tokens).train(num_tokens):
        if token == len(merged):
            merged.append(merged[left] + merged[right])
        merges.append([bytes_to_unicode(merged[left]), bytes_to_unicode(merged[right])])
    return merges, merged


def _digits(config: TokenizerConfig) -> str:
    return r"\p{N}" if config.split_digits else r"\p{N}{1,3}"


def _vocabulary(tokens: Sequence[bytes]) -> dict[bytes, int]:
    return {token: number for number, token in enumerate(tokens)}


def _check_size(tokens: Sequence[bytes], num_tokens: int, config: TokenizerConfig) -> None:
    if len(tokens) < num_tokens:
        raise InputError(
            f"tokenizer.vocab_size={config.vocab_size} is more than the corpus supports: its text gives "
            f"{len(tokens)} of {num_tokens} tokens; set a smaller one, or give it more text (tokenizer.sample_bytes)"
        )


def _split_words(words: pa.Table, pattern: str) -> Words:
    splitter = Tokenizer.from_str(byte_level_json(pattern, _vocabulary(ALPHABET), [], []).decode()).pre_tokenizer
    counts: Counter[str] = Counter()
    for word, count in words_and_counts(words):
        for part, _ in splitter.pre_tokenize_str(word):
            counts[part] += count
    ids = {bytes_to_unicode(token): number for number, token in enumerate(ALPHABET)}
    return Counter({tuple(ids[character] for character in word): count for word, count in counts.items()})


def _split_lines(texts: Iterable[str], content: bytes) -> Words:
    """The strings that merges across spaces see, as ids of the tokens so far."""
    tokenizer = Tokenizer.from_str(content.decode())
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(part for part, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    words: Words = Counter()
    for line, count in counts.items():
        words[tuple(token.id for token in tokenizer.model.tokenize(line))] += count
    return words

"""Trains a byte-level BPE on counted words, and merges across spaces after them (SuperBPE, Liu et al. 2025,
arXiv:2503.13423)."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from gristmill.foundation.errors import InputError
from gristmill.tokenizers.byte_level import BYTE_OF, visible
from gristmill.tokenizers.byte_merges import MergeTrainer
from gristmill.tokenizers.config import FIM_SYMBOLS, TokenizerConfig
from gristmill.tokenizers.pretrained import byte_level_json
from gristmill.tokenizers.train import END_OF_DOCUMENT
from gristmill.tokenizers.word_counts import words_and_counts
from tokenizers import Tokenizer

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
        merges.append([visible(merged[left]), visible(merged[right])])
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
    ids = {visible(token): number for number, token in enumerate(ALPHABET)}
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

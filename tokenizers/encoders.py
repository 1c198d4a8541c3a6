"""Encoders (text to ids): sentencepiece, kitoken if its ids are verified to be equal, Hugging Face's tokenizers.

byte_level.py adds tiktoken, which replaces Hugging Face's tokenizers if its ids are verified to be equal."""

import itertools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import kitoken
import numpy as np
import sentencepiece

from gristmill.tokenizers.adversarial import adversarial_strings
from tokenizers import Tokenizer as HuggingFaceTokenizer


class Encoder(Protocol):
    """name: recorded in manifests. Text never becomes control symbols: "<|endofdocument|>" is encoded as plain text.

    differing: ranges of code points (first, stop) whose texts another encoder encodes; a worker process is given
    them, because finding them takes seconds."""

    name: str
    differing: tuple[tuple[int, int], ...] = ()

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids of all texts concatenated: int32; lengths: int64[len(texts)])."""
        encoded = self.encode_batch(texts)
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.fromiter(itertools.chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths

    def encode_utf8(
        self, buffer: np.ndarray, ends: np.ndarray, end_of_document: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """encode_flat, of the UTF-8 texts that lie one after another in a buffer. buffer: uint8; ends: int64[texts].
        end_of_document: id to append to each text."""
        raw, edges = buffer.tobytes(), [0, *ends.tolist()]
        ids, lengths = self.encode_flat([raw[start:end].decode() for start, end in itertools.pairwise(edges)])
        if end_of_document is None:
            return ids, lengths
        return np.insert(ids, np.cumsum(lengths), end_of_document), lengths + 1


class Utf8Encoder(Encoder):
    """Reads UTF-8 in bulk: `encode_utf8` does the work, the others call it."""

    def encode(self, text: str) -> list[int]:
        return self.encode_flat([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        ids, lengths = self.encode_flat(texts)
        return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])] if len(lengths) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        raw = [text.encode() for text in texts]
        ends = np.cumsum([len(document) for document in raw], dtype=np.int64)
        return self.encode_utf8(np.frombuffer(b"".join(raw), dtype=np.uint8), ends)


class SentencePieceEncoder(Encoder):
    name = "sentencepiece"

    def __init__(self, processor: sentencepiece.SentencePieceProcessor):
        self._processor = processor

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=1)


class KitokenEncoder(Encoder):
    """Four times as fast as sentencepiece on BPE; used only if `first_difference` finds none."""

    name = "kitoken"

    def __init__(self, path: Path):
        self._path = path

    @cached_property
    def _kitoken(self) -> kitoken.Kitoken:
        """Read at first use: 0.05 s that a worker whose segments are all encoded by merges does not spend."""
        return kitoken.Kitoken.from_sentencepiece_file(str(self._path))

    def encode(self, text: str) -> list[int]:
        return self._kitoken.encode(text, False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._kitoken.encode_all(list(texts), False)


class HuggingFaceEncoder(Encoder):
    name = "tokenizers"

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return [
                encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            ]
        except TypeError:  # raised on a lone surrogate; the other encoders raise UnicodeEncodeError
            for text in texts:
                text.encode()
            raise


def first_difference(expected: Sequence[list[int]], other: Encoder, strings: Sequence[str]) -> str | None:
    """The first string that `other` encodes to other ids than expected, None if there is none; the first string if it
    raises."""
    try:
        other_ids = other.encode_batch(strings)
    except Exception:  # whatever the error, `other` cannot replace the reference
        return strings[0]
    pairs = zip(strings, expected, other_ids, strict=True)
    return next((text for text, ours, other_encoding in pairs if ours != other_encoding), None)


def fastest_equal(path: Path, processor: sentencepiece.SentencePieceProcessor, pieces: Sequence[str]) -> Encoder:
    """kitoken if it gives sentencepiece's ids on all adversarial strings of this model, else sentencepiece."""
    strings = strings_for(pieces)
    return fastest_on(path, processor, strings, SentencePieceEncoder(processor).encode_batch(strings))


def fastest_on(
    path: Path, processor: sentencepiece.SentencePieceProcessor, strings: Sequence[str], expected: Sequence[list[int]]
) -> Encoder:
    """kitoken if it reads the model and gives the expected ids of the strings, else sentencepiece."""
    fast = KitokenEncoder(path)
    return SentencePieceEncoder(processor) if first_difference(expected, fast, strings) is not None else fast


def strings_for(pieces: Sequence[str]) -> list[str]:
    """The adversarial strings for a model: the general ones and concatenations of its pieces."""
    return adversarial_strings([piece.replace("▁", " ") for piece in pieces])

"""Byte-level BPE of a tokenizer.json, encoded by tiktoken if its ids are verified to be equal.

tiktoken merges the pair whose concatenation has the lowest rank; tokenizer.json lists its merges. Both agree if the ids
of the merged tokens increase in the order of the merges. That is checked, and both encode the adversarial strings."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tiktoken

from gristmill.tokenizers.adversarial import adversarial_strings
from gristmill.tokenizers.encoders import Encoder, HuggingFaceEncoder, first_difference

# GPT-2's pre-tokenization pattern (Radford et al. 2019, encoder.py), also the default of ByteLevel.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

# Code points that are all compared, since the two libraries use different Unicode tables. Excluded are blocks whose
# class never changed or is undefined: ideographs and Hangul (the adversarial strings hold some of each), private use,
# and planes without characters.
COMPARED_CODE_POINTS = (
    range(0x3400), range(0xA000, 0xAC00), range(0xD7A4, 0xD800), range(0xF900, 0x20000),
    range(0xE0000, 0xE0200),
)  # fmt: skip
CODE_POINTS_PER_STRING = 64


class TiktokenEncoder(Encoder):
    """About five times as fast as Hugging Face's tokenizers; used only if `same_ids` is true.

    A text that tiktoken rejects (its regex overflows the stack on a million blanks) is encoded by the reference."""

    name = "tiktoken"

    def __init__(self, encoding: tiktoken.Encoding, reference: Encoder):
        self._encoding, self._reference = encoding, reference

    def encode(self, text: str) -> list[int]:
        return self._ids(text).tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._ids(text).tolist() for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encoded = [self._ids(text) for text in texts]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.concatenate([np.zeros(0, np.int32), *encoded], dtype=np.int32, casting="unsafe"), lengths

    def _ids(self, text: str) -> np.ndarray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a lone surrogate: also a ValueError
            raise
        except ValueError:
            return np.array(self._reference.encode(text), dtype=np.int32)


def fastest_byte_level(content: dict[str, Any], reference: HuggingFaceEncoder) -> Encoder:
    """tiktoken if it supports the tokenizer.json and gives the same ids, else the reference."""
    fast = tiktoken_encoder(content, reference)
    return fast if fast is not None and same_ids(content, reference, fast) else reference


def tiktoken_encoder(content: dict[str, Any], reference: Encoder) -> TiktokenEncoder | None:
    """tiktoken for a byte-level BPE that it supports, else None. Does not compare the ids."""
    pattern, ranks = _pattern(content), _ranks(content)
    if pattern is None or ranks is None:
        return None
    try:
        encoding = tiktoken.Encoding("adopted", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError:  # a pattern that its regex library does not know
        return None
    return TiktokenEncoder(encoding, reference)


def same_ids(content: dict[str, Any], reference: Encoder, other: Encoder) -> bool:
    """True if both agree on the adversarial strings, concatenations of tokens, and COMPARED_CODE_POINTS."""
    pieces = [_bytes_of(piece) or b"" for piece in content["model"]["vocab"]]
    strings = adversarial_strings([piece.decode("utf-8", "ignore") for piece in pieces])
    strings += _code_points()
    return first_difference(reference.encode_batch(strings), other, strings) is None


def _code_points() -> list[str]:
    """Strings in which each compared code point follows a space, a letter and a digit."""
    tried = [chr(code) for block in COMPARED_CODE_POINTS for code in block]
    return [
        "".join(f" {character}a{character}1{character}" for character in tried[start : start + CODE_POINTS_PER_STRING])
        for start in range(0, len(tried), CODE_POINTS_PER_STRING)
    ]


def _pattern(content: dict[str, Any]) -> str | None:
    """The pre-tokenization pattern, None if anything else changes the text before BPE."""
    parts = content.get("pre_tokenizer") or {}
    parts = parts.get("pretokenizers", []) if parts.get("type") == "Sequence" else [parts]
    if content.get("normalizer") is not None or not parts or not _is_plain_byte_level(parts[-1]):
        return None
    if len(parts) == 1:
        return GPT2_PATTERN if parts[0].get("use_regex", True) else None
    split = parts[0]
    if len(parts) > 2 or parts[1].get("use_regex", True) or split.get("type") != "Split":
        return None
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    return split["pattern"].get("Regex")


def _is_plain_byte_level(part: dict[str, Any]) -> bool:
    return part.get("type") == "ByteLevel" and not part.get("add_prefix_space", True)


def _ranks(content: dict[str, Any]) -> dict[bytes, int] | None:
    """Token bytes to id; None unless the model is plain byte merges with increasing ids."""
    model, added = content["model"], content.get("added_tokens", [])
    unusual = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if model.get("type") != "BPE" or any(model.get(name) for name in unusual):
        return None
    if not all(token["special"] for token in added):  # others are found in text before anything else
        return None
    special = {token["content"] for token in added}
    named = {piece: _bytes_of(piece) for piece in model["vocab"] if piece not in special}
    ranks = {token: model["vocab"][piece] for piece, token in named.items() if token is not None}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    products = [model["vocab"].get(left + right) for left, right in merges]
    if any(token is None for token in named.values()) or any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    if None in products or any(later <= earlier for earlier, later in itertools.pairwise(products)):
        return None
    return ranks if len(products) + 256 == len(ranks) else None


def _bytes_of(piece: str) -> bytes | None:
    """The bytes of a piece in GPT-2's byte-to-character mapping, None if it is not written that way."""
    numbers = [BYTE_OF.get(character) for character in piece]
    return None if None in numbers else bytes(number for number in numbers if number is not None)


def visible(token: bytes) -> str:
    """Bytes in GPT-2's byte-to-character mapping: printable Latin-1 unchanged, the others from U+0100 on."""
    return "".join(BYTE_NAMES[byte] for byte in token)


def _byte_names() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


BYTE_NAMES = _byte_names()
BYTE_OF = {name: byte for byte, name in BYTE_NAMES.items()}

"""Byte-level BPE of a tokenizer.json, encoded by gigatoken or tiktoken if the ids are verified to be equal.

tiktoken merges the pair whose concatenation has the lowest rank; tokenizer.json lists its merges. Both agree if the ids
of the merged tokens increase in the order of the merges. That is checked, and all encode the adversarial strings.

The libraries use different Unicode tables (gigatoken 0.10: Unicode 17, tokenizers 0.23: 16). The characters that they
split differently are determined with a probe vocabulary, and texts that hold one are encoded by tokenizers."""

import itertools
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tiktoken
from gigatoken.gigatoken_rs import load_hf_json

from gristmill.data_pipeline.signals.intrinsics import load64
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from gristmill.foundation.runtime.kernels.kernel_files import kept_json
from gristmill.tokenizers.encoders import (
    Encoder,
    HuggingFaceEncoder,
    Utf8Encoder,
    adversarial_strings,
    first_difference,
)
from tokenizers import Tokenizer as HuggingFaceTokenizer

# GPT-2's pre-tokenization pattern (Radford et al. 2019, encoder.py), also the default of ByteLevel.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

# Code points that are all compared. Excluded are blocks whose class never changed or is undefined: ideographs and
# Hangul, private use, and planes without characters. The unassigned ends of the blocks of ideographs are compared.
COMPARED_CODE_POINTS = (
    range(0x3400), range(0x4DB0, 0x4E00), range(0x9FF0, 0xAC00), range(0xD7A4, 0xD800), range(0xF900, 0x20000),
    range(0x2A6D0, 0x2A700), range(0x2B730, 0x2B740), range(0x2B810, 0x2B820), range(0x2CEA0, 0x2CEB0),
    range(0x2EBE0, 0x2EBF0), range(0x2EE50, 0x2F800), range(0x2FA10, 0x30000), range(0x31340, 0x31350),
    range(0x323A0, 0x34000), range(0xE0000, 0xE0200),
)  # fmt: skip
CODE_POINTS_PER_STRING = 64
NUM_CODE_POINTS = 0x110000
PROBED_NEIGHBOURS = b" aA1.'s\n"  # of every class of the patterns

# gigatoken 0.10 never empties its cache of words (upstream issue 36), so it is loaded anew when the memory of the
# process has grown by so much. Text of random words takes 10 bytes of cache a byte; loading 50k pieces takes 0.3 s.
MAX_CACHE_BYTES = 1 << 29
PAGE_BYTES = 4096
RESIDENT_PAGES = Path("/proc/self/statm")
WORD_BYTES = 8
HIGH_BITS = np.uint64(0x8080808080808080)
THREE_BYTES, FOUR_BYTES = 0xE0, 0xF0


class GigatokenEncoder(Utf8Encoder):
    """10 to 25 times as fast as tiktoken; used only if `encodes_identically` is true.

    content: a tokenizer.json whose list of added tokens is empty. differing: bool[NUM_CODE_POINTS], the characters that
    gigatoken splits differently from the reference, which encodes the texts that hold one."""

    name = "gigatoken"

    def __init__(self, content: str, reference: Encoder, differing: np.ndarray):
        self._content, self._reference, self._differing = content, reference, differing
        self.differing = ranges_of(differing)
        self._backend: Any = None  # loaded at the first text: a process that only plans tasks encodes none

    def _load(self) -> None:
        self._backend = load_hf_json(self._content)
        self._limit_bytes = resident_bytes() + MAX_CACHE_BYTES

    def encode_utf8(
        self, buffer: np.ndarray, ends: np.ndarray, end_of_document: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._backend is None or resident_bytes() > self._limit_bytes:
            self._load()
        raw, encode = buffer.tobytes(), self._backend.encode
        bounds = itertools.pairwise([0, *ends.tolist()])
        parts = [encode(raw[start:end]) for start, end in bounds]
        for document in np.flatnonzero(_texts_with(_padded(buffer), ends, self._differing)).tolist():
            start = int(ends[document - 1]) if document else 0
            parts[document] = np.array(self._reference.encode(raw[start : ends[document]].decode()), dtype=np.uint32)
        lengths = np.array([len(ids) for ids in parts], dtype=np.int64)
        if end_of_document is not None:
            end = np.array([end_of_document], dtype=np.uint32)
            parts = [ids for document in parts for ids in (document, end)]
            lengths += 1
        return np.frombuffer(b"".join(parts), dtype=np.int32), lengths  # twice as fast as np.concatenate


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say it in /proc."""
    try:
        return int(RESIDENT_PAGES.read_bytes().split()[1]) * PAGE_BYTES
    except FileNotFoundError:
        return 0


def _padded(buffer: np.ndarray) -> np.ndarray:
    return np.concatenate([buffer, np.zeros(WORD_BYTES, np.uint8)])


@cached_njit()
def _texts_with(buffer, ends, differing):
    """bool[texts]: the text holds a character that differs. buffer: UTF-8, WORD_BYTES longer than the texts."""
    flags = np.zeros(len(ends), np.bool_)
    position = 0
    for document in range(len(ends)):
        end = ends[document]
        while position < end:
            while position + 4 * WORD_BYTES <= end:
                words = load64(buffer, position) | load64(buffer, position + 8)
                words |= load64(buffer, position + 16) | load64(buffer, position + 24)
                if words & HIGH_BITS != 0:
                    break
                position += 4 * WORD_BYTES
            if load64(buffer, position) & HIGH_BITS == 0:
                position += WORD_BYTES
                continue
            lead = np.int64(buffer[position])
            if lead < 0xC0:  # ASCII, or the rest of a character of which a word skipped over the text's end
                position += 1
            elif lead < THREE_BYTES:
                flags[document] |= differing[(lead & 0x1F) << 6 | np.int64(buffer[position + 1]) & 0x3F]
                position += 2
            else:
                tail = (np.int64(buffer[position + 1]) & 0x3F) << 6 | np.int64(buffer[position + 2]) & 0x3F
                if lead < FOUR_BYTES:
                    flags[document] |= differing[(lead & 0x0F) << 12 | tail]
                    position += 3
                else:
                    code = (lead & 7) << 18 | tail << 6 | np.int64(buffer[position + 3]) & 0x3F
                    flags[document] |= differing[code]
                    position += 4
        position = end
    return flags


class TiktokenEncoder(Encoder):
    """About five times as fast as Hugging Face's tokenizers; used only if `encodes_identically` is true.

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


def fastest_byte_level(content: dict[str, Any], reference: HuggingFaceEncoder) -> Encoder | None:
    """gigatoken, else tiktoken, if it supports the tokenizer.json and gives the same ids; else None."""
    for make in BULK_ENCODERS.values():
        fast = make(content, reference)
        if fast is not None and encodes_identically(content, reference, fast):
            return fast
    return None


def gigatoken_encoder(
    content: dict[str, Any], reference: Encoder, differing: tuple[tuple[int, int], ...] = ()
) -> GigatokenEncoder | None:
    """gigatoken for a byte-level BPE that it supports, else None. Does not compare the ids.

    differing: of an encoder of this content that was compared, which is not looked at again; the differing characters
    are determined without them."""
    if differing:
        return GigatokenEncoder(without_added_tokens(content), reference, mask_of(differing))
    if _pattern(content) is None or _ranks(content) is None:
        return None
    probed = json.dumps(probe_content(content))
    try:
        probe = load_hf_json(probed)
    except RuntimeError:  # a pattern that it does not know
        return None
    ranges = kept_json(  # 3 s; the same for every vocabulary of these patterns
        lambda: ranges_of(
            differing_code_points(content, lambda texts: [probe.encode(text.encode()).tolist() for text in texts])
        ),
        differing_code_points,
        f"{version('tokenizers')} {version('gigatoken')} {probed}",
    )
    return GigatokenEncoder(without_added_tokens(content), reference, mask_of(ranges))


def without_added_tokens(content: dict[str, Any]) -> str:
    """The tokenizer.json with an empty list of added tokens."""
    return orjson.dumps(content | {"added_tokens": []}).decode()


def raw_without_added_tokens(raw: bytes) -> str:
    """The same of a file's bytes. What follows the list is not parsed where the model does, nearly all of the file: of
    128,000 pieces that takes 0.2 s of a worker's start."""
    head, _, model = raw.partition(b'"model":')  # the outer one, or what is before it is no object
    if raw.count(b'"added_tokens":') == 1:
        try:
            before = orjson.loads(head + b'"model":null}')
        except orjson.JSONDecodeError:
            before = {}
        if "added_tokens" in before:
            return orjson.dumps(before | {"added_tokens": []})[: -len("null}")].decode() + model.decode()
    return without_added_tokens(orjson.loads(raw))


def ranges_of(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(first, stop) of every run that is true. [0, 1, 1, 0, 1] -> ((1, 3), (4, 5))."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return tuple(zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True))


def mask_of(ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    """bool[NUM_CODE_POINTS]: true inside of the ranges."""
    mask = np.zeros(NUM_CODE_POINTS, np.bool_)
    for first, stop in ranges:
        mask[first:stop] = True
    return mask


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


def encodes_identically(content: dict[str, Any], reference: Encoder, other: Encoder) -> bool:
    """True if both agree on the adversarial strings, concatenations of tokens, and COMPARED_CODE_POINTS."""
    strings = comparison_texts(content)
    return first_difference(reference.encode_batch(strings), other, strings) is None


def comparison_texts(content: dict[str, Any]) -> list[str]:
    """The strings on which encoders of a byte-level BPE must agree."""
    pieces = [bytes_of_visible(piece) or b"" for piece in content["model"]["vocab"]]
    strings = adversarial_strings([piece.decode("utf-8", "ignore") for piece in pieces])
    return strings + [around_code_points(characters) for characters in compared_characters()]


def differing_code_points(
    content: dict[str, Any], encode_probe: Callable[[Sequence[str]], list[list[int]]]
) -> np.ndarray:
    """bool[NUM_CODE_POINTS]: the characters next to which tokenizers splits text and the other library does not, or the
    other way round. encode_probe: the other library's ids of texts under the probe vocabulary."""
    reference = HuggingFaceEncoder(HuggingFaceTokenizer.from_str(json.dumps(probe_content(content))))

    def different(texts: Sequence[str]) -> list[int]:
        pairs = zip(reference.encode_batch(texts), encode_probe(texts), strict=True)
        return [place for place, (ours, expected) in enumerate(pairs) if ours != expected]

    blocks = compared_characters()
    characters = [
        blocks[place][at]
        for place in different([around_code_points(block) for block in blocks])
        for at in range(len(blocks[place]))
    ]
    differing = np.zeros(NUM_CODE_POINTS, np.bool_)
    for place in different([around_code_points(character) for character in characters]):
        differing[ord(characters[place])] = True
    return differing


def compared_characters() -> list[str]:
    tried = "".join(chr(code) for block in COMPARED_CODE_POINTS for code in block)
    return [tried[start : start + CODE_POINTS_PER_STRING] for start in range(0, len(tried), CODE_POINTS_PER_STRING)]


def around_code_points(characters: str) -> str:
    """Every character between a space, letters, a digit, punctuation, an apostrophe and a line end."""
    return "".join(
        f" {character}a{character}A{character}1{character}..{character}'{character}'s{character}\n{character}"
        for character in characters
    )


def probe_content(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json with a vocabulary of bytes that joins every first or last byte of a character to every
    neighbour in `around_code_points`, so that the ids show on which side of a character the text is split."""
    near, outer = ([bytes([byte]) for byte in group] for group in (PROBED_NEIGHBOURS, range(0x80, 0x100)))
    pairs = [*itertools.product(near, outer), *itertools.product(outer, near)]
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in pairs]
    model: dict[str, Any] = {"vocab": {bytes_to_unicode(token): place for place, token in enumerate(tokens)}}
    model["merges"] = [[bytes_to_unicode(left), bytes_to_unicode(right)] for left, right in pairs]
    return content | {"added_tokens": [], "post_processor": None, "model": content["model"] | model}


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
    named = {piece: bytes_of_visible(piece) for piece in model["vocab"] if piece not in special}
    ranks = {token: model["vocab"][piece] for piece, token in named.items() if token is not None}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    products = [model["vocab"].get(left + right) for left, right in merges]
    if any(token is None for token in named.values()) or any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    if None in products or any(later <= earlier for earlier, later in itertools.pairwise(products)):
        return None
    return ranks if len(products) + 256 == len(ranks) else None


def bytes_of_visible(piece: str) -> bytes | None:
    """The bytes of a piece in GPT-2's byte-to-character mapping, None if it is not written that way."""
    try:
        return piece.translate(_TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def bytes_to_unicode(token: bytes) -> str:
    """Bytes in GPT-2's byte-to-character mapping: printable Latin-1 unchanged, the others from U+0100 on."""
    return "".join(BYTE_NAMES[byte] for byte in token)


def _byte_names() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


BYTE_NAMES = _byte_names()
BYTE_OF = {name: byte for byte, name in BYTE_NAMES.items()}
NO_BYTE = 0xFFFF
_TO_BYTES = {code: BYTE_OF.get(chr(code), NO_BYTE) for code in range(max(map(ord, BYTE_OF)) + 1)}

# In the order in which they are tried.
BULK_ENCODERS: dict[str, Callable[[dict[str, Any], Encoder], Encoder | None]] = {
    GigatokenEncoder.name: gigatoken_encoder,
    TiktokenEncoder.name: tiktoken_encoder,
}

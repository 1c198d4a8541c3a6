"""Encoders (text to ids): sentencepiece, kitoken if its ids are verified to be equal, Hugging Face's tokenizers.

byte_level.py adds tiktoken, which replaces Hugging Face's tokenizers if its ids are verified to be equal."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import kitoken
import numpy as np
import sentencepiece

from gristmill.foundation.runtime.kernels.cached_njit import cached_njit
from tokenizers import Tokenizer as HuggingFaceTokenizer

# Adversarial strings for comparing encoders: ordinary text does not show the differences.
#
# Measured: with another normalizer kitoken agrees with sentencepiece on 400 of 400 documents but only on 1,229 of 2,034
# such strings.

FIXED = (
    "", " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n\n", " \n ", "\t\tx", "a\tb", "a  b", "  a  ", "a ", " a",
    "\u00a0", "\u2003x", "\u3000", "\u200b", "a\u200db", "\ufeffx", "x\ufeff", "\u2028", "\x85", "\x0b\x0c",
    "\x00", "a\x00b", "\x7f", "\u0085", "\ufffd", "\uffff", "\U0010ffff", "\ue000", "\ue000a", "\ue000\ue001A",
    "▁", "▁▁", "a▁b", "▁ ▁", " ▁", "▅", "<unk>", "<s>", "</s>", "<pad>", "<0x0A>", "<0x00><0xFF>", "<0x0a>",
    "<|endofdocument|>", "a<|endofdocument|>b", "<|endoftext|>", "<|fim_prefix|>x<|fim_suffix|>", "<|im_start|>",
    "\\ud800", "\\udfff\\ud83d", "\\u0000", "&#55357;", "e\u0301", "\u0301", "\u0301\u0301\u0301", "é", "n\u0303o",
    "Z\u0351\u036b\u0343\u036aa\u0328lgo", "각", "\u1100\u1161\u11a8", "ﬁ", "Ⅷ", "①", "½", "℡",
    "ſ", "İ", "ı", "ß", "ẞ", "ǅ",
    "İSTANBUL Iğdır ıslak DIŞ", "I\u0307 i\u0307\u0307 İ\u0307", "ΟΔΥΣΣΕΥΣ Οδυσσεύς ΣΑΣ ς", "ΐΪ\u0301ᾼᾳΑΙ",
    "ǄǅǆǇǈǉǊǋǌǱǲǳ", "ĲĳŸÿŐő", "Å\u030aA\u030aÅ", "ᲐაᎠꭰ", "ԵՒևՈւ", "𐐀𐐨𞤀𞤢", "ⅧⅷⒶⓐ", "K\u212aΩ\u2126ß\u1e9e",
    "A\ue000a\ue001B\ue000\ue000A\ue001\ue001",
    "😀", "😀😀😀", "👩‍👩‍👧‍👦", "👍🏽", "🇫🇷🇩🇪", "☺\ufe0f",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "日本語", "漢字かな交じり文", "한국어", "ไทย", "עברית", "العربية", "हिन्दी", "a\u202eb",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𓀀", "ＡＢＣ　１２３",
    "0", "00", "1234567890", "3.14159", "1,000,000", "٠١٢٣", "१२३", "-1", "1e-9", "0x1F", "²³",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "abababababababab", "----------------", "================", "........",
    "\\\\\\\\",
    "    return x\n", "if x:\n\tpass\n", "{\n  \"a\": [1, 2]\n}", "http://a.b/c?d=e&f=%20", "it's", "can’t", "“x”—y…",
)  # fmt: skip

ALPHABET = (
    " \t\n\r\u00a0\u2009\u3000\u200b\u200dabzABZé\u0301\u0308ßİıſﬁΩж漢字かカ한ไअا٠1234567890"
    ".,:;!?'\"-_/\\(){}[]<>|@#$%^&*+=~`"
    "▁▅😀👍🏽\ufe0f\ufeff\x00\x01\x1f\x7f\x85\ufffd\ue000\U0010ffff"
)
NUM_RANDOM = 600
LONG_RUNS = (17, 100, 1000)


def adversarial_strings(pieces: Sequence[str] = (), seed: int = 0) -> list[str]:
    """A deterministic list: fixed strings, every byte, runs, random mixtures, and concatenations of pieces.

    pieces: the vocabulary, as text. Random concatenations of pieces and of parts of pieces are added: implementations
    of merging differ where merges overlap a boundary."""
    rng = random.Random(seed)  # of the standard library: its stream is the same in every version of Python 3
    strings = list(FIXED)
    strings += [chr(code) for code in range(256)] + [f"a{chr(code)}b" for code in range(256)]
    strings += [character * length for character in " a\n😀0▁" for length in LONG_RUNS]
    strings += ["".join(rng.choices(ALPHABET, k=rng.randint(1, 24))) for _ in range(NUM_RANDOM)]
    usable = [piece for piece in pieces if piece]
    if usable:
        strings += ["".join(rng.choices(usable, k=rng.randint(2, 6))) for _ in range(NUM_RANDOM)]
        strings += ["".join(_substring(rng, piece) for piece in rng.choices(usable, k=4)) for _ in range(NUM_RANDOM)]
    return strings


def _substring(rng: random.Random, piece: str) -> str:
    first, last = sorted(rng.randint(0, len(piece)) for _ in range(2))
    return piece[first:last] or piece


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
        return kitoken.Kitoken.from_sentencepiece(self._path.read_bytes())

    def encode(self, text: str) -> list[int]:
        return self._kitoken.encode(text, False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._kitoken.encode_all(list(texts), False)


class HuggingFaceEncoder(Encoder):
    name = "tokenizers"

    def __init__(self, tokenizer: HuggingFaceTokenizer | Path):
        """A path is read at the first text: 0.3 s at 128,000 pieces that most workers do not spend."""
        self._source = tokenizer

    @cached_property
    def _tokenizer(self) -> HuggingFaceTokenizer:
        source = self._source
        tokenizer = HuggingFaceTokenizer.from_buffer(source.read_bytes()) if isinstance(source, Path) else source
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

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
    raises. Raises OSError and MemoryError, which say nothing of the encoder."""
    try:
        other_ids = other.encode_batch(strings)
    except (OSError, MemoryError):
        raise
    except Exception:  # whatever the error, `other` cannot replace the reference
        return strings[0]
    pairs = zip(strings, expected, other_ids, strict=True)
    return next((text for text, ours, other_encoding in pairs if ours != other_encoding), None)


def fastest_verified_encoder(
    path: Path, processor: sentencepiece.SentencePieceProcessor, pieces: Sequence[str]
) -> Encoder:
    """kitoken if it gives sentencepiece's ids on all adversarial strings of this model, else sentencepiece."""
    strings = verification_strings(pieces)
    return fastest_matching_encoder(path, processor, strings, SentencePieceEncoder(processor).encode_batch(strings))


def fastest_matching_encoder(
    path: Path, processor: sentencepiece.SentencePieceProcessor, strings: Sequence[str], expected: Sequence[list[int]]
) -> Encoder:
    """kitoken if it reads the model and gives the expected ids of the strings, else sentencepiece."""
    fast = KitokenEncoder(path)
    return SentencePieceEncoder(processor) if first_difference(expected, fast, strings) is not None else fast


def verification_strings(pieces: Sequence[str]) -> list[str]:
    """The adversarial strings for a model: the general ones and concatenations of its pieces."""
    return adversarial_strings([piece.replace("▁", " ") for piece in pieces])


# BPE merges of short segments in a compiled kernel, by the pieces and scores of a SentencePiece model.
#
# SentencePiece (bpe_model.cc, SampleEncode without dropout) starts with the characters of a text and joins the adjacent
# pair whose concatenation is the piece of the highest score, the leftmost of equal ones, until no pair is a piece. What
# is no piece then is written as its bytes. Here a symbol is a piece's id, or for a character that is no piece but
# occurs in one a number from the vocabulary size on; every pair of symbols that forms a piece is in a hash table.

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # SentencePiece.Type; the others change which pairs may be joined
SPACE_SIGN = "▁"
MAX_CODE_POINT = 0x10FFFF
MAX_MERGED_BYTES = 384  # of a segment: the kernel looks at all its pairs for each merge
NO_PAIR = -1
NO_COST = np.float32(np.inf)
FILTER_BYTES = 1 << 16
FILTER_SHIFT = np.uint64(64 - 16)
U1, U7, U32 = np.uint64(1), np.uint64(7), np.uint64(32)


@dataclass(frozen=True, eq=False)
class MergeTable:
    """symbols: int32[0x110000], of every character, NO_PAIR for those that occur in no piece. keys int64[slots] (left
    symbol << 32 | right symbol) and joined int32[slots]: the pairs. bits: uint8[FILTER_BYTES], a bit is set for each
    pair, so that most that form nothing are seen without a look into the larger table. scores: float32[vocabulary].
    byte_ids: int32[256]: ids of the pieces <0x00> to <0xFF>."""

    symbols: np.ndarray
    bits: np.ndarray
    keys: np.ndarray
    joined: np.ndarray
    scores: np.ndarray
    byte_ids: np.ndarray

    def encode(
        self, keys: np.ndarray, starts: np.ndarray, lengths: np.ndarray, ids: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Writes the ids of every segment keys[start : start + length] (UTF-8) one after another into `ids`.

        Returns (ids of each segment: int64, -1 for one over MAX_MERGED_BYTES, which is left out; ids written).
        `ids` has room for as many ids as the segments have bytes."""
        counts = np.empty(len(starts), dtype=np.int64)
        tables = (self.symbols, self.bits, self.keys, self.joined, self.scores, self.byte_ids)
        return counts, _encode_segments(keys, starts, lengths, tables, ids, counts)


def merge_table(proto: Any) -> MergeTable | None:
    """The table of a BPE model (its ModelProto); None for a model that needs more than merges and bytes: one with
    user-defined or unused pieces, or without a piece for every byte and for the space sign."""
    types = {piece.type for piece in proto.pieces}
    texts = [piece.piece if piece.type == NORMAL else "" for piece in proto.pieces]
    places = {text: place for place, text in enumerate(texts) if text}
    byte_places = {piece.piece: place for place, piece in enumerate(proto.pieces) if piece.type == BYTE}
    byte_ids = [byte_places.get(f"<0x{byte:02X}>") for byte in range(256)]
    if not types <= {NORMAL, UNKNOWN, CONTROL, BYTE} or None in byte_ids or SPACE_SIGN not in places:
        return None
    symbols = _symbols(texts, places)
    table = np.full(MAX_CODE_POINT + 1, NO_PAIR, dtype=np.int32)
    for text, symbol in symbols.items():
        if len(text) == 1:
            table[ord(text)] = symbol
    table[ord(" ")] = table[ord(SPACE_SIGN)]
    pairs = [
        (symbols[text[:end]], symbols[text[end:]], place)
        for text, place in places.items()
        for end in range(1, len(text))
        if text[:end] in symbols and text[end:] in symbols
    ]
    bits, keys, joined = _hash_table(np.array(pairs, dtype=np.int64).reshape(-1, 3))
    scores = np.array([piece.score for piece in proto.pieces], dtype=np.float32)
    return MergeTable(table, bits, keys, joined, scores, np.array(byte_ids, dtype=np.int32))


def _symbols(texts: Sequence[str], places: dict[str, int]) -> dict[str, int]:
    """Every piece and every character of a piece, with its symbol."""
    others = sorted({character for text in texts for character in text} - places.keys())
    return places | {character: len(texts) + number for number, character in enumerate(others)}


def _hash_table(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bits, keys, joined) of pairs, int64[N, 3], columns left, right, joined. At most half of the slots are taken."""
    slots = 1 << max(4, int(2 * len(pairs)).bit_length())
    keys, joined = np.full(slots, NO_PAIR, dtype=np.int64), np.full(slots, NO_PAIR, dtype=np.int32)
    bits = np.zeros(FILTER_BYTES, dtype=np.uint8)
    _fill(pairs, bits, keys, joined)
    return bits, keys, joined


@cached_njit()
def _hashed(key):
    """As splitmix64 mixes."""
    word = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)


@cached_njit()
def _fill(pairs, bits, keys, joined):
    mask = np.uint64(len(keys) - 1)
    for row in range(len(pairs)):
        key = pairs[row, 0] << 32 | pairs[row, 1]
        value = _hashed(key)
        bits[value >> FILTER_SHIFT] |= np.uint8(U1 << (value >> U32 & U7))
        slot = value & mask
        while keys[slot] != NO_PAIR:
            slot = (slot + U1) & mask
        keys[slot] = key
        joined[slot] = pairs[row, 2]


# Inlined: numba counts the references of its arrays at every call, which takes longer than the search.
@cached_njit(forceinline=True)
def _join(left, right, bits, keys, joined):
    """The piece that two symbols form, NO_PAIR if they form none."""
    rank = np.int32(NO_PAIR)
    if left >= 0 and right >= 0:
        key = np.int64(left) << 32 | np.int64(right)
        value = _hashed(key)
        if bits[value >> FILTER_SHIFT] >> (value >> U32 & U7) & U1:
            mask = np.uint64(len(keys) - 1)
            slot = value & mask
            while keys[slot] != NO_PAIR and keys[slot] != key:
                slot = (slot + U1) & mask
            if keys[slot] == key:
                rank = joined[slot]
    return rank


@cached_njit(forceinline=True)
def _characters(raw, start, stop, symbol_of, symbols, places):
    """Writes the symbol and the first byte of every character of raw[start:stop], and `stop`; returns their number."""
    count = 0
    at = start
    while at < stop:
        byte = np.int64(raw[at])
        size, code = 1, byte
        if byte >= 0xF0:
            size, code = 4, byte & 7
        elif byte >= 0xE0:
            size, code = 3, byte & 15
        elif byte >= 0xC0:
            size, code = 2, byte & 31
        for further in range(1, size):
            code = code << 6 | np.int64(raw[at + further]) & 63
        symbols[count], places[count] = symbol_of[code], at
        count += 1
        at += size
    places[count] = stop
    return count


@cached_njit(forceinline=True)
def _merge(symbols, count, places, pairs, costs, tables):
    """Joins the best pair of the symbols until there is none; returns the number of symbols left. places: of their
    first bytes and of the end. pairs, costs: room for what each symbol and the next one form, and minus its score."""
    bits, keys, joined, scores = tables
    for at in range(count - 1):
        pairs[at] = _join(symbols[at], symbols[at + 1], bits, keys, joined)
        costs[at] = -scores[pairs[at]] if pairs[at] >= 0 else NO_COST
    while True:
        best, lowest = 0, NO_COST
        for at in range(count - 1):
            if costs[at] < lowest:
                best, lowest = at, costs[at]
        if lowest == NO_COST:
            break
        symbols[best] = pairs[best]
        count -= 1
        for at in range(best + 1, count):
            symbols[at], places[at] = symbols[at + 1], places[at + 1]
            pairs[at], costs[at] = pairs[at + 1], costs[at + 1]
        places[count] = places[count + 1]
        for at in range(max(best - 1, 0), min(best + 1, count - 1)):
            pairs[at] = _join(symbols[at], symbols[at + 1], bits, keys, joined)
            costs[at] = -scores[pairs[at]] if pairs[at] >= 0 else NO_COST
    return count


@cached_njit()
def _encode_segments(raw, starts, lengths, tables, ids, counts):
    symbol_of, bits, keys, joined, scores, byte_ids = tables
    symbols, pairs = np.empty(MAX_MERGED_BYTES + 1, np.int32), np.empty(MAX_MERGED_BYTES + 1, np.int32)
    places, costs = np.empty(MAX_MERGED_BYTES + 2, np.int64), np.empty(MAX_MERGED_BYTES + 1, np.float32)
    used = 0
    for segment in range(len(starts)):
        if lengths[segment] > MAX_MERGED_BYTES:
            counts[segment] = -1
            continue
        before = used
        start = starts[segment]
        count = _characters(raw, start, start + lengths[segment], symbol_of, symbols, places)
        count = _merge(symbols, count, places, pairs, costs, (bits, keys, joined, scores))
        for at in range(count):
            if 0 <= symbols[at] < len(scores):
                ids[used] = symbols[at]
                used += 1
                continue
            for place in range(places[at], places[at + 1]):
                ids[used] = byte_ids[raw[place]]
                used += 1
        counts[segment] = used - before
    return used

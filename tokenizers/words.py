"""tokenizer.json of any family that splits text before spaces: WordPiece, Unigram, BPE with Metaspace or a normalizer.

Its ids are those of " word" segments, which repeat by Zipf's law and are cached. A file qualifies by its parts, each of
which works inside a word or splits before a space; `fastest_by_words` then compares the ids."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from gigatoken.gigatoken_rs import load_hf_json

from gristmill.tokenizers.byte_level import around_code_points, compared_characters, probe_content
from gristmill.tokenizers.encoders import HuggingFaceEncoder, adversarial_strings, first_difference
from gristmill.tokenizers.segments import SegmentEncoder, adjacent_bytes
from tokenizers import Tokenizer as HuggingFaceTokenizer

SPACE, SPACE_SIGN = 0x20, "▁"
# Last bytes of characters that are white space, or that normalizers remove or turn into it. A text is not split
# after them, because white space is split by what follows the whole run.
BLANK_BYTES = (
    *range(0x21), 0x7F, *range(0x80, 0x90), 0x9F, 0xA0, 0xA8, 0xA9, 0xAF, 0xBF,
)  # fmt: skip
LOCAL_NORMALIZERS = (
    "BertNormalizer", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Precompiled",
)  # fmt: skip
SPLITTERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")  # always split at white space
INSIDE_WORDS = ("Punctuation", "Digits", "ByteLevel", "Metaspace")  # split further


class WordEncoder(SegmentEncoder):
    """Encodes unseen words by tokenizers and caches them.

    content: of a tokenizer.json for which `splits_before_spaces` is true."""

    def __init__(self, content: dict[str, Any]):
        bare, self._prefix = _without_prepended_space(content)
        inner = HuggingFaceEncoder(HuggingFaceTokenizer.from_str(json.dumps(bare)))
        super().__init__(inner, boundaries_before_spaces())

    def encode_utf8(
        self, buffer: np.ndarray, ends: np.ndarray, end_of_document: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._prefix:
            starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
            filled = starts < ends
            buffer = np.insert(buffer, starts[filled], SPACE)
            ends = ends + np.cumsum(filled)
        return super().encode_utf8(buffer, ends, end_of_document)


def boundaries_before_spaces() -> np.ndarray:
    """bool[65536], as `adjacent_bytes`: False (a boundary) before a space that follows no white space."""
    adjacent = np.ones((256, 256), dtype=np.bool_)
    adjacent[:, SPACE] = False
    adjacent[list(BLANK_BYTES), SPACE] = True
    adjacent[0xFF, :] = True
    return adjacent.reshape(-1)


def word_encoder(content: dict[str, Any]) -> WordEncoder | None:
    """Cached words for a tokenizer.json that is split before spaces, else None. Does not compare the ids."""
    return WordEncoder(content) if splits_before_spaces(content) else None


def fastest_by_words(content: dict[str, Any], reference: HuggingFaceEncoder) -> WordEncoder | None:
    """Cached words if they are possible and give the ids of the reference, with an empty and a filled cache."""
    encoder = word_encoder(content)
    if encoder is None:
        return None
    strings = comparison_strings(content)
    expected = reference.encode_batch(strings)
    return encoder if first_difference(expected * 2, encoder, strings * 2) is None else None


def comparison_strings(content: dict[str, Any]) -> list[str]:
    """Adversarial strings, added tokens between words, and every compared code point beside one and two spaces."""
    pieces = [piece.replace(SPACE_SIGN, " ") for piece in _vocabulary(content)]
    strings = adversarial_strings(pieces)
    strings += [f"a {token['content']} b{token['content']}  c" for token in content.get("added_tokens") or []]
    for block in compared_characters():
        strings.append(around_code_points(block))
        strings.append("".join(f"a{character}  b {character} c{character} {character}" for character in block))
    return strings


def splits_before_spaces(content: dict[str, Any]) -> bool:
    """True if no part of a tokenizer.json joins a space with the character before it."""
    model, matched = content["model"], _matched_tokens(content)
    content, is_prepended = _without_prepended_space(content)
    if model.get("dropout") or any(_takes_a_space(token) for token in matched) or (is_prepended and matched):
        return False  # a space is put before the text after an added token, too
    if not all(_is_local_normalizer(part) for part in _parts(content.get("normalizer"), "normalizers")):
        return False
    parts = _parts(content.get("pre_tokenizer"), "pretokenizers")
    local = [_is_local_split(content, part) for part in parts]
    if any(splits is None for splits in local):
        return False
    return any(local) or _merges_stay_in_words(model)


def _matched_tokens(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens that text is searched for; it is not searched for special ones."""
    return [token for token in content.get("added_tokens") or [] if not token["special"]]


def _takes_a_space(token: dict[str, Any]) -> bool:
    flags = token.get("lstrip"), token.get("rstrip"), token.get("single_word")
    return any(flags) or _has_space(token["content"])


def _has_space(text: str) -> bool:
    return SPACE_SIGN in text or any(character.isspace() for character in text)


def _parts(part: dict[str, Any] | None, field: str) -> list[dict[str, Any]]:
    """The steps of a Sequence, nested ones too; none of None."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[field] for step in _parts(inner, field)]


def _is_local_normalizer(part: dict[str, Any]) -> bool:
    if part["type"] != "Replace":
        return part["type"] in LOCAL_NORMALIZERS
    pattern = part["pattern"]
    if "String" in pattern:
        return pattern["String"] == " " or not _has_space(pattern["String"])
    return pattern.get("Regex") == " {2,}"


def _is_local_split(content: dict[str, Any], part: dict[str, Any]) -> bool | None:
    """True: splits before every space. False: splits inside of words. None: may do something else."""
    kind = part["type"]
    if kind in SPLITTERS:
        return True
    if kind == "Metaspace":
        return bool(part.get("split", True))
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind in INSIDE_WORDS:
        return False
    if kind != "Split":
        return None
    if part["pattern"].get("String") == " ":
        return False
    split = [part, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
    sequence = {"type": "Sequence", "pretokenizers": split}
    try:  # the patterns that gigatoken knows match words with the space before them
        load_hf_json(json.dumps(probe_content({"model": {"type": "BPE"}, "pre_tokenizer": sequence})))
    except RuntimeError:
        return None
    return True


def _merges_stay_in_words(model: dict[str, Any]) -> bool:
    """Whether no piece of a BPE on unsplit text holds a space after another character, so that nothing joins words."""
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    adjacent = adjacent_bytes(model["vocab"]).reshape(256, 256)
    return not any(adjacent[byte, SPACE] for byte in range(0x21, 0xC0))


def _without_prepended_space(content: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The tokenizer.json without a normalizer that puts ▁ before every text, which words in a text do not get; and
    whether it had one."""
    steps = _parts(content.get("normalizer"), "normalizers")
    bare = content | {"post_processor": None}
    if not steps or steps[0] != {"type": "Prepend", "prepend": SPACE_SIGN}:
        return bare, False
    return bare | {"normalizer": {"type": "Sequence", "normalizers": steps[1:]}}, True


def _vocabulary(content: dict[str, Any]) -> Sequence[str]:
    vocabulary = content["model"]["vocab"]
    return list(vocabulary) if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]

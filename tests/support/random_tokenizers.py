"""Random tokenizer.json files: models of every family, normalizers, splits, added tokens, truncation and decoders."""

import random
from typing import Any

WORDS = (
    "the", "mill", "turns", "all", "day", "and", "at", "night", "it", "stands", "é", "ß", "日本", "語", "한국", "0",
    "12", ",", ".", "!", "'", "▁", "A", "The", "MILL",
)  # fmt: skip
END = "<|end|>"
ADDED = ("<br>", "mill", "é", "Ｗ", "x y", "12", "<tool>", "ſ", "\n\n", "▁the", " ")
LETTERS = sorted(set("".join(WORDS)) | set("abcdefghijklmnopqrstuvwxyz"))


def random_tokenizer(rng: random.Random, byte_level: dict[str, Any]) -> dict[str, Any]:
    """byte_level: the content of a byte-level BPE, the vocabulary of a quarter of the files."""
    family = rng.choice((_wordpiece, _unigram, _metaspace_bpe, None))
    content = dict(byte_level) if family is None else family(rng)
    vocabulary = content["model"]["vocab"]
    if family is None and rng.random() < 0.5:
        content["normalizer"] = _normalizer(rng)
    names = [END, *rng.sample(ADDED, rng.randint(0, 4))]
    known = vocabulary if isinstance(vocabulary, dict) else {piece: at for at, (piece, _) in enumerate(vocabulary)}
    highest, added = len(known), []
    for name in names:
        if name not in known:
            known, highest = {**known, name: highest}, highest + 1
        added.append(_added(rng, known[name], name))
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    return content | {
        "version": "1.0",
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "truncation": rng.choice((None, truncation)),
        "padding": None,
        "post_processor": None,
        "decoder": _decoder(rng) if family is not None else {**content["decoder"]},
    }


def _added(rng: random.Random, token: int, name: str) -> dict[str, Any]:
    """tokenizers panics if two tokens take the same blanks, so these are rare; and it decodes a special token to its
    normalized text, so the end of a document has none."""
    flags = {flag: rng.random() < 0.03 for flag in ("single_word", "lstrip", "rstrip")}
    normalized = name != END and rng.random() < 0.5
    return {"id": token, "content": name, **flags, "normalized": normalized, "special": name == END}


def _normalizer(rng: random.Random) -> dict[str, Any] | None:
    kinds = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
    steps: list[dict[str, Any]] = [{"type": kind} for kind in rng.sample(kinds, rng.randint(0, 2))]
    if rng.random() < 0.2:
        steps.append({"type": "Strip", "strip_left": rng.random() < 0.5, "strip_right": rng.random() < 0.5})
    if rng.random() < 0.2:
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if rng.random() < 0.1:
        steps.append({"type": "Replace", "pattern": {"String": rng.choice(("l", "a t", "``"))}, "content": "'"})
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _metaspace(rng: random.Random, split: bool) -> dict[str, Any]:
    scheme = rng.choice(("always", "first", "never"))
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def _pieces(rng: random.Random, first: str, rest: str) -> list[str]:
    whole = [first + word for word in WORDS] + [rest + word for word in WORDS]
    halves = [first + word[: len(word) // 2] for word in WORDS if len(word) > 2]
    letters = [part + letter for letter in LETTERS for part in {first, rest}]
    return list(dict.fromkeys([*rng.sample(whole + halves, 40), *letters]))


def _wordpiece(rng: random.Random) -> dict[str, Any]:
    vocabulary = {piece: at for at, piece in enumerate(["[UNK]", *_pieces(rng, "", "##")])}
    bert = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": rng.random() < 0.5}
    bert |= {"strip_accents": rng.choice((None, True)), "lowercase": rng.random() < 0.5}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocabulary}
    return {
        "normalizer": rng.choice((bert, _normalizer(rng))),
        "pre_tokenizer": {"type": rng.choice(("BertPreTokenizer", "Whitespace", "WhitespaceSplit"))},
        "model": model | {"max_input_chars_per_word": rng.choice((8, 100))},
    }


def _unigram(rng: random.Random) -> dict[str, Any]:
    pieces = ["<unk>", "▁", *_pieces(rng, "▁", "")]
    vocabulary = [[piece, -rng.randint(64, 640) / 64] for piece in dict.fromkeys(pieces)]
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
    return {"normalizer": _normalizer(rng), "pre_tokenizer": _metaspace(rng, rng.random() < 0.8), "model": model}


def _metaspace_bpe(rng: random.Random) -> dict[str, Any]:
    """Merges of random pairs; sometimes the pieces of unsplit text hold a space after a letter."""
    symbols = ["▁", *LETTERS]
    vocabulary, merges = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *symbols], []
    for _ in range(60):
        left, right = rng.choice(symbols), rng.choice(symbols)
        is_split = right.startswith("▁") and left != "▁" * len(left)
        if left + right in vocabulary or len(left + right) > 8 or (is_split and rng.random() < 0.98):
            continue
        merges.append([left, right])
        symbols.append(left + right)
        vocabulary.append(left + right)
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": rng.random() < 0.7, "merges": merges}
    model |= {"vocab": {piece: at for at, piece in enumerate(vocabulary)}, "ignore_merges": False}
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced]}
    if rng.random() < 0.4:
        return {"normalizer": llama, "pre_tokenizer": None, "model": model}
    return {"normalizer": _normalizer(rng), "pre_tokenizer": _metaspace(rng, rng.random() < 0.5), "model": model}


def _decoder(rng: random.Random) -> dict[str, Any] | None:
    replaced = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": rng.randint(0, 2), "stop": 0}
    llama = {"type": "Sequence", "decoders": [replaced, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]}
    plain = {"type": "Sequence", "decoders": [replaced, {"type": "Fuse"}]}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return rng.choice((None, llama, llama, plain, metaspace, {"type": "WordPiece", "prefix": "##", "cleanup": True}))


def random_text(rng: random.Random, pieces: list[str]) -> str:
    """Words, pieces, blanks of several kinds and characters that normalizers change."""
    strange = (
        "\u0301",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u200d",
        "ﬁ",
        "¨",
        "Å",
        "각",
        "ſ",
        "\x00",
        "\r\n",
        "😀",
        "İ",
        "ς",
    )
    choices = (WORDS, ADDED, (" ", " ", "  ", "\n", "\t", "   "), strange, pieces, (" ",))
    return "".join(rng.choice(rng.choice(choices)) for _ in range(rng.randint(0, 16)))

"""Decoding by a table of bytes: the text of a token is its bytes, wherever it stands.

That holds for byte-level BPE and for SentencePiece models that put no space in front. Ids whose bytes are no UTF-8
together, and unknown ids, are decoded by the reference: libraries differ in their replacement characters."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

from gristmill.tokenizers.byte_level import bytes_of_visible
from gristmill.tokenizers.config import SPACE

BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")
NORMAL, USER_DEFINED, BYTE = 1, 4, 6  # SentencePiece.Type


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token; None if its text depends on its neighbours."""
        return None


class ModelDecoder(Decoder):
    """A SentencePiece model's own decoding."""

    def __init__(self, processor: Any):
        self._processor = processor

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([int(token) for token in ids])
        return text


class ByteTableDecoder(Decoder):
    """table: bytes by id. stripped_spaces: at most so many are removed in
    front of a text."""

    def __init__(self, table: dict[int, bytes], reference: Decoder, stripped_spaces: int = 0):
        self._table, self._reference, self._stripped_spaces = table, reference, stripped_spaces

    def bytes_of(self, token: int) -> bytes | None:
        return None if self._stripped_spaces else self._table.get(token)

    def decode(self, ids: Sequence[int]) -> str:
        try:
            text = b"".join(map(self._table.__getitem__, ids)).decode()
        except (KeyError, UnicodeDecodeError):
            return self._reference.decode(ids)
        for _ in range(self._stripped_spaces):
            text = text.removeprefix(SPACE)
        return text


def json_decoder(content: dict[str, Any], pieces: Sequence[str], skipped: set[int], reference: Decoder) -> Decoder:
    """The table of a tokenizer.json whose decoder works token by token, else the reference. skipped: ids without
    text."""
    steps = _steps(content.get("decoder"))
    stripped = 0
    if steps and steps[-1]["type"] == "Strip" and any(step["type"] == "Fuse" for step in steps[:-1]):
        if steps[-1]["content"] != SPACE or steps[-1]["stop"]:
            return reference
        stripped = steps.pop()["start"]
    if steps and steps[-1]["type"] == "Fuse":
        steps.pop()
    kinds = [step["type"] for step in steps]
    is_byte_level, byte_fallback = kinds == ["ByteLevel"], kinds[-1:] == ["ByteFallback"]
    added = (content.get("added_tokens") or []) if content.get("normalizer") else []
    normalized = {token["id"] for token in added if token["normalized"]}  # decoded to their normalized text
    replacements = [] if is_byte_level else steps[: len(steps) - byte_fallback]
    if not steps or any(step["type"] != "Replace" or "String" not in step["pattern"] for step in replacements):
        return reference
    table = {}
    for token, piece in enumerate(pieces):
        if token in normalized:
            continue
        if is_byte_level:
            known = bytes_of_visible(piece)
            table[token] = piece.encode() if known is None else known
        else:
            for step in replacements:
                piece = piece.replace(step["pattern"]["String"], step["content"])
            byte = BYTE_PIECE.fullmatch(piece) if byte_fallback else None
            table[token] = bytes.fromhex(byte[1]) if byte else piece.encode()
    return ByteTableDecoder(table | dict.fromkeys(skipped, b""), reference, stripped)


def model_decoder(proto: Any, reference: Decoder) -> Decoder:
    """The table of a SentencePiece model (its ModelProto) without a space in front and case marks, else the
    reference. Control symbols are not in it: the bytes around one are no character."""
    spec = proto.normalizer_spec
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces or proto.denormalizer_spec.precompiled_charsmap:
        return reference
    table = {}
    for token, piece in enumerate(proto.pieces):
        if piece.type in (NORMAL, USER_DEFINED):
            table[token] = piece.piece.replace("▁", SPACE).encode()
        elif piece.type == BYTE:
            table[token] = bytes.fromhex(piece.piece[3:5])
    return ByteTableDecoder(table, reference)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]

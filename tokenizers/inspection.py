"""Inspection of a tokenizer folder: what it is, and which encoders give its ids, the fastest first."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.tokenizers.byte_level import BULK_ENCODERS, comparison_texts
from gristmill.tokenizers.encoders import (
    Encoder,
    HuggingFaceEncoder,
    KitokenEncoder,
    SentencePieceEncoder,
    fastest_on,
    first_difference,
    strings_for,
)
from gristmill.tokenizers.segments import SEGMENTS, SegmentEncoder, adjacent_bytes, is_local, merge_table
from gristmill.tokenizers.tokenizer import JSON_NAME, MODEL_NAME, load_tokenizer
from gristmill.tokenizers.words import comparison_strings, word_encoder
from tokenizers import Tokenizer as HuggingFaceTokenizer

SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class EncoderCheck:
    """One encoder of a tokenizer. outcome: a sentence. is_equal: it gives the ids of the reference on all strings."""

    encoder: str
    outcome: str
    is_equal: bool


NamedCheck = tuple[str, Callable[[], EncoderCheck]]


@dataclass(frozen=True)
class TokenizerInspection:
    """file: the one that defines the ids. family: of the model. checks: the fastest first, the reference last.

    encoder: the one that encodes a corpus, the first that is equal."""

    file: Path
    family: str
    vocab_size: int
    end_of_document: str
    fingerprint: str
    encoder: str
    checks: tuple[EncoderCheck, ...]


def inspect_tokenizer(folder: Path) -> TokenizerInspection:
    """Compares the encoders until one is equal. Raises InputError for a folder without a tokenizer and for a damaged
    file."""
    tokenizer = load_tokenizer(folder)
    if (folder / MODEL_NAME).is_file():
        file = folder / MODEL_NAME
        family, encoders = _model_checks(file, tokenizer.pieces)
    else:
        file = folder / JSON_NAME
        content = json.loads(file.read_bytes())
        family, encoders = _json_family(content), _json_checks(file, content)
    checks: list[EncoderCheck] = []
    for name, check in encoders:
        is_chosen = any(earlier.is_equal for earlier in checks)
        checks.append(EncoderCheck(name, "slower, not compared", False) if is_chosen else check())
    return TokenizerInspection(
        file=file,
        family=family,
        vocab_size=tokenizer.vocab_size,
        end_of_document=f"{tokenizer.pieces[tokenizer.end_of_document]} ({tokenizer.end_of_document})",
        fingerprint=tokenizer.fingerprint,
        encoder=next(check.encoder for check in checks if check.is_equal),
        checks=tuple(checks),
    )


def _model_checks(path: Path, pieces: Sequence[str]) -> tuple[str, Iterator[NamedCheck]]:
    """(family, checks) of a SentencePiece model."""
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())  # type: ignore[attr-defined]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    reference = SentencePieceEncoder(processor)
    strings = strings_for(pieces)
    expected = reference.encode_batch(strings)

    def checks() -> Iterator[NamedCheck]:
        inner = fastest_on(path, processor, strings, expected)
        for merges in dict.fromkeys((merge_table(proto), None)) if is_local(proto) else ():
            segments = SegmentEncoder(inner, adjacent_bytes(pieces), merges)
            yield segments.name, partial(_check, segments, strings * 2, expected * 2)
        yield KitokenEncoder.name, partial(_check, KitokenEncoder(path), strings, expected)
        yield reference.name, lambda: EncoderCheck(reference.name, "the reference", True)

    kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type)
    return f"SentencePiece {kind}", checks()


def _json_family(content: dict[str, Any]) -> str:
    """Type of the model and of what splits the text."""
    splitter = content.get("pre_tokenizer") or {}
    kinds = [part["type"] for part in splitter.get("pretokenizers", [splitter]) if part]
    return " ".join([content["model"]["type"], *([f"({', '.join(kinds)})"] if kinds else [])])


def _json_checks(path: Path, content: dict[str, Any]) -> Iterator[NamedCheck]:
    """Checks in the order in which a corpus' encoder is chosen."""
    reference = HuggingFaceEncoder(HuggingFaceTokenizer.from_file(str(path)))

    def compare(name: str, encoder: Encoder | None, strings_of: Callable[[dict[str, Any]], list[str]]) -> EncoderCheck:
        if encoder is None:
            return EncoderCheck(name, "cannot encode this family", False)
        strings = strings_of(content)
        return _check(encoder, strings * 2, reference.encode_batch(strings) * 2)

    for name, make in BULK_ENCODERS.items():
        yield name, partial(lambda name, make: compare(name, make(content, reference), comparison_texts), name, make)
    words = f"{SEGMENTS} of {reference.name}"
    yield words, lambda: compare(words, word_encoder(content), comparison_strings)
    yield reference.name, lambda: EncoderCheck(reference.name, "the reference", True)


def _check(encoder: Encoder, strings: Sequence[str], expected: Sequence[list[int]]) -> EncoderCheck:
    different = first_difference(expected, encoder, strings)
    if different is None:
        return EncoderCheck(encoder.name, f"equal ids on {len(set(strings)):,} strings", True)
    beginning = different if len(different) <= SHOWN_CHARACTERS else f"{different[:SHOWN_CHARACTERS]}..."
    return EncoderCheck(encoder.name, f"other ids of {beginning!r}", False)

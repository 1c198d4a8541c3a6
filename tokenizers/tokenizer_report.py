"""Tokenizer metrics on a set of texts, per language or source: compression, fertility, parity, round trips; and what a
tokenizer costs the languages of its corpus.

The inspection of a tokenizer folder says what it is and which encoders give its ids."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.data_pipeline.corpus.splits import SPLITS, document_ranges, read
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.data_pipeline.indexed.language_shares import language_tag
from gristmill.data_pipeline.signals.bits import TextBuffer
from gristmill.data_pipeline.signals.language import text_scripts
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.tokenizers.byte_level import BULK_ENCODERS, BYTE_NAMES, comparison_texts
from gristmill.tokenizers.config import TokenizerRequirements
from gristmill.tokenizers.encoders import (
    Encoder,
    HuggingFaceEncoder,
    KitokenEncoder,
    SentencePieceEncoder,
    fastest_matching_encoder,
    first_difference,
    merge_table,
    verification_strings,
)
from gristmill.tokenizers.segments import SEGMENTS, SegmentEncoder, adjacent_bytes, is_local
from gristmill.tokenizers.tokenizer import JSON_NAME, MODEL_NAME, Tokenizer, load_tokenizer
from gristmill.tokenizers.words import comparison_strings, word_encoder
from tokenizers import Tokenizer as HuggingFaceTokenizer

# Texts per encode_batch call.
BATCH = 256
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class ReportText:
    """group: language or source. key: texts of several groups with the same key are translations of each other."""

    group: str
    text: str
    key: str = ""


class ModelBitsPerByte(Config):
    """Bits per byte of small models trained on a tokenizer's tokens: a number for each seed, over all held-out text and
    by group."""

    total: tuple[float, ...]
    groups: dict[str, tuple[float, ...]]


class GroupReport(Config):
    """fertility: tokens per whitespace-separated word (not meaningful for Chinese, Japanese or Thai: use
    bytes_per_token and parity). parity: tokens of the group's texts divided by those of the reference group's texts
    with the same keys, the premium of Petrov et al. 2023 (arXiv:2305.15425); None if they share no key.
    byte_fallback: share of the tokens that are a single byte of a character without a piece. pieces: different ones in
    the texts."""

    group: str
    documents: int
    bytes: int
    tokens: int
    bytes_per_token: float
    fertility: float
    parity: float | None
    byte_fallback: float
    pieces: int


class TokenizerReport(Config):
    """unused: vocabulary pieces (without bytes and control symbols) that no text used. round_trip_failures: texts that
    decode to another text. bits_per_byte: of small models, if they were trained."""

    name: str
    vocab_size: int
    encoder: str
    total: GroupReport
    groups: tuple[GroupReport, ...]
    unused: int
    round_trip_failures: int
    first_failure: str | None
    bits_per_byte: ModelBitsPerByte | None = None


def tokenizer_report(
    name: str,
    tokenizer: Tokenizer,
    texts: Sequence[ReportText],
    reference: str,
    bits_per_byte: ModelBitsPerByte | None = None,
) -> TokenizerReport:
    """Encodes and decodes every text. reference: the group that parity is relative to, such as "en"."""
    counted = _count(tokenizer, texts)
    members: dict[str, list[int]] = defaultdict(list)
    for number, text in enumerate(texts):
        members[text.group].append(number)
    by_key = _tokens_by_key(texts, counted.tokens, reference)
    text_pieces = [number for number, piece in enumerate(tokenizer.pieces) if piece and not _is_byte_or_control(piece)]
    return TokenizerReport(
        name=name,
        vocab_size=tokenizer.vocab_size,
        encoder=tokenizer.encoder,
        total=_group("all", range(len(texts)), texts, counted, {}),
        groups=tuple(_group(group, numbers, texts, counted, by_key) for group, numbers in sorted(members.items())),
        unused=len(text_pieces) - len(frozenset[int]().union(*counted.used).intersection(text_pieces)),
        round_trip_failures=len(counted.failures),
        first_failure=counted.failures[0][:80] if counted.failures else None,
        bits_per_byte=bits_per_byte,
    )


@dataclass(frozen=True, eq=False)
class TokenStats:
    """Counts of each text: its tokens and those that are bytes, int64; the different ids. failures: texts that decode
    to another text."""

    tokens: np.ndarray
    bytes: np.ndarray
    used: list[frozenset[int]]
    failures: list[str]


def _count(tokenizer: Tokenizer, texts: Sequence[ReportText]) -> TokenStats:
    counted = TokenStats(np.zeros(len(texts), np.int64), np.zeros(len(texts), np.int64), [], [])
    is_byte = np.zeros(tokenizer.vocab_size, dtype=bool)
    is_byte[byte_ids(tokenizer.pieces)] = True
    for start in range(0, len(texts), BATCH):
        batch = [report_text.text for report_text in texts[start : start + BATCH]]
        for offset, ids in enumerate(tokenizer.encode_batch(batch)):
            counted.tokens[start + offset] = len(ids)
            counted.bytes[start + offset] = is_byte[ids].sum()
            counted.used.append(frozenset(ids))
            if tokenizer.decode(ids) != batch[offset]:
                counted.failures.append(batch[offset])
    return counted


def byte_ids(pieces: Sequence[str]) -> list[int]:
    """Ids of pieces that are one byte of a character: "<0x0A>" of SentencePiece, else those above ASCII of GPT-2's
    alphabet, in which every vocabulary of merged bytes is written."""
    named = [number for number, piece in enumerate(pieces) if BYTE_PIECE.fullmatch(piece)]
    if named:
        return named
    above = {name for byte, name in BYTE_NAMES.items() if byte >= 0x80}
    return [number for number, piece in enumerate(pieces) if piece in above]


def _group(
    group: str, numbers: Sequence[int], texts: Sequence[ReportText], counted: TokenStats, by_key: dict[str, int]
) -> GroupReport:
    size = sum(len(texts[number].text.encode()) for number in numbers)
    words = sum(len(texts[number].text.split()) for number in numbers)
    tokens = int(counted.tokens[list(numbers)].sum())
    shared = [number for number in numbers if texts[number].key in by_key]
    in_reference = sum(by_key[texts[number].key] for number in shared)
    return GroupReport(
        group=group,
        documents=len(numbers),
        bytes=size,
        tokens=tokens,
        bytes_per_token=size / max(1, tokens),
        fertility=tokens / max(1, words),
        parity=int(counted.tokens[shared].sum()) / in_reference if in_reference else None,
        byte_fallback=int(counted.bytes[list(numbers)].sum()) / max(1, tokens),
        pieces=len(frozenset[int]().union(*(counted.used[number] for number in numbers))),
    )


def _tokens_by_key(texts: Sequence[ReportText], counts: np.ndarray, reference: str) -> dict[str, int]:
    return {text.key: int(counts[n]) for n, text in enumerate(texts) if text.group == reference and text.key}


def _is_byte_or_control(piece: str) -> bool:
    """Bytes and control symbols: "<0x0A>", "<unk>", "<|endofdocument|>"."""
    return piece.startswith("<") and piece.endswith(">") and len(piece) > 2


# How fair a tokenizer is to the languages of its corpus: metrics by language, vocabulary budget, requirements.
#
# Written by the stage `tokenizer` to languages.json, where the recipe groups its text by language or has requirements.

LANGUAGES_NAME = "languages.json"
LANGUAGE_BYTES = 200_000  # measured of each language
SOURCE_BYTES = 64_000_000  # read of each source and split, to find them
BYTES, NO_LETTERS = "single bytes", "digits, punctuation, symbols"


def write_languages(folder: Path, corpus: Path, sources: Sequence[str], tokenizer: Tokenizer, reference: str) -> Any:
    """Writes languages.json; returns the report."""
    texts = language_texts(corpus, sources)
    report = tokenizer_report("trained", tokenizer, texts, reference)
    content = {
        "reference": reference,
        "languages": [group.model_dump(mode="json") for group in report.groups],
        "vocabulary": vocabulary_budget(tokenizer),
    }
    write_atomic(folder / LANGUAGES_NAME, canonical_json(content) + b"\n")
    return report


def language_texts(corpus: Path, sources: Sequence[str]) -> list[ReportText]:
    """About LANGUAGE_BYTES of each language, of all splits. Documents are taken in the order of a hash of their key
    (the last two parts of `path` in the metadata), so that translations of each other are taken together."""
    texts: list[tuple[int, ReportText]] = []
    for source in sources:
        for split in SPLITS:
            ranges, read_bytes = document_ranges(corpus, split, source), 0
            for place in Permutation(len(ranges), key_of("languages", source)).whole() if ranges else ():
                if read_bytes >= SOURCE_BYTES:
                    break
                read_bytes += ranges[place].bytes
                for row in read(ranges[place], "text", "language", "metadata").to_pylist():
                    key = translation_key(row["metadata"])
                    text = ReportText(language_tag(row["language"]), row["text"], key)
                    texts.append((key_of("languages", key or row["text"]), text))
    taken: list[ReportText] = []
    sizes: Counter[str] = Counter()
    for _, text in sorted(texts, key=lambda pair: (pair[0], pair[1].group, pair[1].text)):
        if sizes[text.group] < LANGUAGE_BYTES and text.text:
            sizes[text.group] += len(text.text.encode())
            taken.append(text)
    return taken


def translation_key(metadata: str | None) -> str:
    """The last two parts of `path` in a document's metadata: '{"path": "pages.de/linux/cat.md"}' -> "linux/cat.md"."""
    fields = json.loads(metadata) if metadata else {}
    path = fields.get("path") if isinstance(fields, dict) else None
    return "/".join(path.split("/")[-2:]) if isinstance(path, str) else ""


def vocabulary_budget(tokenizer: Tokenizer) -> dict[str, int]:
    """Number of pieces by the script of their letters, from the most."""
    of_bytes = set(byte_ids(tokenizer.pieces))
    others = [number for number in range(tokenizer.vocab_size) if number not in of_bytes]
    scripts = text_scripts(TextBuffer.of([tokenizer.decode([number]) for number in others]))
    counted = Counter(NO_LETTERS if script == "Zyyy" else script for script in scripts)
    if of_bytes:
        counted[BYTES] = len(of_bytes)
    return dict(sorted(counted.items(), key=lambda pair: (-pair[1], pair[0])))


def check_requirements(report: TokenizerReport, requirements: TokenizerRequirements) -> None:
    """Raises InputError naming every language that misses a required, and every language of a required without text."""
    missed = [line for group in report.groups for line in missed_requirements(group, requirements)]
    absent = sorted(requirements.languages() - {group.group for group in report.groups})
    missed += [f"{language}: no text to measure it on" for language in absent]
    if missed:
        raise InputError(
            f"the tokenizer misses {len(missed)} of tokenizer.requirements: {'; '.join(missed)}; raise "
            "tokenizer.vocab_size, tokenizer.temperature or tokenizer.character_coverage, or change the requirements"
        )


def missed_requirements(group: GroupReport, requirements: TokenizerRequirements) -> list[str]:
    """["ja: byte_fallback 0.1200, at most 0.0500"]."""
    missed = []
    for name in ("parity", "fertility", "byte_fallback"):
        required, value = requirements.limit(f"max_{name}", group.group), getattr(group, name)
        if required is not None and value is not None and value > required:
            missed.append(f"{group.group}: {name} {value:.4f}, at most {required:.4f}")
    required = requirements.limit("min_bytes_per_token", group.group)
    if required is not None and group.bytes_per_token < required:
        missed.append(f"{group.group}: bytes_per_token {group.bytes_per_token:.4f}, at least {required:.4f}")
    return missed


# Inspection of a tokenizer folder: what it is, and which encoders give its ids, the fastest first.

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
    processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
    reference = SentencePieceEncoder(processor)
    strings = verification_strings(pieces)
    expected = reference.encode_batch(strings)

    def checks() -> Iterator[NamedCheck]:
        inner = fastest_matching_encoder(path, processor, strings, expected)
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
    reference = HuggingFaceEncoder(HuggingFaceTokenizer.from_buffer(path.read_bytes()))

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

"""Exports a SentencePiece model to tokenizer.json (Hugging Face) with equal ids, which `differences` verifies.

Control symbols are not added tokens: Hugging Face would match them in text, SentencePiece does not."""

import base64
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.tokenizers.config import OPERATORS, SPACE
from gristmill.tokenizers.encoders import HuggingFaceEncoder, SentencePieceEncoder
from gristmill.tokenizers.tokenizer import JSON_NAME, MODEL_NAME, SETTINGS_NAME
from tokenizers import Tokenizer as HuggingFaceTokenizer

# The named reversible transforms of a trained tokenizer, read from its .model, which stores them.
#
# They are not a step of their own: case marks are sentencepiece's normalization table, single operators and spaces are
# pieces that nothing is merged with, single digits a rule of training. So every reader of the model applies them.

USER_DEFINED = 4  # SentencePiece.Type


def transforms_of(proto: Any) -> list[str]:
    """Names as in the recipe: case_marks, split_digits, split_operators, split_spaces. proto: a ModelProto."""
    symbols = {piece.piece for piece in proto.pieces if piece.type == USER_DEFINED}
    transforms = {
        "case_marks": has_case_marks(proto),
        "split_digits": proto.trainer_spec.split_digits,
        "split_operators": symbols.issuperset(OPERATORS),
        "split_spaces": SPACE.replace(" ", "▁") in symbols,
    }
    return [name for name, present in transforms.items() if present]


def has_case_marks(proto: Any) -> bool:
    if not proto.normalizer_spec.precompiled_charsmap:
        return False
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return bool(processor.normalize("A") == MARK + "a")


# Encodes capital letters as a mark plus the lower-case letter: "Hello" and "hello" then share pieces.
#
# One of the strategies of mGPT (Shliazhko et al. 2022, arXiv:2204.07580). The rules are sentencepiece's normalization
# tables, stored in the .model, so every reader of the model applies them. Text that contains the mark itself
# round-trips: the mark is written as mark + escape.

MARK = "\ue000"  # private use area: has no meaning in interchanged text
ESCAPE = "\ue001"


def capital_letters() -> list[tuple[str, str]]:
    """All pairs (upper, lower) of single characters that map to each other: ("A", "a"), not ("İ", ...)."""
    pairs = ((chr(code), chr(code).lower()) for code in range(sys.maxunicode + 1))
    return [
        (capital, small)
        for capital, small in pairs
        if capital != small and len(small) == 1 and small.upper() == capital and capital.lower() == small
    ]


def capital_letter_rules() -> list[tuple[str, str]]:
    """All replacement rules, in an order in which they can be applied sequentially: the mark itself first."""
    return [(MARK, MARK + ESCAPE)] + [(capital, MARK + small) for capital, small in capital_letters()]


def write_rules(
    folder: Path, rules: list[tuple[str, str]], forward_only: list[tuple[str, str]] | None = None
) -> dict[str, str]:
    """Writes the tables of replacement rules to `folder`; returns the sentencepiece trainer settings that name them.

    forward_only: rules that are not reversed."""
    backward = [(target, source) for source, target in rules]
    paths = {"normalization_rule_tsv": rules + (forward_only or [])}
    if backward:
        paths["denormalization_rule_tsv"] = backward
    for name, table in paths.items():
        (folder / name).write_text("".join(f"{_hex(source)}\t{_hex(target)}\n" for source, target in table))
    return {name: str(folder / name) for name in paths}


def _hex(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)


UNIGRAM, BPE, CHARACTERS = 1, 2, 4  # TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # SentencePiece.Type

# Byte pieces and control symbols are in the vocabulary by name ("<0x0A>"), and Hugging Face's unigram would match the
# name in text. This score is never on a best path: it is worse than a thousand of the worst single characters.
UNREACHABLE_SCORE = -10_000.0


def write_huggingface(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json next to the folder's tokenizer.model.

    The normalization table of case marks is written rule by rule: Hugging Face reads a compiled table by graphemes,
    sentencepiece by longest match, and they differ at combining marks."""
    proto = sentencepiece_model_pb2.ModelProto.FromString((folder / MODEL_NAME).read_bytes())
    write_atomic(folder / JSON_NAME, canonical_json(tokenizer_json(proto)) + b"\n")
    end = proto.pieces[proto.trainer_spec.eos_id].piece
    write_atomic(folder / SETTINGS_NAME, canonical_json(settings_json(end, transforms_of(proto))) + b"\n")


def settings_json(end_of_document: str, transforms: Sequence[str] = ()) -> dict[str, Any]:
    """tokenizer_config.json. split_special_tokens: transformers encodes "<|endofdocument|>" as plain text, too.
    transforms: names for the reader; tokenizer.json holds their rules."""
    named = {"transforms": list(transforms)} if transforms else {}
    return named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end_of_document,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def differences(folder: Path, strings: Sequence[str]) -> list[str]:
    """The strings for which tokenizer.json and tokenizer.model give different ids."""
    reference = SentencePieceEncoder(
        sentencepiece.SentencePieceProcessor(model_proto=(folder / MODEL_NAME).read_bytes())
    )
    exported = HuggingFaceEncoder(HuggingFaceTokenizer.from_buffer((folder / JSON_NAME).read_bytes()))
    pairs = zip(strings, reference.encode_batch(strings), exported.encode_batch(strings), strict=True)
    return [text for text, ours, exported_ids in pairs if ours != exported_ids]


def tokenizer_json(proto: Any) -> dict[str, Any]:
    case_marks = has_case_marks(proto)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(proto),
        "normalizer": _normalizer(proto.normalizer_spec, case_marks),
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": _decoder(proto, case_marks),
        "model": _unigram(proto) if proto.trainer_spec.model_type == UNIGRAM else _bpe(proto),
    }


def _added_tokens(proto: Any) -> list[dict[str, Any]]:
    """The user symbols, which both libraries split off first."""
    return [
        {
            "id": number,
            "content": piece.piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": "▁" in piece.piece,  # matched after spaces become ▁, as in SentencePiece
            "special": False,
        }
        for number, piece in enumerate(proto.pieces)
        if piece.type == USER_DEFINED
    ]


def _normalizer(spec: Any, case_marks: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if case_marks:
        steps += [_replace(source, target) for source, target in capital_letter_rules()]
    elif spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁"})
    steps.append(_replace(" ", "▁"))
    return {"type": "Sequence", "normalizers": steps}


def _replace(source: str, target: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": source}, "content": target}


def _decoder(proto: Any, case_marks: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [_replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if case_marks:
        steps += [_replace(target, source) for source, target in reversed(capital_letter_rules())]
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _unigram(proto: Any) -> dict[str, Any]:
    vocabulary = [[piece.piece, piece.score if piece.type == NORMAL else UNREACHABLE_SCORE] for piece in proto.pieces]
    byte_fallback = proto.trainer_spec.byte_fallback
    return {"type": "Unigram", "unk_id": proto.trainer_spec.unk_id, "vocab": vocabulary, "byte_fallback": byte_fallback}


def _bpe(proto: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": proto.trainer_spec.unk_piece,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": proto.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.piece: number for number, piece in enumerate(proto.pieces)},
        "merges": _merges(proto) if proto.trainer_spec.model_type == BPE else [],
    }


def _merges(proto: Any) -> list[list[str]]:
    """All pairs of pieces that concatenate to a piece, in the order of the scores, which is the merge order.

    SentencePiece merges any adjacent pair whose concatenation is a piece; Hugging Face needs each pair listed."""
    ranks = {piece.piece: -piece.score for piece in proto.pieces if piece.type == NORMAL}
    merges = []
    for piece in sorted((piece for piece in ranks if len(piece) > 1), key=lambda piece: ranks[piece]):
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return [list(pair) for pair in merges]

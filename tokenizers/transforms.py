"""The named reversible transforms of a trained tokenizer, read from its .model, which stores them.

They are not a step of their own: case marks are sentencepiece's normalization table, single operators and spaces are
pieces that nothing is merged with, single digits a rule of training. So every reader of the model applies them."""

import sys
from pathlib import Path
from typing import Any

import sentencepiece

from gristmill.tokenizers.config import OPERATORS, SPACE

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


def capitals() -> list[tuple[str, str]]:
    """All pairs (upper, lower) of single characters that map to each other: ("A", "a"), not ("İ", ...)."""
    pairs = ((chr(code), chr(code).lower()) for code in range(sys.maxunicode + 1))
    return [
        (capital, small)
        for capital, small in pairs
        if capital != small and len(small) == 1 and small.upper() == capital and capital.lower() == small
    ]


def marked() -> list[tuple[str, str]]:
    """All replacement rules, in an order in which they can be applied sequentially: the mark itself first."""
    return [(MARK, MARK + ESCAPE)] + [(capital, MARK + small) for capital, small in capitals()]


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

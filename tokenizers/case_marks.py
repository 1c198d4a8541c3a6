"""Encodes capital letters as a mark plus the lower-case letter: "Hello" and "hello" then share pieces.

One of the strategies of mGPT (Shliazhko et al. 2022, arXiv:2204.07580). The rules are sentencepiece's normalisation
tables, stored in the .model, so every reader of the model applies them. Text that contains the mark itself round-trips:
the mark is written as mark + escape."""

import sys
from pathlib import Path

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


def write_rules(folder: Path) -> dict[str, str]:
    """Writes two tables to `folder`; returns the sentencepiece trainer settings that name them."""
    backward = [(target, source) for source, target in marked()]
    paths = {"normalization_rule_tsv": marked(), "denormalization_rule_tsv": backward}
    for name, rules in paths.items():
        (folder / name).write_text("".join(f"{_hex(source)}\t{_hex(target)}\n" for source, target in rules))
    return {name: str(folder / name) for name in paths}


def _hex(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)

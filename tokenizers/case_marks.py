"""Capital letters as a mark and the small letter: "Hello" and "hello" then share their pieces.

One of the strategies of mGPT (Shliazhko et al. 2022, arXiv:2204.07580). The rules are sentencepiece's own normalisation
tables, kept inside the .model, so that every reader of the model applies them. A text that holds the mark itself still
comes back: the mark is written as mark + escape."""

import sys
from pathlib import Path

MARK = "\ue000"  # private use: no text that is meant for exchange assigns it a meaning
ESCAPE = "\ue001"


def capitals() -> list[tuple[str, str]]:
    """Every (capital, small) that are one character each and each other's only case: ("A", "a"), not ("İ", ...)."""
    pairs = ((chr(code), chr(code).lower()) for code in range(sys.maxunicode + 1))
    return [
        (capital, small)
        for capital, small in pairs
        if capital != small and len(small) == 1 and small.upper() == capital and capital.lower() == small
    ]


def marked() -> list[tuple[str, str]]:
    """Every rule in an order in which one may apply them one after another: the mark itself first."""
    return [(MARK, MARK + ESCAPE)] + [(capital, MARK + small) for capital, small in capitals()]


def write_rules(folder: Path) -> dict[str, str]:
    """Two tables in `folder`, and the settings of sentencepiece's trainer that name them."""
    backward = [(target, source) for source, target in marked()]
    paths = {"normalization_rule_tsv": marked(), "denormalization_rule_tsv": backward}
    for name, rules in paths.items():
        (folder / name).write_text("".join(f"{_hex(source)}\t{_hex(target)}\n" for source, target in rules))
    return {name: str(folder / name) for name in paths}


def _hex(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)

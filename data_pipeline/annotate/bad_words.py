"""Counts of listed words and phrases in a text; C4 drops a page with one of them.

A phrase matches case-insensitively, any white space for white space, if no letter, digit or `_` directly precedes or
follows it: `ass` does not match in `class`. There is no such condition on a side where the phrase has a character of a
script written without spaces (Han, kana, Thai ...) or a character that is not part of a word."""

import re
from collections.abc import Iterable

from gristmill.data_pipeline.signals.characters import IDEOGRAPH, character_table

_WORD = re.compile(r"\w+")


class BadWords:
    """A compiled list of phrases. A text is split into words once, whatever the length of the list."""

    def __init__(self, phrases: Iterable[str]):
        lowered = sorted({" ".join(phrase.lower().split()) for phrase in phrases})
        self._single: set[str] = set()
        self._by_first: dict[str, list[re.Pattern[str]]] = {}
        self._anywhere: list[re.Pattern[str]] = []
        for phrase in lowered:
            first = _WORD.match(phrase)
            if first is None or _is_free(phrase[0]) or _is_free(phrase[first.end() - 1]):
                self._anywhere.append(_pattern(phrase))
            elif first.end() == len(phrase):
                self._single.add(phrase)
            else:
                self._by_first.setdefault(first[0], []).append(_pattern(phrase))

    def count(self, text: str) -> int:
        """Number of matches; two phrases that start at the same position count twice.

        ["red", "red mill"]: "Red mill, red door" -> 3."""
        lowered = text.lower()
        found = sum(1 for pattern in self._anywhere for _ in pattern.finditer(lowered))
        single, by_first = self._single, self._by_first
        if not by_first:
            return found + sum(word in single for word in _WORD.findall(lowered))
        for match in _WORD.finditer(lowered):
            word = match[0]
            found += word in single
            for pattern in by_first.get(word, ()):
                found += pattern.match(lowered, match.start()) is not None
        return found


def _pattern(phrase: str) -> re.Pattern[str]:
    body = r"\s+".join(map(re.escape, phrase.split(" ")))
    before = "" if _is_free(phrase[0]) else r"(?<!\w)"
    after = "" if _is_free(phrase[-1]) else r"(?!\w)"
    return re.compile(before + body + after)


def _is_free(character: str) -> bool:
    """Whether no word boundary is needed at this character: it is not a word character, or its script has no spaces."""
    return not re.match(r"\w", character) or bool(character_table()[ord(character)] & IDEOGRAPH)

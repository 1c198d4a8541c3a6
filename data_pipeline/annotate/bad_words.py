"""How often words and phrases of a list stand in a text: C4 drops a page for one.

A phrase stands in a text where its characters do, upper case or lower, white space for white space, with no letter,
digit or `_` right before or after it: `ass` does not stand in `class`. Where a phrase begins or ends with a
character of a script written without spaces (Han, kana, Thai ...), or with no word character, that side is free."""

import re
from collections.abc import Iterable

from gristmill.data_pipeline.signals.characters import IDEOGRAPH, character_table

_WORD = re.compile(r"\w+")


class BadWords:
    """The list, ready to be looked for. A text is cut into words once, whatever the length of the list."""

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
        """Places where a phrase stands; two phrases that begin at one place are two.

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
    """Whether a word may go on beside this character: it is no word character, or its script has no spaces."""
    return not re.match(r"\w", character) or bool(character_table()[ord(character)] & IDEOGRAPH)

"""Degraded text made from clean text: shuffled words and boilerplate that a quality filter should drop.

Every maker takes the text, the units that can stand alone in it and a seeded generator."""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from gristmill.data_pipeline.signals.characters import IDEOGRAPH, WORD, character_table


@dataclass(frozen=True)
class Source:
    """A text cut into tokens (between white space; characters where the script has none), and its words alone."""

    text: str
    tokens: tuple[str, ...]
    words: tuple[str, ...]
    joiner: str

    @classmethod
    def of(cls, text: str) -> "Source":
        flags = character_table()
        spaced = len(text.split()) > len(text) / 30
        tokens = tuple(text.split()) if spaced else tuple(c for c in text if not c.isspace())
        words = [re.sub(r"^\W+|\W+$", "", token) for token in tokens]
        kept = tuple(w for w in words if w and any(flags[ord(c)] & (WORD | IDEOGRAPH) for c in w))
        return cls(text, tokens, kept, " " if spaced else "")

    def join(self, tokens) -> str:
        return self.joiner.join(tokens)

    def items(self, rng: random.Random, count: int, most: int = 3) -> list[str]:
        """Short phrases of one to `most` words (of twice as many characters), as menus have them."""
        scale = 1 if self.joiner else 2
        return [self.join(rng.choices(self.words, k=scale * rng.randint(1, most))) for _ in range(count)]


def shuffled(source: Source, rng: random.Random) -> str:
    return source.join(rng.sample(source.tokens, len(source.tokens)))


def shuffled_lines(source: Source, rng: random.Random) -> str:
    """In lines of about 80 characters."""
    words = rng.sample(source.tokens, len(source.tokens))
    size = 12 if source.joiner else 40
    return "\n".join(source.join(words[at : at + size]) for at in range(0, len(words), size))


def shuffled_in_lines(source: Source, rng: random.Random) -> str:
    lines = [Source.of(line).tokens if source.joiner else tuple(line) for line in source.text.split("\n")]
    return "\n".join(source.join(rng.sample(line, len(line))) for line in lines)


def shuffled_part(source: Source, rng: random.Random) -> str:
    """300 tokens of the shuffled text."""
    return source.join(rng.sample(source.tokens, min(300, len(source.tokens))))


def without_marks(source: Source, rng: random.Random) -> str:
    return source.join(rng.sample(source.words, len(source.words)))


def rare_words(source: Source, rng: random.Random) -> str:
    """Drawn from the vocabulary without its 20 most frequent words, each as likely as any other."""
    vocabulary = [word for word, _ in Counter(source.words).most_common()][20:] or list(source.words)
    return source.join(rng.choices(vocabulary, k=400))


def repeated_sentence(source: Source, rng: random.Random) -> str:
    return " ".join([_sentence(source, rng)] * 40)


def repeated_line(source: Source, rng: random.Random) -> str:
    return "\n".join([_sentence(source, rng)] * 40)


def _sentence(source: Source, rng: random.Random) -> str:
    lines = [line for line in source.text.split("\n") if len(line) >= 40] or [source.text[:80]]
    return rng.choice(lines)


def menu(source: Source, rng: random.Random) -> str:
    return "\n".join(source.items(rng, 120))


def repeated_menu(source: Source, rng: random.Random) -> str:
    return "\n".join(source.items(rng, 12) * 10)


def navigation(source: Source, rng: random.Random) -> str:
    return "\n".join(" | ".join(source.items(rng, 8)) for _ in range(20))


def bulleted(source: Source, rng: random.Random) -> str:
    return "\n".join(f"• {item}" for item in source.items(rng, 100))


def prices(source: Source, rng: random.Random) -> str:
    items = enumerate(source.items(rng, 100), start=1)
    return "\n".join(f"{number}. {item} - {rng.randint(1, 9999)},{rng.randint(10, 99)} %" for number, item in items)


def symbols(source: Source, rng: random.Random) -> str:
    return " ".join(f"### {item} ... ***" for item in source.items(rng, 120))


def names(source: Source, rng: random.Random) -> str:
    return ", ".join(item.title() for item in source.items(rng, 150, most=2))


Maker = Callable[[Source, random.Random], str]
SALAD: dict[str, Maker] = {
    make.__name__: make
    for make in (shuffled, shuffled_lines, shuffled_in_lines, shuffled_part, without_marks, rare_words)
}
BOILERPLATE: dict[str, Maker] = {
    make.__name__: make
    for make in (
        repeated_sentence,
        repeated_line,
        menu,
        repeated_menu,
        navigation,
        bulleted,
        prices,
        symbols,
        names,
    )
}

"""Reference implementation of every signal in plain Python; the compiled kernels give the same values.

Lengths are in characters (code points). Where a text has no words or no lines, a ratio over them is NaN: nothing was
measured. Sources of the definitions: Gopher (arXiv 2112.11446, appendix A.1.1 and table A1), FineWeb (arXiv
2406.17557) and, where the papers leave a choice, datatrove 0.10, so that decisions agree with it."""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Literal

from gristmill.data_pipeline.signals.characters import (
    ALPHA,
    DIGIT,
    IDEOGRAPH,
    JOINER,
    PUNCTUATION,
    SPACE,
    STOP,
    TERMINAL,
    UPPER,
    WORD,
    character_table,
)

WordRule = Literal["unicode", "whitespace"]

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")  # Gopher, appendix A.1.1
TITLES = ("Mr", "Mrs", "Ms", "Dr", "St", "Prof", "Jr", "Sr", "Gen", "Gov", "Rev", "Inc", "Co", "Corp", "Ltd", "vs")
SHORT_LINE_CHARS = 30  # FineWeb: a line of at most this many characters is short
NAN = float("nan")

_URL = re.compile(r"https?://[^\s]", re.ASCII)
_EMAIL = re.compile(r"[A-Za-z0-9._%+-]@[A-Za-z0-9]")
_LINES = re.compile("\n+")
_PARAGRAPHS = re.compile("\n{2,}")


@cache
def abbreviation_pattern() -> re.Pattern[str]:
    """Compiled at its first use: 0.03 s, which curation does not need."""
    return re.compile(rf"(?<![A-Za-z0-9_\x80-\U0010ffff])(?:[A-Z]|{'|'.join(TITLES)})$|\.[a-z]$")


def signals(text: str, word_rule: WordRule) -> dict[str, float]:
    """Name -> value of every signal in signals/signal_names.py."""
    words = split_words(text, word_rule)
    measured: dict[str, float] = {"num_bytes": len(text.encode()), "num_chars": len(text)}
    measured |= _word_signals(text, words)
    measured |= _line_signals(text)
    measured |= _repetition(text, words)
    measured |= _fineweb(text, words)
    measured |= _addresses(text)
    return measured


def split_words(text: str, rule: WordRule) -> list[str]:
    """whitespace: str.split. unicode: letters, digits and marks in a row are a word, also over one joiner between
    them (don't, 3.14, me@home); hyphens and other @ in a row begin a word that may follow (well-known is well, -known;
    -- is one); an ideograph is a word, and so is any other character that is no white space.

    "Don't panic (42)!" -> [Don't, panic, (, 42, ), !]"""
    if rule == "whitespace":
        return text.split()
    table_C = character_table()
    flags = [int(table_C[ord(c)]) for c in text]
    words, start = [], 0
    while start < len(text):
        end = start + 1
        if flags[start] & SPACE:
            start = end
            continue
        while text[start] in "-@" and end < len(text) and text[end] in "-@":
            end += 1
        if flags[start] & WORD or (text[start] in "-@" and end < len(text) and flags[end] & WORD):
            while end < len(text) and _goes_on(flags, end):
                end += 1
        words.append(text[start:end])
        start = end
    return words


def _goes_on(flags: Sequence[int], at: int) -> bool:
    """Whether a word that ends at `at` continues with the character there: a word character, or a joiner before one."""
    if flags[at] & WORD:
        return True
    return bool(flags[at] & JOINER and at + 1 < len(flags) and flags[at + 1] & WORD)


def split_lines(text: str) -> list[str]:
    return text.splitlines()


def count_sentences(text: str) -> int:
    """Sentences by a simple rule: terminals end one where white space or the text's end follows (closing quotes and
    brackets may stand between), a terminal of scripts without spaces (。！？) wherever it stands, every line's end ends
    one, and a piece without letter or digit is none. Terminals of all scripts count, as ؟ ۔ । ։ ። do.

    'He said "no." Then\\nhe left' -> 3. '下雨了。我们走吧！' -> 2."""
    return sum(_sentences_of_line(line) for line in text.splitlines())


def _sentences_of_line(line: str) -> int:
    table_C = character_table()
    count, has_word, ended = 0, False, False
    for at, character in enumerate(line):
        flags = int(table_C[ord(character)])
        if flags & SPACE or (flags & STOP and has_word):
            if (ended or flags & STOP) and has_word:
                count, has_word = count + 1, False
            ended = False
        elif flags & TERMINAL:
            ended = not (character == "." and abbreviation_pattern().search(line[max(0, at - 8) : at]))
        elif character not in "\"')]}’”»":
            ended = False
        has_word = has_word or bool(flags & (WORD | IDEOGRAPH))
    return count + has_word


def _word_signals(text: str, words: Sequence[str]) -> dict[str, float]:
    table_C = character_table()
    plain = [word for word in words if not all(table_C[ord(c)] & PUNCTUATION for c in word)]
    alpha = sum(any(table_C[ord(c)] & ALPHA for c in word) for word in words)
    return {
        "num_words": len(words),
        "num_plain_words": len(plain),
        "num_stop_words": len(set(STOP_WORDS) & set(words)),
        "mean_word_length": _ratio(sum(map(len, plain)), len(plain)),
        "hash_word_ratio": _ratio(text.count("#"), len(words)),
        "ellipsis_word_ratio": _ratio(text.count("...") + text.count("…"), len(words)),
        "alpha_word_ratio": _ratio(alpha, len(words)),
        "upper_char_ratio": _ratio(sum(bool(table_C[ord(c)] & UPPER) for c in text), len(text)),
        "digit_char_ratio": _ratio(sum(bool(table_C[ord(c)] & DIGIT) for c in text), len(text)),
    }


def _alpha_plain_word_ratio(words: Sequence[str]) -> float:
    """Share of words with a letter among those that are not punctuation alone: "a ( 1 )" -> 1 of 2."""
    table_C = character_table()
    plain = [word for word in words if not all(table_C[ord(c)] & PUNCTUATION for c in word)]
    return _ratio(sum(any(table_C[ord(c)] & ALPHA for c in word) for word in words), len(plain))


def _line_signals(text: str) -> dict[str, float]:
    lines = split_lines(text)
    return {
        "num_lines": len(lines),
        "num_paragraphs": len(_PARAGRAPHS.split(text.strip())) if text.strip() else 0,
        "num_sentences": count_sentences(text),
        "bullet_line_ratio": _ratio(sum(line.lstrip().startswith(("•", "-")) for line in lines), len(lines)),
        "ellipsis_line_ratio": _ratio(sum(line.rstrip().endswith(("...", "…")) for line in lines), len(lines)),
    }


def _repetition(text: str, words: Sequence[str]) -> dict[str, float]:
    """Gopher's table A1. Lines are what stands between runs of newlines, the empty head and tail too; paragraphs
    what stands between runs of two and more in the stripped text; every length is divided by the whole text's."""
    lines = _LINES.split(text)
    paragraphs = _PARAGRAPHS.split(text.strip())
    dup_lines, dup_line_chars = _duplicates(lines)
    dup_paragraphs, dup_paragraph_chars = _duplicates(paragraphs)
    measured = {
        "dup_line_ratio": _ratio(dup_lines, len(lines) if text else 0),
        "dup_line_char_ratio": _ratio(dup_line_chars, len(text)),
        "dup_paragraph_ratio": _ratio(dup_paragraphs, len(paragraphs) if text else 0),
        "dup_paragraph_char_ratio": _ratio(dup_paragraph_chars, len(text)),
    }
    for n in (2, 3, 4):
        measured[f"top_{n}gram_char_ratio"] = _ratio(_top_ngram_chars(words, n), len(text))
    for n in range(5, 11):
        measured[f"dup_{n}gram_char_ratio"] = _ratio(_dup_ngram_chars(words, n), len(text))
    return measured


def _duplicates(pieces: Sequence[str]) -> tuple[int, int]:
    """Number of pieces that occurred before, and their characters: [a, bb, a, a] -> (2, 2)."""
    seen: set[str] = set()
    count = chars = 0
    for piece in pieces:
        if piece in seen:
            count += 1
            chars += len(piece)
        seen.add(piece)
    return count, chars


def _top_ngram_chars(words: Sequence[str], n: int) -> int:
    """Characters of all occurrences of the most frequent n-gram, with the spaces between its words; of equally frequent
    n-grams the first one counts, also if none occurs twice."""
    ngrams = [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]
    if not ngrams:
        return 0
    [(top, count)] = Counter(ngrams).most_common(1)
    return len(top) * count


def _dup_ngram_chars(words: Sequence[str], n: int) -> int:
    """Characters of the words in n-grams that occurred before; after one, the search continues behind it.

    An n-gram is its sequence of words (datatrove joins them without a separator, so there `a bc` equals `ab c`)."""
    seen: set[tuple[str, ...]] = set()
    chars = at = 0
    while at + n <= len(words):
        ngram = tuple(words[at : at + n])
        if ngram in seen:
            chars += sum(map(len, ngram))
            at += n
        else:
            seen.add(ngram)
            at += 1
    return chars


def _fineweb(text: str, words: Sequence[str]) -> dict[str, float]:
    """FineWeb's four ratios: lines are split at newlines, blank lines are left out, lines are not stripped."""
    table_C = character_table()
    lines = [line for line in text.split("\n") if line.strip()]
    without_newlines = len(text) - text.count("\n")
    return {
        "line_punctuation_ratio": _ratio(sum(bool(table_C[ord(line[-1])] & TERMINAL) for line in lines), len(lines)),
        "short_line_ratio": _ratio(sum(len(line) <= SHORT_LINE_CHARS for line in lines), len(lines)),
        "repeated_line_char_ratio": _ratio(_duplicates(lines)[1], without_newlines if lines else 0),
        "newline_word_ratio": _ratio(text.count("\n"), len(words)),
        "alpha_plain_word_ratio": _alpha_plain_word_ratio(words),
    }


def _addresses(text: str) -> dict[str, float]:
    """URLs are found by their scheme, e-mail addresses by the characters around the @, IPv4 addresses by their form."""
    return {
        "num_urls": len(_URL.findall(text)),
        "num_emails": len(_EMAIL.findall(text)),
        "num_ip_addresses": count_ip_addresses(text),
    }


_IP = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9.])")


def count_ip_addresses(text: str) -> int:
    """Four numbers of one to three digits and three dots, with no digit or dot on either side."""
    return len(_IP.findall(text))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else NAN

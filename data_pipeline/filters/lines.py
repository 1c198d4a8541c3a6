"""Line filters of C4 and RefinedWeb: they remove lines from a text and count the removed lines by rule.

Documents are filtered later, by these counts and the signals of the edited text. A line rule whose option is None is
off."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gristmill.data_pipeline.filters import c4_kernel, refinedweb_kernel
from gristmill.data_pipeline.filters.c4_kernel import EditedTexts
from gristmill.data_pipeline.signals.bits import PADDING, TextArrays, TextBuffer, joined
from gristmill.data_pipeline.signals.characters import character_table

Options = Mapping[str, float | None]

# Counts that each edit returns; each is a signal column PRESET_COUNT.
C4_COUNTS = (
    "lines",
    "removed_long_word",
    "removed_no_terminal",
    "removed_few_words",
    "removed_javascript",
    "removed_policy",
    "lorem_ipsum",
    "curly_brackets",
)
REFINEDWEB_COUNTS = (
    "lines",
    "removed_uppercase",
    "removed_digits",
    "removed_counter",
    "removed_few_words",
    "removed_boilerplate",
)

# tensorflow_datasets c4_utils.py, the code behind the paper.
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_TERMINALS = (".", "?", "!", '"', "'")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_POLICY_MARKS = ("terms of", "polic", "cookies")  # each phrase above contains one of these

# DCLM baselines/mappers/modifiers.py, counter_line_modifier: counters below a post.
_COUNTER = re.compile(rf"\W*\d[\d,.]*[kmb]?\s+(?:{refinedweb_kernel.COUNTED.decode()})\W*")
# The same file, substring_line_modifier, as set in dclm_baseline_refinedweb.yaml ("..." there are three wildcards).
_BOILERPLATE = (
    re.compile(r"\s?items in cart", re.IGNORECASE),
    re.compile(r"\s?read more...$", re.IGNORECASE),
    re.compile(r"^sign-in\s?", re.IGNORECASE),
)


@dataclass(frozen=True)
class Edited:
    text: str
    counts: dict[str, int]


def edit_c4(text: str, options: Options) -> Edited:
    """C4 section 2.2, in the order of its code: a line is removed for a word of over 1,000 characters, a missing
    terminal mark (an ellipsis is none), fewer than 3 words, `javascript`, or a policy phrase; citations are removed
    from kept lines. Lines are stripped. `lorem ipsum` and `{` are counted on the lines that remain at that point."""
    counts = dict.fromkeys(C4_COUNTS, 0)
    kept = []
    for line in text.splitlines():
        counts["lines"] += 1
        line = line.strip()
        words = line.split()
        max_word_length = options["line_max_word_length"]
        if (
            max_word_length is not None
            and len(line) > max_word_length
            and any(len(word) > max_word_length for word in words)
        ):
            counts["removed_long_word"] += 1
            continue
        if options["line_citations"] is not None and "[" in line:
            line = _CITATION.sub("", line)
        terminal = options["line_terminal_punctuation"] is None or (
            line.endswith(_TERMINALS) and not line.endswith("...")
        )
        if not terminal:
            counts["removed_no_terminal"] += 1
            continue
        if options["line_min_words"] is not None and len(words) < options["line_min_words"]:
            counts["removed_few_words"] += 1
            continue
        lowered = line.lower()
        counts["lorem_ipsum"] += "lorem ipsum" in lowered
        if options["line_javascript"] is not None and "javascript" in lowered:
            counts["removed_javascript"] += 1
            continue
        counts["curly_brackets"] += "{" in line
        if options["line_policy"] is not None and _has_policy(lowered):
            counts["removed_policy"] += 1
            continue
        kept.append(line)
    return Edited("\n".join(kept).strip(), counts)


def edit_refinedweb(text: str, options: Options) -> Edited:
    """RefinedWeb appendix G.2 as DCLM sets it: a line is removed if over half of it is upper case, all of it is
    digits, it is a counter (12 likes), or it has one word; boilerplate is removed from lines of at most 10 words. Empty
    lines are kept."""
    counts = dict.fromkeys(REFINEDWEB_COUNTS, 0)
    kept = []
    for line in text.split("\n"):
        counts["lines"] += 1
        reason = _removal_reason(line, options) if line else None
        if reason is not None:
            counts[reason] += 1
            continue
        most = options["line_boilerplate_words"]
        if line and most is not None and len(line.split()) <= most:
            cleaned = line
            for pattern in _BOILERPLATE:
                cleaned = pattern.sub("", cleaned)
            if cleaned != line:
                counts["removed_boilerplate"] += 1
                if not cleaned.strip():
                    continue
            line = cleaned
        kept.append(line)
    return Edited("\n".join(kept).strip(), counts)


class EditedBuffer(NamedTuple):
    """N edited texts. counts: int64[N, counts of the edit]. same_words: bool[N], True only for texts that lost white
    space alone, or nothing."""

    texts: TextBuffer
    counts: np.ndarray
    same_words: np.ndarray


def edit_c4_texts(texts: TextBuffer, options: Options) -> EditedBuffer:
    """edit_c4 of every text, with the C4_COUNTS, compiled except for the texts the kernel leaves."""
    max_word_length, min_words = options["line_max_word_length"], options["line_min_words"]
    is_on = {name: value is not None for name, value in options.items()}
    rules = c4_kernel.C4Rules(
        max_word=-1 if max_word_length is None else math.floor(max_word_length),
        citations=is_on["line_citations"],
        terminal=is_on["line_terminal_punctuation"],
        min_words=-1 if min_words is None else math.ceil(min_words),
        javascript=is_on["line_javascript"],
        policy=is_on["line_policy"],
    )
    return _compiled(c4_kernel.edit_texts, rules, edit_c4, texts, options, C4_COUNTS)


def edit_refinedweb_texts(texts: TextBuffer, options: Options) -> EditedBuffer:
    """edit_refinedweb of every text, with the REFINEDWEB_COUNTS, compiled in the same way."""
    upper, digits, min_words = (
        options[name] for name in ("line_uppercase_ratio", "line_digit_ratio", "line_min_words")
    )
    most = options["line_boilerplate_words"]
    rules = refinedweb_kernel.RefinedWebRules(
        upper=-1.0 if upper is None else float(upper),
        digits=-1.0 if digits is None else float(digits),
        counters=options["line_counters"] is not None,
        min_words=-1 if min_words is None else math.ceil(min_words),
        boilerplate=-1 if most is None else math.floor(most),
    )
    return _compiled(refinedweb_kernel.edit_texts, rules, edit_refinedweb, texts, options, REFINEDWEB_COUNTS)


def _compiled(
    kernel: Callable[..., None],
    rules: tuple[float, ...],
    plain: Callable[[str, Options], Edited],
    texts: TextBuffer,
    options: Options,
    names: Sequence[str],
) -> EditedBuffer:
    """Edit the texts by the kernel, and in plain Python those that the kernel leaves."""
    count = len(texts)
    out, ends = np.empty(len(texts.text) + count + PADDING, np.uint8), np.empty(count + 1, np.int64)
    counts = np.zeros((count, len(names)), np.int64)
    left, same_words = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    arrays = TextArrays(texts.text, texts.offsets, character_table())
    kernel(arrays, rules, EditedTexts(out, ends, counts, left, same_words))
    edited = TextBuffer(out[: ends[-1] + PADDING], ends)
    if not left.any():
        return EditedBuffer(edited, counts, same_words)
    pieces = []
    for k in range(count):
        if left[k]:
            plain_text = plain(texts.raw(k).decode(), options)
            counts[k] = [plain_text.counts[name] for name in names]
        pieces.append(plain_text.text.encode() if left[k] else edited.raw(k))
    return EditedBuffer(TextBuffer(*joined(pieces)), counts, same_words)


EDITS: dict[str, Callable[[TextBuffer, Options], EditedBuffer]] = {
    "c4": edit_c4_texts,
    "refinedweb_lines": edit_refinedweb_texts,
}
EDIT_COUNTS = {"c4": C4_COUNTS, "refinedweb_lines": REFINEDWEB_COUNTS}


def _has_policy(lowered: str) -> bool:
    return any(mark in lowered for mark in _POLICY_MARKS) and any(phrase in lowered for phrase in _POLICY)


def _removal_reason(line: str, options: Options) -> str | None:
    """The count of the rule that removes the line; None if it is kept."""
    upper, digits = options["line_uppercase_ratio"], options["line_digit_ratio"]
    if upper is not None and sum(map(str.isupper, line)) / len(line) > upper:
        return "removed_uppercase"
    if digits is not None and line[0].isdigit() and sum(map(str.isdigit, line)) / len(line) > digits:
        return "removed_digits"
    if options["line_counters"] is not None and _COUNTER.fullmatch(line.lower()):
        return "removed_counter"
    if options["line_min_words"] is not None and len(line.split()) < options["line_min_words"]:
        return "removed_few_words"
    return None

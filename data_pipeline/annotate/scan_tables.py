"""Tables for the scan of UTF-8 text: ftfy's regular expression for mojibake as an automaton, and Unicode's NFC data.

They are shipped as scan_tables.npz, made by `python tests/support/scan_tables_file.py` from the installed ftfy and
Python's unicodedata. The file names both versions; where others are installed, the tables are built anew when they are
first used (`normalize.py`), which takes about a second."""

import re
import re._parser as regex_parser  # type: ignore[import-not-found]
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# What a character, or a text, holds. BAD: ftfy's badness (of a character: C1 controls). UNCOMPOSED: the text is not
# certainly in NFC (of a character: NFC_Quick_Check is No or Maybe, UAX 15).
LINE_END, CONTROL, BAD, UNCOMPOSED = 1, 2, 4, 8
START, INSIDE = 0, 1  # states of the automaton: at the start of a text; behind other characters, none of them matched
PAGE = 256  # code points of one page of the table of characters
LINE_ENDS = "\r\x85\u2028\u2029"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe]")
_HANGUL_VOWELS, _HANGUL_TAILS = range(0x1161, 0x1176), range(0x11A8, 0x11C3)  # compose by rule (Unicode 3.12)


class ScanTables(NamedTuple):
    """A character's kind is pages[page_of[code >> 8], code & 255].

    page_of: uint8[0x1100]; pages: uint8[P, 256]. Of each of K kinds: classes uint8[K], its class for the automaton;
    combining uint8[K], its Canonical_Combining_Class; flags uint8[K] (LINE_END ...). next_state: uint8[S, classes]; the
    last state is final: the text is bad. memory: the state depends on so many characters before a place, and on whether
    there are so many."""

    page_of: np.ndarray
    pages: np.ndarray
    classes: np.ndarray
    combining: np.ndarray
    flags: np.ndarray
    next_state: np.ndarray
    memory: int


def build_tables() -> ScanTables:
    from ftfy.badness import BADNESS_RE  # loaded here: the shipped tables do not need it

    every = "".join(map(chr, range(sys.maxunicode + 1)))
    sequences, anchored = _badness_sequences(regex_parser.parse(BADNESS_RE.pattern, BADNESS_RE.flags), every)
    sets = list(dict.fromkeys(members for sequence in [*sequences, *anchored] for members in sequence))
    class_C, in_class_KS = _classes([np.frombuffer(members, bool) for members in sets])
    places = {members: place for place, members in enumerate(sets)}
    anywhere, at_start = (
        [tuple(places[members] for members in sequence) for sequence in some] for some in (sequences, anchored)
    )
    next_state = _automaton(anywhere, at_start, in_class_KS)
    combining_C = np.frombuffer(bytes(map(unicodedata.combining, every)), np.uint8)
    properties_C = class_C.astype(np.uint32) << 16 | combining_C.astype(np.uint32) << 8 | _flags(every)
    kinds, kind_C = np.unique(properties_C, return_inverse=True)
    pages, page_of = np.unique(kind_C.reshape(-1, PAGE), axis=0, return_inverse=True)
    if max(len(kinds), len(pages), len(next_state)) > 256:
        raise ValueError(f"{len(kinds)} kinds, {len(pages)} pages, {len(next_state)} states; each must fit into a byte")
    page_of, pages = page_of.reshape(-1).astype(np.uint8), pages.astype(np.uint8)
    classes, combining, flags = ((kinds >> shift & 0xFF).astype(np.uint8) for shift in (16, 8, 0))
    memory = max(map(len, [*sequences, *anchored]))
    return ScanTables(page_of, pages, classes, combining, flags, next_state, memory)


def _classes(sets_SC: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(class of every character, bool[K, S]: whether the characters of class k are in set s); characters that are in
    the same sets have one class."""
    class_C = np.zeros(len(sets_SC[0]), np.int64)
    for first in range(0, len(sets_SC), 32):
        word_C = sum(members.astype(np.int64) << place for place, members in enumerate(sets_SC[first : first + 32]))
        _, found_C = np.unique(word_C, return_inverse=True)
        _, class_C = np.unique(class_C << 32 | found_C.reshape(-1), return_inverse=True)
    _, example_K = np.unique(class_C, return_index=True)
    return class_C.reshape(-1), np.stack([members[example_K] for members in sets_SC], axis=1)


Sequences = tuple[list[tuple[bytes, ...]], list[tuple[bytes, ...]]]


def _badness_sequences(pattern: Iterable[tuple[Any, Any]], every: str) -> Sequences:
    """(sequences found anywhere, sequences found at the start of a text), each a tuple of sets of characters: a byte
    for each code point, 1 for a member. The expression's alternatives, one sequence without and one with an optional
    character."""
    ((operation, (_, branches)),) = pattern
    if str(operation) != "BRANCH":
        raise ValueError(f"ftfy's expression begins with {operation}; expected alternatives")
    sequences: Sequences = ([], [])
    for branch in branches:
        is_anchored = str(branch[0][0]) == "AT" and str(branch[0][1]) == "AT_BEGINNING"
        for sequence in _expanded(list(branch)[is_anchored:], every):
            sequences[is_anchored].append(sequence)
    return sequences


def _expanded(items: list[tuple[Any, Any]], every: str) -> Iterator[tuple[bytes, ...]]:
    if not items:
        yield ()
        return
    (operation, value), *rest = items
    for tail in _expanded(rest, every):
        if str(operation) == "MAX_REPEAT":
            least, most, inner = value
            if (least, most) != (0, 1):
                raise ValueError(f"a repeat of {least} to {most} in ftfy's expression; expected an optional character")
            yield tail
            yield from (head + tail for head in _expanded(list(inner), every))
        else:
            yield (_members(str(operation), value, every), *tail)


def _members(operation: str, value: Any, every: str) -> bytes:
    """The set of characters of one element of the expression."""
    members = np.zeros(len(every), bool)
    if operation == "ANY":
        members[ord("\n")] = True
        return (~members).tobytes()
    is_negated = False
    for kind, operand in value if operation == "IN" else [(operation, value)]:
        if str(kind) == "NEGATE":
            is_negated = True
        elif str(kind) == "LITERAL":
            members[operand] = True
        elif str(kind) == "RANGE":
            members[operand[0] : operand[1] + 1] = True
        elif str(kind) == "CATEGORY" and str(operand) in _CATEGORIES:
            members |= _category(str(operand), every)
        else:
            raise ValueError(f"{kind} {operand} in ftfy's expression is not known; add it to scan_tables._members")
    return (members != is_negated).tobytes()


_CATEGORIES = {"CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w", "CATEGORY_DIGIT": r"\d"}


@lru_cache(maxsize=8)
def _category(name: str, every: str) -> np.ndarray:
    members = np.zeros(len(every), bool)
    members[[ord(c) for c in re.findall(_CATEGORIES[name], every)]] = True
    return members


Suffix = tuple[int, ...]  # the sets that the rest of a sequence consists of


def _automaton(anywhere: list[Suffix], anchored: list[Suffix], in_class_KS: np.ndarray) -> np.ndarray:
    """next_state of ScanTables by subset construction: a state is the set of suffixes that would complete a match."""
    start, inside = frozenset([*anywhere, *anchored]), frozenset(anywhere)
    states, rows = {start: START, inside: INSIDE}, []
    waiting = [start, inside]
    while waiting:
        row = []
        for in_set_S in in_class_KS.tolist():
            after = {suffix[1:] for suffix in waiting[0] if in_set_S[suffix[0]]}
            target = None if () in after else frozenset(after) | inside
            if target is not None and target not in states:
                states[target] = len(states)
                waiting.append(target)
            row.append(-1 if target is None else states[target])
        rows.append(row)
        waiting.pop(0)
    final = len(states)
    table = np.array([*rows, [final] * len(in_class_KS)])
    return np.where(table < 0, final, table).astype(np.uint8 if final < 256 else np.int64)


def _flags(every: str) -> np.ndarray:
    """uint8[0x110000]: LINE_END, CONTROL, BAD and UNCOMPOSED of every character."""
    flags_C = np.zeros(len(every), np.uint8)
    flags_C[[ord(c) for c in LINE_ENDS]] |= LINE_END
    flags_C[[ord(c) for c in CONTROLS.findall(every)]] |= CONTROL
    flags_C[0x80:0xA0] |= BAD
    flags_C[list(_uncomposed(every))] |= UNCOMPOSED
    return flags_C


def _uncomposed(every: str) -> set[int]:
    """Characters that NFC changes, and those that compose with one before them: the second character of every canonical
    decomposition that NFC undoes, and Hangul's vowels and tails."""
    characters = {*_HANGUL_VOWELS, *_HANGUL_TAILS}
    for code, character in enumerate(every):
        decomposition = unicodedata.decomposition(character)
        if not decomposition or decomposition.startswith("<"):
            continue
        if unicodedata.normalize("NFC", character) != character:
            characters.add(code)
        elif " " in decomposition:
            characters.add(int(decomposition.split()[1], 16))
    return characters

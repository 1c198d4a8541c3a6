"""Personal data: e-mail addresses, IP addresses and phone numbers, to keep, replace or drop documents for."""

import ipaddress
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal, get_args

import numpy as np
from pydantic import Field

from gristmill.data_pipeline.signals.bits import BLOCK, ONE, TOP, ZERO, below, first_bit, without_first
from gristmill.data_pipeline.signals.intrinsics import bytes_within, letters_within, pointer
from gristmill.foundation.config import Config
from gristmill.foundation.runtime.kernels.cached_njit import cached_njit

# Which texts may hold personal data, in one compiled pass over their UTF-8 bytes.
#
# A text is named for marks that every match of filters/pii.py has; some named texts have no match.

EMAIL, IP, PHONE = 1, 2, 4
MAX_DOT_DISTANCE = 8  # from the first dot of an address to the third: two numbers of three digits and a dot


@cached_njit(nogil=True)
def find_marks(data, offsets, kinds, kinds_of_texts):
    """Sets the bits of `kinds` in found: uint8[N] that the texts data[offsets[k] : offsets[k + 1]] may hold.

    EMAIL: an @ between characters of an address. IP: three dots between digits, close to each other. PHONE: a space,
    dot or hyphen between digits."""
    for k in range(len(offsets) - 1):
        start, end = offsets[k], offsets[k + 1]
        if end + BLOCK <= len(data):
            kinds_of_texts[k] = _marks(pointer(data, 0), start, end, kinds)
        else:  # a block may reach behind the last bytes
            copy = np.zeros(end - start + BLOCK, np.uint8)
            copy[: end - start] = data[start:end]
            kinds_of_texts[k] = _marks(pointer(copy, 0), 0, end - start, kinds)


@cached_njit(nogil=True)
def _marks(text, start, end, kinds):
    kinds_of_text, first_dot, second_dot = 0, start - 2 * BLOCK, start - 2 * BLOCK  # the last two dots between digits
    for base in range(start, end, BLOCK):
        inside = below(end - base)
        digit = bytes_within(text, base, 0x30, 10)
        if kinds & EMAIL:
            sign = bytes_within(text, base, 0x40, 1) & inside
            if sign != ZERO:
                address = digit | letters_within(text, base, 0x61, 26)
                address |= bytes_within(text, base, 0x5F, 1) | bytes_within(text, base, 0x2D, 1)
                kinds_of_text |= EMAIL if _between(sign, address) != ZERO else 0
        if kinds & IP:
            dots = _between(bytes_within(text, base, 0x2E, 1) & inside, digit)
            while dots != ZERO:
                dot = base + first_bit(dots)
                dots = without_first(dots)
                kinds_of_text |= IP if dot - first_dot <= MAX_DOT_DISTANCE else 0
                first_dot, second_dot = second_dot, dot
        if kinds & PHONE:
            separator = bytes_within(text, base, 0x20, 1) | bytes_within(text, base, 0x2D, 2)
            kinds_of_text |= PHONE if _between(separator & inside, digit) != ZERO else 0
    return kinds_of_text


@cached_njit(nogil=True, forceinline=True)
def _between(marks, neighbours):
    """The marks with a neighbour on either side; those at the ends of the block are taken to have one outside it."""
    return marks & (neighbours << ONE | ONE) & (neighbours >> ONE | ONE << TOP)


Choice = Literal["keep", "replace", "drop"]
PiiKind = Literal["email", "ip", "phone"]
PII_KINDS: tuple[PiiKind, ...] = get_args(PiiKind)


class PiiConfig(Config):
    """Action for each kind, and the placeholders (reserved names and numbers: RFC 2606, RFC 5737, +1-555-0100).

    replace: applied when the corpus is written, after filters and deduplication, as in FineWeb; signals and
    similarities are those of the original text. drop: documents with a match are removed by the last rule of the
    filters (`pii.email` in the ledger, with the number of matches); changing the dropped kinds annotates the files
    again. ip ignores private, loopback and reserved addresses. phone matches numbers of 10 to 15 digits written with a
    plus or with separators; it is a heuristic and off by default."""

    email: Choice = "replace"
    ip: Choice = "replace"
    phone: Choice = "keep"
    email_placeholder: str = Field(default="email@example.com")
    ip_placeholder: str = Field(default="192.0.2.1")
    phone_placeholder: str = Field(default="+1-555-0100")

    @property
    def dropped(self) -> tuple[PiiKind, ...]:
        return tuple(kind for kind in PII_KINDS if getattr(self, kind) == "drop")

    @property
    def replaced(self) -> tuple[PiiKind, ...]:
        return tuple(kind for kind in PII_KINDS if getattr(self, kind) == "replace")


# The local part, an @, labels with a last one of letters. Not all of RFC 5322: quoted local parts are not matched.
_DOMAIN = r"@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,24}\b"
_EMAIL = r"(?<![\w.+-])[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_])?" + _DOMAIN
_MAX_LOCAL_PART = 64  # characters that _EMAIL matches before the @
# The look-behind is behind the first digit: re then searches for digits, five times as fast as at every character.
_IP = r"\d(?<![\w.]\d)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?![\w]|\.\d)"
_PHONE = r"(?<![\w+.-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)[ .-]?)?\d{2,4}(?:[ .-]\d{2,4}){1,4}(?![\w.-]\d|\w)"
_PATTERNS: dict[PiiKind, str] = {"email": _EMAIL, "ip": _IP, "phone": _PHONE}
_BITS: dict[PiiKind, int] = {"email": EMAIL, "ip": IP, "phone": PHONE}  # of find_marks
_MARKS: dict[PiiKind, str] = {"email": "@", "ip": ".", "phone": ""}  # a text without it has no match


def replace_pii(text: str, config: PiiConfig, kinds: Sequence[PiiKind] = PII_KINDS) -> tuple[str, int]:
    """Return (the text with placeholders, the number of replacements). kinds: those that the text may hold.

    "mail a@b.org or 8.8.8.8" -> ("mail email@example.com or 192.0.2.1", 2)."""
    replaced = 0
    for kind in config.replaced:
        if kind not in kinds and not replaced:  # a placeholder may hold what another kind replaces
            continue
        parts, end = [], 0
        for match in _matches(text, kind):
            if _is_personal(kind, match[0]):
                parts += [text[end : match.start()], getattr(config, f"{kind}_placeholder")]
                end = match.end()
                replaced += 1
        text = "".join([*parts, text[end:]])
    return text, replaced


@cache
def pii_pattern(kind: PiiKind) -> re.Pattern[str]:
    """Compiled at its first use: 0.03 s, which runs that keep personal data do not need."""
    return re.compile(_PATTERNS[kind], 0 if kind == "email" else re.ASCII)


@cache
def pii_domain() -> re.Pattern[str]:
    return re.compile(_DOMAIN)


def _matches(text: str, kind: PiiKind) -> Iterator[re.Match[str]]:
    """All matches from left to right, as finditer. Addresses are searched around every @ only."""
    if kind != "email":
        if _MARKS[kind] in text:
            yield from pii_pattern(kind).finditer(text)
        return
    sign, end = text.find("@"), 0
    while sign >= 0:
        domain = pii_domain().match(text, sign)
        match = domain and pii_pattern("email").search(text, max(end, sign - _MAX_LOCAL_PART), domain.end())
        if match:
            yield match
            end = match.end()
        sign = text.find("@", sign + 1)


def may_hold_pii(data: np.ndarray, offsets: np.ndarray, kinds: Sequence[PiiKind]) -> np.ndarray:
    """bool[kinds, texts]: False for texts without a match of the kind, True for all with one and some others.

    Text i is the UTF-8 data[offsets[i] : offsets[i + 1]]."""
    kinds_of_texts = np.zeros(len(offsets) - 1, np.uint8)
    find_marks(data, offsets, sum(_BITS[kind] for kind in kinds), kinds_of_texts)
    return np.array([kinds_of_texts & _BITS[kind] > 0 for kind in kinds], bool).reshape(len(kinds), len(kinds_of_texts))


def count_pii(text: str, kind: PiiKind) -> int:
    """Number of matches that `replace` would replace, without those that are placeholders."""
    placeholder = getattr(PiiConfig(), f"{kind}_placeholder")
    matches = (match[0] for match in _matches(text, kind))
    return sum(written != placeholder and _is_personal(kind, written) for written in matches)


def pii_signal(kind: PiiKind) -> str:
    return f"num_pii_{kind}"


def _is_personal(kind: PiiKind, written: str) -> bool:
    if kind == "ip":
        return is_public_ip(written)
    return kind == "email" or _is_phone(written)


def is_public_ip(written: str) -> bool:
    """True for a public address: not private, loopback or reserved, and no number over 255."""
    try:
        return ipaddress.IPv4Address(written).is_global
    except ValueError:
        return False


def _is_phone(written: str) -> bool:
    digits = sum(map(str.isdigit, written))
    return 10 <= digits <= 15 and (written.startswith(("+", "(")) or len(re.findall(r"[ .-]", written)) >= 2)

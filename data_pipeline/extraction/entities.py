"""Character references of HTML: lookup table of the named ones, decoding of numeric ones (HTML, 13.2.5.72 to 80)."""

import html.entities

import numpy as np

from gristmill.foundation.cached_njit import cached_njit

HASH_BITS = 13  # 2,231 names
MAX_NAME_BYTES = 33  # CounterClockwiseContourIntegral;
FNV_OFFSET, FNV_PRIME, MASK_32 = 2166136261, 16777619, 0xFFFFFFFF
SEMICOLON = 59


def name_hash(name: bytes) -> int:
    """FNV-1a, 32 bits."""
    value = FNV_OFFSET
    for byte in name:
        value = ((value ^ byte) * FNV_PRIME) & MASK_32
    return value


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(slots int64[8192, 4]: hash or -1, start, length of the name, length of the text; names; texts uint8[n, 8])."""
    size = 1 << HASH_BITS
    slots = np.full((size, 4), -1, np.int64)
    names, texts = bytearray(), np.zeros((size, 8), np.uint8)
    for name, text in sorted(html.entities.html5.items()):
        key, plain = name.encode(), text.encode()
        value = name_hash(key)
        at = value & (size - 1)
        while slots[at, 0] >= 0:
            at = (at + 1) & (size - 1)
        slots[at] = value, len(names), len(key), len(plain)
        texts[at, : len(plain)] = list(plain)
        names += key
    return slots, np.frombuffer(bytes(names), np.uint8), texts


SLOTS, NAMES, TEXTS = _tables()
# Numbers 128 to 159 mean the characters of windows-1252.
_CP1252 = np.array(
    [ord(bytes([byte]).decode("cp1252", "ignore") or chr(byte)) for byte in range(128, 160)], dtype=np.int64
)


@cached_njit(nogil=True)
def decode_reference(source, at, end, out, where):
    """Decode the reference at source[at] == '&' into out[where:]. Returns (bytes read, bytes written); (0, 0) if it is
    none: the '&' is text then."""
    if at + 1 >= end:
        return 0, 0
    if source[at + 1] == 35:  # '#'
        return _number(source, at, end, out, where)
    value = np.int64(FNV_OFFSET)
    best, written, k = 0, 0, at + 1
    while k < end and k - at <= MAX_NAME_BYTES:
        byte = np.int64(source[k])
        letter = (65 <= byte <= 90) or (97 <= byte <= 122) or (48 <= byte <= 57)
        if not letter and byte != SEMICOLON:
            break
        value = ((value ^ byte) * FNV_PRIME) & MASK_32
        slot = _find(value, source, at + 1, k + 1 - at - 1)
        if slot >= 0:
            best, written = k + 1 - at, SLOTS[slot, 3]
            for j in range(written):
                out[where + j] = TEXTS[slot, j]
        k += 1
        if byte == SEMICOLON:
            break
    return best, written


@cached_njit(nogil=True)
def _find(value, source, start, length):
    at = value & ((1 << HASH_BITS) - 1)
    while SLOTS[at, 0] >= 0:
        if SLOTS[at, 0] == value and SLOTS[at, 2] == length:
            same = True
            for j in range(length):
                if NAMES[SLOTS[at, 1] + j] != source[start + j]:
                    same = False
                    break
            if same:
                return at
        at = (at + 1) & ((1 << HASH_BITS) - 1)
    return -1


@cached_njit(nogil=True)
def _number(source, at, end, out, where):
    k, code, digits = at + 2, np.int64(0), 0
    is_hex = k < end and (source[k] | 32) == 120
    if is_hex:
        k += 1
    while k < end:
        byte = np.int64(source[k])
        if 48 <= byte <= 57:
            digit = byte - 48
        elif is_hex and 97 <= (byte | 32) <= 102:
            digit = (byte | 32) - 87
        else:
            break
        code = min(code * (16 if is_hex else 10) + digit, 0x110000)
        digits += 1
        k += 1
    if digits == 0:
        return 0, 0
    if k < end and source[k] == SEMICOLON:
        k += 1
    if 128 <= code < 160:
        code = _CP1252[code - 128]
    if code == 0 or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        code = 0xFFFD
    return k - at, put_character(code, out, where)


@cached_njit(nogil=True)
def put_character(code, out, where):
    """Write the character in UTF-8; returns its bytes."""
    if code < 0x80:
        out[where] = code
        return 1
    if code < 0x800:
        out[where], out[where + 1] = 0xC0 | (code >> 6), 0x80 | (code & 63)
        return 2
    if code < 0x10000:
        out[where], out[where + 1], out[where + 2] = 0xE0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)
        return 3
    out[where], out[where + 1] = 0xF0 | (code >> 18), 0x80 | ((code >> 12) & 63)
    out[where + 2], out[where + 3] = 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)
    return 4

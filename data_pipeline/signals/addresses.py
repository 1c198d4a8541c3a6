"""Counts of URLs, e-mail and IPv4 addresses in UTF-8 bytes; signals/reference.py defines them."""

from gristmill.data_pipeline.signals.bits import BLOCK, ZERO, below, first_bit, without_first
from gristmill.data_pipeline.signals.intrinsics import bytes_within
from gristmill.foundation.cached_njit import cached_njit


@cached_njit(nogil=True)
def count_addresses(text, start, end):
    """Return the numbers of (URLs, e-mail addresses, IPv4 addresses) in text[start:end]. Reads a block behind it."""
    urls, emails, addresses = 0, 0, 0
    url_end, email_end, address_end = start, start, start
    for base in range(start, end, BLOCK):
        colon = bytes_within(text, base, 0x3A, 1) & bytes_within(text, base + 1, 0x2F, 1)
        dot = bytes_within(text, base, 0x2E, 1) & bytes_within(text, base + 1, 0x30, 10)
        marks = (colon | dot | bytes_within(text, base, 0x40, 1)) & below(end - base)
        while marks != ZERO:
            place = base + first_bit(marks)
            marks = without_first(marks)
            byte = text[place]
            if byte == 0x3A:
                if _is_url(text, url_end, place, end):
                    urls += 1
                    url_end = place + 4
            elif byte == 0x40:
                if _is_email(text, email_end, place, end):
                    emails += 1
                    email_end = place + 2
            elif place > address_end:
                stop = _ip_end(text, start, place, end)
                if stop:
                    addresses += 1
                    address_end = stop
    return urls, emails, addresses


@cached_njit(nogil=True)
def _is_email(text, free, at_sign, end):
    """Whether a character of an e-mail name is before the @, at `free` or later, and a letter or digit behind it."""
    if at_sign - 1 < free or at_sign + 1 >= end:
        return False
    return _is_mail(text[at_sign - 1]) and _is_alnum(text[at_sign + 1])


@cached_njit(nogil=True)
def _is_url(text, free, colon, end):
    """Whether http or https is before the colon, at `free` or later, and // and a character behind it."""
    if colon + 3 >= end or text[colon + 1] != 0x2F or text[colon + 2] != 0x2F:
        return False
    if text[colon + 3] == 0x20 or 0x09 <= text[colon + 3] <= 0x0D:
        return False
    letter = colon - 1
    if letter >= free and text[letter] == 0x73:
        letter -= 1
    if letter - 3 < free:
        return False
    return text[letter] == 0x70 and text[letter - 1] == 0x74 and text[letter - 2] == 0x74 and text[letter - 3] == 0x68


@cached_njit(nogil=True)
def _ip_end(text, start, dot, end):
    """End of the IPv4 address whose first dot is at `dot`; 0 if there is none."""
    first = dot
    while first > start and _is_digit(text[first - 1]):
        first -= 1
    if first == dot or dot - first > 3 or (first > start and text[first - 1] == 0x2E):
        return 0
    at = dot
    for _ in range(3):
        if at >= end or text[at] != 0x2E:
            return 0
        at += 1
        size = 0
        while at < end and _is_digit(text[at]):
            at += 1
            size += 1
        if size == 0 or size > 3:
            return 0
    return 0 if at < end and text[at] == 0x2E else at


@cached_njit(nogil=True, forceinline=True)
def _is_digit(byte):
    return 0x30 <= byte <= 0x39


@cached_njit(nogil=True, forceinline=True)
def _is_alnum(byte):
    return _is_digit(byte) or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A


@cached_njit(nogil=True, forceinline=True)
def _is_mail(byte):
    """Letters, digits and . _ % + -"""
    return _is_alnum(byte) or byte == 0x2E or byte == 0x5F or byte == 0x25 or byte == 0x2B or byte == 0x2D

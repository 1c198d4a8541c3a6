"""URLs, e-mail and IPv4 addresses in UTF-8 bytes, counted by their plainest marks."""

import numba
import numpy as np

from gristmill.data_pipeline.intrinsics import load64
from gristmill.data_pipeline.signals.bits import ZERO, equal, every, first_marked


@numba.njit(cache=True, nogil=True)
def count_addresses(text, start, end):
    """(URLs, e-mail addresses, IPv4 addresses) of text[start:end]. Eight more bytes may be read."""
    urls, emails, addresses = 0, 0, 0
    url_end, email_end, address_end = start, start, start
    at = start
    while at < end:
        group = load64(text, at)
        marks = equal(group, every(0x3A)) | equal(group, every(0x40)) | equal(group, every(0x2E))
        while marks != ZERO:
            place = at + first_marked(marks)
            marks &= marks - np.uint64(1)
            if place >= end:
                break
            byte = text[place]
            if byte == 0x3A:
                if _is_url(text, url_end, place, end):
                    urls += 1
                    url_end = place + 4
            elif byte == 0x40:
                if (
                    place - 1 >= email_end
                    and place + 1 < end
                    and _is_mail(text[place - 1])
                    and _is_alnum(text[place + 1])
                ):
                    emails += 1
                    email_end = place + 2
            elif place > address_end:
                stop = _ip_end(text, start, place, end)
                if stop:
                    addresses += 1
                    address_end = stop
        at += 8
    return urls, emails, addresses


@numba.njit(cache=True, nogil=True)
def _is_url(text, free, colon, end):
    """Whether http or https stands before the colon, at `free` or later, and // and a character behind it."""
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


@numba.njit(cache=True, nogil=True)
def _ip_end(text, start, dot, end):
    """Where the address ends whose first dot this is; 0 if there is none."""
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


@numba.njit(cache=True, nogil=True, inline="always")
def _is_digit(byte):
    return 0x30 <= byte <= 0x39


@numba.njit(cache=True, nogil=True, inline="always")
def _is_alnum(byte):
    return _is_digit(byte) or 0x41 <= byte <= 0x5A or 0x61 <= byte <= 0x7A


@numba.njit(cache=True, nogil=True, inline="always")
def _is_mail(byte):
    """Letters, digits and . _ % + -"""
    return _is_alnum(byte) or byte == 0x2E or byte == 0x5F or byte == 0x25 or byte == 0x2B or byte == 0x2D

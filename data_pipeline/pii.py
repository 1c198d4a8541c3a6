"""Personal data in texts that go into a corpus: e-mail, IP and phone numbers kept or replaced."""

import ipaddress
import re
from typing import Literal

from pydantic import Field

from gristmill.data_pipeline.config import Config

Choice = Literal["keep", "replace"]


class PiiConfig(Config):
    """What is replaced, and by what; the placeholders are reserved for it (RFC 2606, RFC 5737, +1-555-0100).

    Done when the corpus is written, after filters and deduplication, as in FineWeb: signals and similarities are of
    the text as it was. To drop a document for its addresses instead, use the filter `addresses`.
    ip leaves addresses alone that name no one: private, loopback, reserved. phone takes numbers of 10 to 15 digits
    written with a plus or with separators; it is a guess, and off unless asked for."""

    email: Choice = "replace"
    ip: Choice = "replace"
    phone: Choice = "keep"
    email_placeholder: str = Field(default="email@example.com")
    ip_placeholder: str = Field(default="192.0.2.1")
    phone_placeholder: str = Field(default="+1-555-0100")


# The local part, an @, labels with a last one of letters. Not the whole of RFC 5322: quoted parts are no addresses.
_EMAIL = re.compile(
    r"(?<![\w.+-])[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_])?@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,24}\b"
)
_IP = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)", re.ASCII)
_PHONE = re.compile(
    r"(?<![\w+.-])(?:\+\d{1,3}[ .-]?)?(?:\(\d{2,4}\)[ .-]?)?\d{2,4}(?:[ .-]\d{2,4}){1,4}(?![\w.-]\d|\w)", re.ASCII
)


def replace_pii(text: str, config: PiiConfig) -> tuple[str, int]:
    """(the text without what the config replaces, how many places were replaced).

    "mail a@b.org or 8.8.8.8" -> ("mail email@example.com or 192.0.2.1", 2)."""
    replaced = 0

    def put(placeholder: str, is_meant):
        def substitute(found: re.Match[str]) -> str:
            nonlocal replaced
            if not is_meant(found[0]):
                return found[0]
            replaced += 1
            return placeholder

        return substitute

    if config.email == "replace" and "@" in text:
        text = _EMAIL.sub(put(config.email_placeholder, lambda _: True), text)
    if config.ip == "replace" and "." in text:
        text = _IP.sub(put(config.ip_placeholder, is_public_ip), text)
    if config.phone == "replace":
        text = _PHONE.sub(put(config.phone_placeholder, _is_phone), text)
    return text, replaced


def is_public_ip(written: str) -> bool:
    """True for an address of a machine on the internet: not private, loopback, reserved, nor a number over 255."""
    try:
        return ipaddress.IPv4Address(written).is_global
    except ValueError:
        return False


def _is_phone(written: str) -> bool:
    digits = sum(map(str.isdigit, written))
    return 10 <= digits <= 15 and (written.startswith(("+", "(")) or len(re.findall(r"[ .-]", written)) >= 2)

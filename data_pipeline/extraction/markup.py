"""Attributes of tags and texts of elements, read from the bytes of a page without a tree."""

import html as html_module
import re

MAX_VALUE_CHARS = 1000

TAG_MARKS = re.compile(rb"<[^>]*>?")
_ATTRIBUTE = re.compile(rb"""([^\s/>"'=]{1,60}+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""")
_INVISIBLE = re.compile("[\u00ad\u200b\ufeff]")


def attributes_of(tag: bytes) -> dict[str, str]:
    """Name in lower case -> value; the first of each. tag: what stands between < and >, its name may be left out."""
    attributes: dict[str, str] = {}
    for name, *values in _ATTRIBUTE.findall(tag):
        attributes.setdefault(name.decode("utf-8", "replace").lower(), unescaped(next(filter(None, values), b"")))
    return attributes


def unescaped(raw: bytes) -> str:
    return html_module.unescape(raw[: 4 * MAX_VALUE_CHARS].decode("utf-8", "replace"))


def inner_text(name: bytes, after: bytes) -> str:
    """The text of an element up to its end tag. after: the page behind its start tag."""
    end = after.lower().find(b"</" + name.lower())
    return unescaped(TAG_MARKS.sub(b" ", after[:end] if end >= 0 else after))


def cleaned(value: str) -> str:
    return " ".join(_INVISIBLE.sub("", html_module.unescape(value)).split())[:MAX_VALUE_CHARS]

"""Attributes of tags and texts of elements, read from the bytes of a page without a tree; and with them the names of
authors in the text: elements for authors, links to pages about authors, and words after "by".

The rules were chosen on half of the sites of WCXB; docs/extraction.md has what each pays on that half and the other."""

import html as html_module
import itertools
import re
from collections.abc import Iterator

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


MAX_NAME_CHARS = 60  # longer texts describe the author, or hold more than the name
MAX_HINTS, MAX_TAG_BYTES, WINDOW_BYTES, MAX_TEXTS = 300, 600, 600, 6
TEXT_BYTES = 400_000  # of markup that is searched for names after "by"

_HINT = re.compile(rb"author|byline|posted-?by|written-?by|username|/(?:contributors?|writers?)/", re.IGNORECASE)
_NO_ELEMENTS = frozenset((b"meta", b"link", b"img", b"svg", b"input", b"body", b"html", b"script", b"style"))
# Kinds of elements, the most trusted first: rel="author" or a class of hAtom and most themes; a class or id with
# "author" in it; a link to /author/NAME; the class of phpBB, XenForo and others for accounts.
KINDS = ("author", "part", "path", "username")
_AUTHOR = re.compile(r"(?:^|\s)(?:author|author-?name|byline|entry-author)(?=\s|$)", re.IGNORECASE)
_PART = re.compile(r"author|byline|posted-?by|written-?by", re.IGNORECASE)
_OTHER_PART = re.compile(
    r"authori[tz]|image|img|photo|avatar|picture|icon|bio\b|title|role|social|link|desc|date|about|position|job|comment"
    r"|related|reply|quote",
    re.IGNORECASE,
)
_AUTHOR_PATH = re.compile(r"/(?:authors?|contributors?|writers?)/[^/?#]+/?(?:[?#]|$)", re.IGNORECASE)
_BY = re.compile(
    r"^(?:(?:reposted|posted|written|words|text|story|article|recipe|blog|post|published|created|submitted|started"
    r"|contributed)\s+)?(?:(?:by|von|par|por|di|av|af|door|autor|authors?)\b[:\s]*)+",
    re.IGNORECASE,
)
_NO_NAME = re.compile(
    r"author|\b(?:about|read|more|share|follow|view|all|posts?|posted|updated|published|reviewed|edited|min|comments?"
    r"|home|blog|articles?|log|sign|login|register|subscribe|click|here|see|date|photo|image|by|via|guest|admin"
    r"|anonymous|privacy|is|was|has|january|february|march|april|june"
    r"|july|august|september|october|november|december)\b|: ",
    re.IGNORECASE,
)
_LAST_NO_NAME = frozenset(("a", "an", "and", "at", "by", "for", "from", "in", "of", "on", "the", "to", "with"))
_AFTER_NAME = re.compile(r" [|\u2022\u00b7\u2013\u2014]|[|\u2022\u00b7] |,? on (?=\w+ \d)")  # Ann | Editor
_NAME_WORD = re.compile(r"[^\W\d_][\w.'\u2019-]*,?")
_SMALL_WORDS = frozenset((
    "and", "und", "et", "y", "e", "&", "the", "of", "de", "la", "le", "van", "von", "der", "den", "del", "di", "da",
    "du", "dos", "al", "bin", "ibn",
))  # fmt: skip
_NUMBER = re.compile(r"[\d,.]+k?")


def clean_author(value: str) -> str:
    """The name without "by" and an account's points, "By drat 1,655" -> "drat"; empty for addresses and numbers."""
    name = cleaned(value)
    if name.startswith(("http://", "https://", "@")) or (name.isdigit() and len(name) > 5):
        return ""
    words = _BY.sub("", name).split(" ")
    while len(words) > 1 and _NUMBER.fullmatch(words[-1]):
        words.pop()
    return " ".join(words).strip(" ,;|:\u2022\u00b7")


def bylines(html: bytes) -> Iterator[str]:
    """Names in elements for authors, the most trusted first. html: without scripts."""
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for tag, after in _hinted_tags(html):
        name, attributes = tag.split(None, 1)[0].lower(), attributes_of(tag)
        kind = None if name in _NO_ELEMENTS else _kind(name, attributes)
        if kind == "username":
            names[kind] += [text for text in texts_of(_inside(name, after))[:1] if len(text) <= MAX_NAME_CHARS]
        elif kind:
            names[kind].append(_name_in(name, after))
    for kind in KINDS:
        yield from filter(None, names[kind])


def _hinted_tags(html: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Start tags that hold a word of _HINT, and WINDOW_BYTES behind each."""
    last = -1
    for hint in itertools.islice(_HINT.finditer(html), MAX_HINTS):
        start = html.rfind(b"<", max(0, hint.start() - MAX_TAG_BYTES), hint.start())
        end = html.find(b">", hint.end(), hint.end() + MAX_TAG_BYTES)
        is_tag = html[start + 1 : start + 2].isalpha() and html.find(b">", start, hint.start()) < 0
        if start >= 0 and end >= 0 and start != last and is_tag:
            last = start
            yield html[start + 1 : end], html[end + 1 : end + 1 + WINDOW_BYTES]


def _kind(name: bytes, attributes: dict[str, str]) -> str | None:
    classes = attributes.get("class", "")
    if "author" in attributes.get("rel", "").lower().split() or _AUTHOR.search(classes):
        return "author"
    tokens = [*classes.split(), attributes.get("id", "")]
    if any(_PART.search(token) and not _OTHER_PART.search(token) for token in tokens):
        return "part"
    if name == b"a" and _AUTHOR_PATH.search(attributes.get("href", "")):
        return "path"
    return "username" if "username" in classes.lower().split() else None


def _inside(name: bytes, after: bytes) -> bytes:
    """Markup before the end tag, or before the last tag of the window."""
    end = after.lower().find(b"</" + name)
    return after[:end] if end >= 0 else _whole_texts(after)


def _whole_texts(after: bytes) -> bytes:
    return after if len(after) < WINDOW_BYTES else after[: after.rfind(b"<")]


def _name_in(name: bytes, after: bytes) -> str:
    """The text of the element up to its end tag if it is a name, else the first name in it."""
    whole = clean_author(" ".join(texts_of(_inside(name, after))))
    if is_name(whole):
        return whole
    firsts = (_AFTER_NAME.split(clean_author(text))[0] for text in texts_of(_whole_texts(after))[:MAX_TEXTS])
    return next(filter(is_name, firsts), "")


def texts_of(markup: bytes) -> list[str]:
    """Texts between tags that are not empty."""
    return [text for piece in TAG_MARKS.split(markup) if not piece.isspace() and (text := cleaned(unescaped(piece)))]


def is_name(text: str) -> bool:
    return (
        1 < len(text) <= MAX_NAME_CHARS
        and text[-1] not in "!?:"
        and "@" not in text
        and not any(map(str.isdigit, text))
        and not _NO_NAME.search(text)
        and (words := text.split(" "))[-1].lower() not in _LAST_NO_NAME
        and (len(words) == 2 or sum(word.islower() and word not in _SMALL_WORDS for word in words) < 2)
    )


def names_after_by(html: bytes) -> Iterator[str]:
    """Texts of 1 to 5 words with capitals after "by": "By Ann Lee", "Written by <a>Ann Lee</a>"."""
    texts = texts_of(html[:TEXT_BYTES])
    for text, following in itertools.pairwise([*texts, ""]):
        if by := _BY.match(text):
            name = _AFTER_NAME.split(text[by.end() :] or following)[0].strip(" ,")
            if is_name(name) and _is_capitalized(name):
                yield name


def _is_capitalized(name: str) -> bool:
    words = [word for word in name.split() if word not in _SMALL_WORDS]
    return 1 <= len(words) <= 5 and all(_NAME_WORD.fullmatch(word) and word[0].isupper() for word in words)

"""Attributes of tags and texts of elements, read from the bytes of a page without a tree; and with them the names of
authors in the text: elements for authors, links to pages about authors, words after "by", and the authors of a
forum's posts.

The rules were chosen on half of the sites of WCXB; docs/extraction.md has what each pays on that half and the other."""

import html as html_module
import itertools
import re
import urllib.parse
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import orjson

from gristmill.data_pipeline.extraction.attributes import (
    ELEMENT,
    ELEMENT_FLAGS,
    END,
    HTML_END,
    HTML_START,
    IN_QUOTE,
    PARENT,
    START,
    TAG,
    TAG_START,
)
from gristmill.data_pipeline.extraction.layout import PostAuthor
from gristmill.data_pipeline.extraction.tags import TAG_IDS

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
    for tag, at in _hinted_tags(html, _HINT, MAX_HINTS):
        after = html[at : at + WINDOW_BYTES]
        name, attributes = tag.split(None, 1)[0].lower(), attributes_of(tag)
        kind = None if name in _NO_ELEMENTS else _kind(name, attributes)
        if kind == "username":
            names[kind] += [text for text in texts_of(_inside(name, after))[:1] if len(text) <= MAX_NAME_CHARS]
        elif kind:
            names[kind].append(_name_in(name, after))
    for kind in KINDS:
        yield from filter(None, names[kind])


def _hinted_tags(html: bytes, hints: re.Pattern[bytes], max_hints: int) -> Iterator[tuple[bytes, int]]:
    """Start tags that hold a hint, and the byte behind each."""
    last = -1
    for hint in itertools.islice(hints.finditer(html), max_hints):
        start = html.rfind(b"<", max(0, hint.start() - MAX_TAG_BYTES), hint.start())
        end = html.find(b">", hint.end(), hint.end() + MAX_TAG_BYTES)
        is_tag = html[start + 1 : start + 2].isalpha() and html.find(b">", start, hint.start()) < 0
        if start >= 0 and end >= 0 and start != last and is_tag:
            last = start
            yield html[start + 1 : end], end + 1


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


# Authors of the posts of a page.

MAX_POST_HINTS, AUTHOR_WINDOW_BYTES, MAX_AUTHOR_BYTES = 50_000, 1000, 60
MAX_LINE_BYTES = 100  # of a kept block with a name; longer ones are prose in which somebody is mentioned
MAX_ADDED_BYTES = 4  # "by " or a sign beside the name in its block
_POST_HINT = re.compile(rb"author|creator|user[-_]?name|poster|nick|hnuser|postleft", re.IGNORECASE)
_POST_TOKEN = re.compile(
    r"(?:.{0,30}[-_])?(?:[a-z]{0,6}user[-_]?name|(?:post|comment)?author|poster|nick(?:name)?|creator|hnuser"
    r"|postleft)(?:[-_]?(?:name|link|coloured|info|information))?[-_\d]{0,12}",
    re.IGNORECASE,
)
_PIECE = re.compile(rb"<(/?)([a-zA-Z][\w-]{0,20})[^<>]{0,600}>|[^<]+")
_NO_AUTHOR = re.compile(  # words beside names, dates, and texts without a letter
    r"(?:(?:posted|written|started|created|asked|answered|by|from|von|par|por|autor|auteur|author|user|re|quote|joined"
    r"|edited|last|post|reply|op|admin|moderator|guest|online|offline|thread|starter|username|advertisement)\b[\s:]*)+|[\W\d_]*"
    r"|\d{4}-\d\d-\d\dT.{0,20}|[^\W\d_]{3,9}\.? \d{1,2},? \d{4}\b.{0,20}",
    re.IGNORECASE,
)
# Names of authors that a page declares: in attributes (GameFAQs, XenForo), in microdata beside the text, in JSON-LD.
_DECLARED = re.compile(
    rb"""\sdata-(?:author|user-?name)\s*=\s*["']?([^"'<>]{2,60})["'\s>]"""
    rb"""|itemprop=["']?author\b[^<>]{0,300}>\s*+(?:<(?!meta)[^<>]{0,300}>\s*+){0,6}"""
    rb"""<meta\s(?=[^<>]{0,100}itemprop=["']?name\b)[^<>]{0,200}?content=["']([^"'<>]{2,60})["']"""
    rb"""|"author"\s*+:\s*+\[?+\s*+\{[^{}]{0,300}?"name"\s*:\s*("(?:[^"\\]|\\.){2,100}")"""
)
_ACCOUNT = re.compile(  # the link to an account; its name is the text too
    rb"""<a\s[^<>]{0,300}?href\s*=\s*["']?[^"'<>\s]{0,100}/(?:(?:u|users?|members?|profiles?|people)/|~)"""
    rb"""([^"'<>\s/?#]{2,60})[^<>]{0,300}>""",
    re.IGNORECASE,
)
_TEXT = re.compile(rb">([^<>]{2,100})(?=<)")
_EDGES = " ,;:|\u2022\u00b7"
_VOID = frozenset((b"img", b"br", b"meta", b"link", b"input", b"hr", b"wbr", b"source"))
DECLARED = 3  # rank
_ROOTS = (TAG_IDS["html"], TAG_IDS["body"])


class _Mark(NamedTuple):
    """A name in an element for authors, and the block that holds it. rank: 0 for properties of schema.org, 1 for
    rel="author", 2 for classes and ids, DECLARED for a text before the post that is a name declared elsewhere."""

    rank: int
    block: int
    name: str
    html_start: int
    html_end: int


def post_authors(
    html: bytes, elements: np.ndarray, blocks: np.ndarray, kept: np.ndarray
) -> tuple[list[PostAuthor], np.ndarray]:
    """(the authors of the kept blocks' posts, the kept blocks without those that are such a name and nothing else).

    A post is the innermost element around a block that holds a name and has a sibling of its tag that holds one, or the
    tag and first class of such an element: a reply may stand alone in a post. Its author is the first name of the best
    rank in it and in no post inside of it. It is not written twice: a post has no author where the name's block is kept
    and holds more. On a page without any such post, texts that are a declared name stand for names; without these too,
    where all names are one, before the text, its post is the innermost element around both. The time is linear in the
    page's bytes."""
    marks = _author_marks(html, elements, blocks, kept)
    of_names = [int(blocks[mark.block, ELEMENT]) for mark in marks]
    if posts := _repeated(html, elements, of_names):
        authors, without = _authors_of_posts(marks, posts, elements, blocks, kept)
        if authors:
            return authors, without
    declared = _declared_marks(html, elements, blocks, kept)
    of_names = [int(blocks[mark.block, ELEMENT]) for mark in declared]
    authors, without = _authors_of_posts(declared, _repeated(html, elements, of_names), elements, blocks, kept)
    if not authors and len({mark.name for mark in marks}) == 1:
        return _authors_of_posts(marks, _single_post(marks[0], elements, blocks, kept), elements, blocks, kept)
    return authors, without


def _authors_of_posts(
    marks: list[_Mark], posts: set[int], elements: np.ndarray, blocks: np.ndarray, kept: np.ndarray
) -> tuple[list[PostAuthor], np.ndarray]:
    """posts: elements that may be one."""
    parents = elements[:, PARENT].tolist()
    chosen = np.flatnonzero(kept).tolist()
    element_of = blocks[:, ELEMENT].tolist()
    names = {mark.block for mark in marks if _is_name_alone(mark, blocks)}
    places = _nearest([element_of[block] for block in chosen], posts, parents)
    first: dict[int, int] = {}  # of each post, its first block that is not a name
    for block, post in zip(chosen, places, strict=True):
        if post and block not in names:
            first.setdefault(post, block)
    best: dict[int, _Mark] = {}
    for mark, post in zip(marks, _nearest([element_of[mark.block] for mark in marks], first, parents), strict=True):
        is_before = mark.rank < DECLARED or (post and mark.html_start < blocks[first[post], HTML_START])
        if post and is_before and (post not in best or mark.rank < best[post].rank):
            best[post] = mark
    best = {post: mark for post, mark in best.items() if not kept[mark.block] or mark.block in names}
    kept = kept.copy()
    kept[[mark.block for mark in best.values()]] = False
    number = np.cumsum(kept) - 1
    authors = [
        PostAuthor(int(number[first[post]]), post, mark.name, mark.html_start, mark.html_end)
        for post, mark in best.items()
    ]
    return authors, kept


def _is_name_alone(mark: _Mark, blocks: np.ndarray) -> bool:
    size = int(blocks[mark.block, END] - blocks[mark.block, START])
    return size <= len(mark.name.encode()) + MAX_ADDED_BYTES


def _repeated(html: bytes, elements: np.ndarray, of_names: list[int]) -> set[int]:
    """Elements that hold a name, and of whose siblings of the same tag one does too, or that have the tag and first
    class of one of these. of_names: the elements of the names' blocks."""
    parents, tags, starts = (elements[:, column].tolist() for column in (PARENT, TAG, TAG_START))
    siblings: dict[tuple[int, int], list[int]] = {}
    with_name: set[int] = set()
    for element in of_names:
        while element and element not in with_name:
            with_name.add(element)
            siblings.setdefault((parents[element], tags[element]), []).append(element)
            element = parents[element]
    repeated = {element for group in siblings.values() if len(group) > 1 for element in group}
    if not repeated:
        return repeated
    classes = {element: (tags[element], _first_class(html, starts[element])) for element in with_name}
    of_posts = {classes[element] for element in repeated if classes[element][1]}
    return repeated | {element for element in with_name if classes[element] in of_posts}


def _first_class(html: bytes, at: int) -> str:
    """The first class of the element whose start tag begins at this byte; empty without one, or with a digit in it."""
    tag = html[at + 1 : html.find(b">", at, at + MAX_TAG_BYTES)] if html.startswith(b"<", at) else b""
    first = next(iter(attributes_of(tag).get("class", "").split()), "")
    return "" if any(map(str.isdigit, first)) else first


def _single_post(mark: _Mark, elements: np.ndarray, blocks: np.ndarray, kept: np.ndarray) -> set[int]:
    """The innermost element around the name and a kept block, inside of <body>, if the name stands before it."""
    parents, tags = elements[:, PARENT].tolist(), elements[:, TAG].tolist()
    first: dict[int, int] = {}  # of each element around kept blocks, the first of these
    for block in np.flatnonzero(kept).tolist():
        element = int(blocks[block, ELEMENT])
        while element and element not in first:
            first[element] = block
            element = parents[element]
    element = int(blocks[mark.block, ELEMENT])
    while element and element not in first:
        element = parents[element]
    is_post = element and tags[element] not in _ROOTS and mark.html_start < blocks[first[element], HTML_START]
    return {element} if is_post else set()


def _nearest(elements: list[int], wanted: Collection[int], parents: list[int]) -> list[int]:
    """The nearest wanted element around each, or itself; 0 without one."""
    known = {0: 0} | {element: element for element in wanted}
    for element in elements:
        chain = []
        while element not in known:
            chain.append(element)
            element = parents[element]
        known.update(dict.fromkeys(chain, known[element]))
    return [known[element] for element in elements]


def _author_marks(html: bytes, elements: np.ndarray, blocks: np.ndarray, kept: np.ndarray) -> list[_Mark]:
    """Names in elements for authors outside of quotes and of long kept blocks, in the order of the page."""
    texts = []
    for tag, at in _hinted_tags(html, _POST_HINT, MAX_POST_HINTS):
        rank = _post_rank(attributes_of(tag))
        if rank is not None and (text := _first_text(html, at)) is not None:
            texts.append((rank, *text))
    return _marks_in_blocks(texts, elements, blocks, kept)


def _marks_in_blocks(
    texts: list[tuple[int, str, int, int]], elements: np.ndarray, blocks: np.ndarray, kept: np.ndarray
) -> list[_Mark]:
    """Those of (rank, name, its first byte, the byte behind it) that stand in blocks outside of quotes and of prose."""
    marks: list[_Mark] = []
    ends = blocks[:, HTML_END].tolist()
    is_in_quote = elements[blocks[:, ELEMENT], ELEMENT_FLAGS] & IN_QUOTE != 0
    is_prose = kept & (blocks[:, END] - blocks[:, START] > MAX_LINE_BYTES)
    for rank, name, start, end in texts:
        block = bisect_right(ends, start)
        if block < len(blocks) and blocks[block, HTML_START] <= start and not (is_in_quote[block] or is_prose[block]):
            marks.append(_Mark(rank, block, name, start, end))
    return marks


def _declared_marks(html: bytes, elements: np.ndarray, blocks: np.ndarray, kept: np.ndarray) -> list[_Mark]:
    """Texts between two tags that are a name which the page declares for an author, or links to an account of it."""
    names = set()
    for declared in _DECLARED.finditer(html):
        raw = declared[1] or declared[2]
        with suppress(orjson.JSONDecodeError):
            names.add(cleaned(unescaped(raw) if raw else orjson.loads(declared[3])))
    for link in _ACCOUNT.finditer(html):
        text = _first_text(html, link.end())
        account = urllib.parse.unquote(link[1].decode("utf-8", "replace")).partition("@")[0]  # of a server in Lemmy
        if text and _letters(text[0].partition(" (")[0]) == _letters(account):  # "Ann (she/her)"
            names.add(text[0])
    names = {name for name in names if not _NO_AUTHOR.fullmatch(name)}
    texts = []
    for piece in _TEXT.finditer(html) if names else ():
        is_mention = html.endswith(b"@", 0, html.rfind(b"<", 0, piece.start() + 1))
        if not is_mention and (name := cleaned(unescaped(piece[1])).strip(_EDGES)) in names:
            texts.append((DECLARED, name, *_bounds(piece[1], name, piece.start(1))))
    return _marks_in_blocks(texts, elements, blocks, kept)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def _bounds(raw: bytes, name: str, at: int) -> tuple[int, int]:
    """Where the name stands in the raw text at this byte; the text without spaces around it if it is escaped."""
    inside = raw.find(name.encode())
    if inside >= 0:
        return at + inside, at + inside + len(name.encode())
    start = at + raw.find(raw.strip())
    return start, start + len(raw.strip())


def _post_rank(attributes: dict[str, str]) -> int | None:
    if not {"author", "creator"}.isdisjoint(attributes.get("itemprop", "").lower().split()):
        return 0
    if "author" in attributes.get("rel", "").lower().split():
        return 1
    tokens = [*attributes.get("class", "").split(), attributes.get("id", "")]
    return 2 if any(map(_POST_TOKEN.fullmatch, tokens)) else None


def _first_text(html: bytes, at: int) -> tuple[str, int, int] | None:
    """(name, its first byte, the byte behind it): the first text in the element whose start tag ends at this byte that
    is not a word such as "by"."""
    depth, end = 0, at + AUTHOR_WINDOW_BYTES
    for piece in _PIECE.finditer(html, at, end):
        if piece[2] is not None:
            depth += -1 if piece[1] else piece[2].lower() not in _VOID
            if depth < 0:
                return None
            continue
        name = _BY.sub("", cleaned(unescaped(piece[0]))).strip(_EDGES + "@")
        if len(name) > 1 and not _NO_AUTHOR.fullmatch(name):  # one letter stands for a picture
            if len(name.encode()) > MAX_AUTHOR_BYTES or piece.end() == end:
                return None
            return name, *_bounds(piece[0], name, piece.start())
    return None

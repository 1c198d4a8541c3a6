"""Main text that a page carries in its data and shows by a script: JSON-LD, and Discourse's preloaded topics; and the
articles that JSON-LD describes.

Nothing is run or fetched. Only strings of known names are taken: on WCXB's development pages .97 of the words below
`articleBody` and .91 of those below `text` in JSON-LD are annotated as main text, but .52 of those below `content` in
other JSON of a page (docs/extraction.md)."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from html import unescape
from itertools import accumulate, islice
from typing import Any, NamedTuple

import orjson

from gristmill.data_pipeline.extraction.attributes import END, START
from gristmill.data_pipeline.extraction.layout import LayoutOptions, PageSpan, layout_with_spans
from gristmill.data_pipeline.extraction.page import NO_TOKENS, read_page, without_marks

# Of the main text that the page shows and of what its data adds: below it trafilatura looks into JSON-LD too
# (MIN_EXTRACTED_SIZE of its settings.cfg).
MIN_CHARACTERS = 250

# Types whose description is main text: of products .92 of its words are annotated, of organizations and persons half.
DESCRIBED = ("Product", "ProductGroup", "JobPosting")
MAX_STRINGS = 10_000  # of a script
MAX_TAGS = 100_000  # of all strings; data of more is left out

_SCRIPT = re.compile(rb"<script\b[^<>]{0,300}?application/ld\+json[^<>]{0,300}+>", re.IGNORECASE)
_SCRIPT_END = re.compile(rb"</script", re.IGNORECASE)
_STRING = rb'\s*+:\s*+"((?:[^"\\]++|\\.)*+)"'
_TEXTS = re.compile(
    rb'"(?:articleBody|text)"' + _STRING + rb'|"@type"\s*+:\s*+"Question"\s*+,\s*+"name"' + _STRING, re.DOTALL
)
_DESCRIPTIONS = re.compile(rb'"description"' + _STRING, re.DOTALL)
_PRELOADED = re.compile(rb"""\bdata-preloaded=(?:"([^"]*+)"|'([^']*+)')""")
_ESCAPED_TAG = re.compile(r"&lt;/?(?:p|br|div|ul|ol|li|h[1-6]|strong|em|span)\b", re.IGNORECASE)
_BLOCK_TAG = re.compile(r"<(?:p|br|div|ul|ol|li|h[1-6]|table|pre|blockquote)\b", re.IGNORECASE)
_SEPARATOR = b"</pre><div></div>"


class _Embedded(NamedTuple):
    """html: a string of the page's data. start, end: the bytes of the page that hold it, as they are escaped there."""

    html: str
    start: int
    end: int


def embedded_text(html: bytes, options: LayoutOptions) -> tuple[str, list[PageSpan]] | None:
    """(the main text of the page's data, its spans), or None if there are not MIN_CHARACTERS. html: UTF-8.

    A span names the bytes of the string that its block stands in, escapes and tags with it; of a Discourse topic, the
    bytes of the whole attribute. The time is linear in the page's bytes."""
    strings = _discourse_posts(html) or _json_ld_strings(html)
    parts = [string.html.encode("utf-8", "replace") + _SEPARATOR for string in strings]
    starts = [0, *accumulate(map(len, parts))]
    fragment = b"".join(parts)
    if fragment.count(b"<") > MAX_TAGS:
        return None
    page = without_marks(read_page(fragment, NO_TOKENS))
    text, spans = layout_with_spans(page, page.blocks[:, START] < page.blocks[:, END], options)
    if len(text) < MIN_CHARACTERS:
        return None
    sources = [strings[bisect_right(starts, span.html_start) - 1] for span in spans]
    return text, [
        span._replace(html_start=source.start, html_end=source.end) for span, source in zip(spans, sources, strict=True)
    ]


def _json_ld_strings(html: bytes) -> list[_Embedded]:
    """Bodies, posts, comments and answers in their order; without any, the descriptions of products and jobs."""
    scripts = list(_json_ld(html)) if b"ld+json" in html else []
    strings = {string.html: string for bounds in scripts for string in _strings(html, bounds, _TEXTS)}
    if not strings:
        for start, end in scripts:
            wanted = _described(_parsed(html[start:end]))
            described = _strings(html, (start, end), _DESCRIPTIONS) if wanted else ()
            strings |= {string.html: string for string in described if string.html in wanted}
    return list(strings.values())


def _described(value: Any) -> set[str]:
    """Descriptions of the things of DESCRIBED types inside parsed JSON-LD, as HTML."""
    descriptions, stack = set(), [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if str(value.get("@type")) in DESCRIBED and isinstance(value.get("description"), str):
                descriptions.add(_markup(value["description"]))
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return descriptions


def _json_ld(html: bytes) -> Iterator[tuple[int, int]]:
    """Bounds of the contents of JSON-LD scripts."""
    at = 0
    while (start := _SCRIPT.search(html, at)) and (end := _SCRIPT_END.search(html, start.end())):
        yield start.end(), end.start()
        at = end.end()


def _strings(html: bytes, bounds: tuple[int, int], names: re.Pattern[bytes]) -> Iterator[_Embedded]:
    for match in islice(names.finditer(html, *bounds), MAX_STRINGS):
        which = match.lastindex or 1
        try:
            # not orjson: line ends inside strings are common, and no harm
            value = json.loads(b'"' + match[which] + b'"', strict=False)
        except ValueError:
            continue
        yield _Embedded(_markup(value), *match.span(which))


def _markup(value: str) -> str:
    """A string as HTML: escaped tags unescaped, lines without any tags of blocks as paragraphs."""
    if _ESCAPED_TAG.search(value):
        value = unescape(value)
    return value if _BLOCK_TAG.search(value) else value.replace("\n", "<p>")


def _discourse_posts(html: bytes) -> list[_Embedded]:
    match = _PRELOADED.search(html) if b"data-preloaded" in html else None
    if match is None:
        return []
    which = match.lastindex or 1
    preloaded = _parsed(unescape(match[which].decode("utf-8", "replace")))
    posts = []
    for name, value in preloaded.items() if isinstance(preloaded, dict) else ():
        if name.startswith("topic_") and isinstance(value, str):
            posts += _items(_entry(_entry(_parsed(value), "post_stream"), "posts"))
    bodies = [_entry(post, "cooked") for post in posts]
    return [_Embedded(body, *match.span(which)) for body in bodies if isinstance(body, str)]


def _entry(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parsed(text: str | bytes) -> Any:
    """The value of the JSON, also with line ends inside of strings; None if it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        with suppress(ValueError, RecursionError):
            return json.loads(text if isinstance(text, str) else text.decode("utf-8", "replace"), strict=False)
    return None


# Articles in the JSON-LD of a page (schema.org, Article and its kin).

MAX_JSON_BYTES, MAX_JSON_DEPTH = 500_000, 20
_JSON_LD = re.compile(rb"<script[^>]{0,300}application/ld\+json[^>]{0,300}>", re.IGNORECASE)
ARTICLE_TYPES = frozenset((
    "Article", "NewsArticle", "BlogPosting", "Report", "ScholarlyArticle", "TechArticle", "WebPage", "Recipe", "Review",
    "DiscussionForumPosting", "SocialMediaPosting", "Question", "OpinionNewsArticle", "LiveBlogPosting", "HowTo",
))  # fmt: skip


def articles_in(html: bytes) -> Iterator[Mapping[str, Any]]:
    """Objects of ARTICLE_TYPES in the page's JSON-LD, those of articles before those of the page."""
    articles: list[Mapping[str, Any]] = []
    start = _JSON_LD.search(html)
    while start and (end := html.find(b"</script", start.end())) >= 0:
        if end - start.end() <= MAX_JSON_BYTES:
            articles += _objects(_parsed(html[start.end() : end]), 0)
        start = _JSON_LD.search(html, end)
    yield from sorted(articles, key=lambda article: "WebPage" in str(article.get("@type")))


def _objects(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if depth > MAX_JSON_DEPTH:
        return
    if isinstance(value, list):
        for member in value:
            yield from _objects(member, depth + 1)
    elif isinstance(value, dict):
        types = value.get("@type")
        if ARTICLE_TYPES & set(map(str, types if isinstance(types, list) else [types])):
            yield value
        for key in ("@graph", "mainEntity"):
            yield from _objects(value.get(key), depth + 1)


def text_of(value: Any, depth: int = 0) -> str:
    """A JSON-LD value as text: itself, the name of an object, or those of a list."""
    if depth > MAX_JSON_DEPTH:
        return ""
    if isinstance(value, dict):
        return text_of(value.get("name") or value.get("alternateName"), depth + 1)
    if isinstance(value, list):
        return "; ".join(filter(None, (text_of(part, depth + 1) for part in value[:20])))
    return value if isinstance(value, str) else ""

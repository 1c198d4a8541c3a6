"""Articles in the JSON-LD of a page (schema.org, Article and its kin)."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import orjson

MAX_JSON_BYTES, MAX_JSON_DEPTH = 500_000, 20
_JSON_LD = re.compile(rb"<script[^>]{0,300}application/ld\+json[^>]{0,300}>", re.IGNORECASE)
ARTICLE_TYPES = frozenset(
    (
        "Article",
        "NewsArticle",
        "BlogPosting",
        "Report",
        "ScholarlyArticle",
        "TechArticle",
        "WebPage",
        "Recipe",
        "Review",
    )
)


def articles_in(html: bytes) -> Iterator[Mapping[str, Any]]:
    """Objects of ARTICLE_TYPES in the page's JSON-LD, those of articles before those of the page."""
    found: list[Mapping[str, Any]] = []
    start = _JSON_LD.search(html)
    while start and (end := html.find(b"</script", start.end())) >= 0:
        if end - start.end() <= MAX_JSON_BYTES:
            with suppress(orjson.JSONDecodeError):
                found += _objects(orjson.loads(html[start.end() : end]), 0)
        start = _JSON_LD.search(html, end)
    yield from sorted(found, key=lambda each: "WebPage" in str(each.get("@type")))


def _objects(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if depth > MAX_JSON_DEPTH:
        return
    if isinstance(value, list):
        for each in value:
            yield from _objects(each, depth + 1)
    elif isinstance(value, dict):
        types = value.get("@type")
        if ARTICLE_TYPES & set(map(str, types if isinstance(types, list) else [types])):
            yield value
        yield from _objects(value.get("@graph"), depth + 1)


def text_of(value: Any, depth: int = 0) -> str:
    """A JSON-LD value as text: itself, the name of an object, or those of a list."""
    if depth > MAX_JSON_DEPTH:
        return ""
    if isinstance(value, dict):
        return text_of(value.get("name") or value.get("alternateName"), depth + 1)
    if isinstance(value, list):
        return "; ".join(filter(None, (text_of(one, depth + 1) for one in value[:20])))
    return value if isinstance(value, str) else ""

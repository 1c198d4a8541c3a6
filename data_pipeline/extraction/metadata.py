"""Metadata of a page: title, date, author and language, and the headings and links of its main text.

JSON-LD is preferred to meta elements (Open Graph, Dublin Core, article:*, citation_*), and these to microdata."""

import html as html_module
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from gristmill.data_pipeline.extraction.blocks_config import MetadataField
from gristmill.data_pipeline.extraction.page import Page
from gristmill.data_pipeline.extraction.page_arrays import (
    ADDRESS_END,
    ADDRESS_START,
    ELEMENT,
    END,
    LINK_BLOCK,
    START,
    TAG,
)
from gristmill.data_pipeline.extraction.tags import TAG_IDS

MAX_VALUE_CHARS, MAX_ENTRIES, MAX_JSON_BYTES, MAX_JSON_DEPTH = 1000, 1000, 500_000, 20

_META = re.compile(rb"<meta\s([^>]{0,1000})>", re.IGNORECASE)
_ATTRIBUTE = re.compile(rb"""([^\s/>"'=]{1,60}+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>"']+))""")
_JSON_LD = re.compile(rb"<script[^>]{0,300}application/ld\+json[^>]{0,300}>", re.IGNORECASE)
_ITEM = re.compile(
    rb"<(\w+)\s[^>]{0,300}?itemprop\s*=\s*[\"']?(headline|datePublished|author)\b[^>]{0,300}>([^<]{0,200})",
    re.IGNORECASE,
)
_TIME = re.compile(rb"<time\s[^>]{0,300}?datetime\s*=\s*[\"']?([0-9T:+.Z -]{8,40})", re.IGNORECASE)
_HTML = re.compile(rb"<html\s([^>]{0,1000})>", re.IGNORECASE)
_TITLE = re.compile(rb"<title[^>]{0,500}>(.{0,4000}?)</title", re.IGNORECASE | re.DOTALL)
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*")
_SEPARATOR = re.compile(r" [|\u00bb\u2013\u2014\u00b7-] ")
ARTICLE_TYPES = frozenset(
    [
        "Article",
        "NewsArticle",
        "BlogPosting",
        "Report",
        "ScholarlyArticle",
        "TechArticle",
        "WebPage",
        "Recipe",
        "Review",
    ]
)
META_NAMES: dict[str, tuple[str, ...]] = {
    "title": ("og:title", "twitter:title", "dc.title", "citation_title", "headline"),
    "date": (
        "article:published_time", "og:article:published_time", "datepublished", "date", "dc.date", "dc.date.issued",
        "dcterms.created", "citation_publication_date", "parsely-pub-date", "sailthru.date", "pubdate",
    ),
    "author": ("author", "article:author", "dc.creator", "citation_author", "parsely-author", "sailthru.author"),
    "language": ("og:locale", "content-language", "dc.language", "language"),
}  # fmt: skip
JSON_NAMES = {"title": "headline", "date": "datePublished", "author": "author", "language": "inLanguage"}
ITEM_NAMES = {"title": b"headline", "date": b"datepublished", "author": b"author"}
HEADINGS = {TAG_IDS[f"h{level}"]: level for level in range(1, 7)}


def page_metadata(html: bytes, page: Page, kept: np.ndarray, fields: tuple[MetadataField, ...]) -> dict[str, Any]:
    """The fields that the page gives. html: UTF-8. kept: bool[B], the blocks of the main text.

    date: YYYY-MM-DD. headings: [level, text]. links: addresses as they stand in the page. Values are cut off at
    MAX_VALUE_CHARS, lists at MAX_ENTRIES."""
    metas = _metas(html)
    articles = list(_articles(html))
    found: dict[str, Any] = {}
    for field in fields:
        value: Any
        if field == "headings":
            value = _headings(page, kept)
        elif field == "links":
            value = _links(html, page, kept)
        else:
            value = next(filter(None, map(_CLEAN[field], _candidates(field, html, metas, articles))), None)
        if value:
            found[field] = value
    return found


def _candidates(field: str, html: bytes, metas: Mapping[str, str], articles: list[Mapping[str, Any]]) -> Iterator[str]:
    """Values of the field, the most trusted first."""
    if field == "language" and (tag := _HTML.search(html)):
        attributes = _attributes(tag[1])
        yield attributes.get("lang", "") or attributes.get("xml:lang", "")
    for article in articles:
        yield _name(article.get(JSON_NAMES[field]))
    for name in META_NAMES[field]:
        yield metas.get(name, "")
    for item in _ITEM.finditer(html):
        if item[2].lower() == ITEM_NAMES.get(field):
            attributes = _attributes(item[0])
            yield attributes.get("content") or attributes.get("datetime") or _text(item[3])
    if field == "date" and (time := _TIME.search(html)):
        yield _text(time[1])
    if field == "title" and (title := _TITLE.search(html)):
        yield max(_SEPARATOR.split(_clean(_text(title[1]))), key=len)


def _metas(html: bytes) -> dict[str, str]:
    """Name, property, itemprop or http-equiv in lower case -> content; the first of each."""
    found: dict[str, str] = {}
    for meta in _META.finditer(html):
        attributes = _attributes(meta[1])
        for key in ("property", "name", "itemprop", "http-equiv"):
            if key in attributes and "content" in attributes:
                found.setdefault(attributes[key].lower(), attributes["content"])
    return found


def _attributes(tag: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, *values in _ATTRIBUTE.findall(tag):
        found.setdefault(name.decode("utf-8", "replace").lower(), _text(next(filter(None, values), b"")))
    return found


def _articles(html: bytes) -> Iterator[Mapping[str, Any]]:
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


def _name(value: Any) -> str:
    """A JSON-LD value as text: itself, the name of an object, or those of a list."""
    if isinstance(value, dict):
        return _name(value.get("name") or value.get("alternateName"))
    if isinstance(value, list):
        return "; ".join(filter(None, map(_name, value[:20])))
    return value if isinstance(value, str) else ""


def _text(raw: bytes) -> str:
    return html_module.unescape(raw[: 4 * MAX_VALUE_CHARS].decode("utf-8", "replace"))


def _clean(value: str) -> str:
    return " ".join(html_module.unescape(value).split())[:MAX_VALUE_CHARS]


def _clean_author(value: str) -> str:
    return "" if value.startswith(("http://", "https://", "@")) else _clean(value)


def _clean_date(value: str) -> str:
    found = _DATE.search(value)
    return found[0] if found and "01" <= found[2] <= "12" and "01" <= found[3] <= "31" else ""


def _clean_language(value: str) -> str:
    """The two or three letters in front: de_AT is de."""
    return value[:3].strip("-_").lower() if _LANGUAGE.fullmatch(value.strip()) else ""


_CLEAN = {"title": _clean, "date": _clean_date, "author": _clean_author, "language": _clean_language}


def _headings(page: Page, kept: np.ndarray) -> list[list[Any]]:
    found: list[list[Any]] = []
    text = page.text.tobytes()
    tags = page.elements[page.blocks[:, ELEMENT], TAG]
    for k in np.flatnonzero(kept & np.isin(tags, list(HEADINGS)))[:MAX_ENTRIES].tolist():
        title = text[page.blocks[k, START] : page.blocks[k, END]].decode("utf-8", "replace")
        found.append([HEADINGS[int(tags[k])], _clean(title)])
    return found


def _links(html: bytes, page: Page, kept: np.ndarray) -> list[str]:
    inside = page.links[page.links[:, LINK_BLOCK] < len(kept)]
    inside = inside[kept[inside[:, LINK_BLOCK]]]
    addresses = [_clean(_text(html[row[ADDRESS_START] : row[ADDRESS_END]])) for row in inside.tolist()]
    return list(dict.fromkeys(filter(None, addresses)))[:MAX_ENTRIES]

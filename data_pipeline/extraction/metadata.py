"""Metadata of a page: title, date, author, language, address and licence, and headings and links of its main text.

JSON-LD is preferred to meta elements (Open Graph, Dublin Core, article:*, citation_*), and these to microdata."""

import html as html_module
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from gristmill.data_pipeline.extraction.attributes import (
    ADDRESS_END,
    ADDRESS_START,
    ELEMENT,
    END,
    LINK_BLOCK,
    START,
    TAG,
)
from gristmill.data_pipeline.extraction.blocks_config import MetadataField
from gristmill.data_pipeline.extraction.bylines import (
    TAG_MARKS,
    attributes_of,
    bylines,
    clean_author,
    cleaned,
    inner_text,
    names_after_by,
    unescaped,
)
from gristmill.data_pipeline.extraction.embedded_text import articles_in, text_of
from gristmill.data_pipeline.extraction.page import Page
from gristmill.data_pipeline.extraction.tags import TAG_IDS

MAX_ENTRIES = 1000

MAX_DATE_CHARS = 60  # of a meta element in words
MIN_YEAR = 1991  # of the first web page; templates give 0001-01-01 and 1970-01-01
_META = re.compile(rb"""<meta\s((?:[^>"']++|"[^"]{0,3000}+"|'[^']{0,3000}+')*+)""", re.IGNORECASE)
_ITEM = re.compile(
    rb"<(\w+)\s[^>]{0,300}?itemprop\s*=\s*[\"']?(headline|datePublished|dateCreated|author)\b[^>]{0,300}>(.{0,300})",
    re.IGNORECASE | re.DOTALL,
)
_DATETIME = re.compile(rb"\sdatetime\s*=\s*[\"']?(\d{4}-\d\d-\d\d)", re.IGNORECASE)  # of <time> and elements of its kin
_ABBREVIATION = re.compile(rb"<abbr\s[^>]{0,300}?title\s*=\s*[\"']?(\d{4}-\d\d-\d\d)", re.IGNORECASE)
_CANONICAL = re.compile(
    rb"<link\s(?=[^>]{0,500}rel=[\"']?canonical)[^>]{0,500}?href\s*=\s*[\"']?([^\"'>\s]{1,2000})", re.IGNORECASE
)
_LINK = re.compile(rb"<(?:a|link)\s((?:[^>\"']++|\"[^\"]{0,3000}+\"|'[^']{0,3000}+')*+)", re.IGNORECASE)
_CREATIVE_COMMONS = re.compile(
    r"\bcreativecommons\.org/(?:licenses/(?P<terms>by(?:-(?:nc|nd|sa))*)|publicdomain/(?P<tool>zero|mark))"
    r"(?:/(?P<version>\d\.\d)(?:/(?P<place>[a-z]{2})\b(?!\.))?)?",
    re.IGNORECASE,
)
_HTML = re.compile(rb"<html\s([^>]{0,1000})>", re.IGNORECASE)
_TITLE = re.compile(rb"<title[^>]{0,500}>(.{0,4000}?)</title", re.IGNORECASE | re.DOTALL)
_SCRIPT = re.compile(rb"<(script|style)[\s>]")
_DATE = re.compile(r"(?<!\d)(\d{4})([-/.]?)(0[1-9]|1[0-2])\2(0[1-9]|[12]\d|3[01])(?!\d)")
_DATE_IN_PATH = re.compile(r"/(\d{4})[-/](0[1-9]|1[0-2])[-/](0[1-9]|[12]\d|3[01])(?!\d)")
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*")
_SEPARATOR = re.compile(r" [|\u00bb\u2013\u2014\u00b7-] ")
_WORD = re.compile(r"\w+")
META_NAMES: dict[str, tuple[str, ...]] = {
    "title": ("og:title", "twitter:title", "dc.title", "citation_title", "headline"),
    "date": (
        "article:published_time", "og:article:published_time", "article:published", "og:published_time",
        "datepublished", "date", "dc.date", "dc.date.issued", "dc.date.created", "dcterms.date", "dcterms.issued",
        "dcterms.created", "citation_publication_date", "parsely-pub-date", "sailthru.date", "pubdate", "publish_date",
        "publish-date", "publishdate", "publication_date", "publication-date", "date_published", "datecreated",
        "published-date", "published", "cxenseparse:recs:publishtime", "ms.date",  # the last: learn.microsoft.com
    ),
    "author": ("author", "article:author", "dc.creator", "citation_author", "parsely-author", "sailthru.author"),
    "language": ("og:locale", "content-language", "dc.language", "language"),
    "canonical": ("og:url",),
    "license": ("dcterms.license", "dc.rights.license", "dc.rights", "dcterms.rights", "license"),
}  # fmt: skip
# Asked where a page says nothing about its publication.
MODIFIED_NAMES = (
    "article:modified_time",
    "og:updated_time",
    "datemodified",
    "last-modified",
    "dcterms.modified",
    "lastmod",
)
_DATE_IN_SCRIPT = re.compile(
    rb"(?:\"|&quot;)(?:datePublished|date_published|firstPublished|publishedDate|published_at|publishedAt|publishDate|dateModified|date)"
    rb"(?:\\?\"|&quot;)\s*:\s*(?:\\?\"|&quot;)(\d{4}-\d\d-\d\d)",
    re.IGNORECASE,
)
# Dates in running text: "May 4th, 2024", "5. Mai 2024", "2024 Jan 7", "2024-05-04", "17.05.2021", "15/12/2025",
# "28-04-2021", "2016年10月14日", "28.09.19 12:44".
_MONTH_NAMES = (  # English, German, French, Spanish, Italian, Portuguese, Dutch, Polish, Russian
    "jan january januar janvier enero gennaio janeiro januari stycznia января",
    "feb february februar février febrero febbraio fevereiro februari lutego февраля",
    "mar march märz mars marzo março maart marca марта",
    "apr april avril abril aprile kwietnia апреля",
    "may mai mayo maggio maio mei maja мая",
    "jun june juni juin junio giugno junho czerwca июня",
    "jul july juli juillet julio luglio julho lipca июля",
    "aug august août agosto augustus sierpnia августа",
    "sep sept september septembre septiembre settembre setembro września сентября",
    "oct october okt oktober octobre octubre ottobre outubro października октября",
    "nov november novembre noviembre novembro listopada ноября",
    "dec december dez dezember décembre diciembre dicembre dezembro grudnia декабря",
)
_MONTHS = {name: number for number, names in enumerate(_MONTH_NAMES, 1) for name in names.split()}
_MONTH = "|".join(sorted(_MONTHS, key=len, reverse=True))
_YEAR = r"20\d\d|199\d"
_IN_WORDS = re.compile(
    rf"\b(?:(?P<m1>{_MONTH})\.?\s+(?P<d1>[0-3]?\d)(?:st|nd|rd|th)?,?\s+(?P<y1>{_YEAR})"
    rf"|(?P<d2>[0-3]?\d)(?:st|nd|rd|th|\.)?\s+(?:de\s+)?(?P<m2>{_MONTH})\.?,?\s+(?:de\s+)?(?P<y2>{_YEAR})"
    rf"|(?P<y3>{_YEAR})\s+(?P<m3>{_MONTH})\.?\s+(?P<d3>[0-3]?\d)(?!,?\s+\d{{4}}))\b",
    re.IGNORECASE,
)
_IN_DIGITS = re.compile(
    rf"(?<![\d./-])(?:(?P<y1>{_YEAR})-(?P<m1>\d\d)-(?P<d1>\d\d)"
    rf"|(?P<first>\d\d?)(?P<mark>[./-])(?P<second>\d\d?)(?P=mark)(?P<y2>{_YEAR}))(?![\d./-]\d|\d)"
)
_BEFORE_TIME = re.compile(  # not certain enough without a time of day behind them
    rf"(?<![\d./])(?:(?P<first>\d\d?)(?P<mark>[./])(?P<second>\d\d?)(?P=mark)(?P<y2>[012]\d),?\s"
    rf"|(?P<y1>{_YEAR})年\s?(?P<m1>\d\d?)月\s?(?P<d1>\d\d?)日)\s*(?=[012]?\d:\d\d)"
)
DATED_BYTES = 400_000  # of markup that is searched for a date in its text
JSON_NAMES = {
    "title": "headline", "date": "datePublished", "author": "author", "language": "inLanguage", "license": "license",
}  # fmt: skip
ITEM_NAMES = {"title": (b"headline",), "date": (b"datepublished", b"datecreated"), "author": (b"author",)}
HEADINGS = {TAG_IDS[f"h{level}"]: level for level in range(1, 7)}


class Markup(NamedTuple):
    """Metadata in a page's markup. whole: UTF-8. html: without scripts. metas: name in lower case -> content. articles:
    of JSON-LD. title: of <title>. heading: the text of the first h1, of the main text if it has one. is_english: also
    where the page does not say its language."""

    whole: bytes
    html: bytes
    metas: Mapping[str, str]
    articles: list[Mapping[str, Any]]
    title: str
    heading: str
    is_english: bool


def page_metadata(html: bytes, page: Page, kept: np.ndarray, fields: tuple[MetadataField, ...]) -> dict[str, Any]:
    """The fields that the page gives, but `spans`. html: UTF-8. kept: bool[B], the blocks of the main text.

    date: YYYY-MM-DD. license: SPDX's name for one of Creative Commons, else as the page gives it. headings: [level,
    text]. links: addresses as they stand in the page. Values are cut off at MAX_VALUE_CHARS, lists at MAX_ENTRIES."""
    plain = without_scripts(html)
    first = _headings(page, kept, 1, {TAG_IDS["h1"]: 1}) or _headings(page, kept | True, 1, {TAG_IDS["h1"]: 1})
    title = _TITLE.search(plain)
    page_tag = _HTML.search(plain)
    language = attributes_of(page_tag[1]).get("lang", "") if page_tag else ""
    markup = Markup(
        html,
        plain,
        _metas(plain),
        list(articles_in(html)),
        cleaned(unescaped(title[1])) if title else "",
        first[0][1] if first else "",
        language[:2].lower() in ("", "en"),
    )
    fields_of_page: dict[str, Any] = {}
    for field in fields:
        if field == "spans":
            continue
        value: Any
        if field == "headings":
            value = _headings(page, kept, MAX_ENTRIES, HEADINGS)
        elif field == "links":
            value = _links(html, page, kept)
        else:
            value = next(filter(None, map(_CLEAN[field], _candidates(field, markup))), None)
        if value:
            fields_of_page[field] = value
    return fields_of_page


def without_scripts(html: bytes) -> bytes:
    """The page without the content of scripts and styles, which may hold markup as text."""
    lower, pieces, at = html.lower(), [], 0
    for start in _SCRIPT.finditer(lower):
        if start.start() >= at:
            pieces.append(html[at : start.end()])
            end = lower.find(b"</" + start[1], start.end())
            at = len(html) if end < 0 else end
    return b"".join([*pieces, html[at:]])


def _candidates(field: str, markup: Markup) -> Iterator[str]:
    """Values of the field, the most trusted first."""
    if field == "language" and (tag := _HTML.search(markup.html)):
        attributes = attributes_of(tag[1])
        yield attributes.get("lang", "") or attributes.get("xml:lang", "")
    if field == "canonical" and (link := _CANONICAL.search(markup.html)):
        yield unescaped(link[1])
    if field == "license":
        yield from _rel_licenses(markup.html)
    if field == "author":
        yield from _authors(markup)
    else:
        yield from _declared(field, markup)
    if field == "title":
        yield _part_of_title(markup)
        yield markup.heading
    elif field == "date":
        yield from _other_dates(markup)
        yield from _less_certain_dates(markup)
    elif field == "license":
        yield _only_creative_commons(markup.html)


def _declared(field: str, markup: Markup) -> Iterator[str]:
    """Values of the field in JSON-LD, meta elements and microdata."""
    for article in markup.articles if field in JSON_NAMES else ():
        yield _headline(article, markup.title) if field == "title" else text_of(article.get(JSON_NAMES[field]))
    for meta in META_NAMES[field]:
        value = markup.metas.get(meta, "")
        is_in_words = field == "date" and value and not _DATE.search(value)
        yield next(_dates_in_text(value[:MAX_DATE_CHARS], markup.is_english), "") if is_in_words else value
    for item in _ITEM.finditer(markup.html):
        if item[2].lower() in ITEM_NAMES.get(field, ()):
            attributes = attributes_of(item[0][: item.start(3) - item.start()])
            yield attributes.get("content") or attributes.get("datetime") or inner_text(item[1], item[3])


def _authors(markup: Markup) -> Iterator[str]:
    """Declared persons, else names in bylines, else declared organizations, else names after "by"."""
    names = [text_of(article.get("publisher")) for article in markup.articles] + [markup.metas.get("og:site_name", "")]
    sites = {cleaned(name).casefold() for name in names}
    organizations = {
        text_of(author)
        for article in markup.articles
        if isinstance(author := article.get("author"), dict) and author.get("@type") == "Organization"
    }
    others = []
    for value in _declared("author", markup):
        name = clean_author(value)
        if name.casefold() in sites or value in organizations:
            others.append(name)
        else:
            yield name
    if markup.metas.get("twitter:label1", "").lower() == "written by":  # as Yoast SEO writes
        yield markup.metas.get("twitter:data1", "")
    yield from bylines(markup.html)
    yield from others
    yield from names_after_by(markup.html)


def _rel_licenses(html: bytes) -> Iterator[str]:
    """Addresses of links with rel="license" (HTML, 4.6.7.9)."""
    for link in _LINK.finditer(html):
        if b"license" in link[1].lower():
            attributes = attributes_of(link[1])
            if "license" in attributes.get("rel", "").lower().split():
                yield attributes.get("href", "")


def _only_creative_commons(html: bytes) -> str:
    """The Creative Commons licence that the page links to; none if it links to several, as pages about them do."""
    links = _CREATIVE_COMMONS.finditer(html.decode("utf-8", "replace"))
    licenses = {_clean_license(link[0]) for link in links}
    return licenses.pop() if len(licenses) == 1 else ""


def _headline(article: Mapping[str, Any], title: str) -> str:
    """JSON-LD headline. Some sites put a description there, and the headline in `name`: the one in the title."""
    headline, name = (text_of(article.get(key)) for key in ("headline", "name"))
    folded = title.casefold()
    return (
        name if name and cleaned(name).casefold() in folded and cleaned(headline).casefold() not in folded else headline
    )


def _part_of_title(markup: Markup) -> str:
    """The part that has most words of the first h1, else the longest: "The mill | River News" -> "The mill"."""
    heading = set(_WORD.findall(markup.heading.casefold()))

    def rank(part: str) -> tuple[int, int]:
        return len(heading & set(_WORD.findall(part.casefold()))), len(part)

    return max(_SEPARATOR.split(markup.title), key=rank)


def _other_dates(markup: Markup) -> Iterator[str]:
    """Dates of a <time> or <abbr>, and in the page's address."""
    for pattern in (_DATETIME, _ABBREVIATION):
        if time := pattern.search(markup.html):
            yield unescaped(time[1])
    canonical = _CANONICAL.search(markup.html)
    for address in (unescaped(canonical[1]) if canonical else "", markup.metas.get("og:url", "")):
        if date := _DATE_IN_PATH.search(address):
            yield "-".join(date.groups())


def _less_certain_dates(markup: Markup) -> Iterator[str]:
    """Dates in the text, of changes, and in the data of scripts: the first of each."""
    text = html_module.unescape(TAG_MARKS.sub(b" ", markup.html[:DATED_BYTES]).decode("utf-8", "replace"))
    yield from _dates_in_text(text, markup.is_english)
    for article in markup.articles:
        yield text_of(article.get("dateModified"))
    for name in MODIFIED_NAMES:
        yield markup.metas.get(name, "")
    if script := _DATE_IN_SCRIPT.search(markup.whole):
        yield unescaped(script[1])
    for match in _BEFORE_TIME.finditer(text):
        yield _in_digits(match, markup.is_english)


def _dates_in_text(text: str, is_english: bool) -> Iterator[str]:
    """Dates in running text as YYYY-MM-DD, with the name of a month or in digits."""
    matches = sorted([*_IN_WORDS.finditer(text), *_IN_DIGITS.finditer(text)], key=re.Match.start)
    for match in matches:
        if match.re is _IN_DIGITS:
            yield _in_digits(match, is_english)
        else:
            year, month, day = (match[f"{part}1"] or match[f"{part}2"] or match[f"{part}3"] for part in "ymd")
            yield _date(year, str(_MONTHS[month.lower()]), day)


def _in_digits(match: re.Match[str], is_english: bool) -> str:
    """Day.month.year; month/day/year and month-day-year in English; the other way round where no month is that high."""
    if match["y1"]:
        return _date(match["y1"], match["m1"], match["d1"])
    day, month = int(match["first"]), int(match["second"])
    if month > 12 or (match["mark"] != "." and is_english and day <= 12):
        day, month = month, day
    return _date(match["y2"] if len(match["y2"]) == 4 else f"20{match['y2']}", str(month), str(day))


def _date(year: str, month: str, day: str) -> str:
    """YYYY-MM-DD; empty if there is no such month or day."""
    is_date = 1 <= int(month) <= 12 and 1 <= int(day) <= 31
    return f"{year}-{int(month):02d}-{int(day):02d}" if is_date else ""


def _metas(html: bytes) -> dict[str, str]:
    """Name, property, itemprop or http-equiv in lower case -> content; the first of each."""
    metas: dict[str, str] = {}
    for meta in _META.finditer(html):
        attributes = attributes_of(meta[1])
        for key in ("property", "name", "itemprop", "http-equiv"):
            if key in attributes and "content" in attributes:
                metas.setdefault(attributes[key].lower(), attributes["content"])
    return metas


def _clean_date(value: str) -> str:
    date = _DATE.search(value)
    return f"{date[1]}-{date[3]}-{date[4]}" if date and int(date[1]) >= MIN_YEAR else ""


def _clean_address(value: str) -> str:
    address = cleaned(value)
    return address if address.startswith(("http://", "https://")) else ""


def _clean_license(value: str) -> str:
    """SPDX's name of a Creative Commons licence from its address, CC-BY-SA-4.0 or CC0-1.0; else the value."""
    link = _CREATIVE_COMMONS.search(value)
    if link is None:
        return cleaned(value)
    name = f"CC-{link['terms']}" if link["terms"] else "CC0" if link["tool"].lower() == "zero" else "CC-PDM"
    return "-".join(filter(None, (name, link["version"], link["place"]))).upper()


def _clean_language(value: str) -> str:
    """The two or three letters in front: de_AT is de."""
    return value[:3].strip("-_").lower() if _LANGUAGE.fullmatch(value.strip()) else ""


_CLEAN = {
    "title": cleaned, "date": _clean_date, "author": clean_author, "language": _clean_language,
    "canonical": _clean_address, "license": _clean_license,
}  # fmt: skip


def _headings(page: Page, kept: np.ndarray, most: int, levels: Mapping[int, int]) -> list[list[Any]]:
    """[level, text] of the first kept headings. levels: tag -> level."""
    headings: list[list[Any]] = []
    text = page.text.tobytes()
    tags = page.elements[page.blocks[:, ELEMENT], TAG]
    for k in np.flatnonzero(kept & np.isin(tags, list(levels)))[:most].tolist():
        title = text[page.blocks[k, START] : page.blocks[k, END]].decode("utf-8", "replace")
        headings.append([levels[int(tags[k])], cleaned(title)])
    return headings


def _links(html: bytes, page: Page, kept: np.ndarray) -> list[str]:
    inside = page.links[page.links[:, LINK_BLOCK] < len(kept)]
    inside = inside[kept[inside[:, LINK_BLOCK]]]
    addresses = [cleaned(unescaped(html[row[ADDRESS_START] : row[ADDRESS_END]])) for row in inside.tolist()]
    return list(dict.fromkeys(filter(None, addresses)))[:MAX_ENTRIES]

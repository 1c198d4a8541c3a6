"""Posts of forums and their authors by the markup of each forum software, against `post_authors`; languages of code."""

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import zstandard
from lxml import html as lxml_html
from rich.console import Console
from rich.table import Table

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.html_extraction import NotExtracted, extract_page

MIN_POST_WORDS, MAX_POST_WORDS = 4, 8  # of a post's first words, by which it is looked for in the text
_WORD = re.compile(r"\w+")
_FENCE = re.compile(r"^\s*(?:> )*(`{3,})(\S*)[^`]*$", re.MULTILINE)


class Software(NamedTuple):
    """XPaths of a forum software: of posts, and below each of its author and of its text."""

    name: str
    page: str
    post: str
    author: str
    text: str


def _xpath(pattern: str) -> str:
    return re.sub(r"\{([\w-]+)\}", r'contains(concat(" ", normalize-space(@class), " "), " \1 ")', pattern)


# {name} stands for a class of that name.
SOFTWARE = (
    Software("Discourse", "0512", "//*[{crawler-post}]", ".//*[@itemprop='author']", ".//*[{post}]"),
    Software("XenForo", "0516", "//article[{message--post}]", "@data-author", ".//*[{bbWrapper}]"),
    Software(
        "vBulletin",
        "0527",
        "//div[starts-with(@id, 'post_message_')]",
        "ancestor::*[starts-with(@id, 'edit')]//a[{bigusername}]",
        ".",
    ),
    Software("phpBB", "0535", "//div[{post}]", ".//a[contains(@class, 'username')]", ".//*[{content}]"),
    Software(
        "Invision", "0548", "//article[{ipsComment}]", ".//*[{cAuthorPane_author}]", ".//*[@data-role='commentContent']"
    ),
    Software("MyBB", "0558", "//div[{post}]", ".//*[{author_information}]//a", ".//*[{post_body}]"),
    Software("FluxBB", "0541", "//div[{blockpost}]", ".//*[{postleft}]//dt", ".//*[{postmsg}]"),
    Software("FluxBB", "0555", "//div[{blockpost}]", ".//*[{postleft}]//dt", ".//*[{postmsg}]"),
    Software("Simple Machines", "0556", "//div[{post_wrapper}]", ".//*[{poster}]//h4", ".//*[{inner}]"),
    Software("NodeBB", "0553", "//li[@component='post']", "@data-username", ".//*[@component='post/content']"),
    Software("NodeBB of 2026", "0552", "//li[@component='post']", "@data-username", ".//*[@component='post/content']"),
    Software("Stack Exchange", "0565", "//*[@data-author-username]", "@data-author-username", ".//*[{js-post-body}]"),
    Software("Flarum", "0557", "//*[@id='flarum-content']//article", ".//*[{PostUser-name}]", ".//*[{Post-body}]"),
    Software("Vanilla", "0559", "//*[{Discussion} or {Comment}]", ".//a[{Username}]", ".//*[{Message}]"),
    Software("Lemmy", "0573", "//article[{comment-node}]", ".//*[{person-listing}]/span[1]", ".//*[{comment-content}]"),
    Software(
        "Lobsters",
        "0575",
        "//div[{comment}][@data-shortid]",
        ".//*[{byline}]//a[text()][starts-with(@href, '/~')]",
        ".//*[{comment_text}]",
    ),
    Software("Nairaland", "0576", "//td[starts-with(@id, 'pb')]", "preceding::a[{user}][1]", ".//*[{narrow}]"),
)


def labelled(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """(a page of WCXB's development pages, its HTML)."""
    with path.open("rb") as raw:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(raw), encoding="utf-8"):
            page = json.loads(line)
            yield page, page["html"].encode() if "html" in page else base64.b64decode(page["html_base64"])


def posts_of(html: bytes, software: Software) -> list[tuple[str, list[str]]]:
    """(author, first words) of the posts, in the order of the page."""
    posts = []
    for post in lxml_html.fromstring(html.decode("utf-8", "replace")).xpath(_xpath(software.post)):
        authors, texts = post.xpath(_xpath(software.author)), post.xpath(_xpath(software.text))
        if not authors or not texts:
            continue
        name = " ".join((authors[0] if isinstance(authors[0], str) else authors[0].text_content()).split())
        own = texts[0].xpath(
            ".//text()[not(ancestor::blockquote or ancestor::aside or ancestor::*[contains(@class, 'quote')])]"
        )
        paragraphs = [text for text in own if len(_WORD.findall(text)) >= MIN_POST_WORDS]
        if paragraphs:
            posts.append((name, _WORD.findall(paragraphs[0])[:MAX_POST_WORDS]))
    return posts


def counted(text: str, posts: list[tuple[str, list[str]]]) -> tuple[int, int, int]:
    """(posts that stand in the text, with an author in a line between them and the post before, with the right one)."""
    num_posts = num_authors = num_right = at = 0
    names = {name for name, _ in posts}
    for name, words in posts:
        start = re.compile(r"\W+".join(map(re.escape, words))).search(text, at)
        if start is None:
            continue
        num_posts += 1
        lines = (re.sub(r"^[-\d.\s]+(?=\S)", "", line) for line in text[at : start.start()].split("\n"))
        lines_of_authors = [line[:-1] for line in lines if line.endswith(":") and line[:-1] in names]
        num_authors += bool(lines_of_authors)
        num_right += bool(lines_of_authors) and lines_of_authors[-1] == name
        at = start.end()
    return num_posts, num_authors, num_right


def print_posts(path: Path) -> None:
    """path: WCXB's pages. Posts by software, pages that are no forums and get authors, and fences with a language."""
    by_page = {software.page: software for software in SOFTWARE}
    table = Table("software (page)", "posts in the text", "with an author", "the right one")
    others = fences = with_language = pages_with_language = forums = forums_with_authors = 0
    for page, html in labelled(path):
        lines = _authors(html)
        if page["page_type"] == "forum":
            forums, forums_with_authors = forums + 1, forums_with_authors + bool(lines)
        else:
            others += bool(lines)
        if software := by_page.get(page["id"]):
            counts = counted(_text(html, BlocksConfig(post_authors=True)), posts_of(html, software))
            table.add_row(f"{software.name} ({software.page})", *map(str, counts))
        languages = [language for _, language in _FENCE.findall(_text(html, BlocksConfig(format="markdown")))][::2]
        fences, with_language = fences + len(languages), with_language + sum(map(bool, languages))
        pages_with_language += any(languages)
    Console(width=100).print(table)
    print(f"{forums_with_authors} of {forums} forum pages have authors, and {others} of the other pages")
    print(f"{with_language} of {fences} fences have a language, on {pages_with_language} pages")


def _text(html: bytes, config: BlocksConfig) -> str:
    try:
        return extract_page(html, None, "blocks", config).text
    except NotExtracted:
        return ""


def _authors(html: bytes) -> set[str]:
    """Lines that `post_authors` adds."""
    plain = set(_text(html, BlocksConfig()).split("\n"))
    return {line for line in _text(html, BlocksConfig(post_authors=True)).split("\n") if line.endswith(":")} - plain

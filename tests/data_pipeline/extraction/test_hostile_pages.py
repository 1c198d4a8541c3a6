"""Pages that are built to break an extractor, read from files as a crawl's: text or a reason, in bounded memory."""

import json
import resource
from typing import get_args

import pytest

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig, MetadataField
from gristmill.data_pipeline.extraction.html_extraction import MAX_HTML_BYTES, NotExtracted, extract_page
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

STORY = "".join(
    f"<p>Sentence {k} tells of the mill, of the river, and of the people who live there all year.</p>"
    for k in range(20)
)
FIRST, LAST = (f"Sentence {k} tells of the mill, of the river" for k in (0, 19))
PAGE = f"<html><head><title>Mill</title></head><body><article><h1>Mill</h1>{STORY}</article></body></html>"
MANY, LONG = 1_000_000, 9_500_000
MAX_GROWTH_BYTES = 600_000_000  # 250 bytes a tag for a million tags, and some copies of 10 MB
OPTIONS = BlocksConfig(metadata=get_args(MetadataField), comments=True, post_authors=True)


def inside(hostile: str) -> bytes:
    return PAGE.replace("<article>", hostile + "<article>").encode()


# name -> (page, what of the story must be in its text).
WITH_TEXT = {
    "cut inside a tag": (PAGE[: PAGE.rindex("<p>") + 2].encode(), FIRST),
    "cut inside a character": (PAGE.partition("</article>")[0].encode() + "<p>ü".encode()[:-1], LAST),
    "100,000 levels deep": (inside("<div>" * 100_000), FIRST),
    "100,000 nested tables": (inside("<table><tr><td>" * 100_000), FIRST),
    "100,000 nested lists": (inside("<ul><li>" * 100_000), FIRST),
    "an attribute of 9.5 MB": (inside(f'<b title="{"x" * LONG}">y</b>'), LAST),
    "a class of 9.5 MB": (inside(f'<div class="{"ab " * (LONG // 3)}">y</div>'), LAST),
    "an address of 9.5 MB": (inside(f'<a href="{"x" * LONG}">y</a>'), LAST),
    "a million attributes": (inside(f"<div {'a=b c ' * MANY}>y</div>"), LAST),
    "a million references": (inside("<p>" + "&amp;x" * MANY), LAST),
    "a tag of authors": (inside(f"<i itemtype=https://schema.org/Comment {'author ' * MANY}>"), LAST),
    "a million end tags": (inside("</div></b>" * (MANY // 4)), LAST),
    "a comment without an end": (PAGE.encode() + b"<!--" + b"x" * MANY, LAST),
    "a script without an end": (PAGE.encode() + b"<script>" + b"a<b" * (MANY // 4), LAST),
    "CDATA without an end": (PAGE.encode() + b"<![CDATA[" + b"x" * MANY, LAST),
    "a noscript without an end": (inside("<noscript>"), FIRST),
    "an attribute without an end": (PAGE.encode() + b"<p class='" + b"x" * MANY, LAST),
    "a tag name of 1 MB": (inside(f"<{'x' * MANY}>"), LAST),
    "null bytes": (PAGE.replace(" ", " \0").encode(), "Sentence 0 tells of the mill"),
    "UTF-16 with a mark": (PAGE.encode("utf-16"), LAST),
    "a wrong charset": (PAGE.replace("<head>", "<head><meta charset=big5>").encode(), LAST),
    "a charset that does not exist": (PAGE.replace("<head>", "<head><meta charset=klingon>").encode(), LAST),
}  # fmt: skip
# name -> (bytes, kind of the reason).
WITHOUT_TEXT = {
    "empty": (b"", "no_text"),
    "an empty body": (b"<html><head><title>x</title></head><body></body></html>", "no_text"),
    "null bytes alone": (b"\0" * MANY, "no_text"),
    "an XML feed": (
        b'<?xml version="1.0"?><rss version="2.0"><channel><item><title>a</title></item></rss>',
        "not_html",
    ),
    "a sitemap after a comment": (b"<!-- a --><urlset><url><loc>https://a.org</loc></url></urlset>", "not_html"),
    "JSON": (json.dumps({"html": PAGE}).encode(), "not_html"),
    "11 MB": (PAGE.encode() + b" " * (MAX_HTML_BYTES + 1), "page_too_large"),
    "100 MB": (PAGE.encode() + b" " * 100_000_000, "record_too_large"),
    "more than a million tags": (b"<p>a" * (MANY + 1), "page_too_large"),
}


def read(folder, page: bytes, **options) -> Record | Unreadable:
    path = folder / "a.html"
    path.write_bytes(page)
    source = SourceConfig(name="s", format="html", paths=(str(path),), **options)
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    (found,) = read_range(FileRange(file, str(path)), source)
    return found


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", WITH_TEXT)
def test_the_story_of_a_hostile_page_is_found(name, tmp_path):
    page, wanted = WITH_TEXT[name]
    before = peak_bytes()
    found = read(tmp_path, page, blocks=OPTIONS)
    assert isinstance(found, Record) and wanted in found.text
    assert len(json.dumps(dict(found.metadata))) < 100_000
    assert peak_bytes() - before < MAX_GROWTH_BYTES


@pytest.mark.parametrize("name", WITHOUT_TEXT)
def test_what_is_no_page_has_a_reason(name, tmp_path):
    page, kind = WITHOUT_TEXT[name]
    before = peak_bytes()
    found = read(tmp_path, page, blocks=OPTIONS)
    assert isinstance(found, Unreadable) and found.kind == kind and found.reason
    assert peak_bytes() - before < MAX_GROWTH_BYTES


def test_a_charset_of_the_header_decodes_pages_without_a_mark():
    assert LAST in extract_page(PAGE.encode("utf-16-le"), "utf-16le", "blocks", OPTIONS).text
    with pytest.raises(NotExtracted, match="no main text"):
        extract_page(b"\xff\xfe", None, "blocks", OPTIONS)

import json

import numpy as np
import pytest

from benchmarks.support.warc_file import write_warc
from gristmill.data_pipeline.extraction.blocks import (
    MAX_TAGS,
    NotAPage,
    check_page,
    whole_text,
    with_options,
    without_copies,
)
from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.html_extraction import MAX_HTML_BYTES, NotExtracted, extract, extract_page
from gristmill.data_pipeline.extraction.layout import LayoutOptions, layout
from gristmill.data_pipeline.extraction.page import NO_TOKENS, read_page
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

STORY = [" ".join(f"Sentence {k} of part {j} tells of the mill, and of the river." for k in range(8)) for j in range(6)]
PAGE = f"""<html><head><title>The mill</title><script>var menu = "<p>x</p>";</script></head><body>
<nav><ul><li><a href=/>Home</a><li><a href=/about>About us</a><li><a href=/contact>Contact</a></ul></nav>
<article><h1>The mill</h1>{"".join(f"<p>{part}</p>" for part in STORY)}</article>
<footer><a href=/imprint>Imprint</a> <a href=/privacy>Privacy</a> &copy; 2024</footer></body></html>"""


def text_of(html: bytes, **options) -> str:
    return extract(html, None, "blocks", BlocksConfig(**options))


def reason(html: bytes) -> str:
    with pytest.raises(NotExtracted) as refused:
        text_of(html)
    return refused.value.kind


def everything(html: str, **options) -> str:
    return whole_text(html.encode(), BlocksConfig(**options))


def test_the_story_without_menu_and_footer():
    found = text_of(PAGE.encode()).split("\n")
    assert [line for line in found if line in STORY] == STORY
    assert not {"Home", "About us", "Contact"} & set(found)


def test_bytes_that_are_no_page_have_a_reason():
    assert reason(b"") == reason(b"   \n") == reason(b"<html><body></body></html>") == "no_text"
    assert reason(json.dumps({"text": STORY}).encode()) == "not_html"
    assert reason(b'<?xml version="1.0"?>\n<!-- a --><rss><channel><item>a</item></channel></rss>') == "not_html"
    assert reason(b'<feed xmlns="http://www.w3.org/2005/Atom"><entry/></feed>') == "not_html"
    assert reason(b"\x00" * 1000) == "no_text"
    assert reason(b" " * (MAX_HTML_BYTES + 1)) == "page_too_large"
    assert reason(b"<p>a" * (MAX_TAGS + 1)) == "page_too_large"
    check_page(b"<?a?><!-- b -->" * 200 + b"text")
    check_page(b"[1] Footnotes are not JSON")
    with pytest.raises(NotAPage):
        check_page(b"[1, 2]")


def test_a_page_keeps_its_story_where_it_is_damaged():
    whole, body = PAGE.encode(), "\n\n".join(STORY)
    assert body in text_of(b"\x00".join([whole[:100], whole[100:]]))
    assert body in text_of(whole[: whole.index(b"<footer")])
    assert "\n\n".join(STORY[:3]) in text_of(whole[: whole.index(STORY[4].encode())])
    assert body in text_of(b"<div>" * 100_000 + b"</div>" * 100_000 + whole)
    assert STORY[0] in text_of(b"<div>" * 100_000 + whole)
    assert body in text_of(whole.replace(b"<body>", b"<body><p>" * 1000))


def test_a_wrong_charset_is_repaired_and_counted():
    page = PAGE.replace("river", "rivière")
    assert "rivière" in extract(page.encode("latin-1"), None, "blocks")
    text, repairs, _ = extract_page(page.encode("latin-1"), "utf-8", "blocks", BlocksConfig())
    assert "rivi\ufffdre" in text and repairs == ("replaced_bytes",)
    assert "rivière" in extract(page.encode("utf-16"), None, "blocks")


def test_a_page_has_the_same_text_after_any_other_page():
    first = text_of(PAGE.encode())
    text_of((PAGE * 20).encode())
    text_of(b"<p>" + STORY[0].encode())
    assert text_of(PAGE.encode()) == first


def test_tables_can_be_left_out():
    html = "<p>a<table><tr><th>b<th>c<tr><td>d<td>e<p>f</table>g"
    assert everything(html) == "a\n\nb | c\nd | e f\n\ng"
    page = read_page(html.encode(), NO_TOKENS)
    kept = with_options(page, np.ones(len(page.blocks), bool), BlocksConfig(tables=False))
    assert layout(page, kept, LayoutOptions()) == "a\n\ng"


def test_the_kind_of_a_page_is_in_its_metadata():
    metadata = extract_page(PAGE.encode(), None, "blocks", BlocksConfig()).metadata
    assert metadata["page_kind"] == "article" and 0.5 < metadata["page_kind_score"] <= 1


def test_a_text_of_two_layouts_is_kept_once():
    story = "<p>The mill stands here.</p>"
    line = "<p>Not so bad.</p>"
    html = f"<div>{story}{line}</div><div>{story}{line}</div><pre>The mill stands here.</pre>"
    page = read_page(html.encode(), NO_TOKENS)
    assert without_copies(page, np.ones(5, bool)).tolist() == [True, True, False, True, True]
    assert without_copies(page, np.array([0, 1, 1, 1, 1], bool)).tolist() == [False, True, True, True, True]
    verse = read_page(f"<div>{story * 3}</div>".encode(), NO_TOKENS)  # below one element, so on purpose
    assert without_copies(verse, np.ones(3, bool)).all()
    menu = read_page(f"<div>{story}</div>".encode() * 4, NO_TOKENS)
    assert without_copies(menu, np.ones(4, bool)).all()


def test_all_text_of_a_fragment_whatever_its_layout():
    assert whole_text(b"<nav>a</nav><footer>b\xff</footer>", BlocksConfig()) == "a\n\nb\ufffd"
    with pytest.raises(NotAPage):
        whole_text(b"<p>" * (MAX_TAGS + 1), BlocksConfig())


def test_comments_are_kept_when_asked():
    comment = "I have seen this mill, and the river too."
    html = PAGE.replace("</article>", f"</article><section id=comments><ol><li><p>{comment}</p></li></ol></section>")
    assert f"1. {comment}" in text_of(html.encode(), comments=True).split("\n")
    assert text_of(PAGE.encode(), comments=True) == text_of(PAGE.encode())


def test_a_higher_threshold_keeps_less():
    kept = [set(text_of(PAGE.encode(), threshold=value).split("\n")) for value in (0.1, 0.5, 0.9)]
    assert kept[2] <= kept[1] <= kept[0]


def test_a_warc_file_through_the_reader(tmp_path):
    path = tmp_path / "a.warc.gz"
    page = PAGE.replace("<title>", "<meta name=author content=Ann><title>")
    pages = {"https://a.org/1": page.encode(), "https://a.org/2": b"<html><body>", "https://a.org/3": b"{}"}
    write_warc(path, pages.items())
    source = SourceConfig.model_validate(
        {"name": "s", "format": "warc", "paths": [str(path)], "extractor": "blocks", "blocks": {"metadata": ["author"]}}
    )
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    story, empty, data = read_range(FileRange(file, str(path)), source)
    assert isinstance(story, Record) and "\n\n".join(STORY) in story.text
    kind = {"page_kind": "article", "page_kind_score": story.metadata["page_kind_score"]}
    assert story.metadata == {"warc_date": "2024-01-01T00:00:00Z", "author": "Ann"} | kind
    assert [(one.kind, one.excerpt) for one in (empty, data)] == [
        ("no_text", "https://a.org/2"),
        ("not_html", "https://a.org/3"),
    ]


def test_options_of_blocks_need_the_extractor_blocks():
    with pytest.raises(ValueError, match="set extractor: blocks or remove them"):
        SourceConfig.model_validate(
            {"name": "s", "format": "warc", "paths": ["a"], "extractor": "resiliparse", "blocks": {"tables": False}}
        )


def test_the_weights_count_for_sources_of_pages_only():
    assert SourceConfig(name="s", format="html", paths=("a",)).extracted_by_blocks
    assert SourceConfig(name="s", format="jsonl", paths=("a",), html_field="html").extracted_by_blocks
    assert not SourceConfig(name="s", format="jsonl", paths=("a",)).extracted_by_blocks
    assert not SourceConfig(name="s", format="warc", paths=("a",), extractor="resiliparse").extracted_by_blocks

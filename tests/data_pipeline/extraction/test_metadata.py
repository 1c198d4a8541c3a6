import numpy as np

from gristmill.data_pipeline.extraction.metadata import page_metadata
from gristmill.data_pipeline.extraction.page import NO_TOKENS, read_page

FIELDS = ("title", "date", "author", "language", "headings", "links")


def metadata(html: str, fields=FIELDS) -> dict:
    page = read_page(html.encode(), NO_TOKENS)
    return page_metadata(html.encode(), page, np.ones(len(page.blocks), bool), fields)


def test_json_ld_is_preferred_to_meta_elements():
    html = """<html lang="de-AT"><title>A - Site</title><meta property="og:title" content="B">
      <script type="application/ld+json">{"@graph": [{"@type": "WebPage", "headline": "page", "author": "x"},
        {"@type": ["NewsArticle"], "headline": "C &amp; D", "datePublished": "2024-02-03T10:00:00Z",
         "author": [{"@type": "Person", "name": "Ann"}, {"name": "Bob"}]}]}</script>"""
    assert metadata(html) == {"title": "C & D", "date": "2024-02-03", "author": "Ann; Bob", "language": "de"}


def test_meta_elements_microdata_and_the_page_itself():
    html = """<meta name=Author content='Ann &amp; Bob'><meta content="2021-05-06" property="article:published_time">
      <title>The mill by the river | Site</title><h2 itemprop="headline">Head</h2>"""
    assert metadata(html, ("title", "date", "author")) == {"title": "Head", "date": "2021-05-06", "author": "Ann & Bob"}
    assert metadata("<title>The mill by the river | Site</title>", ("title",)) == {"title": "The mill by the river"}
    assert metadata('<time datetime="2020-01-02T03:04">', ("date",)) == {"date": "2020-01-02"}


def test_headings_and_links_of_the_main_text():
    html = "<h1>One</h1><p>a <a href='/x?a=1&amp;b=2'>b</a> <a href=#y>c</a><h3>Two</h3><p><a href=/x?a=1&amp;b=2>d</a>"
    assert metadata(html, ("headings", "links")) == {
        "headings": [[1, "One"], [3, "Two"]],
        "links": ["/x?a=1&b=2", "#y"],
    }
    page = read_page(html.encode(), NO_TOKENS)
    kept = np.array([False, False, True, True])
    assert page_metadata(html.encode(), page, kept, ("headings", "links")) == {
        "headings": [[3, "Two"]],
        "links": ["/x?a=1&b=2"],
    }


def test_values_that_make_no_sense_are_left_out():
    html = """<html lang="???"><meta name=date content="yesterday"><meta name=author content="https://a.org/ann">
      <script type="application/ld+json">{"@type": "Article", "headline": [</script>
      <script type="application/ld+json">{"@type": "Article", "datePublished": 5, "author": {"name": null}}</script>"""
    assert metadata(html) == {}


def test_hostile_pages_take_linear_time_and_end():
    deep = "[" * 500 + "]" * 500
    many = "<script type=application/ld+json>" * 20_000 + "<meta " * 20_000 + "<b itemprop=" * 20_000
    assert metadata(f"<script type=application/ld+json>{deep}</script>{many}", FIELDS[:4]) == {}

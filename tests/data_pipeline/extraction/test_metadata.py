import numpy as np

from gristmill.data_pipeline.extraction.metadata import page_metadata, without_scripts
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
    many += "<meta 'a" * 20_000 + '<b class="' * 20_000 + "<b class=byline>" * 20_000 + "<link rel=canonical " * 20_000
    many += (
        "<b author" * 20_000 + "by " * 200_000 + "<b>by</b>" * 20_000 + "1.1." * 200_000 + "<b class=author>1 " * 20_000
    )
    assert metadata(f"<script type=application/ld+json>{deep}</script>{many}", FIELDS[:4]) == {}


def test_the_headline_is_the_name_that_the_title_holds():
    """Wikipedia puts a description in headline."""
    html = """<title>The mill - Wikipedia</title><script type="application/ld+json">
      {"@type": "Article", "name": "the Mill", "headline": "a building"}</script>"""
    assert metadata(html, ("title",)) == {"title": "the Mill"}


def test_the_part_of_the_title_that_is_like_the_heading():
    html = "<title>River News, the paper of the whole valley | The mill</title><h1>Our mill</h1>"
    assert metadata(html, ("title",)) == {"title": "The mill"}
    assert metadata("<h1>The mi\u00adll</h1>", ("title",)) == {"title": "The mill"}


def test_authors_in_bylines_and_nested_items():
    assert metadata('<p itemprop=author>By <b itemprop="name">Ann Lee</b></p>', ("author",)) == {"author": "Ann Lee"}
    assert metadata("<a rel=author href=/ann>Ann Lee</a>", ("author",)) == {"author": "Ann Lee"}
    assert metadata('<span class="post byline">Von <a>Ann Lee</a></span>', ("author",)) == {"author": "Ann Lee"}
    assert metadata('<span class="byline">3 May 2024</span><p class="author-box">Ann is', ("author",)) == {}
    assert metadata("<p class=author>About the author</p>", ("author",)) == {}


def author(html: str) -> str | None:
    return metadata(html, ("author",)).get("author")


def test_classes_that_hold_the_word_author():
    card = """<div class="post-author"><div class="author-photo"><img alt="Ann"></div>
      <div class="card-title">Ann Lee</div><div>Editor in chief</div></div>"""
    assert author(card) == "Ann Lee"
    assert author('<p id="article_author">Posted by: <b>Ann Lee</b> | Editor, 3 May 2024</p>') == "Ann Lee"
    assert author("<div class='byline'><span>Posted on May 3</span> <a>Ann Lee</a></div>") == "Ann Lee"
    assert author('<div class="author-bio">Ann Lee</div><p class="authority">Ann Lee</p>') is None
    assert author('<p class="by-author">Insights from</p><p class="text-author">Read more</p>') is None


def test_links_to_pages_of_authors():
    assert author('<a href="/authors/ann-lee">Ann Lee</a>') == "Ann Lee"
    assert author('<a href="/authors/">Ann Lee</a><a href="/contributor/ann-lee/posts">Ann Lee</a>') is None


def test_names_after_by():
    assert author("<h1>Mill</h1><p>Written by <a>Ann van der Lee</a> on 3 May") == "Ann van der Lee"
    assert author("<p>By</p><p>Ann Lee</p>") == "Ann Lee"
    assert author("<p>Text by Ann Lee | May 2024</p>") == "Ann Lee"
    assert author("<p>By the river stands a mill.</p><p>By Monday 3 May</p><p>by then</p>") is None
    assert author('<meta name="twitter:label1" content="Written by"><meta name="twitter:data1" content="Ann">') == "Ann"


def test_authors_of_threads():
    assert author('<dt><a href="/u/1" class="username">ann12</a></dt><a class="username">bob</a>') == "ann12"
    assert (
        author('<div itemprop="author"><a href="/users/1">ann</a> <span>1,655</span> <span>14.6k</span></div>') == "ann"
    )
    thread = """<script type="application/ld+json">{"@type": "QAPage", "mainEntity": {"@type": "Question",
      "datePublished": "2024-05-06", "author": {"@type": "Person", "name": "ann"}}}</script>"""
    assert metadata(thread) == {"author": "ann", "date": "2024-05-06"}


def test_a_name_in_the_text_is_preferred_to_the_name_of_the_site():
    data = """<script type="application/ld+json">{"@type": "Article", "author": {"@type": "Organization",
      "name": "River News"}}</script>"""
    name = '<meta property="og:site_name" content="River News"><meta name="author" content="River News">'
    for declared in (data, name):
        assert author(declared + "<p class=author>Ann Lee</p>") == "Ann Lee"
        assert author(declared + "<p>By Ann Lee</p>") == "River News"


def test_dates_of_templates_are_no_dates_and_addresses_have_some():
    html = """<meta name=date content="0001-01-01"><meta name=pubdate content="1970-01-01T00:00:00Z">
      <link rel="canonical" href="https://a.org/2024/05/06/mill"><abbr class=published title="2024-05-07">x</abbr>"""
    assert metadata(html, ("date",)) == {"date": "2024-05-07"}
    assert metadata(html.replace("<abbr", "<b"), ("date",)) == {"date": "2024-05-06"}
    assert metadata("<meta name=date content=20240506>", ("date",)) == {"date": "2024-05-06"}
    assert metadata("<meta name=date content=2024050612>", ("date",)) == {}
    assert metadata("<meta name=date content=2024-13-06>", ("date",)) == {}


def test_markup_inside_scripts_is_no_markup():
    html = """<script>a = '<b itemprop="headline">' + x</script><style><b itemprop="headline">y</style><h1>Mill</h1>"""
    assert metadata(html, ("title",)) == {"title": "Mill"}
    assert (
        without_scripts(b"a<script>b</script>c<STYLE>d</style>e<script>f")
        == b"a<script></script>c<STYLE></style>e<script>"
    )
    assert metadata('<meta name="author" content="a > b">', ("author",)) == {"author": "a > b"}


def test_json_ld_as_deep_as_the_parser_allows():
    value = '{"name": ' * 900 + '"x"' + "}" * 900
    html = f'<script type="application/ld+json">{{"@type": "Article", "author": {value}}}</script>'
    assert metadata(html, ("author",)) == {}


def test_a_page_without_a_published_date_gives_the_first_of_the_less_certain_ones():
    changed = "<meta property=article:modified_time content=2024-05-06T01:02:03Z>"
    script = '<script>state = {"publishedDate": "2024-05-05T00:00:00Z"}</script>'
    words = "<p>Posted on <b>May</b>&nbsp;4th, 2024 in <a>News</a>, changed 5. Mai 2024"
    assert metadata(script + changed + words, ("date",)) == {"date": "2024-05-04"}
    assert metadata(script + changed, ("date",)) == {"date": "2024-05-06"}
    assert metadata(script, ("date",)) == {"date": "2024-05-05"}
    assert metadata("<i props='{&quot;datePublished&quot;:&quot;2024-05-03T00'>", ("date",)) == {"date": "2024-05-03"}
    assert metadata("<p>am 3. März 2021", ("date",)) == {"date": "2021-03-03"}
    assert metadata("<p>el 7 de octubre de 2020", ("date",)) == {"date": "2020-10-07"}
    assert metadata("<p>May 44, 2024, Mayor 4, 2024, may 2024", ("date",)) == {}
    published = '<local-time format="short" datetime="2020-01-02">'
    assert metadata(changed + script + published, ("date",)) == {"date": "2020-01-02"}


def test_dates_in_digits():
    assert metadata("<p>3 May 2021 <p>1/2/2020", ("date",)) == {"date": "2021-05-03"}
    assert metadata("<p>1/2/2020 <p>3 May 2021", ("date",)) == {"date": "2020-01-02"}  # the first in the text
    assert metadata("<p>2024-05-06 15:14:37", ("date",)) == {"date": "2024-05-06"}
    assert metadata("<p>am 17.05.2021", ("date",)) == {"date": "2021-05-17"}
    assert metadata("<p>15/12/2025 at 19:00", ("date",)) == {"date": "2025-12-15"}
    assert metadata("<p>3/4/2025", ("date",)) == {"date": "2025-03-04"}  # of an American page, as most are
    assert metadata("<p>3.4.2025", ("date",)) == {"date": "2025-04-03"}
    assert metadata("<p>1.2.20251 13/13/2025 10.0.2.2001 1/2.2020 2024-13-06 40/1/2024", ("date",)) == {}


def date(html: str) -> str:
    return metadata(html, ("date",)).get("date", "")


def test_the_order_of_day_and_month_is_that_of_the_language():
    for language, day_first in (("en-US", False), ("pl", True), ("es", True)):
        page = f'<html lang="{language}"><p>'
        assert date(page + "3/4/2025") == date(page + "3-4-2025") == ("2025-04-03" if day_first else "2025-03-04")
        assert date(page + "3.4.2025") == "2025-04-03"
        assert date(page + "11-29-2024, 10:11") == "2024-11-29" and date(page + "28-04-2021") == "2021-04-28"


def test_months_of_nine_languages():
    for words in (
        "4 maja 2021", "4 мая 2021", "4 maggio 2021", "4 de maio de 2021", "4 mei 2021", "4 mai 2021", "2021 May 4;",
    ):  # fmt: skip
        assert date(f"<p>{words}") == "2021-05-04"
    assert date("<p>Prizes of 2021 May 4, 2022") == "2022-05-04"


def test_short_dates_before_a_time_of_day():
    assert date("<p>ann 28.09.19 12:44") == "2019-09-28" and date("<p>3/09/15 8:00am") == "2015-03-09"
    assert date("<p>TNW 2016年10月14日07:17") == "2016-10-14"
    assert date("<p>version 1.2.10, 28.09.19, 2016年10月14日") == ""


def test_dates_in_words_of_meta_elements():
    assert date('<meta name="citation_publication_date" content="2023 Jan 7">') == "2023-01-07"
    assert date('<meta name="publishdate" content="05/29/2007 09:49:00">') == "2007-05-29"
    assert date(f'<meta name="date" content="{"x" * 100} May 4, 2021">') == ""
    build = '<script type="application/ld+json">{"@type": "Article", "datePublished": "Jun 24, 2025"}</script>'
    assert date(build + "<p>25 August 2024") == "2024-08-25"  # Webflow writes there when the site was built


def test_the_date_of_a_question_and_json_with_line_ends():
    comment = "<i itemprop=datePublished>2018-05-21</i>"
    assert date("<time itemprop=dateCreated datetime='2014-02-04 13:02'></time>" + comment) == "2014-02-04"
    html = """<script type="application/ld+json">{"@type": "DiscussionForumPosting", "text": "a
      b", "datePublished": "2024-02-21 13:00", "author": {"name": "ann"}}</script>"""
    assert metadata(html, ("date", "author")) == {"date": "2024-02-21", "author": "ann"}


def test_canonical_address_and_licence():
    html = """<link rel=canonical href="https://a.org/x?y=1&amp;z=2"><meta property=og:url content="https://b.org">
      <a class=x href="https://creativecommons.org/licenses/by-sa/4.0/deed.de" rel="nofollow license">free</a>"""
    assert metadata(html, ("canonical", "license")) == {
        "canonical": "https://a.org/x?y=1&z=2",
        "license": "CC-BY-SA-4.0",
    }
    assert metadata("<meta property=og:url content=/x><link rel=license href=/terms>", ("canonical", "license")) == {
        "license": "/terms"
    }


def test_a_licence_without_rel_is_that_of_the_only_link_to_creative_commons():
    address = '<a href="http://creativecommons.org/{}">c</a>'
    assert metadata(address.format("licenses/by/3.0/de/"), ("license",)) == {"license": "CC-BY-3.0-DE"}
    assert metadata(address.format("publicdomain/zero/1.0/"), ("license",)) == {"license": "CC0-1.0"}
    both = address.format("licenses/by/4.0/") + address.format("licenses/by-nc/4.0/")
    assert metadata(both, ("license",)) == {}
    assert metadata('<a rel="nofollow" href="/license">c</a>', ("license",)) == {}

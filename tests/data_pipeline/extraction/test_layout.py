"""Forty structures written for the purpose, each with the text and the Markdown that they must give."""

import html as html_module
import re

import numpy as np
import pytest

from gristmill.data_pipeline.extraction.attributes import END, HTML_END, HTML_START, START
from gristmill.data_pipeline.extraction.blocks import whole_text
from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.bylines import post_authors
from gristmill.data_pipeline.extraction.html_extraction import extract
from gristmill.data_pipeline.extraction.layout import LayoutOptions, layout, layout_with_spans
from gristmill.data_pipeline.extraction.page import NO_TOKENS, read_page, without_marks

TEX = '<annotation encoding="application/x-tex">{}</annotation>'
# name -> (HTML, text, Markdown; None: as the text).
STRUCTURES: dict[str, tuple[str, str, str | None]] = {
    "paragraphs": ("<p>one<p>two", "one\n\ntwo", None),
    "text between blocks": ("one<div>two</div>three", "one\n\ntwo\n\nthree", None),
    "a line end in a paragraph": ("<p>one<br>two", "one\ntwo", None),
    "two line ends are a paragraph": ("<p>one<br><br>two", "one\n\ntwo", None),
    "links of headings and notes to themselves": (
        '<h1>A<a class="headerlink" href="#a">¶</a></h1><h2><a href=#b>§</a>B</h2><p>a <a href="/c#d">↩︎</a> b '
        '<a href="#e">#</a><p><a href="#f"><b>^</b></a> c<br><a href="#g">↑</a>d',
        "A\n\nB\n\na b\n\nc\nd", "# A\n\n## B\n\na b\n\nc\nd",
    ),
    "marks that are no such links": (
        '<p>¶ a<a href="/b">§</a> <a name=c>#</a> <a href="#d">#d</a><pre>x <a href="#e">^</a> 2</pre>',
        "¶ a§ # #d\n\nx ^ 2", "¶ a§ # #d\n\n```\nx ^ 2\n```",
    ),
    "headings": ("<h1>A</h1><p>a<h3>B</h3><p>b", "A\n\na\n\nB\n\nb", "# A\n\na\n\n### B\n\nb"),
    "a heading of two lines": ("<h2>A<br>B</h2>", "A\nB", "## A B"),
    "a list": ("<ul><li>a<li>b</ul>", "- a\n- b", "-   a\n-   b"),
    "a numbered list": ("<ol><li>a<li>b</ol>", "1. a\n2. b", None),
    "a list from another number": ("<ol start=3><li>a<li>b</ol>", "3. a\n4. b", None),
    "numbers of items": ('<ol start="0"><li>a<li value=7 id=x>b<li>c</ol>', "0. a\n7. b\n8. c", None),
    "a list that counts down": (
        "<ol reversed><li>a<li>b</ol><ol start='2' reversed=''><li>c<li>d<li>e<li>f</ol>",
        "2. a\n1. b\n\n2. c\n1. d\n0. e\n0. f", None,
    ),
    "numbers without sense": (
        "<ol start=x><li value=-4>a<li value=99999999999>b<li data-value=9>c</ol><ol start=999999999><li>d<li>e</ol>",
        "1. a\n2. b\n3. c\n\n999999999. d\n999999999. e", None,
    ),
    "a number in a list without": ("<ul start=3><li value=5>a</ul>", "- a", "-   a"),
    "a nested list": (
        "<ul><li>a<ul><li>b<li>c</ul><li>d</ul>", "- a\n  - b\n  - c\n- d", "-   a\n    -   b\n    -   c\n-   d",
    ),
    "numbers in a list": ("<ul><li>a<ol><li>b</ol></ul>", "- a\n  1. b", "-   a\n    1. b"),
    "three levels": (
        "<ul><li>a<ul><li>b<ul><li>c</ul></ul></ul>", "- a\n  - b\n    - c", "-   a\n    -   b\n        -   c",
    ),
    "paragraphs in an item": ("<ul><li><p>a<p>b<li>c</ul>", "- a\n  b\n- c", "-   a\n    b\n-   c"),
    "text behind a nested list": (
        "<ul><li>a<ul><li>b</ul>c</ul>", "- a\n  - b\n  c", "-   a\n    -   b\n    c",
    ),
    "a heading in an item": ("<ul><li><h3>A</h3>a</ul>", "- A\n  a", "-   ### A\n    a"),
    "code in an item": (
        "<ol><li>a<pre>b\n\n  c</pre>d<li>e</ol>", "1. a\n\nb\n\n  c\n\n   d\n2. e",
        "1. a\n\n   ```\n   b\n\n     c\n   ```\n\n   d\n2. e",
    ),
    "an item of code": ("<ul><li><pre>a</pre><li>b</ul>", "a\n\n- b", "-   ```\n    a\n    ```\n\n-   b"),
    "a quote in an item": (
        "<ul><li>a<blockquote>b<p>c</blockquote>d<ul><li>e<blockquote><ul><li>f</ul></blockquote></ul></ul>",
        "- a\n  b\n  c\n  d\n  - e\n    - f", "-   a\n\n    > b\n    > c\n\n    d\n    -   e\n        > -   f",
    ),
    "an item of a list alone": (
        "<ul><li>a</ul><p>b<ul><li><ul><li>c</ul><li>d</ul>", "- a\n\nb\n\n- c\n- d", "-   a\n\nb\n\n-   c\n-   d",
    ),
    "a table in an item": (
        "<ul><li>a<table><tr><th>b<th>c</table>d<ul><li>e</ul></ul>", "- a\n\nb | c\n\n- d\n  - e",
        "-   a\n\n| b | c |\n| --- | --- |\n\n-   d\n    -   e",
    ),
    "signs of fences and headings": ("<p>~~~<p>a<br>==<p>1.", "~~~\n\na\n==\n\n1.", "\\~~~\n\na\n\\==\n\n1\\."),
    "two lists": ("<ul><li>a</ul><ul><li>b</ul>", "- a\n\n- b", "-   a\n\n-   b"),
    "a list between paragraphs": ("<p>a<ul><li>b</ul><p>c", "a\n\n- b\n\nc", "a\n\n-   b\n\nc"),
    "an item outside of a list": ("<li>a<li>b", "- a\n- b", "-   a\n-   b"),
    "a menu": ("<menu><li>a</menu>", "- a", "-   a"),
    "a table": (
        "<table><tr><td>a<td>b<tr><td>c<td>d</table>", "a | b\nc | d", "|  |  |\n| --- | --- |\n| a | b |\n| c | d |",
    ),
    "a table with a header": (
        "<table><tr><th>A<th>B<tr><td>a<td>b</table>", "A | B\na | b", "| A | B |\n| --- | --- |\n| a | b |",
    ),
    "empty cells": (
        "<table><tr><th>A<th>B<th>C<tr><td>a<td><td>c<tr><td><td>d</table>", "A | B | C\na |  | c\n | d",
        "| A | B | C |\n| --- | --- | --- |\n| a |  | c |\n|  | d |  |",
    ),
    "cells of several columns and rows": (
        "<table><tr><th rowspan=2>A<th colspan=2>B<th rowspan=2>C<tr><th>D<th>E<tr><td>a<td>d<td>e<td>c</table>",
        "A | B |  | C\n | D | E\na | d | e | c",
        "| A | B |  | C |\n| --- | --- | --- | --- |\n|  | D | E |  |\n| a | d | e | c |",
    ),
    "cells of several rows in sections": (
        '<table><thead><tr><th>A<th COLSPAN="9">B<tbody><tr><td rowspan="0">a<td>b<tr><td>c<tbody><tr><td>d<td>e'
        "<tr><td colspan=0 rowspan=70000>f<td>g<tr><td>h</table>",
        "A | B\na | b\n | c\nd | e\nf | g\n | h",
        "| A | B |\n| --- | --- |\n| a | b |\n|  | c |\n| d | e |\n| f | g |\n|  | h |",
    ),
    "a row of more cells than MAX_COLUMNS": (
        f"<table><tr><td rowspan=2>a{'<td>b' * 100}<tr><td>c</table>", f"a{' | b' * 100}\nc",
        f"|{'  |' * 101}\n|{' --- |' * 101}\n| a{' | b' * 100} |\n| c{' | ' * 99} |",
    ),
    "a bar in a cell": (
        "<table><tr><th>A<th>B<tr><td>a|a<td>b</table>", "A | B\na|a | b", "| A | B |\n| --- | --- |\n| a\\|a | b |",
    ),
    "lines in a cell": (
        "<table><tr><th>A<th>B<tr><td>a<br>c<td><p>b<p>d</table>", "A | B\na c | b d",
        "| A | B |\n| --- | --- |\n| a c | b d |",
    ),
    "a caption": (
        "<table><caption>C</caption><tr><th>A<th>B</table>", "C\n\nA | B", "C\n\n| A | B |\n| --- | --- |",
    ),
    "a layout of one column": ("<table><tr><td>a<tr><td>b</table>", "a\n\nb", None),
    "a layout of headings": ("<table><tr><td><h2>A</h2>a<td>b</table>", "A\n\na\n\nb", "## A\n\na\n\nb"),
    "a layout of prose": (f"<table><tr><td>{'long ' * 80}<td>b</table>", f"{('long ' * 80).strip()}\n\nb", None),
    "a table in a layout": (
        "<table><tr><td>menu<td><h1>T</h1><table><tr><th>A<th>B</table></table>", "menu\n\nT\n\nA | B",
        "menu\n\n# T\n\n| A | B |\n| --- | --- |",
    ),
    "code": (
        "<pre>def f():\n    return 1\n\n\nx = 2\n</pre>", "def f():\n    return 1\n\n\nx = 2",
        "```\ndef f():\n    return 1\n\n\nx = 2\n```",
    ),
    "code in a language": (
        '<pre><code class="hljs language-c++">a</code></pre><p>b<pre class=lang-py>c</pre>', "a\n\nb\n\nc",
        "```c++\na\n```\n\nb\n\n```py\nc\n```",
    ),
    "code in a wrapper": (
        '<div class="highlight highlight-source-shell"><pre>a</pre></div><pre class="brush: js; toolbar: no">b</pre>'
        '<div class="highlight-python notranslate"><div class=highlight><pre><span></span>c</pre></div></div>',
        "a\n\nb\n\nc", "```shell\na\n```\n\n```js\nb\n```\n\n```python\nc\n```",
    ),
    "no language": (
        '<pre class="language-none">a</pre><pre class="language-a`b">b</pre><pre title=x>c <code class=lang-c>d</code>'
        f'</pre><pre class="lang-{"x" * 21}">e</pre><div class=language-en><p>f<p>g<p>h<pre>i</pre></div>',
        "a\n\nb\n\nc d\n\ne\n\nf\n\ng\n\nh\n\ni",
        "```\na\n```\n\n```\nb\n```\n\n```\nc d\n```\n\n```\ne\n```\n\nf\n\ng\n\nh\n\n```\ni\n```",
    ),
    "code of line elements": (
        "<pre><code>def f():<br>    return 1<br><br/>\tx<br></code></pre>", "def f():\n    return 1\n\n\tx",
        "```\ndef f():\n    return 1\n\n\tx\n```",
    ),
    "line numbers of Pygments": (
        '<pre><span class="linenos"> 9</span>a = 1\n<span class=lineno><a href="#l10">10</a></span>  b\n'
        "<span class=mi>3</span><span class=linenos>x</span></pre><p><span class=linenos>5</span>",
        "a = 1\n  b\n3x\n\n5", "```\na = 1\n  b\n3x\n```\n\n5",
    ),
    "line numbers of Hexo": (
        "<figure class='highlight c'><table><tr><td><pre><i>9</i><br><i>10</i><br></pre><td><pre>a<br> b</pre></table>",
        "a\n b", "```\na\n b\n```",
    ),
    "code of numbers": (
        "<table><tr><td><pre>1\n3</pre><td><pre>a</pre><tr><td><pre>1</pre></table>", "1\n3\n\na\n\n1",
        "```\n1\n3\n```\n\n```\na\n```\n\n```\n1\n```",
    ),
    "code of pandoc, Org and MediaWiki": (
        '<pre class="sourceCode numberSource r numberLines"><code class="sourceCode r">a</code></pre><pre class="src '
        'src-sh">b</pre><div class="mw-highlight mw-highlight-lang-lua mw-content-ltr"><pre>c</pre></div>'
        '<div class="language-go"><div><table><tr><td>1<td><div><pre>d</pre></div></table></div></div>',
        "a\n\nb\n\nc\n\n1\n\nd", "```r\na\n```\n\n```sh\nb\n```\n\n```lua\nc\n```\n\n1\n\n```go\nd\n```",
    ),
    "code with fences": ("<pre>```\nx\n```</pre>", "```\nx\n```", "````\n```\nx\n```\n````"),
    "code between paragraphs": ("<p>a<pre>b  c</pre><p>d", "a\n\nb  c\n\nd", "a\n\n```\nb  c\n```\n\nd"),
    "a quote": ("<blockquote><p>a<p>b</blockquote><p>c", "a\n\nb\n\nc", "> a\n>\n> b\n\nc"),
    "a quote in a quote": ("<blockquote>a<blockquote>b</blockquote></blockquote>", "a\n\nb", "> a\n>\n> > b"),
    "definitions": ("<dl><dt>a<dd>b<dt>c<dd>d</dl>", "a\nb\nc\nd", "a\n: b\nc\n: d"),
    "a caption of a figure": ("<figure><img><figcaption>a</figcaption></figure><p>b", "a\n\nb", None),
    "MathML": (
        f"<p>a <math><semantics><mi>x</mi>{TEX.format('x^2 &lt; y')}</semantics></math> b", "a $x^2 < y$ b", None,
    ),
    "MathML without TeX": ("<p>a <math><mi>x</mi><mo>=</mo><mn>2</mn></math> b", "a $x=2$ b", None),
    "KaTeX": (
        f'<p>a <span class="katex"><span class="katex-mathml"><math>{TEX.format("E=mc^2")}</math></span>'
        '<span class="katex-html" aria-hidden="true"><span>E</span>=mc2</span></span>, b', "a $E=mc^2$, b", None,
    ),
    "MathJax": (
        '<p>a <span class="MathJax_Preview">z</span><script type="math/tex; mode=display">\\int x\n dx</script> b',
        "a $\\int x dx$ b", None,
    ),
    "ruby": ("<p><ruby>虐待<rp>(</rp><rt>ぎゃくたい</rt><rp>)</rp></ruby>です", "虐待です", None),
    "ruby without end tags": ("<p><ruby>漢<rt>kan<rb>字<rt>ji</ruby>です", "漢字です", None),
    "lines of Chinese and Japanese": (
        "<p>水車は\n回る。\r\n\t「そう」<p>水車 の\nmill\nの<br>\n水&nbsp;\n車<p>水\n한\n글 上",
        "水車は回る。「そう」\n\n水車 の mill の\n水 車\n\n水 한 글 上", None,
    ),
    "soft hyphens": ("<p>Müh&shy;len\u00adrad", "Mühlenrad", None),
    "what Markdown would read as markup": (
        "<p># a<p>1. b<p>- c<p>&gt; d<p>1.5", "# a\n\n1. b\n\n- c\n\n> d\n\n1.5",
        "\\# a\n\n1\\. b\n\n\\- c\n\n\\> d\n\n1.5",
    ),
}  # fmt: skip


def everything(html: str, **options) -> str:
    return whole_text(html.encode(), BlocksConfig(**options))


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_as_text_and_as_markdown(name):
    html, text, markdown = STRUCTURES[name]
    assert everything(html) == text
    assert everything(html, format="markdown") == (text if markdown is None else markdown)


def test_options_of_the_layout():
    table, items = "<table><tr><td>a<td>b<tr><td>c<td>d</table>", "<ul><li>a<li>b</ul>"
    assert everything(table, table_rows=False) == "a\n\nb\n\nc\n\nd"
    assert everything(items, list_markers=False) == "a\nb"
    assert everything("<pre>a\n  b</pre>", code=False) == "a b"
    assert everything("<p>a<br>b", line_breaks=False) == "a b"


def test_formulas_without_an_end_lose_no_text_and_take_linear_time():
    assert everything("<p>a <math>b<p>c") == "a b\n\nc"
    assert everything("<span class=katex-html>a<p>b</span>c") == "a\n\nbc"
    assert everything("<rt>a<p>b") == "a\n\nb"
    many = 50_000
    assert everything("<span class=katex-html>" * many + "a") == "a"
    assert everything("<math>" * many + "a") == everything("<rt>" * many + "<p>a") == "a"


def with_spans(html: bytes, text_format="text") -> list[tuple[str, str]]:
    """(part of the text, part of the page) of each span."""
    page = without_marks(read_page(html, NO_TOKENS))
    kept = np.ones(len(page.blocks), bool)
    options = LayoutOptions(format=text_format)
    text, spans = layout_with_spans(page, kept, options)
    assert text == whole_text(html, BlocksConfig(format=text_format))
    return [(text[span.start : span.end], html[span.html_start : span.html_end].decode()) for span in spans]


def test_a_table_of_unequal_rows_takes_linear_space():
    """Rows are filled up to MAX_COLUMNS, and cells that span rows move others by as many at most."""
    many = 20_000
    html = f"<table><tr>{'<td>a' * many}{'<tr><td>b' * many}</table>"
    assert len(everything(html)) == 6 * many - 3
    assert len(everything(html, format="markdown")) < 400 * many
    assert len(everything(f"<table><tr>{'<td rowspan=65534>a' * 99}{'<tr><td>b' * 1000}</table>")) < 301 * 1001


def test_no_block_gives_no_text():
    page = read_page(b"<p>a", NO_TOKENS)
    assert layout(page, np.zeros(1, bool), LayoutOptions()) == "" == everything("")
    assert layout_with_spans(page, np.zeros(1, bool), LayoutOptions()) == ("", [])


def test_spans_name_the_bytes_of_the_page():
    html = "<h1> Öl &amp; <i>Korn</i> </h1><ul><li>a<br>b</ul><table><tr><td>c<td>d|e</table><pre>  x\n y\n</pre>"
    assert with_spans(html.encode()) == [
        ("Öl & Korn", "Öl &amp; <i>Korn"),
        ("a\n  b", "a<br>b"),
        ("c", "c"),
        ("d|e", "d|e"),
        ("  x\n y", "  x\n y"),
    ]
    assert with_spans(html.encode(), "markdown")[1:4] == [("a\n    b", "a<br>b"), ("c", "c"), ("d\\|e", "d|e")]


@pytest.mark.parametrize("text_format", ["text", "markdown"])
def test_a_span_has_the_words_of_its_bytes(text_format):
    """Law: the text is that without spans, spans follow each other in the page, and the words of each are those of its
    bytes without tags. Formulas, ruby and line numbers write other words than their bytes."""
    num_spans = 0
    for name, (html, _, _) in STRUCTURES.items():
        if any(part in html.lower() for part in ("<math", "tex", "<rt", "<script", "=linenos")):
            continue
        for text, source in with_spans(html.encode(), text_format):
            source = re.sub(r"(?<=[\u3001-\u9fff])[ \t]*[\r\n]\s*(?=[\u3001-\u9fff])", "", source)
            plain = html_module.unescape(re.sub(r"<!--.*?-->|<[^>]*>", " ", source)).replace("\u00ad", "")
            assert re.findall(r"\w+", text) == re.findall(r"\w+", plain), name
            num_spans += 1
        bounds = read_page(html.encode(), NO_TOKENS).blocks[:, (HTML_START, HTML_END)]
        assert (bounds[:, 0] < bounds[:, 1]).all() and (bounds[1:, 0] >= bounds[:-1, 1]).all(), name
    assert num_spans > 80


def test_a_page_cannot_write_the_marks_of_spans():
    """References to control characters are dropped, in text and in formulas."""
    tex = TEX.format("a&#1;9&#2;b&#3;")
    assert with_spans(b"<p>x&#1;1&#2;y&#3;</p>") == [("x1y", "x&#1;1&#2;y")]
    assert with_spans(f"<p><math>{tex}</math>".encode()) == [("$a 9 b$", "a&#1;9&#2;b&#3;")]


# HTML of a thread of two posts, and its authors: the elements that forum software gives them.
THREADS: dict[str, tuple[str, list[str]]] = {
    "Discourse": (
        '<div itemprop=comment><span class=creator itemprop=author><a href=/u/ann><span itemprop=name>ann</span></a>'
        '</span><div class=post>{}</div></div>', ["ann", "bob"],
    ),
    "phpBB": (
        '<div class="post bg1"><div class=postbody><h3><a href=#p1>Re: mill</a></h3><div class=content>{}</div></div>'
        '<dl class=postprofile><dt>by <a class=username-coloured href=/ann>ann</a></dt><dd>Posts: 3</dd></dl></div>',
        ["ann", "bob"],
    ),
    "XenForo": (
        '<article><div><a class=avatar><span>A</span></a><h4><a class="username ">ann</a></h4></div><div><blockquote>'
        '<a class=username>eve</a> said: no</blockquote>{}</div></article>', ["ann", "bob"],
    ),
    "a table": (
        '<table class=post><tr><td><div id=postauthor12>ann</div><td>{}</table>', ["ann", "bob"],
    ),
    "signed below": ('<div class=answer><p>{}<div itemprop=author><a>ann</a> 1,204</div></div>', ["ann", "bob"]),
    "FluxBB": (
        '<div class=blockpost><div class=postleft><dl><dt><strong>ann</strong></dt><dd class=usertitle>Member</dd></dl>'
        '</div><div class=postmsg>{}</div></div>', ["ann", "bob"],
    ),
    "a link to an account": ('<div><a href="/~ann/"><img></a><a href="/~ann/">ann</a><p>{}</div>', ["ann", "bob"]),
    "with pronouns": ('<div><a href="/u/ann@mill.org">Ann (she)</a><p>{}</div>', ["Ann (she)", "Bob (she)"]),
    "an attribute": ('<div><a data-username="ann"><b>ann</b></a> #1<p>{}</div>', ["ann", "bob"]),
    "microdata": (
        '<div><p><span itemprop=author><meta itemprop=name content="ann"></span>by <i>ann</i>:<p>{}</div>',
        ["ann", "bob"],
    ),
    "JSON-LD": (
        '<div><script type="application/ld+json">{{"author": {{"@type": "Person", "name": "ann"}}}}</script>'
        '<p><i>ann</i> <i>today</i><p>{}</div>', ["ann", "bob"],
    ),
    "a mention": ('<div><p>@<a href=/u/ann>ann</a> <p>{}</div>', []),
    "the name of a reply": ('<div><p>{}<div><a href=/u/ann>ann</a> So it is.</div></div>', []),
    "a date": ('<div><p class=author><time>2006-08-08T22:13+00:00</time><p>{}</div>', []),
    "no name": ('<div class=post><div class=author></div><p>{}</div>', []),
    "a long text": (f'<div class=post><div class=author>{"ann " * 20}</div><p>{{}}</div>', []),
}  # fmt: skip


def thread(html: str, kept_texts: tuple[str, ...], text_format="text") -> tuple[str, list[tuple[str, str]]]:
    """(the text with the authors of the posts, (text, part of the page) of each span). kept_texts: texts of blocks."""
    page = read_page(html.encode(), NO_TOKENS)
    text = page.text.tobytes()
    kept = np.array([text[row[START] : row[END]].decode() in kept_texts for row in page.blocks])
    authors, kept = post_authors(html.encode(), page.elements, page.blocks, kept)
    options = LayoutOptions(format=text_format)
    written, spans = layout_with_spans(page, kept, options, authors)
    assert written == layout(page, kept, options, authors)
    parts = [(written[span.start : span.end], html.encode()[span.html_start : span.html_end]) for span in spans]
    return written, [(part, source.decode()) for part, source in parts]


@pytest.mark.parametrize("name", THREADS)
def test_the_author_of_a_post_stands_before_it(name):
    post, authors = THREADS[name]
    html = post.format("The mill is old.") + post.format("It still turns.").replace("ann", "bob").replace("Ann", "Bob")
    texts = ["The mill is old.", "It still turns."]
    text, spans = thread(html, tuple(texts))
    marked, _ = thread(html, tuple(texts), "markdown")
    if authors:
        ann, bob = authors
        assert text == f"{ann}:\n\nThe mill is old.\n\n{bob}:\n\nIt still turns."
        assert marked == f"**{ann}**\n\nThe mill is old.\n\n**{bob}**\n\nIt still turns."
        texts = [ann, texts[0], bob, texts[1]]
    assert text.replace(":", "") == "\n\n".join(texts)
    assert spans == [(part, part) for part in texts]


def test_no_author_is_written_twice():
    post = "<li><p class=author>{}</p><p>{}</p></li>"
    posts = post.format("ann", "The mill is old.") + post.format("by <a>bob</a> on Monday", "It turns.")
    kept = ("ann", "by bob on Monday", "The mill is old.", "It turns.")
    text, _ = thread(f"<ol>{posts}</ol>", kept)
    assert text == "1. ann:\n   The mill is old.\n2. by bob on Monday\n   It turns."
    reply = "<div><b class=author>{}</b><p>{}</p>{}</div>"
    nested = reply.format("ann", "a", reply.format("bob", "b", "") + reply.format("a*b", "c", ""))
    assert thread(nested + reply.format("dan", "d", ""), ("a", "b", "c", "d"), "markdown")[0] == (
        "**ann**\n\na\n\n**bob**\n\nb\n\n**a\\*b**\n\nc\n\n**dan**\n\nd"
    )


def test_a_reply_that_stands_alone_in_a_post_has_its_author():
    """By the tag and first class of posts that stand beside others; other elements around a name are no posts."""
    post = "<li class='{}'><div class=head><b class=author>{}</b></div><p>{}</p><ul class=replies>{}</ul></li>"
    reply = post.format("node depth-2", "bob", "b", post.format("node depth-3 odd", "cid", "c", ""))
    posts = post.format("node depth-1", "ann", "a", reply) + post.format("node", "dan", "d", "")
    assert thread(f"<ul>{posts}</ul>", ("a", "b", "c", "d"))[0] == (
        "- ann:\n  a\n  - bob:\n    b\n    - cid:\n      c\n- dan:\n  d"
    )


def test_a_thread_of_one_post():
    post = "<body><div><h1>Title</h1><div><i class=author>{}</i></div><p>{}</p></div>"
    assert thread(post.format("ann", "a"), ("Title", "a"))[0] == "Title\n\na"  # the name stands behind the first
    assert thread(post.format("ann", "a"), ("a",))[0] == "ann:\n\na"
    assert thread(post.format("ann", "a") + "<i class=author>bob</i>", ("a",))[0] == "a"
    assert thread("<body><i class=author>ann</i><p>a</p>", ("a",))[0] == "a"  # in no element of their own


def test_authors_take_linear_time():
    many = 20_000
    posts = thread("<div><b class=author>ann</b><p>a</p></div>" * many, ("a",))[0]
    assert posts == "\n\n".join(["ann:\n\na"] * many)
    assert thread("<div><b class=author>ann</b><p>a</p>" * many, ("a",))[0].count("ann:") <= 250


def test_declared_names_take_linear_time():
    many = 5000
    posts = thread("<div><a href=/u/ann>ann</a><p>a</p></div>" * many, ("a",))[0]
    assert posts == "\n\n".join(["ann:\n\na"] * many)
    for opening in ("<a href=////", '"author":  ', "<p itemprop=author><b>", " data-author=", "<a href=/u/a"):
        thread("<p>a</p>" + opening * (100_000 // len(opening)), ("a",))


def test_authors_only_on_pages_with_posts():
    """Of kind forum, or with schema.org's types of posts."""
    story = "".join(f"<p>Sentence {k} tells of the mill, and of the river that turns its wheel.</p>" for k in range(9))
    part = "<div><b class=author>ann</b>" + story + "</div>"
    page = "<html><head><meta property=og:type content=article></head><body><h1>The mill</h1><article {}>{}</article>"
    parts = part + part.replace("ann", "bob").replace("mill", "dam")
    marked, plain = (page.format(kind, parts).encode() for kind in ("itemtype=https://schema.org/Comment", ""))

    def names(html: bytes, **options) -> set[str]:
        lines = extract(html, None, "blocks", BlocksConfig(**options)).split("\n")
        return {"ann:", "bob:"}.intersection(lines)

    assert names(marked, post_authors=True) == {"ann:", "bob:"}
    assert names(plain, post_authors=True) == names(marked) == set()

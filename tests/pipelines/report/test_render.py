"""A small report as Markdown and HTML, with untrusted text that tries to inject markup."""

import re
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.pipelines.report.figures import curves
from gristmill.pipelines.report.render import Excerpt, Figure, Heading, Paragraph, Table, to_html, to_markdown

BIDI_CONTROLS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
EVIL = "</pre><script>alert(1)</script> `````\n| x | <img src=http://x.example/y onerror=z>"


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def parsed(html):
    tags = Tags()
    tags.feed(html)
    return tags


def test_worked_example():
    blocks = [Heading("Scores"), Table(("task", "value"), (("cloze", "0.5"),), numeric=1)]
    assert to_markdown(blocks) == "## Scores\n\n| task | value |\n| --- | --: |\n| cloze | 0.5 |\n"
    assert '<tr><td>cloze</td><td class="number">0.5</td></tr>' in to_html("t", blocks)


@pytest.mark.parametrize(
    "block", [Excerpt(EVIL, EVIL), Paragraph(EVIL), Heading(EVIL), Table((EVIL,), ((EVIL,),), caption=EVIL)]
)
def test_foreign_text_stays_text(block):
    tags = parsed(to_html(EVIL, [Heading("t", 1), Paragraph("p"), block]))
    assert not {"script", "img", "iframe", "link"} & {tag for tag, _ in tags.tags}
    assert all(not name.startswith("on") for _, attributes in tags.tags for name in attributes)


@given(st.text(st.characters(codec="utf-8")))
def test_a_report_holds_no_control_character(text):
    """Whatever a document holds: nothing that a terminal obeys or that turns the direction of the text around it."""
    blocks = [Heading(text, 1), Paragraph(text), Excerpt(text, text), Table((text,), ((text,),), caption=text)]
    for page in (to_html(text, blocks), to_markdown(blocks)):
        forbidden = [c for c in page if (unicodedata.category(c) == "Cc" and c not in "\t\n") or c in BIDI_CONTROLS]
        assert forbidden == []


def test_a_control_character_has_a_picture():
    assert "red\u241b" in to_markdown([Paragraph("red\x1b[31m")])


@given(st.text("a`\n~"))
def test_a_fence_is_longer_than_any_run_inside_it(text):
    lines = to_markdown([Excerpt("t", text)]).split("\n")
    fence = lines[-2]
    assert re.fullmatch("`{3,}", fence)
    assert not re.search(re.escape(fence), text)


def test_nothing_is_loaded_from_elsewhere():
    svg = curves({"loss": ([1, 2, 3], [3.0, 2.0, 1.5])}, "step", "loss")
    page = to_html("t", [Figure("loss", svg, "the loss")])
    sources = [attributes["src"] for tag, attributes in parsed(page).tags if "src" in attributes]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/svg+xml;base64,")
    assert "default-src 'none'" in page


def test_a_figure_has_the_same_bytes_every_time():
    draw = lambda: curves({"a": ([0, 1], [1.0, 0.5]), "b": ([0, 1], [1.0, 0.7])}, "x", "y")  # noqa: E731
    assert draw() == draw()

import html as html_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.extraction.attributes import DEPTH, ELEMENT, LINK_BYTES, LINKS, PARENT, TAG
from gristmill.data_pipeline.extraction.page import NO_TOKENS, Page, PageBuffers, block_texts, read_page
from gristmill.data_pipeline.extraction.tags import TAGS
from gristmill.data_pipeline.extraction.tokenizer import MAX_DEPTH

NAMES = ["", *TAGS]


def read(html: str) -> Page:
    return read_page(html.encode(), NO_TOKENS)


def texts(html: str) -> list[str]:
    return block_texts(read(html))


def path(page: Page, block: int) -> str:
    """The names of the elements around a block, outermost first."""
    names, element = [], page.blocks[block, ELEMENT]
    while element:
        names.append(NAMES[page.elements[element, TAG]])
        element = page.elements[element, PARENT]
    return " ".join(reversed(names))


def test_blocks_end_at_block_level_tags_and_at_two_line_breaks():
    story = "<h1>The <i>mill</i></h1><p>By the\n  river.<p>One<br>two<br><br>three<div>four<span>teen</span></div>five"
    assert texts(story) == ["The mill", "By the river.", "One\ntwo", "three", "fourteen", "five"]


def test_elements_that_may_stay_open_are_closed():
    page = read(
        "<body><ul><li>a<li>b<ul><li>c</ul><li>d</ul><table><tr><td>e<td>f<tr><th>g</table><dl><dt>h<dd>i</dl>j"
    )
    found = dict(zip(block_texts(page), (path(page, k) for k in range(10)), strict=True))
    assert found == {
        "a": "body ul li",
        "b": "body ul li",
        "c": "body ul li ul li",
        "d": "body ul li",
        "e": "body table tr td",
        "f": "body table tr td",
        "g": "body table tr th",
        "h": "body dl dt",
        "i": "body dl dd",
        "j": "body",
    }


def test_an_end_tag_closes_nothing_outside_its_cell():
    page = read("<div><table><tr><td>a</div>b</td><td>c</table>d</div>e")
    assert [path(page, k) for k in range(5)] == [*["div table tr td"] * 3, "div", ""]


def test_what_is_no_text_is_skipped():
    page = (
        "<!doctype html><title>T</title><style>p {}</style><script>if (a < b) '</p>'</script >"
        "<!-- <p>x</p> --><?php a ?>"
        "<noscript><img></noscript><svg><text>s</text></svg><select><option>o</select><textarea>t</textarea>kept"
    )
    assert texts(page) == ["kept"]
    assert texts("kept<script>lost for good") == ["kept"]
    assert texts("kept<noscript>and <p>this too") == ["kept", "and", "this too"]
    assert texts("a<svg/>b<script src=x />c") == ["abc"]


def test_text_that_looks_like_tags():
    assert texts("1 < 2 <3 & 4 &amp 5 > 6 <!> <a title='>'>x</a>") == ["1 < 2 <3 & 4 & 5 > 6 x"]


def test_links_are_measured_over_blocks():
    page = read("<p>ab <a href=/x>cde</a> f</p><a href=/y><h2>gh</h2>ij</a>k<a name=here>l</a>")
    assert block_texts(page) == ["ab cde f", "gh", "ijkl"]
    assert page.blocks[:, LINK_BYTES].tolist() == [4, 2, 2]  # the space before a link's text counts as its own
    assert page.blocks[:, LINKS].tolist() == [1, 1, 1]


def test_white_space_is_kept_in_code_and_nowhere_else():
    assert texts("<pre>\nx = 1\n  y\t= 2</pre> <p>\ta \n\u00a0\u3000 b\u00ad\u200bc\x00") == ["x = 1\n  y\t= 2", "a bc"]


def test_deep_nesting_keeps_start_and_end_tags_in_step():
    deep = 100_000
    page = read("<div>" * deep + "<p>deepest</p>" + "</div>" * (deep - 1) + "<p>shallow</p></div>end")
    assert block_texts(page) == ["deepest", "shallow", "end"]
    assert page.elements[:, DEPTH].max() == MAX_DEPTH
    assert (path(page, 1), path(page, 2)) == ("div p", "")


REFERENCES = [
    "&amp;", "&lt", "&nbsp", "&notit;", "&notin;", "&#65;", "&#x41", "&#128;", "&#0;", "&#xD800;", "&#x110000;",
    "&#", "&;", "&nLt;", "&", "&hellip;", "&#xZ;", "é", "漢", "x", ";", "&CounterClockwiseContourIntegral;",
    "&#99999999999;",
]  # fmt: skip


@given(st.lists(st.sampled_from([*REFERENCES, " "])).map("".join))
def test_references_are_decoded_as_pythons_html_module_does(text):
    found = " ".join(texts(f"<p>a{text}b</p>"))
    wanted = "".join(c for c in html_module.unescape(f"a{text}b") if c >= " ")
    assert found.split() == wanted.split()


TAG_PIECES = [
    "<p>", "</p>", "<div class='a b-c'>", "</div>", "<li>", "<table>", "<tr>", "<td>", "</td>", "</table>", "<br>",
    "<pre>", "</pre>", "<a href=x>", "</a>", "<b>", "<script>", "</script>", "<!--", "-->", "<", ">", "text",
    "&amp;", '"', "'",
]  # fmt: skip


@given(st.lists(st.sampled_from(TAG_PIECES)).map("".join))
def test_any_page_is_a_tree_of_blocks_in_order(html):
    page = read(html)
    assert all(0 <= parent < child for child, parent in enumerate(page.elements[1:, PARENT].tolist(), 1))
    bounds = page.blocks[:, 1:3].ravel().tolist()
    assert bounds == sorted(bounds) and (not bounds or bounds[-1] == len(page.text))
    assert all(text.strip() for text in block_texts(page) if "<pre" not in html)


@pytest.mark.parametrize("html", ["<p>a</p>" * 1000, "<", "", "<p", "<!--", "</", "&", "<a href='", "<p>a" * 3])
def test_a_workspace_that_was_used_before_changes_nothing(html):
    space = PageBuffers()
    read_page(b"<div class=x>longer text than any</div>" * 50, NO_TOKENS, space)
    used, fresh = read_page(html.encode(), NO_TOKENS, space), read_page(html.encode(), NO_TOKENS)
    assert all((a == b).all() for a, b in zip(used[:5], fresh[:5], strict=True))

"""Formulas of pages that state no TeX: MathML as it is written, and the TeX that stands for it."""

import random
import re

import pytest
from lxml import etree

from gristmill.data_pipeline.extraction.blocks_config import BlocksConfig
from gristmill.data_pipeline.extraction.formulas import MAX_LEVELS, with_tex
from gristmill.data_pipeline.extraction.html_extraction import extract_page


def tag(name: str, *inner: str, **attributes: str) -> str:
    """An element; a text that is no markup is a number, a letter or an operator."""
    stated = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<{name}{stated}>{''.join(map(token, inner))}</{name}>"


def token(text: str) -> str:
    if text.startswith("<"):
        return text
    return f"<mn>{text}</mn>" if text.isdigit() else f"<mi>{text}</mi>" if text.isalpha() else f"<mo>{text}</mo>"


def row(*inner: str) -> str:
    return tag("mrow", *inner)


ROOT = tag("msqrt", tag("msup", "b", "2"), "\u2212", "4", "a", "c")
TABLE = tag("mtable", *(tag("mtr", *(f"<mtd>{token(cell)}</mtd>" for cell in line)) for line in ("ab", "01")))
PAIR = tag("munderover", "\u2211", row("i", "=", "1"), "n")
FORMULAS = [
    (
        row("x", "=", tag("mfrac", row("\u2212", "b", "\u00b1", ROOT), row("2", "a"))),
        r"x=\frac{-b\pm\sqrt{b^2-4ac}}{2a}",
    ),
    (tag("msub", "x", row("i", "+", "1")) + token("y"), "x_{i+1}y"),
    (tag("msubsup", "\u03b1", "\u03b2", "10"), r"\alpha_\beta^{10}"),
    (tag("msup", row("a", "b"), "n"), "{ab}^n"),
    (tag("msup", row("(", "a", "+", "b", ")"), "2"), "(a+b)^2"),
    (tag("msup", "f", "\u2032") + token("x"), "f'x"),
    (tag("mroot", "x", "3"), r"\sqrt[3]{x}"),
    (PAIR + token("i"), r"\sum_{i=1}^n i"),
    (tag("munder", "lim", row("x", "\u2192", "0")) + token("x"), r"\lim_{x\to0} x"),
    (tag("msubsup", "\u222b", "0", "1") + token("x"), r"\int_0^1x"),
    (token("sin") + token("\u2061") + token("x"), r"\sin x"),
    (token("rank") + token("A"), r"\operatorname{rank}A"),
    ('<mi mathvariant="double-struck">R</mi>', r"\mathbb{R}"),
    ('<mi mathvariant="normal">d</mi><mi>t</mi>', r"\mathrm{d}t"),
    (token("a") + "<mo>&le;</mo>" + token("b"), r"a\leq b"),
    (token("a") + "<mo>&PlusMinus;</mo>" + token("b"), r"a\pm b"),
    (token("a") + "<mo>&lt;</mo>" + token("b"), "a<b"),
    (token("a") + "<mo>&amp;</mo>" + token("b"), r"a\&b"),
    ("<mtext>for 50 % of</mtext><mi>x</mi>", r"\text{for 50 \% of}x"),
    (row("(", TABLE, ")"), r"\begin{pmatrix} a & b \\ 0 & 1 \end{pmatrix}"),
    (row("|", TABLE, "|"), r"\begin{vmatrix} a & b \\ 0 & 1 \end{vmatrix}"),
    (row("f", "=", "{", TABLE), r"f=\begin{cases} a & b \\ 0 & 1 \end{cases}"),
    (row("{", TABLE, ","), r"\begin{cases} a & b \\ 0 & 1 \end{cases},"),
    (row(*"xy", "<mrow/>", tag("mi", "\u2061")), "xy"),
    (TABLE, r"\begin{matrix} a & b \\ 0 & 1 \end{matrix}"),
    (tag("mfrac", "n", "k", linethickness="0"), r"{n \atop k}"),
    (tag("mfrac", "a", row("b", "c"), bevelled="true"), "a/{bc}"),
    (tag("mover", "x", "\u00af"), r"\bar{x}"),
    (tag("mover", row("A", "B"), "\u2192"), r"\overrightarrow{AB}"),
    (tag("mover", "v", "~"), r"\tilde{v}"),
    (tag("mover", row("a", "+", "b"), "\u23de"), r"\overbrace{a+b}"),
    (tag("munder", "a", "\u0332"), r"\underline{a}"),
    (tag("mover", "=", "<mtext>def</mtext>"), r"\overset{\text{def}}{=}"),
    (tag("mmultiscripts", "C", "<mprescripts/>", "6", "14"), "{}_6^{14}C"),
    (tag("mmultiscripts", "R", "i", "<none/>", "<none/>", "j"), "R_i^j"),
    (tag("mfenced", "a", "b", open="[", close=")"), "[a,b)"),
    (tag("mfenced", row("x", "+", "y")), "(x+y)"),
    (tag("menclose", "x", notation="box"), r"\boxed{x}"),
    (tag("mstyle", "a", "<mspace width='1em'/>", tag("mphantom", "b"), tag("mpadded", "c")), "ac"),
    (tag("semantics", row("a", "b"), '<annotation encoding="text/plain">ab in words</annotation>'), "ab"),
]


def page(math: str) -> bytes:
    return f"<p>Before <math display='block'>{math}</math>, behind.</p>".encode()


@pytest.mark.parametrize(("mathml", "tex"), FORMULAS, ids=[tex for _, tex in FORMULAS])
def test_a_formula_is_tex_in_as_many_bytes(mathml, tex):
    before, after = page(mathml), with_tex(page(mathml))
    assert (
        len(after) == len(before) and after.startswith(b"<p>Before <math ") and after.endswith(b"</math>, behind.</p>")
    )
    shown = etree.fromstring(after).find("math").text
    assert shown == f"${tex}$"
    assert with_tex(after) is after


@pytest.mark.parametrize(
    "html",
    [
        page('<semantics><mi>x</mi><annotation encoding="application/x-tex">x</annotation></semantics>'),
        page("x"),
        page("<mspace/>"),
        page(f"<mrow>{'<mi>x</mi>' * 10_001}</mrow>"),
        page(f"{'<msqrt>' * (MAX_LEVELS + 1)}<mi>x</mi>{'</msqrt>' * (MAX_LEVELS + 1)}"),
        b"<p><math><mi>x</mi> is without an end",
        b"<math",
        b"<p>No formula.</p>",
    ],
    ids=["stated", "text", "empty", "long", "deep", "open", "cut", "none"],
)
def test_what_stays_as_it_is(html):
    assert with_tex(html) is html


def test_many_formulas_without_an_end_take_linear_time():
    """500,000 of them; a search from each to the end of the page would take an hour."""
    html = b"<math><mi>x" * 500_000
    assert with_tex(html) is html


def test_random_structures_are_balanced_and_keep_their_numbers():
    rng, shapes = random.Random(7), ["mrow", "msqrt", "msup", "msub", "mfrac", "msubsup", "mover", "munder", "mroot"]

    def structure(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return f"<mn>{rng.randint(10, 99)}</mn>"
        name = rng.choice(shapes)
        return tag(name, *(structure(depth - 1) for _ in range(3 if name == "msubsup" else 2)))

    for _ in range(300):
        mathml = structure(5)
        tex = etree.fromstring(with_tex(page(f"<mrow>{mathml}</mrow>"))).find("math").text
        assert tex.count("{") == tex.count("}") and tex[0] == tex[-1] == "$"
        assert sorted(re.findall(r"\d\d", tex)) == sorted(re.findall(r"\d\d", mathml))


STORY = " ".join(f"Sentence number {k} tells of the mill and of the river behind it." for k in range(8))


def test_an_article_has_the_formula_and_the_positions_of_its_blocks():
    math = f"<math>{tag('mfrac', '1', '2')}</math>"
    html = f"<html><body><article><h1>The mill</h1><p>{STORY} Half is {math}.</p><p>{STORY}</p></article></body></html>"
    config = BlocksConfig(metadata=("spans",))
    found = extract_page(html.encode(), None, "blocks", config, None)
    assert r"Half is $\frac{1}{2}$." in found.text
    ends = [end for *_, end in found.metadata["spans"]]
    assert html.encode()[: ends[-1]].endswith(STORY.encode())

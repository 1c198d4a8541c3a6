"""Formulas of Word documents: Office Math as Word writes it, and the TeX that stands for it."""

import random

import pytest
from lxml import etree

from gristmill.data_pipeline.extraction.formulas import MAX_LEVELS, MAX_TEX_CHARS
from gristmill.data_pipeline.readers.word_formulas import formula_tex

SPACE = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math" xmlns:w="w"'


def r(text: str, **style: str) -> str:
    """A run; style: sty, scr or nor."""
    properties = "".join(f'<m:{name} m:val="{value}"/>' for name, value in style.items())
    return f'<m:r><m:rPr>{properties}</m:rPr><w:rPr><w:b/><!-- --></w:rPr><m:t xml:space="preserve">{text}</m:t></m:r>'


def s(name: str, properties: dict[str, str] | None = None, **parts: str) -> str:
    """A structure with its properties and parts; a text that is no XML is a run."""
    values = "".join(f'<m:{key} m:val="{value}"/>' for key, value in (properties or {}).items())
    inner = "".join(f"<m:{key}>{part if part[:1] == '<' else r(part)}</m:{key}>" for key, part in parts.items())
    return f"<m:{name}><m:{name}Pr>{values}<m:ctrlPr/></m:{name}Pr>{inner}</m:{name}>"


def d(*parts: str, **properties: str) -> str:
    """Delimiters around the parts."""
    inner = "".join(f"<m:e>{part if part[:1] == '<' else r(part)}</m:e>" for part in parts)
    return s("d", properties).replace("</m:d>", inner + "</m:d>")


def rows(name: str, *of_rows: str) -> str:
    """A matrix, cells separated by " | ", or equations below each other."""
    cells = [[f"<m:e>{r(cell)}</m:e>" for cell in row.split(" | ")] for row in of_rows]
    inner = "".join(f"<m:mr>{''.join(row)}</m:mr>" if name == "m" else row[0] for row in cells)
    return f"<m:{name}>{inner}</m:{name}>"


def tex(xml: str) -> str:
    return formula_tex(etree.fromstring(f"<m:oMath {SPACE}>{xml}</m:oMath>"))


P = {"sty": "p"}
FORMULAS = [
    (r("E=m") + s("sSup", e="c", sup="2"), "E=mc^2"),
    (s("sSub", e="x", sub="i+1") + r("y"), "x_{i+1}y"),
    (s("sSubSup", e="x", sub="i", sup="\u2032"), "x'_i"),
    (s("sSubSup", e="\u03b1", sub="\u03b2", sup="10"), r"\alpha_\beta^{10}"),
    (s("sSup", e="ab", sup="n"), "{ab}^n"),
    (s("sSup", e=d("a+b"), sup="2"), "(a+b)^2"),
    (s("sSup", e="10", sup="\u22123"), "10^{-3}"),
    (s("sPre", sub="6", sup="14", e=r("C", **P)), r"{}_6^{14}\mathrm{C}"),
    (
        r("x=") + s("f", num=r("\u2212b\u00b1") + s("rad", {"degHide": "1"}, e=s("sSup", e="b", sup="2")), den="2a"),
        r"x=\frac{-b\pm\sqrt{b^2}}{2a}",
    ),
    (s("f", {"type": "lin"}, num="a", den="b+c"), "a/{b+c}"),
    (d(s("f", {"type": "noBar"}, num="n", den="k")), r"\binom{n}{k}"),
    (s("rad", deg="3", e="x"), r"\sqrt[3]{x}"),
    (
        s("nary", {"chr": "\u2211", "limLoc": "undOvr"}, sub="k=1", sup="n", e=s("sSup", e="k", sup="2")),
        r"\sum_{k=1}^n k^2",
    ),
    (s("nary", {}, sub="0", sup="\u221e", e=r("f") + d("x") + r("dx")), r"\int_0^\infty f(x)dx"),
    (s("nary", {"chr": "\u220f", "supHide": "1"}, sub="p", sup="", e="p"), r"\prod_p p"),
    (s("nary", {"chr": "\u222e", "subHide": "on", "supHide": "on"}, sub="", sup="", e="F"), r"\oint F"),
    (s("func", fName=r("sin", **P), e="x"), r"\sin x"),
    (s("func", fName=s("sSup", e=r("cos", **P), sup="2"), e=d("\u03b8")), r"\cos^2(\theta)"),
    (s("func", fName="rank", e="A"), r"\operatorname{rank} A"),
    (
        s("func", fName=s("limLow", e=r("lim", **P), lim="n\u2192\u221e"), e=s("sSub", e="a", sub="n")),
        r"\lim_{n\to\infty} a_n",
    ),
    (s("func", fName=s("limLow", e="argmax", lim="x"), e="f"), r"\operatorname{argmax}_x f"),
    (s("acc", e="x"), r"\hat{x}"),
    (s("acc", {"chr": "\u20d7"}, e="AB"), r"\overrightarrow{AB}"),
    (s("acc", {"chr": "\u0307"}, e="\u03c6"), r"\dot{\varphi}"),
    (s("bar", {"pos": "top"}, e="z"), r"\overline{z}"),
    (s("bar", e="z"), r"\underline{z}"),
    (s("limLow", e=s("groupChr", e="a+b"), lim="n"), r"\underbrace{a+b}_n"),
    (s("limUpp", e=s("groupChr", {"chr": "\u23de", "pos": "top"}, e="a"), lim="n"), r"\overbrace{a}^n"),
    (s("groupChr", {"chr": "\u2192", "pos": "bot"}, e="f"), r"\xrightarrow{f}"),
    (s("limUpp", e="=", lim=r("def", nor="1")), r"\overset{\text{def}}{=}"),
    (d(rows("m", "a | b", "c | d")), r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}"),
    (d(rows("m", "a | b"), begChr="[", endChr="]"), r"\begin{bmatrix} a & b \end{bmatrix}"),
    (rows("m", "1 | 0", "0 | 1"), r"\begin{matrix} 1 & 0 \\ 0 & 1 \end{matrix}"),
    (
        r("|x|=") + d(rows("eqArr", "x,&amp;x\u22650", "\u2212x,&amp;x&lt;0"), begChr="{", endChr=""),
        r"|x|=\begin{cases} x,&x\geq0 \\ -x,&x<0 \end{cases}",
    ),
    (rows("eqArr", "a&amp;=b", "&amp;=c"), r"\begin{aligned} a&=b \\ &=c \end{aligned}"),
    (r("f") + d("x", "y", sepChr=","), "f(x,y)"),
    (d("x", begChr="{", endChr="}"), r"\{x\}"),
    (d("x", begChr="\u230a", endChr="\u230b"), r"\lfloor x\rfloor"),
    (d(s("f", num="a", den="b")), r"\left(\frac{a}{b}\right)"),
    (d("0", begChr="", endChr="|"), r"\left.0\right|"),
    (s("borderBox", e="x"), r"\boxed{x}"),
    (s("phant", {"show": "0"}, e="x") + s("box", e="y"), "y"),
    (r("x\u2208\u211d, \u2200\u03b5&gt;0: n\u2264m\u00d72"), r"x\in\mathbb{R}, \forall\varepsilon>0: n\leq m\times2"),
    (r("A", sty="b") + r("N", scr="double-struck") + r("L", scr="script"), r"\mathbf{A}\mathbb{N}\mathcal{L}"),
    (r("\u03b1", sty="b") + r("x"), r"\boldsymbol{\alpha}x"),
    (r(" if x_1 ", nor="1"), r"\text{ if x\_1 }"),
    (r("\U0001d465=\U0001d431, 50%$"), r"x=\mathbf{x}, 50\%\$"),
    (r("a&amp;b{}") + "<w:del>" + r("gone") + "</w:del><w:ins>" + r("c") + "</w:ins><!-- no text -->", r"ab\{\}c"),
    (r("\u6b63\u786e=\u00e9"), "\u6b63\u786e=\u00e9"),
]  # fmt: skip


@pytest.mark.parametrize(("xml", "expected"), FORMULAS, ids=[expected for _, expected in FORMULAS])
def test_a_formula_is_tex(xml, expected):
    assert tex(xml) == expected


def test_braces_of_formulas_are_paired():
    """Of formulas that are put together by chance."""
    draw = random.Random(4)
    for _ in range(300):
        part = r("x")
        for _ in range(draw.randrange(1, 6)):
            xml = draw.choice(FORMULAS)[0]
            part = draw.choice((
                xml + part, s("f", num=part, den=xml), s("sSup", e=part, sup=xml), s("acc", e=part), d(part, xml),
                s("nary", sub=xml, sup=part, e=xml), s("func", fName=part, e=xml), s("limLow", e=part, lim=xml),
            ))  # fmt: skip
        bare = tex(part).replace(r"\{", "").replace(r"\}", "")
        depth = 0
        for character in bare:
            depth += (character == "{") - (character == "}")
            assert depth >= 0
        assert depth == 0, bare
        assert bare.count(r"\left") - bare.count(r"\leftarrow") == bare.count(r"\right") - bare.count(r"\rightarrow")
        assert bare.count(r"\begin{") == bare.count(r"\end{")


def test_a_formula_over_the_limits_is_its_words():
    deep = "x"
    for _ in range(MAX_LEVELS):
        deep = s("sSup", e=deep, sup="2")
    assert tex(deep).count("^2") == MAX_LEVELS
    assert tex(s("acc", e=deep)) == " ".join(["x", *"2" * MAX_LEVELS])
    assert tex(r("x" * MAX_TEX_CHARS)) == tex(r("x" * (MAX_TEX_CHARS + 1)))[1:]
    assert tex(s("f", num="x" * MAX_TEX_CHARS, den="y")) == "x" * MAX_TEX_CHARS + " y"

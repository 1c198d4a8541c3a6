"""One generated file of each document format, read as the pipeline reads it; and damaged ones."""

import gzip
import io
import json
import zipfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from html import escape

import numpy as np
import pytest

from gristmill.data_pipeline.readers import markup
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.pdf import join_line, without_headers
from gristmill.data_pipeline.readers.pdf_lines import Line, joined_lines
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

MARKDOWN = {"blocks": {"format": "markdown"}}


def read(folder, content: bytes, format_: str, suffix: str = "", **options) -> list[Record | Unreadable]:
    path = folder / f"file.{format_}{suffix}"
    path.write_bytes(content)
    source = SourceConfig(name="s", format=format_, paths=(str(path),), **options)
    file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
    return list(read_range(FileRange(file, str(path)), source))


def read_text(folder, content: bytes, format_: str, **options) -> tuple[str, dict]:
    (record,) = read(folder, content, format_, **options)
    assert isinstance(record, Record), record
    return record.text, dict(record.metadata)


def refusal(folder, content: bytes, format_: str, **options) -> str:
    (record,) = read(folder, content, format_, **options)
    assert isinstance(record, Unreadable) and record.reason, record
    return record.kind


# PDF.


def pdf(pages: list[list[tuple[int, int, str]]], title: str = "The mill", letters: str = "", drawn: str = "") -> bytes:
    """A document in Helvetica, and in Courier where the text ends with a space, of 10 points; lines are (x, y,
    text). letters: what a stands for, of letters that follow each other in Unicode. drawn: operators of graphics."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", ""]
    objects += ["<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>", f"<< /Title ({title}) /Author (Ann) >>"]
    kids = []
    if letters:
        span = f"1 beginbfrange <61> <7a> <{ord(letters):04x}> endbfrange"
        codes = f"begincmap 1 begincodespacerange <00> <ff> endcodespacerange {span} endcmap"
        objects[2] = objects[2].replace(" >>", " /ToUnicode 5 0 R >>")
        objects.append(f"<< /Length {len(codes)} >>\nstream\n{codes}\nendstream")
    for lines in pages:
        shown = (f"/F{2 if text[-1] == ' ' else 1} 10 Tf 1 0 0 1 {x} {y} Tm ({text}) Tj" for x, y, text in lines)
        content = f"{drawn} BT {' '.join(shown)} ET"
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
        kids.append(f"{len(objects) + 1} 0 R")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents {len(objects)} 0 R "
            "/Resources << /Font << /F1 3 0 R /F2 << /Type /Font /Subtype /Type1 /BaseFont /Courier >> >> >> >>"
        )
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>"
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    trailer = f"<< /Size {len(objects) + 1} /Root 1 0 R /Info 4 0 R >>\nstartxref\n{len(out)}\n%%EOF"
    return out + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n{trailer}".encode()


def column(x: int, top: int, *lines: str) -> list[tuple[int, int, str]]:
    return [(x, top - 12 * number, line) for number, line in enumerate(lines)]


def numbered_page(number: int) -> list[tuple[int, int, str]]:
    name = ["wheel", "river", "flour", "stone"][number]
    left = column(50, 700, f"The {name} of the mill has turned for", "two hundred years, and the mil-", "ler is proud.")
    left += column(50, 640, "A second paragraph stands in the", f"same {name} and goes on in the")
    right = column(320, 700, f"next {name}, as it does in journals.")
    right += column(
        320, 670, "The last paragraph of the page", "is short, but it has three lines,", "and then it ends."
    )
    return [(250, 770, "Journal of Mills"), *left, *right, (290, 30, f"{number + 1}")]


def test_columns_hyphens_and_headers_of_a_pdf(tmp_path):
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    text, metadata = read_text(tmp_path, pdf([numbered_page(number) for number in range(4)]), "pdf")
    paragraphs = text.split("\n\n")
    assert paragraphs[:3] == [
        "The wheel of the mill has turned for two hundred years, and the miller is proud.",
        "A second paragraph stands in the same wheel and goes on in the next wheel, as it does in journals.",
        "The last paragraph of the page is short, but it has three lines, and then it ends.",
    ]
    assert len(paragraphs) == 12 and "Journal of Mills" not in text
    assert metadata == {"title": "The mill", "author": "Ann", "pages": 4}


def test_lines_of_low_letters_and_of_several_fonts_stay_in_their_paragraph(tmp_path):
    """Boxes are those of the printed letters: "so" is half as high as "(by the river)"."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    page = column(50, 700, "The old mill (by the river) grinds", "so", "quickly that all of the flour is sold.")
    assert read_text(tmp_path, pdf([page]), "pdf")[0] == " ".join(text for _, _, text in page)
    code = Line(92, 101, 112, 106, "cave")  # in a small font of low letters, and with a mark that is printed twice
    pieces = [Line(50, 98, 90, 108, "A (mill)"), code, Line(114, 100, 140, 108, "is"), Line(116, 102, 139, 107, "is")]
    assert [line.text for line in joined_lines(pieces[::-1])] == ["A (mill) cave is"]
    columns = [Line(50, 98, 90, 108, "(left)"), Line(300, 100, 320, 108, "right"), Line(50, 86, 90, 96, "(below)")]
    assert [line.text for line in joined_lines(columns)] == ["(left)", "right", "(below)"]


def test_words_of_several_fonts_in_a_pdf_keep_their_spaces(tmp_path):
    """As browsers print: a piece ends or begins with the space, and slanted letters reach over it."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    runs = "1 0 0 1 50 700 Tm (See the ) Tj /F2 10 Tf (mill) Tj /F1 10 Tf ( of old) Tj"
    runs += " 1 0 0 1 50 680 Tm (The Word) Tj /F2 10 Tf 1 0 0 1 92.5 680 Tm ( turns it) Tj"
    content = pdf([column(50, 660, "A line of the page.")], drawn=f"BT /F1 10 Tf {runs} ET")
    text = read_text(tmp_path, content, "pdf")[0]
    assert text == "See the mill of old The Word turns it A line of the page."


def test_letters_of_a_pdf_that_reach_into_another_line_stand_once(tmp_path):
    """A raised figure reaches into the line above it, whose letters reach down."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    runs = "1 0 0 1 50 700 Tm (So it turns at x) Tj /F1 8 Tf 1 0 0 1 118 705 Tm (27) Tj"
    content = pdf([[(50, 712, "gggggggggggggggggggggggggg")]], drawn=f"BT /F1 10 Tf {runs} ET")
    letters = Counter(read_text(tmp_path, content, "pdf")[0])
    assert letters["g"] == 26 and letters["2"] == letters["7"] == 1


def test_short_paragraphs_of_a_pdf_are_not_joined(tmp_path):
    """The distance of lines is that of the few that go on, not that of most, which are paragraphs of one line."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    lines = ["Ann Miller", "The mill at the river", "The dam above the village", "The field", "A house"]
    page = [(50, 700 - 26 * number, line) for number, line in enumerate(lines)]
    page += column(50, 560, "This paragraph has two lines", "and then a third one that", "ends it.")
    text = read_text(tmp_path, pdf([page]), "pdf")[0]
    assert text.split("\n\n") == [*lines, "This paragraph has two lines and then a third one that ends it."]


def test_items_and_tables_of_a_pdf_are_lines(tmp_path):
    """A mark stands apart from its text; a table has cells under each other, and a column of figures."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    page = column(50, 700, "The mill has three parts, each of which", "is old:")
    for number, (mark, item) in enumerate([("\\267", "a wheel in the river, which is of oak,"), ("-", "and a house.")]):
        page += [(60, 676 - 24 * number, mark), *column(75, 676 - 24 * number, item, "and is wide")[: 2 - number]]
    page += column(50, 640, "Nobody knows its age - it may be 200 years", "- but the books give its flour.")
    rows = [("Year", "Flour"), ("1899", "11"), ("1900", "12 t"), ("1901", "-")]
    page += [(x, 600 - 14 * row, cells[k]) for row, cells in enumerate(rows) for k, x in enumerate((60, 160))]
    page += [(50, 520, "1 The wheel . . . . . . . . . . . 4"), (50, 508, "2 The house . . . . . . . . 17")]
    text, _ = read_text(tmp_path, pdf([page]), "pdf")
    assert text.split("\n\n") == [
        "The mill has three parts, each of which is old:",
        "- a wheel in the river, which is of oak, and is wide\n- and a house.",
        "Nobody knows its age - it may be 200 years - but the books give its flour.",
        "Year | Flour\n1899 | 11\n1900 | 12 t\n1901 | -",
        "1 The wheel ... 4\n2 The house ... 17",
    ]
    text, _ = read_text(tmp_path, pdf([page]), "pdf", **MARKDOWN)
    assert "| Year | Flour |\n| --- | --- |\n| 1899 | 11 |" in text


def test_letters_of_a_pdf_that_are_written_from_right_to_left(tmp_path):
    """Drawn from the left, as programs do: a word's first letter is its last one here. The right column is first."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    left = column(50, 700, ".onm lkj", "rqp")
    right = column(300, 700, "gfe dcba", "ihg fed", "srq nml", "cba ihg")
    text, _ = read_text(
        tmp_path, pdf([[*left, *column(50, 676, "uts rqp", "xwv uts"), *right]], letters="\u05d0"), "pdf"
    )
    expected = "abcd efg def ghi lmn qrs ghi abc jkl mno. pqr pqr stu stu vwx"
    assert text.split() == [
        "".join(chr(ord(x) - 97 + 0x5D0) if x.isalpha() else x for x in word) for word in expected.split()
    ]


def test_lines_of_scripts_without_spaces_are_joined_without_one():
    assert join_line("\u6c34\u8eca\u5c0f", "\u5c4b\u3002", Counter()) == "\u6c34\u8eca\u5c0f\u5c4b\u3002"
    assert join_line("\u6c34\u8eca", "mill", Counter()) == "\u6c34\u8eca mill"


def test_code_of_a_pdf_keeps_its_lines(tmp_path):
    """In letters of one width, two lines or more; a word of code in prose is prose."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    page = [*column(50, 700, "The mill is described by", "these lines of its book:"), (157, 700, "mill.py ")]
    page += column(60, 660, "def grind\\(grain\\): ", "    return grain / 2 ", "grind\\(4\\) ")
    page += column(50, 600, "The rest of the book is about", "stones, and has no code.")
    text, _ = read_text(tmp_path, pdf([page]), "pdf")
    assert text.split("\n\n") == [
        "The mill is described by mill.py these lines of its book:",
        "def grind(grain):\n    return grain / 2\ngrind(4)",
        "The rest of the book is about stones, and has no code.",
    ]
    text, _ = read_text(tmp_path, pdf([page]), "pdf", **MARKDOWN)
    assert "\n\n```\ndef grind(grain):\n    return grain / 2\ngrind(4)\n```\n\n" in text
    typed, _ = read_text(tmp_path, pdf([column(50, 700, "A whole text of a ", "typewriter is prose. ")]), "pdf")
    assert typed == "A whole text of a typewriter is prose."


def test_words_in_columns_are_no_table():
    """Of a book's index, for example; figures are what tells a table."""
    index = [
        Line(x, 700 - 12 * k, x + 60, 708 - 12 * k, f"entry {name}")
        for k in range(4)
        for x, name in ((50, "a"), (300, "b"))
    ]
    assert [line.text for line in joined_lines(index)] == ["entry a", "entry b"] * 4
    figures = [line._replace(text="12.5 %") if line.left == 300 else line for line in index]
    assert [line.text for line in joined_lines(figures)] == ["entry a | 12.5 %"] * 4
    assert len(joined_lines(figures[:4])) == 4  # two rows are too few


def _rule(y: int, left: int = 50, right: int = 350) -> str:
    return f"{left} {y} m {right} {y} l S "


def _box(left: int, bottom: int, width: int, height: int) -> str:
    return f"{left} {bottom} {width} {height} re S "


CROPS = [("Crop", "Mill", "Owner"), ("wheat", "upper", "Ann Lee"), ("rye", "lower", "Bob"), ("oats", "river", "Cid")]
RULED = {  # lines that are drawn around and between the rows of CROPS, whose baselines are at 600, 586, ...
    "head": _rule(612) + _rule(596),
    "head and foot": _rule(596) + _rule(552),
    "rows": _rule(596) + _rule(582) + _rule(568),
    "cells": "".join(_box(left, 554 + 14 * row, 100, 14) for row in range(4) for left in (50, 150, 250)),
    "shaded rows": "50 582 300 14 re f 50 554 300 14 re f",
}


@pytest.mark.parametrize("name", RULED)
def test_lines_across_the_columns_tell_a_table_of_words(tmp_path, name):
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    page = [(x, 600 - 14 * row, cells[k]) for row, cells in enumerate(CROPS) for k, x in enumerate((60, 160, 260))]
    page += column(50, 520, "Nobody knows its age.")
    text, _ = read_text(tmp_path, pdf([page], drawn=RULED[name]), "pdf")
    assert text.split("\n\n") == ["\n".join(map(" | ".join, CROPS)), "Nobody knows its age."]


@pytest.mark.parametrize(
    "drawn", ["", _rule(612) + _rule(540), _rule(596), _box(45, 500, 310, 120), "200 500 m 200 620 l S"]
)
def test_columns_between_lines_are_no_table(tmp_path, drawn):
    """Lines above and below them, in a box, with a line between them, or with one below their titles alone."""
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    page = [
        *column(60, 600, "The mill stands", "at the river and", "turns", "all day."),
        *column(210, 600, "It is", "old.", "Its wheel is", "of oak."),
    ]
    text, _ = read_text(tmp_path, pdf([page], drawn=drawn), "pdf")
    assert "".join(text.split()) == "Themillstandsattheriverandturnsallday.Itisold.Itswheelisofoak."


def test_marks_in_a_font_of_their_own_stay_on_their_line():
    """A comma's box is below the line, a quote's above it; neither has a space to its word."""
    pieces = [
        Line(50, 100, 90, 107, "Call"),
        Line(94, 105, 95, 108, "\u2018"),
        Line(97, 100, 120, 107, "mill"),
        Line(122, 105, 123, 108, "\u2019"),
        Line(125, 98, 126, 101, ","),
    ]
    assert [line.text for line in joined_lines(pieces)] == ["Call \u2018mill\u2019,"]


def test_pieces_without_a_height_are_read():
    """As damaged fonts give them, beside others."""
    flat = [Line(50, 100, 52, 100, "-"), Line(60, 100, 90, 100, "mill"), Line(200, 100.5, 230, 108, "wheel")]
    assert [line.text for line in joined_lines(flat)] == ["-", "mill", "wheel"]


def test_headers_of_a_chapter_and_numbers_of_pages_are_left_out():
    """Of thirty pages a chapter has four, a number at its foot three."""

    def page(number: int) -> list[Line]:
        header = [f"Chapter 2: Wheels {number}"] if 10 <= number < 14 else []
        foot = [str(number)] if number in (1, 9, 20) else []
        texts = [*header, *(f"{word}{'a' * number}" for word in ("one", "two", "three")), *foot]
        return [Line(50, 700 - 30 * k, 200, 708 - 30 * k, text) for k, text in enumerate(texts)]

    kept = [[line.text for line in lines] for lines in without_headers([page(number) for number in range(30)])]
    assert kept[10][0] == "one" + 10 * "a" and kept[9][-1] == "three" + 9 * "a"
    assert sum(map(len, kept)) == 30 * 3


def test_scanned_and_damaged_pdfs_are_refused(tmp_path):
    pytest.importorskip("pypdfium2", reason="PDF needs the extra `documents`")
    assert refusal(tmp_path, pdf([[], [(10, 10, "stamp")]]), "pdf") == "scanned_pdf"
    assert refusal(tmp_path, b"%PDF-1.4\nnothing", "pdf") == "bad_pdf"
    crowded = [(20 * (number % 25) + 5, 790 - 4 * (number // 25), "a") for number in range(4100)]
    assert refusal(tmp_path, pdf([crowded]), "pdf") == "page_too_large"
    assert refusal(tmp_path, pdf([crowded], letters="\u05d0"), "pdf") == "page_too_large"
    assert refusal(tmp_path, pdf([numbered_page(0)]), "pdf", max_record_bytes=500) == "record_too_large"


# EPUB and Word.


def package(members: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return out.getvalue()


BOOK = {
    "mimetype": "application/epub+zip",
    "META-INF/container.xml": '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
    "OEBPS/book.opf": '<package xmlns="http://www.idpf.org/2007/opf"><metadata '
    'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Mills</dc:title><dc:creator>Ann</dc:creator>'
    '<dc:language>en</dc:language></metadata><manifest><item id="b" href="text/two.xhtml" '
    'media-type="application/xhtml+xml"/><item id="a" href="text/one.xhtml" media-type="application/xhtml+xml"/>'
    '<item id="n" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/></manifest>'
    '<spine><itemref idref="n"/><itemref idref="a"/><itemref idref="b"/></spine></package>',
    "OEBPS/nav.xhtml": "<html><body><nav>Contents</nav></body></html>",
    "OEBPS/text/one.xhtml": "<html><body><h1>One</h1><p>First.</p><ul><li>a</li></ul></body></html>",
    "OEBPS/text/two.xhtml": "<html><body><h1>Two</h1><p>Second.</p></body></html>",
}


def test_an_epub_is_read_in_the_order_of_its_spine(tmp_path):
    text, metadata = read_text(tmp_path, package(BOOK), "epub")
    assert text == "One\n\nFirst.\n\n- a\n\nTwo\n\nSecond."
    assert metadata == {"title": "Mills", "author": "Ann"}
    repeated = BOOK["OEBPS/book.opf"].replace("</spine>", '<itemref idref="a"/>' * 1000 + "</spine>")
    assert read_text(tmp_path, package(BOOK | {"OEBPS/book.opf": repeated}), "epub")[0] == text
    assert read_text(tmp_path, package(BOOK), "epub", **MARKDOWN)[0].startswith("# One\n\nFirst.")


def test_parts_of_a_book_in_other_charsets_and_cases(tmp_path):
    one = '<?xml version="1.0" encoding="utf-16"?><html><body><p>Die M\u00fchle</p></body></html>'.encode("utf-16")
    two = '<?xml version="1.0" encoding="windows-1252"?><html><body><p>am Flu\u00df</p></body></html>'.encode("cp1252")
    book = {name: content for name, content in BOOK.items() if "text/" not in name}
    book |= {"OEBPS/text/One.xhtml": one, "OEBPS/text/two.xhtml": two}
    second = "<dc:creator>Ann</dc:creator><dc:creator> Bob\n</dc:creator>"
    book["OEBPS/book.opf"] = BOOK["OEBPS/book.opf"].replace("<dc:creator>Ann</dc:creator>", second)
    text, metadata = read_text(tmp_path, package(book), "epub")
    assert text == "Die M\u00fchle\n\nam Flu\u00df" and metadata["author"] == "Ann; Bob"


def test_packages_that_are_no_books_or_too_large_are_refused(tmp_path):
    assert refusal(tmp_path, b"PK no package", "epub") == "bad_epub"
    assert refusal(tmp_path, package({"a": "b"}), "epub") == "bad_epub"
    assert refusal(tmp_path, package(BOOK | {"META-INF/rights.xml": ""}), "epub") == "encrypted"
    assert (
        refusal(tmp_path, package(BOOK | {"x.html": "a" * 100_000}), "epub", max_record_bytes=5000)
        == "package_too_large"
    )
    renamed = BOOK["OEBPS/book.opf"].replace("two.xhtml", "two.png")
    bomb = BOOK | {"OEBPS/book.opf": renamed, "OEBPS/two.png": "a" * 100_000}
    assert refusal(tmp_path, package(bomb), "epub", max_record_bytes=5000) == "package_too_large"
    bomb = BOOK | {"OEBPS/book.opf": '<!DOCTYPE a [<!ENTITY b "' + "c" * 1000 + '">]>' + "<package>&b;&b;</package>"}
    assert refusal(tmp_path, package(bomb), "epub") == "no_text"


def test_a_word_document_keeps_headings_lists_and_tables(tmp_path):
    docx = pytest.importorskip("docx", reason="docx needs the extra `documents`")
    document = docx.Document()
    document.core_properties.title, document.core_properties.author = "Mills", ""
    document.add_heading("The mill", 1)
    document.add_paragraph("It stands <here>.")
    document.add_paragraph("So they say.", style="Quote")
    for item in ("wheel", "stone"):
        document.add_paragraph(item, style="List Bullet")
    table = document.add_table(2, 2)
    for row, texts in zip(table.rows, (("year", "flour"), ("1900", "12 t")), strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    out = io.BytesIO()
    document.save(out)
    text, metadata = read_text(tmp_path, out.getvalue(), "docx")
    assert text == "The mill\n\nIt stands <here>.\n\nSo they say.\n\n- wheel\n- stone\n\nyear | flour\n1900 | 12 t"
    assert "\n\n> So they say.\n\n" in read_text(tmp_path, out.getvalue(), "docx", **MARKDOWN)[0]
    assert metadata == {"title": "Mills"}
    assert refusal(tmp_path, package(BOOK), "docx") == "bad_docx"
    assert refusal(tmp_path, bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600), "docx") == "encrypted"
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("word/media/image.png", bytes(1_000_000))
    assert refusal(tmp_path, out.getvalue(), "docx", max_record_bytes=100_000) == "package_too_large"


def test_cells_of_a_word_table_stand_once(tmp_path):
    docx = pytest.importorskip("docx", reason="docx needs the extra `documents`")
    document = docx.Document()
    table = document.add_table(2, 3)
    for number, cell in enumerate(cell for row in table.rows for cell in row.cells):
        cell.text = str(number)
    table.cell(0, 0).merge(table.cell(1, 0))
    table.cell(0, 1).merge(table.cell(0, 2)).text = "wide"
    table.cell(0, 1)._tc.grid_span = 2_000_000_000  # a list of its cells would not fit in memory
    out = io.BytesIO()
    document.save(out)
    assert read_text(tmp_path, out.getvalue(), "docx")[0] == "0 3 | wide\n | 4 | 5"


def word_xml(body: str, **parts: str) -> bytes:
    """A Word document with this body, in the prefix w; parts: other XML parts, by the last word of their relation."""
    docx = pytest.importorskip("docx", reason="docx needs the extra `documents`")
    from docx.opc.packuri import PackURI
    from docx.opc.part import Part
    from docx.oxml.parser import parse_xml

    space = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main" xmlns:mc="mc" xmlns:v="v"'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/"
    document = docx.Document()
    for element in parse_xml(f"<w:body {space}>{body}</w:body>"):
        document.element.body.insert(len(document.element.body) - 1, element)
    for name, content in parts.items():
        blob = f"<w:{name} {space}>{content}</w:{name}>".encode()
        part = Part(PackURI(f"/word/its_{name}.xml"), f"application/x-{name}", blob, document.part.package)
        document.part.relate_to(part, office + name)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def run(text: str, name: str = "t") -> str:
    return f"<w:r><w:{name}>{text}</w:{name}></w:r>"


def paragraph(*parts: str, style: str = "") -> str:
    return (
        f'<w:p><w:pPr><w:pStyle w:val="{style}"/></w:pPr>{"".join(parts)}</w:p>'
        if style
        else f"<w:p>{''.join(parts)}</w:p>"
    )


def test_what_stands_in_controls_boxes_and_notes_of_a_word_document_is_text(tmp_path):
    """A table of contents, ruby's readings, and what a tracked change deletes or moves away are not."""
    contents = '<w:sdtPr><w:docPartObj><w:docPartGallery w:val="Table of Contents"/></w:docPartObj></w:sdtPr>'
    box = f"<w:txbxContent>{paragraph(run('in a box'))}</w:txbxContent>"
    older = f"<w:pict><v:shape><v:textbox>{box}</v:textbox></v:shape></w:pict>"
    boxes = (
        f"<mc:AlternateContent><mc:Choice>{older}</mc:Choice><mc:Fallback>{older}</mc:Fallback></mc:AlternateContent>"
    )
    moved = f"<w:moveFrom>{run(' moved')}</w:moveFrom>"
    note = '<w:r><w:footnoteReference w:id="7"/></w:r>'
    ruby = f"<w:r><w:ruby><w:rt>{run('gyakutai')}</w:rt><w:rubyBase>{run('base')}</w:rubyBase></w:ruby></w:r>"
    row = f"<w:tr><w:tc>{paragraph(run('a cell'))}</w:tc><w:tc>{paragraph(run('beside it'))}</w:tc></w:tr>"
    deleted = f"<w:tr><w:trPr><w:del/></w:trPr><w:tc>{paragraph(run('a deleted row'))}</w:tc></w:tr>"
    body = (
        f"<w:sdt>{contents}<w:sdtContent>{paragraph(run('Mills 1'))}</w:sdtContent></w:sdt>"
        f"<w:sdt><w:sdtContent>{paragraph(run('in a control'))}</w:sdtContent></w:sdt>"
        + paragraph(run("kept"), f"<w:ins>{run(' added')}</w:ins>", moved, note)
        + paragraph(run("before"), boxes)
        + paragraph(ruby)
        + f"<w:tbl>{row}{deleted}<w:sdt><w:sdtContent>{row}</w:sdtContent></w:sdt></w:tbl>"
    )
    notes = {"7": "a note", "8": "of nothing"}
    notes = "".join(f'<w:footnote w:id="{name}">{paragraph(run(text))}</w:footnote>' for name, text in notes.items())
    text, _ = read_text(tmp_path, word_xml(body, footnotes=notes), "docx")
    assert text.split("\n\n") == [
        "in a control", "kept added", "before", "in a box", "base", "a cell | beside it\na cell | beside it", "a note",
    ]  # fmt: skip


def test_numbers_of_a_word_list_go_on_after_a_paragraph(tmp_path):
    item = partial(paragraph, style="ListNumber")
    body = item(run("one")) + item(run("two")) + paragraph(run("between")) + item(run("three"))
    body += paragraph(run("no item"), style="ListParagraph") + paragraph(run("inner"), style="ListBullet2")
    text, _ = read_text(tmp_path, word_xml(body), "docx")
    assert text == "1. one\n2. two\n\nbetween\n\n3. three\n\nno item\n\n- inner"


def test_word_counts_lists_by_their_definition_and_start(tmp_path):
    """Numberings of one definition go on, also behind others, unless they begin again; a level without a sign has no
    items."""
    levels = "".join(
        f'<w:lvl w:ilvl="{level}"><w:start w:val="{start}"/><w:numFmt w:val="{name}"/><w:lvlText w:val="{sign}"/>'
        "</w:lvl>"
        for level, start, name, sign in ((0, 5, "decimal", "%1."), (1, 1, "lowerLetter", "%2)"), (2, 1, "bullet", " "))
    )
    again = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="9"/></w:lvlOverride>'
    numbering = f'<w:abstractNum w:abstractNumId="3">{levels}</w:abstractNum>' + "".join(
        f'<w:num w:numId="{number}"><w:abstractNumId w:val="3"/>{override}</w:num>'
        for number, override in ((1, ""), (2, ""), (4, again))
    )

    def item(number: int, level: int, text: str) -> str:
        place = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{number}"/></w:numPr>'
        return f"<w:p><w:pPr>{place}</w:pPr>{run(text)}</w:p>"

    places = ((1, 0), (1, 1), (1, 1), (2, 0), (2, 1), (4, 0), (4, 0), (1, 0), (1, 2))
    body = "".join(item(*place, "abcdefghi"[number]) for number, place in enumerate(places))
    text, _ = read_text(tmp_path, word_xml(body, numbering=numbering), "docx")
    assert text == "5. a\n  1. b\n  2. c\n6. d\n  1. e\n9. f\n10. g\n11. h\n\ni"


def test_code_of_a_word_document_keeps_its_lines(tmp_path):
    code = partial(paragraph, style="MacroText")
    lines = (
        code('<w:r><w:t xml:space="preserve">  b</w:t></w:r>', run("", "br"), run("", "tab"), run("c")),
        code(),
        code(run("d")),
    )
    cell = f"<w:tbl><w:tr><w:tc>{code(run('a'))}{''.join(lines)}</w:tc></w:tr></w:tbl>"
    body = paragraph(run("before")) + code(run("a")) + "".join(lines) + paragraph(run("after")) + cell
    text, _ = read_text(tmp_path, word_xml(body), "docx")
    assert text == "before\n\na\n  b\n\tc\n\nd\n\nafter\n\na\n  b\n\tc\n\nd"


def test_cells_of_a_word_table_stand_in_their_columns(tmp_path):
    def cell(text: str, properties: str = "") -> str:
        return f"<w:tc><w:tcPr>{properties}</w:tcPr>{paragraph(run(text))}</w:tc>"

    merged = '<w:vMerge w:val="{}"/>'
    head = f"<w:trPr><w:tblHeader/></w:trPr>{cell('A', merged.format('restart'))}"
    rows = (
        head + cell("B", '<w:gridSpan w:val="2"/>') + cell("C"),
        cell("x", merged.format("continue")) + cell("b") + cell("c") + cell("d"),
        '<w:trPr><w:gridBefore w:val="2"/></w:trPr>' + cell("e") + cell("f"),
    )
    body = f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in rows)}</w:tbl>"
    markdown, _ = read_text(tmp_path, word_xml(body), "docx", **MARKDOWN)
    assert markdown.split("\n") == [
        "| A | B |  | C |", "| --- | --- | --- | --- |", "|  | b | c | d |", "|  |  | e | f |",
    ]  # fmt: skip


@pytest.mark.parametrize("text_format", ["text", "markdown"])
def test_formulas_of_a_word_document_are_tex(tmp_path, text_format):
    space = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
    script = "<m:sSub><m:e><m:r><m:t>x</m:t></m:r></m:e><m:sub><m:r><m:t>1</m:t></m:r></m:sub></m:sSub>"
    formula = f"<m:oMath {space}><m:r><m:t>a&lt;</m:t></m:r>{script}</m:oMath>"
    body = paragraph(run("Let "), formula, run(" be &lt;small&gt;."))
    body += paragraph(f"<m:oMathPara {space}>{formula}</m:oMathPara>") + paragraph(f"<m:oMath {space}/>")
    text, _ = read_text(tmp_path, word_xml(body), "docx", blocks={"format": text_format})
    assert text == "Let $a<x_1$ be <small>.\n\n$a<x_1$"


# Markup of other programs.


def test_a_notebook_keeps_its_text_and_code(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# Mills\n", "Text ![a](data:image/png;base64,iVBORw0KGgo=)."]},
        {"cell_type": "code", "source": "x = '```'", "outputs": [{"text": "out"}]},
        {"cell_type": "raw", "source": "left out"},
        {"cell_type": "code", "source": []},
    ]
    notebook = {"cells": cells, "metadata": {"kernelspec": {"language": "python"}}, "nbformat": 4}
    text, metadata = read_text(tmp_path, json.dumps(notebook).encode(), "ipynb")
    assert text == "# Mills\nText ![a]().\n\n````python\nx = '```'\n````" and metadata == {
        "programming_language": "python"
    }
    assert read_text(tmp_path, b"\xef\xbb\xbf" + json.dumps(notebook).encode(), "ipynb") == (text, metadata)
    assert refusal(tmp_path, b"[1]", "ipynb") == "bad_ipynb"
    assert refusal(tmp_path, b"{", "ipynb") == "bad_ipynb"
    assert refusal(tmp_path, b'{"cells": [3]}', "ipynb") == "bad_ipynb"
    assert refusal(tmp_path, b'{"cells": 3}', "ipynb") == "bad_ipynb"
    assert refusal(tmp_path, b'{"cells": [{"cell_type": "code", "source": {"a": 1}}]}', "ipynb") == "bad_ipynb"


def test_latex_keeps_formulas_and_leaves_out_the_preamble(tmp_path):
    latex = r"""\documentclass{article}\usepackage{x}\title{On mills}
\begin{document}\section{The wheel} % a comment
Its speed is $v = \frac{d}{t}$, as \emph{everybody} knows. \input{/etc/passwd}

Caf\'e.\end{document} after"""
    text, metadata = read_text(tmp_path, latex.encode(), "latex")
    assert text == "The wheel\n\nIts speed is $v = \\frac{d}{t}$, as everybody knows.\n\nCafé."
    assert metadata == {"title": "On mills"}
    assert read_text(tmp_path, latex.encode(), "latex", **MARKDOWN)[0].startswith("## The wheel\n\n")
    assert refusal(tmp_path, b"{" * 10_000, "latex") == "nested_too_deep"
    assert refusal(tmp_path, b"\\begin{document}\\end{document}", "latex") == "no_text"


LISTINGS = r"""\begin{document}It is \verb|a_b|:
\begin{lstlisting}[language=C]
#include <a.h>  // 100 % of it
  int x;
\end{lstlisting}
\begin{minted}{python}
def f():
    return 1
\end{minted}
\includegraphics[width=3cm]{mill}Seen.\end{document}"""


def test_latex_keeps_listings(tmp_path):
    c_code, python = "#include <a.h>  // 100 % of it\n  int x;", "def f():\n    return 1"
    assert read_text(tmp_path, LISTINGS.encode(), "latex")[0] == f"It is a_b:\n\n{c_code}\n\n{python}\n\nSeen."
    markdown = read_text(tmp_path, LISTINGS.encode(), "latex", **MARKDOWN)[0]
    assert markdown == f"It is a_b:\n\n```\n{c_code}\n```\n\n```\n{python}\n```\n\nSeen."


DUMP = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/"><siteinfo><sitename>W</sitename></siteinfo>
<page><title>Mill</title><ns>0</ns><id>1</id><revision><id>5</id><timestamp>2024-01-01</timestamp><text>{{Infobox|a=b}}
A '''mill''' grinds [[grain|corn]].&lt;ref&gt;Book&lt;/ref&gt; &amp;lt;3

== Parts ==
* [[wheel]]
** spoke
{| class="x"
| cell
|}
Its power is &lt;math&gt;P=Fv&lt;/math&gt;. [http://a.org Site]
[[Category:Mills]]</text></revision></page>
<page><title>Old</title><ns>0</ns><redirect title="Mill"/><revision><text>#REDIRECT [[Mill]]</text></revision></page>
<page><title>Talk:Mill</title><ns>1</ns><revision><text>talk</text></revision></page>
<page><title>Dam</title><ns>0</ns><revision><text>A dam.</text></revision></page></mediawiki>"""


def test_articles_of_a_wikipedia_dump(tmp_path):
    pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    records = read(tmp_path, gzip.compress(DUMP.encode()), "mediawiki", ".gz")
    assert [record.metadata["title"] for record in records] == ["Mill", "Dam"]
    assert [record.number for record in records] == [0, 3]
    assert records[0].metadata == {"title": "Mill", "id": "1", "timestamp": "2024-01-01"}
    assert records[0].text == ("A mill grinds corn. <3\n\nParts\n\n- wheel\n  - spoke\n\nIts power is $P=Fv$. Site")
    cut = read(tmp_path, DUMP.encode()[:600], "mediawiki")
    assert [type(record) for record in cut] == [Record, Unreadable] and cut[1].kind == "bad_mediawiki"


WIKI_CODE = """A <ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby> mill.<syntaxhighlight lang="python">
# comment

* = 2
    x
</syntaxhighlight>So <syntaxhighlight inline lang="c">#x</syntaxhighlight>."""


def test_code_and_ruby_of_a_wikipedia_dump(tmp_path):
    pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    dump = f"<mediawiki><page><ns>0</ns><revision><text>{escape(WIKI_CODE)}</text></revision></page></mediawiki>"
    code = "# comment\n\n* = 2\n    x"
    (record,) = read(tmp_path, dump.encode(), "mediawiki")
    assert record.text == f"A 漢 mill.\n\n{code}\n\nSo #x."
    (record,) = read(tmp_path, dump.encode(), "mediawiki", **MARKDOWN)
    assert record.text == f"A 漢 mill.\n\n```python\n{code}\n```\n\nSo #x."


def test_headings_and_html_of_a_wikipedia_dump(tmp_path):
    """Magic words and links to other languages are left out."""
    pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    wikitext = "A\n== B ==\n# c\n__NOTOC__<ol><li>d</li><li>e</li></ol><div>f</div>g [[fr:Moulin]][[:Category:M]]"
    dump = f"<mediawiki>{wiki_page(wikitext)}</mediawiki>".encode()
    (record,) = read(tmp_path, dump, "mediawiki", **MARKDOWN)
    assert record.text == "A\n\n## B\n\n1. c\n\n1. d\n2. e\n\nf\n\ng Category:M"
    (record,) = read(tmp_path, dump, "mediawiki")
    assert record.text == "A\n\nB\n\n1. c\n\n1. d\n2. e\n\nf\n\ng Category:M"


def test_lists_and_addresses_of_a_wikipedia_dump(tmp_path):
    pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    wikitext = "# a\n# b\n#: of b\n## c\n#* d\n# e\n\n# f\n* g\n*# h\n"
    html = "<ul><li><p>i</p>\n<ol>\n<li>j</li> <li>k</li></ol></li>\n\n<li></li></ul> http://a.b/c [http://d.e]"
    (record,) = read(tmp_path, f"<m>{wiki_page(wikitext + html)}</m>".encode(), "mediawiki")
    lines = ["1. a", "2. b", "of b", "  1. c", "  - d", "3. e", "", "1. f", "- g", "  1. h"]
    assert record.text.split("\n") == [*lines, "", "- i", "  1. j", "  2. k", "-", "", "http://a.b/c"]
    (record,) = read(tmp_path, f"<m>{wiki_page(wikitext)}</m>".encode(), "mediawiki", **MARKDOWN)
    assert record.text.split("\n")[3:6] == ["   1. c", "   - d", "3. e"]


def test_words_in_templates_of_a_wikipedia_dump(tmp_path):
    """Of templates that stand in sentences; others leave no bracket behind."""
    pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    wikitext = (
        "A mill ({{IPA|m}}; {{lang-fr|moulin}}) ({{x}}, {{y}}) is {{convert|5|km|mi}} {{Nowrap|1=of ''the''}} "
        "{{lang|la|flumen}}{{snd}}{{circa|1900}} f() {{unknown|a}}end.{{sfn|A}} {{quote|text=It [[turns]].|by=Ann}}"
    )
    (record,) = read(tmp_path, f"<m>{wiki_page(wikitext)}</m>".encode(), "mediawiki")
    assert record.text == "A mill (moulin) is 5 km of the flumen \u2013 c. 1900 f() end.\n\nIt turns."


WIKI_OPENINGS = (
    "{{", "{{{", "{{{a|", "[[", "[[a|", "{|\n", "{|\n|a|", "<ref>", "<a b=\"", "<div>", "''", "'''a", "'''''",
    "[http://a ", "<!--", "<nowiki>", "== ", "{{a|b=[[c", "<ref>{{", "''[[a|", "{|\n!a\n|{{", "[[a|'''b''<i>",
    "}}{{", "]][[a|<b>", "\n*{{a|\n== b", "{{a}{{b", "<li>''", "&amp;{{",
)  # fmt: skip


def wiki_page(wikitext: str) -> str:
    return f"<page><ns>0</ns><revision><text>{escape(wikitext)}</text></revision></page>"


@pytest.mark.parametrize("opening", WIKI_OPENINGS)
def test_wiki_pages_of_openings_without_end_are_read_in_linear_steps(opening, tmp_path, monkeypatch):
    """mwparserfromhell takes quadratic or exponential time on them. Law: characters that it looks at, for each of the
    page. A page over the bound is refused, the page behind it is read."""
    parser = pytest.importorskip("mwparserfromhell.parser.tokenizer", reason="mediawiki needs the extra `documents`")
    num_read, read_one = 0, parser.Tokenizer._read

    def counted(*arguments, **options):
        nonlocal num_read
        num_read += 1
        return read_one(*arguments, **options)

    monkeypatch.setattr(parser.Tokenizer, "_read", counted)
    for size in (1000, 4000):
        num_read = 0
        wikitext = "A mill. " + opening * (size // len(opening))
        page, record = read(tmp_path, f"<m>{wiki_page(wikitext)}{wiki_page('A dam.')}</m>".encode(), "mediawiki")
        assert isinstance(page, Record) or (page.kind == "bad_mediawiki" and "without an end" in page.reason)
        assert record.text == "A dam."
        assert num_read < 8 * (50_000 + 20 * len(wikitext))  # 8 looks a step
    if opening in ("{{{a|", "<ref>", '<a b="', "<div>", "[http://a "):
        assert isinstance(page, Unreadable)


def test_a_wiki_page_with_a_few_openings_without_end_is_read(tmp_path):
    pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    line = "A ''mill'' grinds [[grain|corn]].{{cite|a=b}} "
    wikitext = (line * 9 + "{{a| <ref> [[b| ").join([line * 9] * 4)
    (record,) = read(tmp_path, f"<m>{wiki_page(wikitext)}</m>".encode(), "mediawiki")
    assert record.text.count("A mill grinds corn.") == 63


def test_wiki_markup_in_any_order_never_raises(tmp_path):
    parser = pytest.importorskip("mwparserfromhell", reason="mediawiki needs the extra `documents`")
    pieces = [
        *WIKI_OPENINGS,
        "}}",
        "]]",
        "|}",
        "|",
        "=",
        "</ref>",
        ">",
        "\n",
        "a",
        " ",
        "-->",
        "*",
        ";",
        ":",
        "}",
        "</b>",
    ]
    rng = np.random.default_rng(8)
    for _ in range(60):
        wikitext = "".join(rng.choice(pieces, int(rng.integers(1, 60))).tolist())
        records = read(tmp_path, f"<m>{wiki_page(wikitext + ' The end.')}</m>".encode(), "mediawiki")
        assert all(isinstance(record, Record) or record.kind == "bad_mediawiki" for record in records)
        expected = markup.wiki_text(parser.parse(wikitext + " The end."), markdown=False)  # by the tokenizer in C
        assert [record.text for record in records if isinstance(record, Record)] in ([], [expected])


def test_posts_of_stack_exchange(tmp_path):
    body = escape("<p>Why</p><pre><code>a  b</code></pre>")
    posts = f"""<?xml version="1.0"?><posts>
<row Id="1" PostTypeId="1" Score="4" Title="How?" Body="{body}" Tags="&lt;mills&gt;&lt;flour&gt;"/>
<row Id="2" PostTypeId="2" ParentId="1" Body="&lt;p&gt;So.&lt;/p&gt;" ContentLicense="CC BY-SA 4.0"/>
<row Id="3" PostTypeId="5" Body="wiki"/></posts>"""
    question, answer = read(tmp_path, posts.encode(), "stack_exchange")
    assert question.text == "How?\n\nWhy\n\na  b" and answer.text == "So."
    assert question.metadata == {"post_type": "question", "id": "1", "score": "4", "tags": ["mills", "flour"]}
    assert answer.metadata == {"post_type": "answer", "id": "2", "parent_id": "1", "license": "CC-BY-SA-4.0"}
    comments = b'<comments><row Id="1" PostId="1" Text="Good."/><row Id="2" PostId="1" Text="Bad."/></comments>'
    (refused,) = read(tmp_path, comments, "stack_exchange")
    assert refused.kind == "bad_stack_exchange" and "Posts.xml" in refused.reason


def word_document() -> bytes:
    docx = pytest.importorskip("docx", reason="docx needs the extra `documents`")
    document = docx.Document()
    document.add_heading("The mill", 1)
    document.add_paragraph("wheel", style="List Bullet")
    document.add_table(2, 2).rows[0].cells[0].text = "flour"
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


LATEX = r"""\documentclass{article}\title{On mills}\begin{document}\section{The wheel} % a comment
Its speed is $v = \frac{d}{t}$, as \emph{everybody} \\[2pt] knows~\cite{a}.
\begin{itemize}\item one\item[b] two\end{itemize}\end{document}"""
NOTEBOOK = {
    "cells": [{"cell_type": "markdown", "source": ["# Mills"]}, {"cell_type": "code", "source": "x", "outputs": []}],
    "metadata": {"kernelspec": {"language": "python"}, "language_info": {"name": "python"}},
    "worksheets": [{"cells": [{"cell_type": "heading", "level": 2, "source": "Old"}]}],
}
POSTS = """<?xml version="1.0"?><posts><row Id="1" PostTypeId="1" Title="How?" Body="&lt;p&gt;Why" Tags="&lt;a&gt;"/>
<row Id="2" PostTypeId="2" ParentId="1" Body="&lt;p&gt;So.&lt;/p&gt;"/></posts>"""
WHOLE = {
    "pdf": lambda: pdf([numbered_page(0)]), "epub": lambda: package(BOOK), "docx": word_document,
    "ipynb": lambda: json.dumps(NOTEBOOK).encode(), "latex": LATEX.encode, "mediawiki": DUMP.encode,
    "stack_exchange": POSTS.encode,
}  # fmt: skip


@pytest.mark.parametrize("format_", WHOLE)
def test_a_damaged_document_never_raises(format_, tmp_path):
    """Bytes changed, cut and repeated at random places, of packages also inside their members."""
    pytest.importorskip("pypdfium2", reason="documents need the extra `documents`")
    rng, content = np.random.default_rng(41), WHOLE[format_]()
    for number in range(20 if format_ == "docx" else 40):
        if content[:2] == b"PK" and number % 2:
            with zipfile.ZipFile(io.BytesIO(content)) as file:
                members = {name: file.read(name) for name in file.namelist()}
            for name in rng.permutation(sorted(members))[:2].tolist():
                members[name] = damage(members[name], rng)
            damaged = package(members)
        else:
            damaged = damage(content, rng)
        for record in read(tmp_path, damaged, format_):
            assert isinstance(record, Record) or (record.kind and record.reason)


def test_a_notebook_whose_values_have_other_types_is_refused_or_read(tmp_path):
    rng, values = np.random.default_rng(7), [None, 3, "a", [], {}, [{}], [None], True, {"language": 4}]
    for _ in range(60):
        notebook = json.loads(json.dumps(NOTEBOOK))
        holder = [notebook, notebook["metadata"], *notebook["cells"], *notebook["worksheets"]][int(rng.integers(5))]
        holder[str(rng.choice(sorted(holder)))] = values[int(rng.integers(len(values)))]
        for record in read(tmp_path, json.dumps(notebook).encode(), "ipynb"):
            assert isinstance(record, Record) or (record.kind and record.reason)


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    if not content:
        return content
    damaged = bytearray(content[: int(rng.integers(1, len(content) + 1))] if rng.random() < 0.3 else content)
    for place in rng.integers(len(damaged), size=int(rng.integers(1, 20))).tolist():
        damaged[place] = int(rng.integers(256))
    start, size = int(rng.integers(len(damaged))), int(rng.integers(1, 60))
    if rng.random() < 0.3:
        damaged[start:start] = damaged[start : start + size] * int(rng.integers(1, 40))
    return bytes(damaged)

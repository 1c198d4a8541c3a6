"""CSV, TSV and mail, by hand and against Python's own packages."""

import csv
import io
import mailbox
from email.message import EmailMessage

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.readers.text_files import read_delimited, read_mailbox

TABLE = SourceConfig(name="t", format="csv", paths=("x",), text_field="body")
MAIL = SourceConfig(name="m", format="mbox", paths=("x",))


def rows(raw: bytes, name: str = "a.csv", **settings):
    return list(read_delimited(io.BytesIO(raw), name, TABLE.model_copy(update=settings)))


def test_rows_are_records_and_other_cells_metadata():
    found = rows(b'\xef\xbb\xbfid,body,url\n1,"two\nlines, and a comma",http://a\n\n2,,\n')
    assert found[0] == Record(0, "two\nlines, and a comma", url="http://a", metadata={"id": "1"})
    assert isinstance(found[1], Unreadable) and "no field 'body'; fields are id" in found[1].reason


def test_a_table_in_the_encoding_of_the_source():
    raw = "id,body\n2,El niño comió piñas\n".encode("cp1252")
    assert rows(raw, encoding="cp1252") == [Record(0, "El niño comió piñas", metadata={"id": "2"})]
    (refused,) = rows(raw)
    assert refused.kind == "invalid_encoding"
    assert "set encoding of the source, its bytes look like cp1252" in refused.reason


@pytest.mark.parametrize("delimiter, name", [(";", "a.csv"), ("\t", "a.csv"), ("|", "a.csv"), ("\t", "a.tsv")])
def test_the_delimiter_is_that_of_the_first_row(delimiter, name):
    assert rows(f"id{delimiter}body\n7{delimiter}a, b\n".encode(), name) == [Record(0, "a, b", metadata={"id": "7"})]


def test_a_bad_row_costs_itself_alone():
    found = rows(b"id,body\n1,a,too many\n2,caf\xe9\n3,c\n")
    assert [getattr(entry, "kind", "record") for entry in found] == ["bad_row", "invalid_encoding", "record"]
    large = rows(b"id,body\n1," + b"x" * 200 + b"\n2,b\n", max_record_bytes=100)
    assert [getattr(entry, "kind", "record") for entry in large] == ["record_too_large", "record"]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20), max_size=8))
def test_what_pythons_writer_wrote_comes_back(texts):
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["id", "body"])
    writer.writerows(enumerate(texts, start=1))
    found = rows(out.getvalue().encode())
    assert [(entry.text, entry.metadata["id"]) for entry in found] == [(t, str(n)) for n, t in enumerate(texts, 1)]


def message(subject: str, text: str, html: str | None = None) -> EmailMessage:
    made = EmailMessage()
    made["From"], made["Subject"], made["Date"] = "miller@mill.example", subject, "Mon, 2 Nov 2026 10:00:00 +0000"
    if text:
        made.set_content(text)
    if html:
        made.add_alternative(html, subtype="html") if text else made.set_content(html, subtype="html")
    return made


@pytest.mark.parametrize(("delsp", "joined"), [("", "a b"), ("; delsp=yes", "ab")])
def test_lines_of_mail_that_flow_are_joined(delsp, joined):
    """RFC 3676: a space at the end of a line, one depth of quotes, and a signature that begins anew."""
    head = f"From x\nContent-Type: text/plain; charset=utf-8; format=Flowed{delsp}\n\n"
    body = "a \nb\nc\n>> a \n>>b\n> a \nd\n From e \n-- \nf\n"
    (record,) = read_mailbox(io.BytesIO((head + body).encode()), "a.mbox", MAIL)
    end = "" if delsp else " "
    assert record.text == f"{joined}\nc\n> > {joined}\n> a{end}\nd\nFrom e{end}\n-- \nf"


def test_messages_of_an_mbox_file(tmp_path):
    """As Python's mailbox wrote it: `From ` in a body was escaped, the plain part wins, addresses are not kept."""
    box = mailbox.mbox(tmp_path / "a.mbox")
    box.add(message("Mühle", "The wheel turns.\nFrom the river comes water."))
    page = "<html><body><article>" + "<p>Grain is ground between two stones, slowly, all day long.</p>" * 5
    box.add(message("Both", "Plain words.", page))
    box.add(message("Page", "", page + "</article></body></html>"))
    box.close()
    found = list(read_mailbox(io.BytesIO((tmp_path / "a.mbox").read_bytes()), "a.mbox", MAIL))
    assert [entry.metadata["subject"] for entry in found] == ["Mühle", "Both", "Page"]
    assert found[0].text == "The wheel turns.\nFrom the river comes water." and found[1].text == "Plain words."
    assert found[2].text.startswith("Grain is ground") and "<" not in found[2].text
    assert not any("miller@" in str(entry) for entry in found)


def test_a_short_message_in_html_is_read_whole():
    """One of so few words has no main text."""
    head = b"Subject: a\nMIME-Version: 1.0\nContent-Type: text/html; charset=utf-8\n\n"
    html = "<html><body><p>See you at the m\u00fchle.</p><p>Ann</p></body></html>".encode()
    (record,) = read_mailbox(io.BytesIO(head + html), "a.eml", MAIL)
    assert record.text == "See you at the m\u00fchle.\n\nAnn"


def test_one_message_in_a_file_and_damaged_ones():
    single = list(read_mailbox(io.BytesIO(message("One", "Flour.").as_bytes()), "a.eml", MAIL))
    assert [(entry.number, entry.text) for entry in single] == [(0, "Flour.")]
    nested = b"Content-Type: message/rfc822\n\n" * 2000
    found = list(read_mailbox(io.BytesIO(b"From a\n" + nested + b"\nFrom b\nSubject: x\n\nfine\n"), "a.mbox", MAIL))
    assert [getattr(entry, "kind", entry[1]) for entry in found] == ["bad_message", "fine"]


@pytest.mark.parametrize(
    ("charset", "content", "text"),
    [
        ("", "été", "été"),  # declared by nothing, in UTF-8
        ("us-ascii", "été", "été"),
        ("no-such", "été", "été"),
        ("iso-8859-15", "Gr\xfc\xdfe \xa4".encode("latin-1"), "Grüße €"),
        ("utf-7", "caf+AOk-", "café"),
        ("iso-2022-jp", "水車".encode("iso-2022-jp"), "水車"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "html"])
def test_charsets_of_messages(charset, content, text, kind):
    content = content.encode() if isinstance(content, str) else content
    if kind == "html":
        content = b"<html><body><p>" + content + b"</p></body></html>"
    declared = f'; charset="{charset}"' if charset else ""
    header = f"Content-Type: text/{kind}{declared}\n".encode()
    (found,) = read_mailbox(io.BytesIO(header + b"\n" + content), "a.eml", MAIL)
    assert found.text == text and not found.repairs


def test_invalid_bytes_of_a_message_are_counted():
    (found,) = read_mailbox(io.BytesIO(b"Content-Type: text/plain; charset=utf-8\n\ncaf\xc3\xa9 \xff"), "a.eml", MAIL)
    assert found.text == "café \ufffd" and found.repairs == ("replaced_bytes",)

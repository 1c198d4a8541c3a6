"""A page's characters, as browsers find them."""

import pytest

from gristmill.data_pipeline.extraction.html_encoding import codec_of, declared_codec, decode_html

RUSSIAN = "Мельница стоит у реки, и колесо её вертится. "


def text(html: bytes, charset: str | None = None) -> str:
    return decode_html(html, charset).text


def test_the_order_is_mark_header_meta_and_the_bytes():
    page = "<meta charset=windows-1251>é"
    assert text("\ufeffé".encode(), "latin-1") == "é"
    assert text("\ufeffé".encode("utf-16-le"), "latin-1") == text("\ufeffé".encode("utf-16-be"), "latin-1") == "é"
    assert text(page.encode("utf-8"), "utf-8").endswith("é")
    assert text("<meta charset='windows-1251'>Ж".encode("cp1251")).endswith("Ж")
    assert text("<meta charset='no-such-set'>é".encode()).endswith("é")
    assert text("é".encode(), "no-such-set") == text("é".encode()) == "é"


def test_one_bad_byte_costs_one_character():
    good = "Grüße aus der Mühle. "
    found = decode_html(good.encode() + b"caf\xe9 " + good.encode(), None)
    assert found == (f"{good}caf\ufffd {good}", True)
    assert decode_html(good.encode() + b"caf\xe9", "utf-8").text == good + "caf\ufffd"
    assert decode_html((good * 2).encode(), None) == (good * 2, False)
    assert decode_html("a \ufffd stood there. é".encode() + b"\xe9", None).text == "a \ufffd stood there. é\ufffd"


def test_bytes_that_are_no_utf8_are_told_by_their_looks():
    assert text("café déjà vu, ".encode("latin-1") * 20).startswith("café déjà")
    assert text((RUSSIAN * 20).encode("cp1251")).startswith(RUSSIAN)
    assert text(("日本語のテキストを読みます。" * 20).encode("shift_jis")).startswith("日本語のテキスト")
    assert text("磨坊在河边，水轮在转。".encode("gb18030") * 20).startswith("磨坊在河边")


def test_utf8_under_another_name():
    """Pages that were saved anew keep their old declaration; well-formed UTF-8 that is no GB 18030 is UTF-8."""
    page = "<meta charset=gb2312>磨坊在河边，水轮在转。"
    assert text(page.encode()) == page and text(page.encode("gb18030")) == page


def test_no_byte_is_deleted():
    """WHATWG's windows-1252 has a character for every byte; bytes 81 8D 8F 90 9D were dropped."""
    every = bytes(range(256))
    assert len(text(every, "latin-1")) == 256
    assert text(b"a\x81\x93b\x94", "iso-8859-1") == "a\x81“b”"
    assert text("日本".encode("cp932") + b"\x81", "shift_jis") == "日本\ufffd"


def test_labels_mean_what_the_standard_says():
    assert [codec_of(one) for one in (" Latin1 ", "ASCII", "iso-8859-1", "windows-1252")] == ["cp1252"] * 4
    assert (codec_of("gb2312"), codec_of("x-sjis"), codec_of("euc-kr"), codec_of("tis-620")) == (
        "gb18030",
        "cp932",
        "cp949",
        "cp874",
    )
    assert (codec_of("iso-8859-9"), codec_of("utf8"), codec_of("x-mac-cyrillic")) == ("cp1254", "utf-8", "mac-cyrillic")
    assert codec_of("utf-7") is codec_of("") is codec_of(None) is codec_of("no-such") is None


@pytest.mark.parametrize(
    ("head", "codec"),
    [
        (b"<meta charset=koi8-r>", "koi8-r"),
        (b"<META CHARSET = 'koi8-r' >", "koi8-r"),
        (b'<meta http-equiv="Content-Type" content="text/html; charset=koi8-r">', "koi8-r"),
        (b"<meta content='text/html;charset=\"koi8-r\"' http-equiv=content-type />", "koi8-r"),
        (b'<meta name="x" content="charset=koi8-r">', None),  # no http-equiv: about something else
        (b"<!-- <meta charset=koi8-r> --><meta charset=utf-8>", "utf-8"),
        (b"<meta charset=utf-16>", "utf-8"),
        (b"<meta charset=nonesuch><meta charset=koi8-r>", "koi8-r"),
        (b'<?xml version="1.0" encoding="koi8-r"?><html>', "koi8-r"),
        (b"<metadata charset=koi8-r>", None),
        (b"<p>charset=koi8-r", None),
    ],
)
def test_what_a_page_declares(head, codec):
    assert declared_codec(head) == codec


def test_every_label_of_the_table_can_be_decoded():
    names = "utf-8 gbk gb18030 big5 euc-jp iso-2022-jp shift_jis euc-kr koi8-r koi8-u macintosh ibm866 x-mac-cyrillic"
    names += " x-user-defined utf-16be utf-16le windows-874 " + " ".join(f"windows-125{k}" for k in range(9))
    names += " " + " ".join(f"iso-8859-{k}" for k in (2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 15, 16)) + " iso-8859-8-i"
    for name in names.split():
        assert "a" in text(b"aa\x80\xff", name) or name.startswith("utf-16"), name

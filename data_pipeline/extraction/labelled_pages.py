"""Labelled pages for fitting the extractor, read from folders of three layouts.

- `ground-truth.json` with `{address: {file, with: [...], without: [...]}}`: chunks of text that belong to the main text
  and chunks that do not (trafilatura's evaluation).
- `ground-truth.json` with `{id: {articleBody, url}}`, pages in `html/<id>.html.gz` (article-extraction-benchmark).
- `expected.json.gz` with `{name: HTML of the main text}`, pages in `<name>.html.gz` (Readability's test pages).
- any other folder: its `.html`, `.htm` and `.gz` files, labelled by trafilatura alone."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple

import courlan

from gristmill.data_pipeline.extraction.html_encoding import decode_html
from gristmill.foundation.errors import InputError

FOLDS = 5
_ADDRESS = re.compile(
    rb"""(?:rel=["']?canonical["']?[^>]{0,300}href|["']og:url["'][^>]{0,300}content)=["']?(https?://[^"'>\s]+)"""
)
_TAG = re.compile(r"<[^<>]*>")


class LabelledPage(NamedTuple):
    """html: UTF-8. wanted, unwanted: chunks of text inside and outside of the main text. body: the whole main text."""

    name: str
    site: str
    html: bytes
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    body: str | None = None


def site_of(address: str) -> str:
    """The registered domain of an address; of an archived page that of the page; else the address itself.

    24 addresses of trafilatura's pages are `hard::` and a file's name: each is a site of its own."""
    return courlan.extract_domain(address[max(0, address.rfind("http")) :]) or address


def fold_of(site: str) -> int:
    """Pages of one site have one template, so they are in one fold."""
    return zlib.crc32(site.encode()) % FOLDS


def labelled_pages(folder: Path) -> list[LabelledPage]:
    """Raises InputError if the folder has no pages or its labels do not fit its files."""
    try:
        pages = list(_pages(folder))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder}: its labels cannot be read ({type(error).__name__}: {error}); the layouts are described in "
            "docs/extraction.md"
        ) from error
    if not pages:
        raise InputError(f"{folder}: no pages; give a folder with ground-truth.json, expected.json.gz or .html files")
    return pages


def _pages(folder: Path) -> Iterator[LabelledPage]:
    if (folder / "ground-truth.json").is_file():
        for name, truth in json.loads((folder / "ground-truth.json").read_bytes()).items():
            if "articleBody" in truth:
                html = _utf8(folder / "html" / f"{Path(name).name}.html.gz")
                yield LabelledPage(name, site_of(truth["url"]), html, body=truth["articleBody"])
            else:
                html = _utf8(folder / Path(truth["file"]).name)
                yield LabelledPage(name, site_of(name), html, tuple(truth["with"]), tuple(truth["without"]))
    elif (folder / "expected.json.gz").is_file():
        for name, expected in json.loads(gzip.decompress((folder / "expected.json.gz").read_bytes())).items():
            html = _utf8(folder / f"{Path(name).name}.html.gz")
            yield LabelledPage(name, _site_in(html) or name, html, body=_plain(expected))
    else:
        for path in sorted(folder.rglob("*")):
            if path.name.endswith((".html", ".htm", ".html.gz", ".htm.gz")):
                html = _utf8(path)
                yield LabelledPage(path.name, _site_in(html) or path.name, html)


def _utf8(path: Path) -> bytes:
    raw = path.read_bytes()
    return decode_html(gzip.decompress(raw) if path.suffix == ".gz" else raw, None).text.encode("utf-8", "replace")


def _site_in(html: bytes) -> str | None:
    found = _ADDRESS.search(html)
    return site_of(found[1].decode("utf-8", "replace")) if found else None


def _plain(html: str) -> str:
    return unescape(_TAG.sub("\n", html))

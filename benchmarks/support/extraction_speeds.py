"""MB of HTML a second on one core, with decompression and charset detection: pages, and a WARC file to text."""

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

import trafilatura
from fastwarc.warc import ArchiveIterator, WarcRecordType
from measure import Figure, in_turn
from support.annotated_chunks import annotated_pages
from support.article_extraction import pages
from support.peers import PEER_PYTHON, peers_there, run_peer
from support.warc_file import write_warc
from zlib_ng import zlib_ng

from gristmill.data_pipeline.extraction.html_extraction import Extractor, NotExtracted, extract
from gristmill.data_pipeline.extraction.labelled_pages import labelled_pages
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

QUICK_PAGES = 20
GZIP_BITS = 31  # zlib's wbits of the gzip format
UNIT = "MB of HTML/s/core"


def ours(name: Extractor, charset: str | None = None) -> Callable[[bytes], str]:
    """charset: utf-8 for pages that are decoded already, which may still declare another one."""

    def text(html: bytes) -> str:
        try:
            return extract(html, charset, name)
        except NotExtracted:
            return ""

    return text


def speeds(folder: Path, quick: bool) -> list[Figure]:
    """Of a sample of the pages of all kinds, each beside trafilatura in the same run."""
    read = [html for html, _ in pages(folder / "article_extraction")]
    read += [page.html for page in annotated_pages(folder / "trafilatura_eval")]
    read = read[:: len(read) // QUICK_PAGES] if quick else read[::8]
    if not quick:
        read += [page.html for page in labelled_pages(folder / "wcxb_dev")[::16]]
    return page_speeds(read, 1 if quick else 3) + warc_speeds(read, 1 if quick else 3)


def page_speeds(read: list[bytes], rounds: int) -> list[Figure]:
    """Gzipped pages, one after another: `extract_speed` of blocks, and `extract_resiliparse_speed`."""
    packed = [gzip.compress(html) for html in read]

    def unpacked(name: Extractor) -> Callable[[], object]:
        run = ours(name)
        return lambda: [run(zlib_ng.decompress(page, GZIP_BITS)) for page in packed]

    blocks = speed("extract_speed", unpacked("blocks"), unpacked("trafilatura"), read, rounds, 80)
    return blocks + speed(
        "extract_resiliparse_speed", unpacked("resiliparse"), unpacked("trafilatura"), read, rounds, None
    )


def warc_speeds(read: list[bytes], rounds: int) -> list[Figure]:
    """`warc_to_text`: a WARC file of the pages, as the reader reads it, against trafilatura and datatrove."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pages.warc.gz"
        write_warc(path, ((f"https://site{k}.org/", html) for k, html in enumerate(read)))
        found = speed("warc_to_text", lambda: warc_texts(path), lambda: fastwarc_trafilatura(path), read, rounds, 50)
        if peers_there(PEER_PYTHON):
            megabytes = sum(map(len, read)) / 1e6
            seconds = run_peer(PEER_PYTHON, "datatrove_warc.py", str(path))["cpu_seconds"]
            own, peer = found[0].ours, megabytes / seconds
            found.append(Figure("warc_to_text_to_datatrove", own, UNIT, peer, "datatrove", own / peer))
    return found


def speed(
    name: str,
    run: Callable[[], object],
    peer: Callable[[], object],
    read: list[bytes],
    rounds: int,
    goal: float | None,
) -> list[Figure]:
    megabytes = sum(map(len, read)) / 1e6
    own, other, ratio = in_turn(run, peer, rounds)
    return [
        Figure(name, megabytes / own, UNIT, goal=goal),
        Figure(f"{name}_to_trafilatura", megabytes / own, UNIT, megabytes / other, "trafilatura", ratio),
    ]


def warc_texts(path: Path) -> int:
    """Pages of the file with text, as the default reader and extractor find them."""
    source = SourceConfig(name="s", format="warc", paths=(str(path),))
    part = FileRange(RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path)), str(path))
    return sum(isinstance(record, Record) for record in read_range(part, source))


def fastwarc_trafilatura(path: Path) -> int:
    """FastWARC's reader and trafilatura, which decodes the bytes."""
    with path.open("rb") as file:
        records = ArchiveIterator(file, record_types=WarcRecordType.response)
        return sum(bool(trafilatura.extract(record.reader.read(), include_comments=False)) for record in records)

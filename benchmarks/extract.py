"""Text out of pages: F1 and MB of HTML a second on one core, by extractor.

--data names the folder html/ of the shared data: article_extraction (181 pages, F1 of word 4-grams), trafilatura_eval
(660 pages, F1 of annotated chunks) and readability (130 pages). The extractor blocks is fitted on pages of these sets,
so it is scored in five folds by site: `extract_blocks_trafilatura_pages` and `extract_blocks_articles`, and by leaving
out each set. The fits take some minutes and are kept under build/extraction. The published F1 of trafilatura on
article_extraction is 0.958 (the benchmark's README).

--options instead compares settings of trafilatura and chooses one by cross-validation over five folds by site."""

import gzip
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import trafilatura
from fastwarc.warc import ArchiveIterator, WarcRecordType
from measure import Figure, arguments, in_turn, print_figures
from support import extraction_folds
from support.annotated_chunks import Annotated, annotated_pages, counts, total
from support.article_extraction import pages, score_extractor
from support.extraction_languages import Pair, crawl_pairs, print_languages
from support.extraction_options import print_comparison
from support.warc_file import write_warc

from gristmill.data_pipeline.extraction.html_extraction import Extractor, NotExtracted, extract
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile

SHARED = Path(__file__).parent / "../../shared/data/html"
PUBLISHED = 0.958
QUICK_PAGES = 20
RECALL = {"include_comments": False, "favor_recall": True}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--options", action="store_true", help="compare settings of trafilatura, some ten minutes")
    parser.add_argument("--speed", action="store_true", help="only the speeds")
    parser.add_argument("--blocks", action="store_true", help="only the F1 of the extractor blocks")
    parser.add_argument("--languages", action="store_true", help="blocks against trafilatura by language, in folds")
    parser.add_argument("--crawl", type=Path, nargs="+", metavar="WARC", help="the same on the pages of WARC files")
    options = parser.parse_args()
    if options.crawl:
        print_languages(crawl_pairs(options.crawl))
        return
    folder = options.data or SHARED
    if not (folder / "article_extraction" / "ground-truth.json").is_file():
        print(f"{folder}: the pages are not here; name the folder html/ with --data", file=sys.stderr)
        return
    if options.options:
        most = QUICK_PAGES if options.quick else None
        print_comparison(folder / "article_extraction", folder / "trafilatura_eval", most)
        return
    if options.languages:
        print_languages(held_out_pairs(folder))
        return
    figures = [] if options.speed or options.quick else blocks_figures(folder)
    if not options.speed and not options.blocks and not options.quick:
        figures += [figure for name, run in systems().items() for figure in other_figures(name, run, folder)]
    if not options.blocks:
        figures += speeds(folder, options.quick)
    print_figures(figures)


def blocks_figures(folder: Path) -> list[Figure]:
    """F1 of blocks on sites, and on whole sets, that it was not fitted on."""
    sets = extraction_folds.labelled_sets(folder)
    held_out = extraction_folds.in_folds(sets)
    chunks = extraction_folds.chunk_counts(held_out)
    found = [
        Figure("extract_blocks_trafilatura_pages", chunks.f1, "F1", goal=0.935),
        Figure("extract_blocks_trafilatura_pages_precision", chunks.precision, "precision"),
        Figure("extract_blocks_trafilatura_pages_recall", chunks.recall, "recall"),
        Figure("extract_blocks_articles", extraction_folds.article_f1(held_out), "F1", goal=0.955),
    ]
    without_chunks = extraction_folds.without_set(sets, extraction_folds.CHUNKS)
    without_articles = extraction_folds.without_set(sets, extraction_folds.ARTICLES)
    transferred = extraction_folds.chunk_counts(without_chunks).f1
    return [
        *found,
        Figure("extract_blocks_transfer_to_trafilatura_pages", transferred, "F1"),
        Figure("extract_blocks_transfer_to_articles", extraction_folds.article_f1(without_articles), "F1"),
    ]


def held_out_pairs(folder: Path) -> list[Pair]:
    found = []
    for one in extraction_folds.in_folds(extraction_folds.labelled_sets(folder)):
        page = one.labelled.page
        chunks = Annotated("", b"", page.wanted, page.unwanted) if one.of == extraction_folds.CHUNKS else None
        found.append(Pair(one.text, ours("trafilatura")(page.html), chunks))
    return found


def systems() -> dict[str, Callable[[bytes], str]]:
    def recall(html: bytes) -> str:
        page = extraction_folds.utf8(html)
        return trafilatura.extract(page.decode(), **RECALL) or ""

    others = [name for name in get_args(Extractor) if name != "blocks"]
    return {name: ours(name) for name in others} | {
        "trafilatura_recall": recall,
        "readability_like": lambda html: extraction_folds.readability_like(extraction_folds.utf8(html)),
    }


def other_figures(name: str, run: Callable[[bytes], str], folder: Path) -> list[Figure]:
    chunks = total(counts(page, run(page.html)) for page in annotated_pages(folder / "trafilatura_eval"))
    articles = score_extractor(run, folder / "article_extraction")
    published = {"peer": PUBLISHED, "peer_name": "published"} if name == "trafilatura" else {}
    return [
        Figure(f"extract_{name}_trafilatura_pages", chunks.f1, "F1"),
        Figure(f"extract_{name}_precision", articles.precision, "precision"),
        Figure(f"extract_{name}_recall", articles.recall, "recall"),
        Figure(f"extract_{name}_f1", articles.f1, "F1", **published),
    ]


def ours(name: Extractor) -> Callable[[bytes], str]:
    def text(html: bytes) -> str:
        try:
            return extract(html, None, name)
        except NotExtracted:
            return ""

    return text


def speeds(folder: Path, quick: bool) -> list[Figure]:
    """Extraction of gzipped pages, and a WARC file to text, both with decompression and charset detection."""
    read = [html for html, _ in pages(folder / "article_extraction")]
    read += [page.html for page in annotated_pages(folder / "trafilatura_eval")]
    read = read[:: len(read) // QUICK_PAGES] if quick else read[::8]
    packed = [gzip.compress(html) for html in read]
    rounds = 1 if quick else 3
    found = []
    for name, figure, goal in (("blocks", "extract_blocks_speed", 80), ("resiliparse", "extract_speed", None)):
        found += speed(figure, unpacked(packed, name), unpacked(packed, "trafilatura"), read, rounds, goal)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pages.warc.gz"
        write_warc(path, ((f"https://site{k}.org/", html) for k, html in enumerate(read)))
        source = SourceConfig(name="s", format="warc", paths=(str(path),), extractor="blocks")
        part = FileRange(RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path)), str(path))
        texts = lambda: sum(isinstance(record, Record) for record in read_range(part, source))  # noqa: E731
        found += speed("warc_to_text", texts, lambda: fastwarc_trafilatura(path), read, rounds, 50)
    return found


def speed(
    name: str, run: Callable[[], object], peer: Callable[[], object], read: list[bytes], rounds: int, goal: float | None
) -> list[Figure]:
    megabytes, unit = sum(map(len, read)) / 1e6, "MB of HTML/s/core"
    own, other, ratio = in_turn(run, peer, rounds)
    return [
        Figure(name, megabytes / own, unit, goal=goal),
        Figure(f"{name}_to_trafilatura", megabytes / own, unit, megabytes / other, "trafilatura", ratio),
    ]


def unpacked(packed: list[bytes], name: Extractor) -> Callable[[], object]:
    run = ours(name)
    return lambda: [run(gzip.decompress(page)) for page in packed]


def fastwarc_trafilatura(path: Path) -> int:
    """FastWARC's reader and trafilatura, which decodes the bytes."""
    with path.open("rb") as file:
        records = ArchiveIterator(file, record_types=WarcRecordType.response)
        return sum(bool(trafilatura.extract(record.reader.read(), include_comments=False)) for record in records)


if __name__ == "__main__":
    main()

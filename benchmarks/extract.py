"""Text out of pages: F1 and MB of HTML a second on one core, by extractor.

--data names the folder html/ of the shared data: trafilatura_eval (660 pages, F1 of annotated chunks),
article_extraction (181 pages) and readability (130 pages; F1 of word 4-grams), and wcxb_dev (1,497 pages of seven
kinds; F1 of words). The extractor blocks is fitted on pages of these sets, so it is scored in five folds by site
(`extract_blocks_trafilatura_pages`, `extract_blocks_articles`, `extract_wcxb`, `extract_wcxb_KIND`) and with each set
held out (--transfer). The fits take half an hour and are kept under build/extraction. The published F1 of trafilatura
on article_extraction is 0.958 (the benchmark's README)."""

import sys
from pathlib import Path

from measure import Figure, arguments, print_figures
from support import extraction_folds
from support.annotated_chunks import Annotated
from support.extraction_embedded import print_embedded
from support.extraction_kinds import kind_figures, peer_figures
from support.extraction_languages import Pair, crawl_pairs, print_languages
from support.extraction_metadata import labelled_figures, print_metadata
from support.extraction_options import print_comparison
from support.extraction_posts import print_posts
from support.extraction_sites import print_repeats, print_site
from support.extraction_speeds import QUICK_PAGES, ours, speeds
from support.extraction_systems import quality_figures, transfer_figures

SHARED = Path(__file__).parent / "../../shared/data/html"


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--speed", action="store_true", help="only the speeds")
    parser.add_argument("--blocks", action="store_true", help="only the F1, with the tables")
    parser.add_argument("--wcxb", action="store_true", help="only the F1 of words by kind of page, with the tables")
    parser.add_argument("--peers", action="store_true", help="F1 of words: trafilatura, resiliparse, newspaper4k")
    parser.add_argument("--embedded", action="store_true", help="text in JSON of pages against their annotations")
    parser.add_argument("--transfer", action="store_true", help="only the F1 with each set held out, with the table")
    parser.add_argument("--options", action="store_true", help="compare settings of trafilatura, some ten minutes")
    parser.add_argument("--languages", action="store_true", help="blocks against trafilatura by language, in folds")
    parser.add_argument("--crawl", type=Path, nargs="+", metavar="WARC", help="the same on the pages of WARC files")
    parser.add_argument("--repeats", action="store_true", help="the second pass by site on the annotated pages")
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="the same on a folder of one site's HTML files")
    parser.add_argument("--metadata", action="store_true", help="metadata against trafilatura and labels")
    parser.add_argument("--posts", action="store_true", help="authors of forum posts, and languages of code")
    options = parser.parse_args()
    if options.crawl:
        return print_languages(crawl_pairs(options.crawl))
    if options.site:
        return print_site(options.site)
    folder = options.data or SHARED
    if not (folder / "article_extraction" / "ground-truth.json").is_file():
        print(f"{folder}: the pages are not here; name the folder html/ with --data", file=sys.stderr)
        return None
    if options.options:
        most = QUICK_PAGES if options.quick else None
        return print_comparison(folder / "article_extraction", folder / "trafilatura_eval", most)
    if options.languages:
        return print_languages(held_out_pairs(folder))
    if options.repeats:
        return print_repeats(folder)
    if options.peers:
        return print_figures(peer_figures(folder, 12 if options.quick else 4))
    if options.posts:
        return print_posts(folder / "wcxb_dev" / "pages.jsonl.zst")
    if options.embedded:
        return print_figures(print_embedded(folder))
    if options.wcxb:
        return print_figures(kind_figures(folder))
    if options.transfer:
        return print_figures(transfer_figures(folder))
    if options.metadata:
        print_metadata(folder, 8 if options.quick else 1)
        return print_figures(labelled_figures(folder / "wcxb_dev" / "pages.jsonl.zst", 12 if options.quick else 1))
    figures: list[Figure] = [] if options.speed or options.quick else quality_figures(folder)
    if not (options.speed or options.quick or options.blocks):
        figures += kind_figures(folder) + transfer_figures(folder)
    return print_figures(figures if options.blocks else figures + speeds(folder, options.quick))


def held_out_pairs(folder: Path) -> list[Pair]:
    found = []
    for one in extraction_folds.in_folds(extraction_folds.labelled_sets(folder)):
        page = one.labelled.page
        chunks = Annotated("", b"", page.wanted, page.unwanted) if one.of == extraction_folds.CHUNKS else None
        found.append(Pair(one.text, ours("trafilatura", "utf-8")(page.html), chunks))
    return found


if __name__ == "__main__":
    main()

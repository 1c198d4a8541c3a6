"""Text extraction from HTML: F1 on article-extraction-benchmark by its own metric, and MB of HTML a second on one core.

--data names the benchmark's folder (html/, ground-truth.json). The published figure of trafilatura there is 0.958
(the benchmark's README); the benchmark gives the extractor the page as UTF-8, we decode it as the pipeline does.

--options instead compares settings of trafilatura, on those pages and on 660 annotated ones of trafilatura's own
evaluation (trafilatura_eval/ beside the folder), and chooses one by cross-validation over five folds by site."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import trafilatura
from measure import Figure, arguments, in_turn, print_figures
from support.article_extraction import Score, pages, score_extractor
from support.extraction_options import print_comparison

from gristmill.data_pipeline.readers.html_extraction import Extractor, NotExtracted, extract

SHARED = Path(__file__).parent / "../../shared/data/html/article_extraction"
PUBLISHED = 0.958
QUICK_PAGES = 20


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--options", action="store_true", help="compare settings of trafilatura, some ten minutes")
    options = parser.parse_args()
    folder = options.data or SHARED
    if not (folder / "ground-truth.json").is_file():
        print(f"{folder}: article-extraction-benchmark is not here; name its folder with --data", file=sys.stderr)
        return
    if options.options:
        print_comparison(folder, folder.parent / "trafilatura_eval", QUICK_PAGES if options.quick else None)
        return
    figures = []
    for name in get_args(Extractor):
        found = score_extractor(ours(name), folder)
        goal = PUBLISHED if name == "trafilatura" else None
        figures += [Figure(f"extract_{name}_{part}", value, part) for part, value in parts(found)]
        figures.append(Figure(f"extract_{name}_f1", found.f1, "F1", PUBLISHED, "trafilatura, published", goal=goal))
    as_published = score_extractor(the_benchmarks, folder)
    figures.append(Figure("extract_benchmark_options_f1", as_published.f1, "F1", PUBLISHED, "trafilatura, published"))
    print_figures([*figures, speed(folder, options.quick)])


def ours(name: Extractor) -> Callable[[bytes], str]:
    def text(html: bytes) -> str:
        try:
            return extract(html, None, name)
        except NotExtracted:
            return ""

    return text


def the_benchmarks(html: bytes) -> str:
    """Extraction with the call of the benchmark's own run_trafilatura.py."""
    return trafilatura.extract(html.decode("utf-8"), include_comments=False) or ""


def parts(found: Score) -> list[tuple[str, float]]:
    return [("precision", found.precision), ("recall", found.recall)]


def speed(folder: Path, quick: bool) -> Figure:
    """Speed of the fast extractor compared with trafilatura, both as the pipeline runs them."""
    read = [html for html, _ in pages(folder)][: QUICK_PAGES if quick else None]
    megabytes = sum(map(len, read)) / 1e6
    fast, slow, ratio = in_turn(
        lambda: [ours("resiliparse")(html) for html in read],
        lambda: [ours("trafilatura")(html) for html in read],
        rounds=1 if quick else 3,
    )
    return Figure("extract_speed", megabytes / fast, "MB of HTML/s", megabytes / slow, "trafilatura", ratio)


if __name__ == "__main__":
    main()

"""Does a step of curation make a better small model? Two ablations on shared text, each step against none.

- `noise`: web pages out of WARC files, manuals in several editions, meeting notes, and short pages in fourteen
  languages; the baseline is not curated, every arm has one step more: language, filters of published recipes, a model
  of quality, exact or near duplicates.
- `web`: the web pages alone by our extractor; the arms are other extractors, and decontamination.

Models are scored on the paragraphs of WikiText-2's validation text, which no arm reads: an encyclopedia is what the
curation of web text is usually for. A figure is the difference in bits a byte from the baseline (below 0: better), at
the tuned learning rate. `gristmill ablate` decides; the whole takes about 15 minutes of one core. Nobody else measures
this: there is no peer."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import zstandard
from measure import Figure, arguments, print_figures
from rich.console import Console
from rich.table import Table
from support.warc_file import write_warc

PROGRAM = str(Path(sys.executable).with_name("gristmill"))
SHARED = Path(os.environ.get("GRISTMILL_SHARED_DATA") or Path(__file__).parents[1] / "../shared/data")
MIN_PARAGRAPH = 300  # characters
NOT_CURATED: dict[str, Any] = {
    "filters": [],
    "exact_dedup": None,
    "near_dedup": None,
    "splits": {"validation": 0.0, "test": 0.1},
}
FILTERS = {
    "gopher": ["gopher_quality"],
    "gopher_repetition": ["gopher_quality", "gopher_repetition"],
    "c4": ["c4"],
    "fineweb": ["fineweb_quality"],
    "quality": [{"quality_mine": {"min": 0.5}}],
}
# experiment -> arm -> what `--vary` is given
ARMS = {
    "noise": {
        "language": "curate.languages=[en]",
        **{name: f"curate.filters={json.dumps(filters)}" for name, filters in FILTERS.items()},
        "exact_dedup": "curate.exact_dedup={}",
        "near_dedup": "curate.near_dedup={}",
    },
    "web": {
        **{name: f"sources.pages.extractor={name}" for name in ("trafilatura", "trafilatura_precision", "resiliparse")},
        "decontaminate": "curate.decontaminate={tasks: [arc_easy, piqa, hellaswag]}",
    },
}
FLOPS = 1e12  # of an arm


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--work", type=Path, help="folder that keeps the runs, so that the program goes on after a stop"
    )
    options = parser.parse_args()
    data = options.data or SHARED
    if not data.is_dir():
        sys.exit(f"{data} is absent; set GRISTMILL_SHARED_DATA to the shared data folder")
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        target = write_target(data, folder / "encyclopedia.txt")
        model = fit_quality(data, folder / "mine.safetensors")
        for name, arms in ARMS.items():
            recipe = write_recipe(name, data, model, folder)
            chosen = dict(list(arms.items())[:1]) if options.quick else arms
            rows = ablated(recipe, chosen, target, folder, FLOPS / 20 if options.quick else FLOPS)
            Console(width=120).print(table_of(name, rows))
            figures += [figure for arm, row in rows.items() for figure in figures_of(f"{name}_{arm}", row)]
    print_figures(figures)


def write_target(data: Path, path: Path) -> Path:
    packed = (data / "corpora" / "wikitext2_valid.txt.zst").read_bytes()
    text = zstandard.ZstdDecompressor().decompressobj().decompress(packed).decode()
    lines = (line.strip() for line in text.split("\n"))
    path.write_text("\n\n".join(line for line in lines if len(line) > MIN_PARAGRAPH))
    return path


def fit_quality(data: Path, path: Path) -> Path:
    """Articles against listings, collections and products, by WCXB's annotated text."""
    labels = ["--label-field", "page_type", "--good", "article", "--bad", "listing,collection,product"]
    pages = data / "html" / "wcxb_dev" / "pages.jsonl.zst"
    command = [PROGRAM, "quality", "fit", str(pages), "--text-field", "main_content", *labels, "--output", str(path)]
    if not path.is_file():
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def write_pages(data: Path, path: Path) -> Path:
    """The annotated pages of WCXB as a crawl would have stored them."""
    packed = (data / "html" / "wcxb_dev" / "pages.jsonl.zst").read_bytes()
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(packed).splitlines()
    write_warc(path, ((page["url"], page["html"].encode()) for page in map(json.loads, lines)))
    return path


def write_recipe(name: str, data: Path, model: Path, folder: Path) -> Path:
    corpora, crawled = data / "corpora", data / "warc"
    captures = [crawled / "resiliparse/tests/data/warcfile.warc.gz", crawled / "whirlwind/whirlwind.warc.gz"]
    paths = [str(path) for path in (write_pages(data, folder / "pages.warc.gz"), *captures)]
    pages = {"name": "pages", "format": "warc", "paths": paths}
    manuals = [corpora / "rust_book.jsonl.zst", corpora / "kubernetes_community.jsonl.zst"]
    noise = [
        {"name": "manuals", "paths": [str(path) for path in manuals]},
        {"name": "tldr", "paths": [str(corpora / "tldr.jsonl.zst")]},
    ]
    sources = [{"format": "jsonl", **source} for source in ([pages, *noise] if name == "noise" else [pages])]
    scores = {"quality_scores": {"mine": {"model": str(model.absolute())}}} if name == "noise" else {}
    path = folder / f"{name}.yaml"
    fields = {"name": name, "sources": sources, "curate": NOT_CURATED | scores, "evaluate": {"data": str(data)}}
    path.write_text(json.dumps(fields))
    return path


def ablated(recipe: Path, arms: dict[str, str], target: Path, folder: Path, flops: float) -> dict[str, Any]:
    """Arm -> its row in ablation.json."""
    work = folder / f"ablate-{recipe.stem}"
    vary = [part for value in arms.values() for part in ("--vary", value)]
    size = ["--budget", f"{flops * (len(arms) + 1):g}", "--workers", "1", "--workdir", str(work)]
    command = [PROGRAM, "ablate", str(recipe), *vary, "--target", str(target), "--targets-alone", *size]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads((work / "ablation.json").read_bytes())["rows"]
    return dict(zip(arms, rows, strict=True))


def table_of(name: str, rows: dict[str, Any]) -> Table:
    table = Table("step", "verdict", "effect", "95 % interval", "at a tenth of the rate", title=name)
    for arm, row in rows.items():
        low, high = row["interval"]
        effects = f"{row['tuned']['effect']:+.4f}", f"{low:+.4f} to {high:+.4f}", f"{row['low']['effect']:+.4f}"
        table.add_row(arm, row["decision"], *effects)
    return table


def figures_of(name: str, row: dict[str, Any]) -> list[Figure]:
    low, high = row["interval"]
    unit = f"bits a byte, {low:+.4f} to {high:+.4f}: {row['decision']}"
    return [Figure(f"effect_{name}", row["tuned"]["effect"], unit)]


if __name__ == "__main__":
    main()

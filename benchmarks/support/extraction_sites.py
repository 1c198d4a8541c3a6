"""The second pass by site: its gain in F1 on the annotated pages, and its cost on a folder of one site's pages."""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from measure import cpu_seconds, peak_megabytes
from rich.console import Console
from rich.table import Table
from support.extraction_folds import ARTICLES, ExtractedPage, fold_weights, kept_texts, labelled_sets
from support.extraction_systems import body_score, chunk_counts
from support.warc_file import write_warc

from gristmill.data_pipeline.annotate.site_boilerplate import (
    boilerplate,
    find_site_boilerplate,
    page_rows,
    save_array,
    unique_rows,
)
from gristmill.data_pipeline.extraction.blocks_config import RepeatedBlocks, SiteBoilerplateConfig, load_repeated_blocks
from gristmill.data_pipeline.readers.document import Record
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

DEFAULTS = SiteBoilerplateConfig()
SETTINGS = [(10, 0.3), (5, 0.3), (3, 0.3), (2, 0.3), (2, 0.1)]  # min_pages, min_share; the annotated sites are small
SHOWN = 12  # of the blocks that are left out most often


def print_repeats(folder: Path) -> None:
    """Scores of the annotated pages in folds, without the blocks that repeat over pages of one registered domain."""
    sets = labelled_sets(folder)
    weights = fold_weights(sets)
    pages = [(of, one, kept_texts(one, weights[one.fold])) for of, held in sets.items() for one in held]
    table = Table("min_pages", "min_share", "blocks left out", "of pages", "chunk F1", "article F1")
    add_row(table, "no second pass", "", [ExtractedPage(of, one, "\n".join(texts)) for of, one, texts in pages], [])
    for min_pages, min_share in SETTINGS:
        config = SiteBoilerplateConfig(min_pages=min_pages, min_share=min_share)
        repeated = repeated_blocks([(one.page.site, texts) for _, one, texts in pages], config)
        masks = [repeated.mask(one.page.site, [text.encode() for text in texts]) for _, one, texts in pages]
        left = [
            ExtractedPage(of, one, "\n".join(text for text, out in zip(texts, mask, strict=True) if not out))
            for (of, one, texts), mask in zip(pages, masks, strict=True)
        ]
        add_row(table, str(min_pages), str(min_share), left, masks)
    Console(width=100).print(table)


def repeated_blocks(pages: Sequence[tuple[str, list[str]]], config: SiteBoilerplateConfig) -> RepeatedBlocks:
    """pages: (site, blocks)."""
    rows = unique_rows([page_rows(site, [text.encode() for text in texts]) for site, texts in pages])
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.npy"
        save_array(path, rows)
        return RepeatedBlocks(*boilerplate([path], config, LocalEngine(1, Reporter.silent())))


def add_row(table: Table, pages: str, share: str, found: Sequence[ExtractedPage], masks: Sequence[np.ndarray]) -> None:
    blocks, of_pages = sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks)
    scores = (chunk_counts(found).f1, body_score(found, ARTICLES).f1)
    table.add_row(pages, share, str(blocks), str(of_pages), *(f"{value:.4f}" for value in scores))


def print_site(folder: Path) -> None:
    """Cost of the pass on the HTML files of a folder, as a WARC file of one host, and what it leaves out."""
    paths = sorted(path for path in folder.rglob("*.html") if path.is_file())
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "site.warc.gz"
        write_warc(path, ((f"https://site.example/{one.relative_to(folder)}", one.read_bytes()) for one in paths))
        part = FileRange(RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path)), str(path))
        plain = SourceConfig(name="s", format="warc", paths=(str(path),))
        source = plain.model_copy(update={"blocks": plain.blocks.model_copy(update={"site_boilerplate": DEFAULTS})})

        def first_pass() -> Path:
            engine = LocalEngine(1, Reporter.silent())
            return find_site_boilerplate(source, [[part]], Path(scratch) / str(os.getpid()), engine)

        texts(part, plain, None)  # compiles the kernels
        megabytes = sum(one.stat().st_size for one in paths) / 1e6
        print(f"{len(paths)} pages, {megabytes:.0f} MB of HTML, {path.stat().st_size / 1e6:.0f} MB of WARC")
        table = Table("step", "CPU seconds", "MB of HTML/s", "peak memory grows by, MB")
        repeated = load_repeated_blocks(first_pass())
        for name, run in (
            ("without the pass", lambda: texts(part, plain, None)),
            ("first pass: blocks are counted", first_pass),
            ("second pass: texts", lambda: texts(part, source, repeated)),
        ):
            seconds, grown = in_fork(run)
            table.add_row(name, f"{seconds:.2f}", f"{megabytes / seconds:.0f}", f"{grown:.0f}")
        Console(width=100).print(table)
        print_left_out(texts(part, plain, None), texts(part, source, repeated))


def texts(part: FileRange, source: SourceConfig, repeated: RepeatedBlocks | None) -> dict[int, str]:
    return {one.number: one.text for one in read_range(part, source, repeated) if isinstance(one, Record)}


def in_fork(run: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds, MB that the peak memory of a forked process grows by)."""
    reader, writer = os.pipe()
    if not os.fork():
        before = peak_megabytes()
        os.write(writer, f"{cpu_seconds(run)} {peak_megabytes() - before}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        seconds, grown = pipe.read().split()
    os.wait()
    return float(seconds), float(grown)


def print_left_out(before: dict[int, str], after: dict[int, str]) -> None:
    times: dict[str, int] = {}
    for number, text in before.items():
        left = set(after.get(number, "").split("\n"))
        for line in dict.fromkeys(text.split("\n")):
            if line not in left:
                times[line] = times.get(line, 0) + 1
    size, left = sum(map(len, before.values())), sum(map(len, after.values()))
    print(
        f"{len(before)} pages with text, {len(after)} after; {1 - left / size:.1%} of the text is left out, most often:"
    )
    for line in sorted(times, key=lambda one: (-times[one], one))[:SHOWN]:
        print(f"  {times[line]:5d}  {line[:100]}")

"""The second pass by site: counts against plain Python, and the texts of pages of three hosts."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks.support.warc_file import write_warc
from gristmill.data_pipeline.annotate import site_boilerplate
from gristmill.data_pipeline.annotate.site_boilerplate import find_site_boilerplate
from gristmill.data_pipeline.extraction.blocks_config import block_keys, host_key, load_repeated_blocks
from gristmill.data_pipeline.extraction.html_extraction import main_blocks
from gristmill.data_pipeline.readers.document import Record, Unreadable
from gristmill.data_pipeline.readers.read import FileRange, read_range
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest
from gristmill.foundation.lock import RawFile
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine

ABOUT = "The River News is written by three people who live at the river, and it is printed in the mill every week."


def story(name: str) -> list[str]:
    return [f"Part {k} of {name} tells of the mill, of the river, and of the people who live there." for k in range(4)]


def page(*paragraphs: str) -> bytes:
    inside = "".join(f"<p>{text}</p>" for text in paragraphs)
    return f"<html><body><article><h1>{paragraphs[0][:16]}</h1>{inside}</article></body></html>".encode()


def crawl() -> list[tuple[str, bytes]]:
    """a.org: 12 stories with ABOUT, one of them captured 20 times more. b.org: 3 stories with ABOUT. c.org: 40 stories,
    ABOUT on 11 of them."""
    pages = [(f"https://a.org/{k}", page(*story(f"a{k}"), ABOUT)) for k in range(12)]
    pages += [(f"https://a.org/0?copy={k}", page(*story("a0"), ABOUT)) for k in range(20)]
    pages += [(f"https://b.org/{k}", page(*story(f"b{k}"), ABOUT)) for k in range(3)]
    pages += [(f"https://C.org:80/{k}", page(*story(f"c{k}"), *([ABOUT] * (k < 11)))) for k in range(40)]
    return pages


def source_of(**options) -> SourceConfig:
    return SourceConfig.model_validate(
        {"name": "s", "format": "warc", "paths": ["*.warc.gz"], "blocks": {"site_boilerplate": options}}
    )


def ranges(folder: Path, pages: list[tuple[str, bytes]], num_files: int) -> list[list[FileRange]]:
    groups = []
    for k in range(num_files):
        path = folder / f"{num_files}-{k}.warc.gz"
        write_warc(path, pages[k::num_files])
        file = RawFile(name=path.name, bytes=path.stat().st_size, sha256=file_digest(path))
        groups.append([FileRange(file, str(path))])
    return groups


def table_of(folder: Path, groups: list[list[FileRange]], source: SourceConfig, workers: int = 1) -> Path:
    return find_site_boilerplate(source, groups, folder, LocalEngine(workers, Reporter.silent()))


def texts(groups: list[list[FileRange]], source: SourceConfig, table: Path) -> dict[str, Record | Unreadable]:
    repeated = load_repeated_blocks(table)
    found = [record for (one,) in groups for record in read_range(one, source, repeated)]
    return {record.url if isinstance(record, Record) else record.excerpt: record for record in found}


def test_a_block_of_most_pages_of_a_host_is_left_out(tmp_path):
    source, groups = source_of(), ranges(tmp_path, crawl(), 2)
    found = texts(groups, source, table_of(tmp_path / "cache", groups, source))
    of_a, of_b, of_c = (found[f"https://{host}/1"] for host in ("a.org", "b.org", "C.org:80"))
    assert of_a.text.split("\n\n")[-4:] == story("a1") and of_a.repairs == ("site_boilerplate",)
    assert of_b.text.split("\n\n")[-5:] == [*story("b1"), ABOUT] and of_b.repairs == ()  # 3 pages are under 10
    assert of_c.text.split("\n\n")[-5:] == [*story("c1"), ABOUT]  # 11 of 40 pages are under 0.3
    assert "\n\n".join(story("a0")) in found["https://a.org/0?copy=3"].text  # copies of a page count once


def test_a_page_of_nothing_but_boilerplate_is_quarantined(tmp_path):
    pages = [*crawl(), ("https://a.org/about", b"<html><body><article><p>%b</p></article>" % ABOUT.encode())]
    source, groups = source_of(), ranges(tmp_path, pages, 1)
    found = texts(groups, source, table_of(tmp_path / "cache", groups, source))["https://a.org/about"]
    assert isinstance(found, Unreadable) and found.kind == "only_boilerplate"


def plain_counts(pages: list[tuple[str, bytes]], source: SourceConfig) -> set[tuple[int, int]]:
    """(host, block) of the boilerplate, counted with sets of texts."""
    pages_of, of_block = defaultdict(set), defaultdict(set)
    for url, html in pages:
        host = url.split("/")[2].lower().removesuffix(":80")
        blocks = main_blocks(html, None, source.blocks)
        pages_of[host].add(tuple(blocks))
        for block in blocks:
            of_block[host, block].add(tuple(blocks))
    config = source.blocks.site_boilerplate
    return {
        (host_key(host), int(block_keys(host, [block])[0]))
        for (host, block), held in of_block.items()
        if len(held) >= config.min_pages and len(held) / len(pages_of[host]) >= config.min_share
    }


@pytest.mark.parametrize("options", [{}, {"min_pages": 2, "min_share": 0.01}, {"min_pages": 3, "min_share": 1.0}])
def test_counts_are_those_of_sets_for_any_order_and_number_of_files(tmp_path, monkeypatch, options):
    source, pages = source_of(**options), crawl()
    tables = [table_of(tmp_path / "one", ranges(tmp_path, pages, 1), source)]
    monkeypatch.setattr(site_boilerplate, "MAX_ROWS", 20)  # many files of rows and ranges of keys
    tables.append(table_of(tmp_path / "small", ranges(tmp_path, pages[::-1], 3), source))
    assert len({table.read_bytes() for table in tables}) == 1
    hosts, keys = np.load(tables[0])
    assert keys.tolist() == sorted(keys.tolist())
    found = set(zip(hosts.tolist(), keys.tolist(), strict=True))
    assert found == plain_counts(pages, source) and found


def test_an_interrupted_pass_goes_on_and_two_workers_write_the_same(tmp_path):
    source, groups = source_of(), ranges(tmp_path, crawl(), 3)
    whole = table_of(tmp_path / "cache", groups, source)
    content, names = whole.read_bytes(), {path.name for path in whole.parent.iterdir()}
    whole.unlink()
    next(path for path in whole.parent.glob("*.npy")).write_bytes(b"cut")
    (whole.parent / "other.npy").write_bytes(b"of another recipe")
    assert table_of(tmp_path / "cache", groups, source, workers=2).read_bytes() == content
    assert {path.name for path in whole.parent.iterdir()} == names


def test_a_file_of_rows_that_is_missing_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(site_boilerplate, "MAX_ROWS", 20)
    source, groups = source_of(), ranges(tmp_path, crawl(), 2)
    whole = table_of(tmp_path / "cache", groups, source)
    content = whole.read_bytes()
    whole.unlink()
    rows = next(whole.parent.glob("*-000001.npy"))
    rows.unlink()
    assert table_of(tmp_path / "cache", groups, source).read_bytes() == content
    (rows.parent / f"{rows.stem[:-7]}.npy").unlink()  # the number of its files
    assert table_of(tmp_path / "cache", groups, source) == whole


def test_a_damaged_table_says_so(tmp_path):
    (tmp_path / "t.npy").write_bytes(b"no table")
    with pytest.raises(InputError, match=r"t.npy: no table of repeated blocks"):
        load_repeated_blocks(tmp_path / "t.npy")


def test_a_recipe_removes_boilerplate_before_signals_and_counts_it(call, tmp_path):
    lines = [json.dumps({"url": url, "html": html.decode()}) for url, html in crawl()]
    (tmp_path / "pages.jsonl").write_text("\n".join(lines))
    recipe = tmp_path / "recipe.yaml"
    options = "html_field: html, blocks: {site_boilerplate: {}}"
    recipe.write_text(
        f"name: r\nsources: [{{name: s, format: jsonl, paths: [{tmp_path}/pages.jsonl], {options}}}]\n"
        "curate: {filters: [], near_dedup: null, language_id: null}\n"
    )
    work = tmp_path / "work"
    for workers in (1, 2):
        code, said = call("curate", recipe, "--workers", workers, "--workdir", work / str(workers))
        assert code == 0, said
    one, two = (
        {path.relative_to(root): path.read_bytes() for path in (root / "curate").rglob("*") if path.is_file()}
        for root in (work / "1", work / "2")
    )
    assert one == two
    counts = json.loads((work / "1/curate/counts.json").read_bytes())
    assert counts["sources"]["s"]["changed"]["site_boilerplate"] == 32  # 12 stories of a.org and 20 copies of one
    assert [path.name for path in (work / "1/cache/site_boilerplate").iterdir()] == ["s"]
    recipe.write_text(recipe.read_text().replace("site_boilerplate: {}", "site_boilerplate: null"))
    assert call("curate", recipe, "--workers", 1, "--workdir", work / "1")[0] == 0
    assert "site_boilerplate" not in json.loads((work / "1/curate/counts.json").read_bytes())["sources"]["s"]["changed"]
    assert list((work / "1/cache/site_boilerplate").iterdir()) == []

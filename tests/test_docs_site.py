"""The site of docs/: generated pages are current, every page is in the navigation, the guided path of a crawl runs."""

import gzip
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from doc_figures import figures
from reference_pages import pages

from tests.support.corpora import prose

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SETTINGS = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))


@pytest.mark.parametrize("name", ["reference_commands.md", "reference_recipe.md"])
def test_generated_pages_are_current(name):
    assert (DOCS / name).read_text("utf-8") == pages()[name], "run: python tests/support/reference_pages.py"


def test_drawn_figures_are_current():
    drawn = figures()
    assert {name: (DOCS / name).read_text("utf-8") for name in drawn} == drawn, (
        "run: python tests/support/doc_figures.py"
    )


def pages_of(navigation):
    for entry in navigation:
        if isinstance(entry, dict):
            for children in entry.values():
                yield from pages_of(children if isinstance(children, list) else [children])
        else:
            yield entry


def test_every_page_is_in_the_navigation_once():
    listed = sorted(pages_of(SETTINGS["nav"]))
    assert listed == sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.skipif(find_spec("material") is None, reason="the extra `docs` is not installed: pip install -e '.[docs]'")
def test_the_site_builds_strictly(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").is_file()


def warc(number: int) -> bytes:
    paragraphs = "".join(f"<p>{line}</p>" for line in prose(number, words=240).split("\n"))
    page = f"<html><body><article><h1>Mill {number}</h1>{paragraphs}</article></body></html>".encode()
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
    head = (
        f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: https://mill.example/{number}\r\n"
        f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
    )
    return gzip.compress(head.encode() + http + b"\r\n\r\n")


def test_the_path_of_a_crawl_runs(call, tmp_path):
    """Every command of the page, in its order, on ten pages."""
    page = (DOCS / "path_crawl.md").read_text("utf-8")
    (recipe,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "crawl.yaml").write_text(recipe)
    (tmp_path / "crawl").mkdir()
    (tmp_path / "crawl" / "a.warc.gz").write_bytes(b"".join(map(warc, range(10))))
    (tmp_path / "my_rules.py").write_text("def has_mill(document):\n    return 'mill' in document['text']\n")
    commands = re.findall(r"^gristmill .*$", page, re.MULTILINE)
    assert len(commands) == 7
    said = []
    for command in commands:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', command)][1:]
        if "DOC_ID" in words:
            found = call("explore", "work/crawl", "--sql", "SELECT doc_id FROM ledger LIMIT 1")[1]
            doc_id = re.search(r"\b[0-9a-f]{32}\b", found)
            words[words.index("DOC_ID")] = doc_id[0]
        code, text = call(*["1" if word == "8" else word for word in words])
        assert code == 0, (command, text)
        said.append(text)
    assert "no errors found" in said[0] and "10 documents read" in said[1]
    assert "my_rules.has_mill: would remove" in said[5] and "curate: complete, skipped" in said[6]

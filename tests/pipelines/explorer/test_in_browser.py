"""The explorer and the report as a reader sees them: in Chromium, on a phone and a screen, light and dark."""

import json
import subprocess
import sys

import pytest

from gristmill.pipelines.explorer.corpus import ExploredCorpus
from gristmill.pipelines.explorer.explorer_server import make_app
from tests.support.chromium import UNREADABLE, chromium
from tests.support.served import served

HOSTILE = "<script>document.title = 'run'</script> the \u202egnp.exe <img src=x onerror=\"document.title = 'run'\">"
RECIPE = {
    "name": "small",
    "sources": [{"name": "notes", "format": "jsonl", "paths": ["notes.jsonl"]}],
    "curate": {"filters": [{"gopher_quality": {"min_words": 30}}], "near_dedup": {"keep_signatures": True}},
}
VIEWS = ("/", "/documents", "/rules", "/duplicates", "/contamination", "/personal", "/sql?q=SELECT+text+FROM+annotated")


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    words = " ".join(f"the river {n} turns and of that wheel be to have with mill" for n in range(8))
    texts = [f"{words} {n} " + " ".join(f"sack{n}x{k}" for k in range(60)) for n in range(20)]
    texts += [texts[0], f"{HOSTILE} {texts[5][300:]}", "too short", HOSTILE, "a" * 1_000_000]
    (folder / "notes.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "small.yaml").write_text(json.dumps(RECIPE))
    for command in (("curate", "--workers", "1"), ("report",)):
        arguments = [command[0], "small.yaml", "--workdir", "work", *command[1:]]
        subprocess.run([sys.executable, "-m", "gristmill.pipelines.cli.main", *arguments], cwd=folder, check=True)
    return folder / "work"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(scope="module")
def address(work):
    with served(make_app(ExploredCorpus(work))) as url:
        yield url


def test_faults_of_a_page_are_seen(browser, tmp_path):
    browser.view(390, False)
    (tmp_path / "bad.html").write_text(
        "<body><p style='font-size: 9px'>small</p><p style='color: #bbb'>faint</p><p style='width: 900px'>wide</p>"
    )
    browser.open((tmp_path / "bad.html").as_uri())
    faults = browser.ask(UNREADABLE)
    assert [fault.split(":")[0] for fault in faults] == ["page 908 px wide", "text of 9.0 px", "contrast 1.9"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_every_page_can_be_read(browser, address, work, width, dark, tmp_path):
    """Not wider than the window, no text below 11 px, contrast at least 4.5; a hostile document stays text."""
    browser.view(width, dark)
    (report,) = work.glob("report/**/report.html")
    kept = browser_document(work)
    faults = {}
    for name in (*VIEWS, f"/document/{kept}", report.as_uri()):
        browser.open(name if name.startswith("file:") else address + name)
        if seen := browser.ask(UNREADABLE):
            faults[name.rpartition("/")[2] or name] = seen
        assert browser.ask("document.title") != "run"
    browser.screenshot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert faults == {}


def browser_document(work):
    """The document with the hostile text that is kept."""
    rows = ExploredCorpus(work).rows("SELECT doc_id FROM ledger WHERE outcome = 'kept' ORDER BY record DESC LIMIT 1")
    return rows[0]["doc_id"]


def test_a_reader_clicks_from_the_start_to_a_document(browser, address):
    browser.view(1400, False)
    browser.open(address + "/")
    for link, arrived in (("a[href^='/documents']", "/documents"), ("a[href^='/document/']", "/document/")):
        assert browser.ask(f'document.querySelector("{link}") !== null'), link
        browser.ask(f'document.querySelector("{link}").click()')
        browser.wait_for(f"location.pathname.startsWith('{arrived}') && document.readyState === 'complete'")
    assert "sack" in browser.ask("document.body.innerText")


def test_the_slider_counts_without_a_reload(browser, address):
    browser.view(1400, False)
    browser.open(address + "/rule?source=notes&rule=gopher_quality.min_words&value=3")
    before = browser.ask("document.body.innerText")
    slider = "document.querySelector('input[type=range]')"
    browser.ask(f"{slider}.value = {slider}.max; {slider}.dispatchEvent(new Event('input', {{bubbles: true}}));"
                f"{slider}.dispatchEvent(new Event('change', {{bubbles: true}}))")  # fmt: skip
    browser.wait_for(f"document.body.innerText !== {json.dumps(before)}")

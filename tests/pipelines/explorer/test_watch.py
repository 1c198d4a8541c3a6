"""The page of `gristmill watch`, on the folders of a run that goes on and of one that has ended."""

import json

import pytest
from starlette.testclient import TestClient

from gristmill.foundation.errors import InputError
from gristmill.pipelines.explorer.watch import body, make_watch_app, time_left, watched_runs
from tests.support.chromium import UNREADABLE, chromium
from tests.support.served import served

HOSTILE = "<script>document.title = 'run'</script> \u202egnp.exe"


def write_run(folder, train: str, losses, scale=1.0):
    (folder / train / "logs").mkdir(parents=True)
    lines = [
        {"step": n, "tokens": 1000 * n, "loss": loss * scale, "learning_rate": 1e-3, "valid_tokens": 1000}
        for n, loss in enumerate(losses, 1)
    ]
    lines[-1]["validation"] = {"sources": {"books": {"loss": 3.25}}}
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / train / "metrics.jsonl").write_text(text + '{"step": 99, "tok')  # a line that is being written
    timing = [{"step": n, "tokens_per_second": 500.0, "memory_bytes": 2e9} for n in range(1, len(lines) + 1)]
    (folder / train / "logs" / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in timing))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One that trains, and one that has ended and has samples."""
    folder = tmp_path_factory.mktemp("watched")
    write_run(folder / "first", ".train-abc", [5.0, 4.0, 3.5])
    write_run(folder / HOSTILE.replace("/", ""), "train", [5.0, 4.5, 4.0, 3.9], 1.1)
    (folder / HOSTILE.replace("/", "") / "evaluate").mkdir()
    sample = {"source": "books", "prompt": "The mill", "greedy": HOSTILE}
    (folder / HOSTILE.replace("/", "") / "evaluate" / "generations.json").write_text(json.dumps([sample]))
    return watched_runs(sorted(folder.iterdir()), 63_000)


def test_the_page_says_where_each_run_is(runs):
    client = TestClient(make_watch_app(runs), base_url="http://localhost")
    page = client.get("/").text
    for said in ("3,000 of 63,000", "3.5000", "500", "2 min", "2.00 GB", "train (running)", "4,000 of 63,000"):
        assert said in page, said
    assert "<script>document" not in page and "\u202e" not in page and "&lt;script&gt;" in page
    assert client.get("/body").text in page
    for name in ("loss", "validation", "learning_rate", "valid_tokens", "tokens_per_second"):
        answer = client.get(f"/figure/{name}.svg")
        assert answer.headers["content-type"] == "image/svg+xml" and answer.text.count("first") >= 1, name
        assert "\u202e" not in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert client.get("/figure/x.svg").status_code == 404


def test_the_page_follows_the_files(tmp_path):
    """Nothing yet, then a first step."""
    (tmp_path / "run").mkdir()
    client = TestClient(make_watch_app(watched_runs([tmp_path / "run"], None)), base_url="http://localhost")
    assert "none yet" in client.get("/body").text and "<img" not in client.get("/body").text
    write_run(tmp_path / "run", ".train-abc", [4.25])
    assert "4.2500" in client.get("/body").text and "<img" in client.get("/body").text


def test_a_run_past_the_end_of_the_recipe_has_no_time_left(tmp_path):
    """Two steps of 1,000 tokens may end a run of 1,500; a third one belongs to a longer run."""
    for num_steps, tokens in ((2, "2,000 of 1,500"), (3, "<td>3,000</td>")):
        write_run(tmp_path / f"run{num_steps}", ".train-abc", [4.0] * num_steps)
        content = body(watched_runs([tmp_path / f"run{num_steps}"], 1_500))
        assert tokens in content.replace(' class="number"', "")
        assert ("0 min" in content) == (num_steps == 2)


def test_strangers_are_refused(runs):
    assert TestClient(make_watch_app(runs), base_url="http://evil.example").get("/").status_code == 403
    assert TestClient(make_watch_app(runs, "secret"), base_url="http://localhost").get("/body").status_code == 401
    with pytest.raises(InputError, match="no such folder"):
        watched_runs([runs[0].folder / "none"], None)


def test_time_left_is_the_tokens_over_the_rate():
    assert time_left(7_200_000, 0, 1000.0) == "2 h 0 min"
    assert time_left(63_000, 3_000, 500.0) == "2 min"
    assert time_left(None, 1, 1.0) == time_left(10, None, 1.0) == time_left(10, 1, None) == ""


def test_the_page_can_be_read(runs, tmp_path):
    """In Chromium: on a phone and a screen, light and dark, not too wide, no faint or small text."""
    with served(make_watch_app(runs)) as address, chromium(tmp_path) as browser:
        for width, dark in ((390, False), (1400, True)):
            browser.view(width, dark)
            browser.open(address)
            assert browser.ask("document.title") == "Runs"
            browser.wait_for("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
            assert browser.ask(UNREADABLE) == []
            browser.screenshot(tmp_path / f"watch-{width}.png")

"""The explorer over HTTP, on a small corpus with hostile documents."""

import json
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.explorer.corpus import ExploredCorpus
from gristmill.pipelines.explorer.pages import compared, marked_spans
from gristmill.pipelines.explorer.server import Address, make_app

SCRIPT = "<script>alert(1)</script> the \u202egnp.exe and \x1b[2J"
RECIPE = {
    "name": "small",
    "sources": [{"name": "notes", "format": "jsonl", "paths": ["notes.jsonl"]}],
    "curate": {"filters": [{"gopher_quality": {"min_words": 30}}], "near_dedup": {"keep_signatures": True}},
}
URL = "http://localhost"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("explorer")
    words = " ".join(f"the river {n} turns and of that wheel be to have with mill" for n in range(8))
    texts = [f"{words} {n} " + " ".join(f"sack{n}x{k}" for k in range(60)) for n in range(20)]
    texts += [texts[0], f"{SCRIPT} {texts[5][300:]} {SCRIPT}", "too short", SCRIPT, "a" * 1_000_000 + "\ud800"]
    (folder / "notes.jsonl").write_text(
        "\n".join(json.dumps({"text": text, "url": "https://a.example/"}) for text in texts)
    )
    (folder / "small.yaml").write_text(json.dumps(RECIPE))
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "curate", "small.yaml", "--workdir", "work"]
    subprocess.run([*command, "--workers", "1"], cwd=folder, check=True, capture_output=True)
    return ExploredCorpus(folder / "work")


@pytest.fixture(scope="module")
def client(corpus):
    return TestClient(make_app(corpus), base_url=URL)


def ids(corpus, condition):
    return [row["doc_id"] for row in corpus.rows(f"SELECT doc_id FROM ledger WHERE {condition} ORDER BY record")]


def test_every_view_opens_and_runs_nothing_of_a_document(client, corpus):
    removed, kept = ids(corpus, "outcome = 'removed'")[0], ids(corpus, "outcome = 'kept'")[0]
    (copied,) = corpus.rows("SELECT any_value(duplicate_of) AS doc_id FROM ledger")[0].values()
    paths = ("/", "/documents", f"/document/{removed}", f"/document/{kept}", "/rules", "/duplicates", 
             f"/similar?id={kept}",
             "/rule?source=notes&rule=gopher_quality.min_words&value=3", f"/duplicates/{copied}", "/contamination",
             "/personal", "/sql?q=SELECT+text+FROM+annotated", "/documents?words=alert",
             "/documents?host=a.example")  # fmt: skip
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert "<script>" not in answer.text and "\u202e" not in answer.text and "\x1b" not in answer.text
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    assert "&lt;script&gt;alert(1)" in client.get("/sql?q=SELECT+text+FROM+annotated").text


def test_counts_are_duckdbs(client, corpus):
    (removed,) = corpus.rows("SELECT count(*) AS n FROM ledger WHERE outcome = 'removed'")
    assert f"<p>{removed['n']:,} documents, page 1.</p>" in client.get("/documents?outcome=removed").text


def test_a_threshold_shows_what_it_would_keep(corpus):
    """At the recipe's threshold nothing changes; at a million words every document would fail."""
    asked = corpus.threshold("notes", "gopher_quality.min_words", "")
    now = corpus.sweep(asked)
    assert (now.lost, now.gained) == (0, 0)
    high = corpus.sweep(corpus.threshold("notes", "gopher_quality.min_words", "1e6"))
    assert high.lost == high.kept == now.kept > 0


@pytest.mark.parametrize(
    "query",
    ["COPY (SELECT 1) TO 'x'", "EXPLAIN ANALYZE SELECT 1", "SELECT 1; SELECT 2", "SET threads = 1", "",
     "SELECT * FROM read_text('/etc/hostname')", "SELECT * FROM glob('/etc/*')", "ATTACH 'x.db'"],
)  # fmt: skip
def test_sql_reads_the_corpus_alone(client, corpus, query):
    if query:
        assert client.get("/sql", params={"q": query}).status_code == 400
    assert corpus.query("SELECT count(*) FROM ledger")[1] == [(25,)]


def test_a_query_cannot_write_even_by_a_statement_of_ours(corpus, tmp_path):
    with pytest.raises(Exception, match="disabled by config"):
        corpus.rows(f"COPY (SELECT 1) TO '{tmp_path}/x'")


@pytest.mark.parametrize("path", ["/document/xyz", "/duplicates/none", "/rule?source=no&rule=no", "/documents?page=-1",
                                  "/rule?source=notes&rule=gopher_quality.min_words&value=x"])  # fmt: skip
def test_what_is_wrong_is_said(client, path):
    assert client.get(path).status_code == 400


def test_strangers_are_refused(client, corpus):
    assert client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    guarded = TestClient(make_app(corpus, "secret"), base_url=URL, follow_redirects=False)
    assert guarded.get("/").status_code == 401
    assert guarded.get("/", headers={"authorization": "Bearer secret"}).status_code == 200
    assert guarded.get("/?token=secret").status_code == 307
    assert guarded.get("/").status_code == 200  # by the cookie
    with pytest.raises(RecipeError, match="token-file"):
        Address("0.0.0.0").check()


def test_differences_and_spans_are_marked():
    assert compared("a b c", "a x c") == ("a <del>b</del> c", "a <ins>x</ins> c")
    assert marked_spans("ab<d", [(1, 3)], 0, 4) == "a<del>b&lt;</del>d"

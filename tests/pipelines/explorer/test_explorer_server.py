"""The explorer over HTTP, on a small corpus with hostile documents."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.explorer import rows
from gristmill.pipelines.explorer.corpus import ExploredCorpus
from gristmill.pipelines.explorer.explorer_server import Address, make_app
from gristmill.pipelines.explorer.pages import compared, contamination, marked_spans
from gristmill.pipelines.explorer.rows import Cursor, Filters

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
    assert f"<p>{removed['n']:,} documents; " in client.get("/documents?outcome=removed").text


@pytest.mark.parametrize("filters", ["outcome=kept", "source=notes", "rule=gopher_quality.min_words", "split=train",
                                     "outcome=kept&language=en"])  # fmt: skip
def test_counts_and_lists_of_filters_are_duckdbs(client, corpus, filters):
    names = dict(pair.split("=") for pair in filters.split("&"))
    clause = " AND ".join(f"{name} = '{value}'" for name, value in names.items() if name != "language")
    if "language" in names:
        clause += f" AND doc_id IN (SELECT doc_id FROM signals WHERE detected_language = '{names['language']}')"
    wanted = {row["doc_id"] for row in corpus.rows(f"SELECT doc_id FROM ledger WHERE {clause}")}
    page = client.get(f"/documents?{filters}").text
    assert f"<p>{len(wanted):,} documents; " in page
    for text in (page, client.get(f"/documents?{filters}&after=0-0-0").text):  # the sample and the search have all
        assert set(re.findall(r"/document/([0-9a-f]{32})", text)) == wanted


@pytest.mark.parametrize("value", ["0.5", "30", "66.5", "1e6"])
def test_exact_counts_of_a_threshold_are_duckdbs(client, corpus, value):
    answer = client.get(f"/rule/exact?source=notes&rule=gopher_quality.min_words&value={value}").json()["text"]
    (kept,) = corpus.rows(
        "SELECT count(*) AS kept, count(*) FILTER (num_words < CAST(? AS DOUBLE)) AS lost FROM signals", [value]
    )
    (gained,) = corpus.rows(
        "SELECT count(*) AS n FROM ledger WHERE len(failed) = 1 AND failed[1].rule = 'gopher_quality.min_words' AND "
        "failed[1].value >= CAST(? AS DOUBLE)", [value]
    )  # fmt: skip
    assert f" {kept['kept']:,} now, {kept['lost']:,} would fail, {gained['n']:,} more would pass" in answer


def test_a_search_goes_on_where_it_stopped(corpus):
    """One row group a page at the least: all pages together have every match once."""
    rows, cursor, pages = [], Cursor(), 0
    while cursor is not None:
        search = corpus.document_rows.search(Filters(outcome="kept"), cursor, limit=3, seconds=0)
        rows, cursor, pages = rows + search.rows, search.after, pages + 1
    assert sorted(row["doc_id"] for row in rows) == sorted(ids(corpus, "outcome = 'kept'")) and pages > 5


def test_a_run_that_has_not_ended_can_be_looked_at(corpus, tmp_path):
    """The shards that are there, without counts, manifest, index or merged sketches."""
    started = tmp_path / ".curate-0123"
    for name in ("documents/train", "signals/train", "ledger"):
        shutil.copytree(corpus.files.folder / name, started / name)
    half = TestClient(make_app(ExploredCorpus(tmp_path)), base_url=URL)
    kept = ids(corpus, "outcome = 'kept' AND split = 'train'")
    for path in ("/", "/documents", "/documents?outcome=kept&after=0-0-0", f"/document/{kept[0]}", "/rules",
                 "/duplicates", "/personal", "/contamination", "/sql?q=SELECT+count(*)+FROM+ledger"):  # fmt: skip
        assert half.get(path).status_code == 200, path
    assert "25 documents" in half.get("/documents").text and "sack" in half.get(f"/document/{kept[0]}").text


def test_a_run_with_annotated_files_alone_can_be_looked_at(corpus, tmp_path):
    """Documents without an outcome yet; the record that could not be read is counted apart."""
    shutil.copytree(corpus.files.folder.parent / "cache" / "annotated", tmp_path / "cache" / "annotated")
    started = ExploredCorpus(tmp_path)
    client = TestClient(make_app(started), base_url=URL)
    (kept, *_) = ids(corpus, "outcome = 'kept'")
    for path in ("/", "/documents", "/documents?outcome=annotated&after=0-0-0", f"/document/{kept}", "/rules",
                 "/documents?language=en&after=0-0-0", "/duplicates", "/personal", "/contamination",
                 "/documents?host=a.example", "/sql?q=SELECT+count(*)+FROM+annotated"):  # fmt: skip
        assert client.get(path).status_code == 200, path
    (waiting,) = corpus.rows("SELECT count(*) AS n FROM annotated WHERE unreadable IS NULL")
    (read,) = corpus.rows("SELECT count(*) AS n FROM ledger")
    assert started.counts["sources"]["notes"]["annotated"]["annotated"]["documents"] == waiting["n"]
    assert started.counts["sources"]["notes"]["read"]["documents"] == read["n"]
    listed = client.get("/documents?words=sack5x3").text
    assert "sack" in client.get(f"/document/{kept}").text and len(re.findall("/document/[0-9a-f]{32}", listed)) == 2
    with pytest.raises(InputError, match="no ledger"):
        ExploredCorpus(tmp_path / "cache" / "annotated")


def test_the_schema_is_duckdbs(corpus):
    """Read from a few footers, not from all."""
    columns = corpus.rows("SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal")
    wanted = {(row["table_name"], row["column_name"], row["data_type"]) for row in columns}
    assert {(view, *column) for view, of_view in corpus.schema.items() for column in of_view} == wanted


def test_a_similar_document_is_compared_block_by_block(corpus, monkeypatch):
    """A page of one document each: all pages together compare every signature once, and one has the document."""
    monkeypatch.setattr(rows, "BLOCK_DOCUMENTS", 1)
    (kept, *_) = ids(corpus, "outcome = 'kept'")
    text, after, pages = corpus.texts([kept])[kept], 0, []
    while after is not None:
        pages.append(corpus.signatures.nearest(text, after, seconds=0))
        after = pages[-1].after
    assert [page.compared for page in pages] == [1] * pages[0].documents
    nearest = [page.neighbours[0] for page in pages if page.neighbours]
    assert [neighbour.similarity for neighbour in nearest if neighbour.doc_id == kept] == [1]


def test_a_threshold_shows_what_it_would_keep(corpus):
    """At the recipe's threshold nothing changes; at a million words every document would fail."""
    asked = corpus.threshold("notes", "gopher_quality.min_words", "")
    now = corpus.sweep(asked)
    assert (now.counts.lost, now.counts.gained) == (0, 0)
    high = corpus.thresholds.exact(corpus.threshold("notes", "gopher_quality.min_words", "1e6"), 60)
    assert high.lost == high.kept == now.counts.kept > 0


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


@pytest.mark.parametrize("path", ["/document/xyz", "/duplicates/none", "/rule?source=no&rule=no",
                                  "/duplicates?page=-1", "/documents?after=-1",
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


def test_contamination_stands_beside_the_question():
    """A hit with both texts and a link, and the questions with the documents that they are in; all of it as text."""
    match = {"doc_id": "a" * 32, "example": "7", "kind": "verbatim", "benchmark_text": "<b>why?", "excerpt": "so: why?"}
    question = {"benchmark": "rivers", "example": "7", "kind": "verbatim", "documents": [{"doc_id": "a" * 32}]}
    question["texts"] = {"<i>question": "which <river>?"}
    page = contamination({"rivers": {"documents": 1, "shown": [match]}}, [question], 0)
    assert "&lt;b&gt;why?" in page and "so: why?" in page and page.count(f'href="/document/{"a" * 32}"') == 2
    assert "&lt;i&gt;question: which &lt;river&gt;?" in page
    del question["texts"]  # of a corpus that an older version wrote
    assert "rivers" in contamination({"rivers": {"documents": 1, "shown": [match]}}, [question], 0)
    assert "no decontamination" in contamination({}, [], 0)

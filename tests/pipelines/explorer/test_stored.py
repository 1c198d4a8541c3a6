"""The explorer on a corpus behind an address: the pages of the folder, by reading only what they show."""

import hashlib
import json
import re
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from gristmill.data_pipeline.corpus.corpus_files import RemoteCorpusFiles
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.pipelines.explorer.corpus import ExploredCorpus
from gristmill.pipelines.explorer.explorer_server import make_app
from gristmill.pipelines.workdir.publication import Published, folder_name
from gristmill.pipelines.workdir.remote import RemoteWork, local_mirror
from tests.support.corpora import prose, write_jsonl
from tests.support.s3_server import s3_server

pytest.importorskip("moto.server", reason="moto[server] is not installed")
RUN = "s3://corpus/run"
RECIPE = {
    "name": "small",
    "sources": [{"name": "lines", "format": "jsonl", "paths": ["a.jsonl"]}],
    "curate": {"filters": [{"gopher_quality": {"min_words": 30}}], "near_dedup": {"keep_signatures": True}},
}


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A local work folder whose cache is gone: a store has none."""
    folder = tmp_path_factory.mktemp("stored")
    texts = [prose(k % 300) if k % 10 else f"too short {k}" for k in range(400)]
    records = [{"text": text, "url": f"https://host{k % 7}.example/{k}"} for k, text in enumerate(texts)]
    write_jsonl(folder / "a.jsonl", records)
    (folder / "small.yaml").write_text(json.dumps(RECIPE))
    command = [sys.executable, "-m", "gristmill.pipelines.cli.main", "curate", "small.yaml", "--workdir", "work"]
    subprocess.run([*command, "--workers", "1"], cwd=folder, check=True, capture_output=True)
    (folder / "work" / "cache").rename(folder / "cache")
    return folder / "work"


@pytest.fixture(scope="module")
def remote(work, tmp_path_factory):
    """That work folder in a store, as `--workdir` publishes it, beside an object of somebody else."""
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="corpus")
        monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path_factory.mktemp("scratch")))
        content = (work / "curate" / MANIFEST_NAME).read_bytes()
        name = folder_name(read_manifest(work / "curate").fingerprint, content)
        lock = (work / "lock.json").read_bytes()
        digest = hashlib.sha256(lock).hexdigest()
        objects = {f"run/curate/{name}/{path.relative_to(work / 'curate')}": path.read_bytes()
                   for path in (work / "curate").rglob("*") if path.is_file()}  # fmt: skip
        objects |= {f"run/lock/{digest}.json": lock, "other/secret.csv": b"word\nswordfish\n"}
        objects["run/published.json"] = Published({"curate": name}, digest, 1, 1).content()
        for key, body in objects.items():
            client.put_object(Bucket="corpus", Key=key, Body=body)
        yield RemoteWork.of_mirror(local_mirror(RUN))


def pages_of(corpus):
    """The paths of a page of each kind that reads rows."""
    rows = corpus.rows("SELECT doc_id, outcome, duplicate_of FROM ledger ORDER BY record")
    kept, removed = (next(row["doc_id"] for row in rows if row["outcome"] == kind) for kind in ("kept", "removed"))
    original = next(row["duplicate_of"] for row in rows if row["duplicate_of"])
    return ["/", "/documents", "/documents?outcome=removed&after=0-0-0", 
            "/documents?language=en", f"/document/{kept}", f"/document/{removed}", "/rules", "/duplicates",
            f"/duplicates/{original}", "/personal", "/contamination"]  # fmt: skip


def test_pages_are_those_of_the_folder(work, remote):
    local, stored = ExploredCorpus(work), ExploredCorpus(remote.stored_files("curate"))
    ours, theirs = (TestClient(make_app(corpus), base_url="http://localhost") for corpus in (local, stored))
    rule = "/rule/exact?source=lines&rule=gopher_quality.min_words&value=40"
    for path in (*pages_of(local), rule, "/sql?q=SELECT+outcome,count(*)+FROM+ledger+GROUP+BY+1+ORDER+BY+1"):
        answer = theirs.get(path)
        assert answer.status_code == 200 and answer.text == ours.get(path).text, path
    assert not (remote.mirror / "curate").exists()  # nothing was downloaded as a whole


def test_a_page_reads_what_it_shows(work, remote):
    """As many bytes of a corpus of four times as many shards."""
    files = remote.stored_files("curate")
    sizes = {output.path: output.bytes for output in read_manifest(work / "curate").outputs}
    for name in list(sizes):
        copies = (0, 1, 2, 3) if re.match("(documents|signals|ledger)/", name) else (0,)
        for number in copies:
            copy = name.replace("-00000.parquet", f"-{number:05}.parquet") if number else name
            remote.store.put(f"large/{copy}", work / "curate" / name)
            sizes[copy] = sizes[name]
    paths, bytes_read = pages_of(ExploredCorpus(work)), {}
    for path in paths:  # each by a server of its own, which knows no footer yet
        larger = RemoteCorpusFiles(remote.store, "large", sizes, files.beside)
        for corpus_files in (remote.stored_files("curate"), larger):
            client = TestClient(make_app(ExploredCorpus(corpus_files)), base_url="http://localhost")
            before = corpus_files.bytes_read
            assert client.get(path).status_code == 200, path
            bytes_read.setdefault(path, []).append(corpus_files.bytes_read - before)
    assert all(small == large for small, large in bytes_read.values()), bytes_read
    assert bytes_read["/documents"] == [0, 0]


def test_searches_find_documents(work, remote):
    """They read for a bounded time a page, so that a slow machine finds a document on a later one."""
    client = TestClient(make_app(ExploredCorpus(remote.stored_files("curate"))), base_url="http://localhost")
    kept = pages_of(ExploredCorpus(work))[4]
    assert any(kept in page for page in search_pages(client, kept.replace("/document/", "/similar?id=")))
    assert any("/document/" in page for page in search_pages(client, "/documents?words=the"))


def search_pages(client, path):
    """The text of a search's first page and of those that follow it."""
    yield (text := client.get(path).text)
    while onward := re.search("[?;]after=([0-9-]+)", text):
        yield (text := client.get(f"{path}&after={onward[1]}").text)


@pytest.mark.parametrize("query", ["SELECT * FROM read_csv('s3://corpus/other/secret.csv')",
                                   "SELECT * FROM 's3://corpus/other/secret.csv'",
                                   "SELECT * FROM glob('s3://corpus/*')",
                                   "SELECT * FROM read_text('/etc/hostname')"])  # fmt: skip
def test_sql_reads_the_corpus_alone(remote, query):
    stored = ExploredCorpus(remote.stored_files("curate"))
    assert stored.query("SELECT count(*) FROM ledger")[1] == [(400,)]
    with pytest.raises(InputError, match=r"disabled|allowed|Permission"):
        stored.query(query)


def test_an_object_that_is_too_short_is_named(remote):
    files = remote.stored_files("curate")
    name = next(name for name in files.tables("ledger"))
    longer = RemoteCorpusFiles(
        remote.store, files.place.removeprefix(f"{remote.store.address}/"), {name: 10**9}, files.beside
    )
    with pytest.raises(InputError, match=f"{name}: shorter than its manifest says"):
        longer.read(name)

"""Raw files in S3 and behind HTTP: the bytes of local files, clear errors, and no credentials in what is written."""

import http.server
import socket
import threading
from functools import partial

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
import zstandard

from gristmill.data_pipeline.readers.files import matching, open_raw, raw_size
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.store import store as addresses
from tests.support.corpora import prose, run_curate, tree_digests
from tests.support.s3_server import KEY, SECRET, s3_server

pytest.importorskip("moto.server", reason="moto[server] is not installed")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A folder with text in three formats, cut into several frames and row groups."""
    folder = tmp_path_factory.mktemp("raw")
    texts = [prose(k) for k in range(60)]
    lines = [orjson.dumps({"text": text}) + b"\n" for text in texts[:20]]
    (folder / "a.jsonl").write_bytes(b"".join(lines))
    frames = [zstandard.ZstdCompressor().compress(orjson.dumps({"text": text}) + b"\n") for text in texts[20:40]]
    (folder / "b.jsonl.zst").write_bytes(b"".join(frames))
    pq.write_table(pa.table({"text": texts[40:]}), folder / "c.parquet", row_group_size=5)
    return folder


@pytest.fixture(scope="module")
def bucket(raw):
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="corpus")
        for path in raw.iterdir():
            client.put_object(Bucket="corpus", Key=f"raw/{path.name}", Body=path.read_bytes())
        yield client


def sources(place) -> list[SourceConfig]:
    jsonl = SourceConfig(name="lines", format="jsonl", paths=(f"{place}/*.jsonl*",))
    return [jsonl, SourceConfig(name="rows", format="parquet", paths=(f"{place}/c.parquet",))]


def test_files_in_s3_give_the_bytes_of_local_files(raw, bucket, tmp_path, monkeypatch):
    here = run_curate(sources(raw), tmp_path / "here")
    assert run_curate(sources("s3://corpus/raw"), tmp_path / "s3") == here
    assert tree_digests(tmp_path / "s3" / "curate") == tree_digests(tmp_path / "here" / "curate")
    monkeypatch.setattr("gristmill.data_pipeline.annotate.annotate.MIN_RANGE_BYTES", 3_000)
    run_curate(sources("s3://corpus/raw"), tmp_path / "ranges")
    assert len(list((tmp_path / "ranges/cache/annotated").glob("*.parquet"))) > 6
    assert tree_digests(tmp_path / "ranges" / "curate") == tree_digests(tmp_path / "here" / "curate")


def test_a_folder_and_a_glob_name_the_same_files(raw, bucket):
    found = dict(matching("s3://corpus/raw"))
    assert found == {f"raw/{name}": f"s3://corpus/raw/{name}" for name in ("a.jsonl", "b.jsonl.zst", "c.parquet")}
    assert dict(matching("s3://corpus/ra*/*")) == found
    assert raw_size(found["raw/a.jsonl"]) == (raw / "a.jsonl").stat().st_size
    with open_raw(found["raw/a.jsonl"]) as file:
        assert file.read() == (raw / "a.jsonl").read_bytes()


@pytest.mark.parametrize("address", ["s3://no-such-bucket/raw", "s3://corpus/none/*.jsonl", "s3://corpus/raw/none"])
def test_a_bucket_or_file_that_is_not_there(bucket, address):
    with pytest.raises(InputError, match="^" + address.replace("*", r"\*").replace("?", "")):
        dict(matching(address))
    with pytest.raises(InputError, match=r"no-such|none"):
        open_raw(address)


def test_missing_credentials_are_one_sentence(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(InputError, match="s3://corpus/raw: cannot be listed"):
        dict(matching("s3://corpus/raw"))


def test_a_store_that_does_not_answer_is_an_error_soon(monkeypatch):
    """A port that takes connections and says nothing."""
    monkeypatch.setattr(addresses, "READ_SECONDS", 0.2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in {"ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "DEFAULT_REGION": "us-east-1"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(InputError) as caught:
            dict(matching("s3://corpus/raw"))
    assert "s3://corpus/raw: cannot be listed" in str(caught.value) and SECRET not in str(caught.value)
    s3fs.S3FileSystem.clear_instance_cache()


RECIPE = """
name: small
sources: [{name: lines, paths: ["PLACE/a.jsonl"], format: jsonl}]
curate: {filters: [], near_dedup: {}}
"""


def test_credentials_are_in_no_file_and_no_message(bucket, call, tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("PLACE", "s3://corpus/raw"))
    code, said = call("curate", "recipe.yaml", "--workers", 1)
    assert code == 0, said
    written = b"".join(path.read_bytes() for path in (tmp_path / "work").rglob("*") if path.is_file())
    assert b"s3://corpus/raw/a.jsonl" in written  # the recipe is in the manifest
    for secret in (KEY, SECRET):
        assert secret not in said and secret.encode() not in written


@pytest.mark.parametrize(
    "address",
    [
        f"s3://{KEY}:{SECRET}@corpus/raw",
        f"https://me:{SECRET}@example.org/raw",
        f"https://corpus.example.org/raw/a.jsonl?X-Amz-Credential={KEY}&X-Amz-Signature={SECRET}",
        f"https://example.org/raw/a.jsonl?sv=2022&sig={SECRET}",
    ],
)
def test_an_address_with_credentials_is_refused_and_not_repeated(call, tmp_path, address):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("PLACE/a.jsonl", address))
    code, said = call("check", "recipe.yaml")
    assert code == 2 and "holds credentials" in said and "AWS_PROFILE" in said
    assert KEY not in said and SECRET not in said


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_file_behind_http_is_read(raw):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(raw))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/a.jsonl"
        try:
            assert dict(matching(address)) == {"a.jsonl": address}
            with open_raw(address) as file:
                assert file.read() == (raw / "a.jsonl").read_bytes()
            with pytest.raises(InputError, match=r"none.jsonl: no file matches; check the address"):
                dict(matching(address.replace("a.jsonl", "none.jsonl")))
        finally:
            server.shutdown()

"""Work folders in an S3 server of this machine: the local bytes, whole objects, one writer, no credentials."""

import hashlib
import json
import os
import shutil
import socket
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
import s3fs
import xxhash

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.format import IndexedReader, _map_file, block_mark
from gristmill.data_pipeline.indexed.samples import open_samples
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import Stub, stubs_below
from gristmill.foundation.fingerprint import digested_json, read_digested_json
from gristmill.foundation.manifest import MANIFEST_NAME, StageIdentity, write_manifest
from gristmill.foundation.runtime.store import store as addresses
from gristmill.foundation.runtime.store import store as block_file
from gristmill.foundation.runtime.store.store import Store
from gristmill.pipelines.workdir import publication as remote_lease
from gristmill.pipelines.workdir import remote as remote_work
from gristmill.pipelines.workdir.publication import RemoteLease
from gristmill.pipelines.workdir.remote import RemoteWork, fetched, local_mirror
from tests.support.corpora import prose, tree_digests, write_jsonl
from tests.support.s3_server import KEY, SECRET, s3_server, seaweed_server

pytest.importorskip("moto.server", reason="moto[server] is not installed")
RUN = "s3://corpus/run"
RECIPE = """
name: small
sources: [{name: lines, paths: ["PLACE"], format: jsonl}]
curate: {filters: [], near_dedup: {}, splits: {validation: 0.1, test: 0.1}}
model: {layers: 2, width: 32, heads: 2, sequence_length: 64}
train: {tokens: 8192, batch_tokens: 512}
"""


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as client:
        client.create_bucket(Bucket="corpus")
        yield client


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    """An empty bucket, and a scratch folder of the test's own."""
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(remote_lease, "BEAT_SECONDS", 0.05)
    for entry in server.list_objects_v2(Bucket="corpus").get("Contents", []):
        server.delete_object(Bucket="corpus", Key=entry["Key"])
    raw = write_jsonl(tmp_path / "a.jsonl", [{"text": prose(k % 25)} for k in range(40)])
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("PLACE", str(raw)))
    return server


def write_stage(folder) -> RemoteWork:
    """A complete stage `curate` of two files in `folder`, which is the mirror of RUN."""
    stage = folder / "curate"
    for name in ("counts.json", "documents/train/lines-00000.parquet"):
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_bytes(name.encode())
    write_manifest(stage, StageIdentity("curate", 1), {}, {})
    return RemoteWork(folder, Store(RUN))


def publish(remote: RemoteWork, stage: str = "curate") -> None:
    writer = RemoteLease(remote.store, print, 0.05)
    try:
        remote.publish(stage, writer)
    finally:
        writer.release()


def keys(server) -> list[str]:
    return [entry["Key"] for entry in server.list_objects_v2(Bucket="corpus").get("Contents", [])]


def test_a_run_in_a_store_publishes_the_local_bytes_and_another_machine_reads_them(bucket, call, tmp_path, monkeypatch):
    assert call("curate", "recipe.yaml", "--workdir", "local", "--workers", 1)[0] == 0
    code, said = call("curate", "recipe.yaml", "--workdir", RUN, "--workers", 1)
    assert code == 0, said
    pointer = json.loads(bucket.get_object(Bucket="corpus", Key="run/published.json")["Body"].read())
    local = tree_digests(tmp_path / "local" / "curate")
    prefix = f"run/curate/{pointer['stages']['curate']}/"
    published = {key.removeprefix(prefix) for key in keys(bucket) if key.startswith(prefix)}
    assert published == set(local)
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "other-machine"))
    code, said = call("curate", "recipe.yaml", "--workdir", RUN, "--workers", 1)
    assert code == 0 and "curate: complete, skipped" in said
    assert tree_digests(local_mirror(RUN) / "curate") == local
    ledger = next((tmp_path / "local/curate/ledger").glob("*.parquet"))
    doc_id = pq.read_table(ledger, columns=["doc_id"])["doc_id"][0].as_py()
    code, said = call("why", doc_id, "--corpus", RUN)
    assert code == 0 and said == call("why", doc_id, "--corpus", "local")[1]
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "third-machine"))
    query = "SELECT split, count(*) AS n, sum(length(text)) AS characters FROM documents GROUP BY split ORDER BY split"
    code, said = call("explore", f"{RUN}/curate", "--sql", query)
    assert code == 0 and said == call("explore", "local", "--sql", query)[1] and "train" in said
    code, said = call("explore", RUN, "--sql", "SELECT count(*) AS n FROM ledger")
    assert code == 0 and "40" in said
    assert not (local_mirror(RUN) / "curate").exists()  # nothing was downloaded as a whole
    apps: list = []
    monkeypatch.setattr("gristmill.pipelines.explorer.explorer_server.serve_pages", lambda app, *_: apps.append(app))
    code, said = call("explore", RUN, "--web", "--port", 0)
    assert code == 0 and len(apps) == 1 and not (local_mirror(RUN) / "curate").exists()
    code, said = call("explore", "s3://corpus/other", "--sql", "SELECT 1")
    assert code == 1 and "the stage curate is not published here (published.json); run it" in said
    code, said = call("plan", "recipe.yaml", "--workdir", RUN)
    assert code == 0 and "skip" in said and "complete" in said, said
    code, said = call("verify", RUN)
    assert code == 0 and "files, identical" in said, said
    code, said = call("reproduce", f"{RUN}/curate/{MANIFEST_NAME}", "--workdir", "again", "--workers", 1)
    assert code == 0 and "identical:" in said, said


def test_training_data_is_downloaded_as_it_is_read(bucket, call, tmp_path, monkeypatch):
    """Another machine reads the samples of the local run, block by block."""
    (tmp_path / "recipe.yaml").write_text((tmp_path / "recipe.yaml").read_text() + "tokenizer: {vocab_size: 300}\n")
    code, said = call("run", "recipe.yaml", "--to", "index", "--workdir", RUN, "--workers", 1)
    assert code == 0, said
    first = local_mirror(RUN) / "index"
    local = open_samples(first, "train", 64, 1, IndexConfig())
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "other-machine"))
    monkeypatch.setattr(remote_work, "MIN_BLOCKS_BYTES", 1)
    monkeypatch.setattr(block_file, "DOWNLOAD_BLOCK_BYTES", 1000)
    folder = fetched(local_mirror(RUN)) / "index"
    there = open_samples(folder, "train", 64, 1, IndexConfig())
    path = folder / "train/lines.bin"
    blocks = np.memmap(block_mark(path).with_suffix(".blocks"), np.uint8, "r")
    assert len(blocks) == -(-path.stat().st_size // 1000) > 5 and blocks.sum() == 0
    drawn = there.batch(range(1))
    assert 0 < blocks.sum() <= 2
    assert all(np.array_equal(drawn[name], values) for name, values in local.batch(range(1)).items())
    for k in range(10):
        assert all(np.array_equal(there.sample(k)[name], values) for name, values in local.sample(k).items())
    IndexedReader(path.with_suffix("")).check_ids(300)  # reads all of it
    assert blocks.all() and path.read_bytes() == (first / "train/lines.bin").read_bytes()
    for key in keys(bucket):
        bucket.delete_object(Bucket="corpus", Key=key)
    with pytest.raises(InputError, match=r"was deleted, and .* holds a part of it"):
        publish(RemoteWork.of_mirror(local_mirror(RUN)), "index")


@pytest.mark.slow
def test_machines_that_train_and_evaluate_from_a_store_get_the_local_scores(bucket, call, tmp_path, monkeypatch):
    more = "tokenizer: {vocab_size: 300}\nevaluate: {tasks: [bits_per_byte], text_bytes: 3000}\n"
    recipe = (tmp_path / "recipe.yaml").read_text().replace("test: 0.1", "test: 0.3")
    (tmp_path / "recipe.yaml").write_text(recipe + more)
    monkeypatch.setattr(remote_work, "MIN_BLOCKS_BYTES", 1)
    for work, command in ((RUN, ("run", "--to", "index")), (RUN, ("train",)), ("local", ("run", "--to", "train"))):
        code, said = call(command[0], "recipe.yaml", *command[1:], "--workdir", work)
        assert code == 0, said
        monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "other-machine"))
    assert block_mark(local_mirror(RUN) / "index/train/lines.bin").is_file()
    losses = [(folder / "train/metrics.jsonl").read_text() for folder in (local_mirror(RUN), tmp_path / "local")]
    of_run, of_local = ([json.loads(line).get("loss") for line in text.splitlines()] for text in losses)
    assert of_run == of_local and len(of_run) > 10
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "third-machine"))
    tables = []
    for work in (RUN, "local"):
        command = ("evaluate", "--checkpoint", work, "--corpus", work, "--tasks", "bits_per_byte", "--output")
        code, said = call(*command, f"results-{work[:2]}")
        assert code == 0, said
        tables.append((tmp_path / f"results-{work[:2]}/table.md").read_text())
    assert tables[0] == tables[1] and "bits_per_byte" in tables[0]


def test_verify_finds_a_changed_and_an_extra_object(bucket, call, tmp_path):
    publish(write_stage(tmp_path / "mirror"))
    counts = next(key for key in keys(bucket) if key.endswith("counts.json"))
    bucket.put_object(Bucket="corpus", Key=counts.replace("counts", "more"), Body=b"x")
    code, said = call("verify", RUN)
    assert code == 1 and "more.json: in no manifest" in said
    bucket.put_object(Bucket="corpus", Key=counts, Body=b"{}")
    code, said = call("verify", RUN)
    assert code == 1 and "counts.json: 2 bytes" in said and "its manifest says" in said


def test_credentials_are_in_no_file_object_or_message(bucket, call, tmp_path):
    code, said = call("curate", "recipe.yaml", "--workdir", RUN, "--workers", 1)
    assert code == 0
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    written += b"".join(bucket.get_object(Bucket="corpus", Key=key)["Body"].read() for key in keys(bucket))
    for secret in (KEY, SECRET):
        assert secret not in said and secret.encode() not in written
    code, said = call("curate", "recipe.yaml", "--workdir", f"s3://{KEY}:{SECRET}@corpus/run")
    assert code == 2 and "holds credentials" in said and SECRET not in said


def test_a_folder_whose_first_object_appears_while_it_is_listed_is_no_object(bucket, monkeypatch):
    listing = s3fs.S3FileSystem._lsdir

    async def late(self, *arguments, **options):
        monkeypatch.setattr(s3fs.S3FileSystem, "_lsdir", listing)
        bucket.put_object(Bucket="corpus", Key="run/answers/1.task", Body=b"x")
        return []

    monkeypatch.setattr(s3fs.S3FileSystem, "_lsdir", late)
    store = Store(RUN)
    assert set(store.list("answers")) <= {"answers/1.task"}
    assert store.list("answers") == {"answers/1.task": 1}


def test_a_scratch_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRISTMILL_SCRATCH", str(tmp_path / "file/scratch"))
    with pytest.raises(RecipeError, match=r"cannot hold the copy of memory://b/run \(Not a directory\); set GRIST"):
        local_mirror("memory://b/run")


def test_an_address_of_no_file_system_is_refused():
    with pytest.raises(RecipeError, match=r"foo://corpus/run: foo:// is no file system; use s3://, gs:// or a folder"):
        Store("foo://corpus/run")


def test_a_second_writer_is_refused_and_a_dead_one_is_taken_over(bucket):
    store = Store(RUN)
    first = RemoteLease(store, print, 0.05)
    with pytest.raises(InputError, match=r"another gristmill \(process \d+ on .*\) writes here; wait for it, or use"):
        RemoteLease(store, print, 0.05)
    first.check()
    first._stop_beats()  # its machine is gone: no more beats, and the lease was not given back
    second = RemoteLease(store, print, 0.05)
    with pytest.raises(InputError, match="took this work folder over"):
        first.check()
    second.check()
    second.release()
    started = time.monotonic()
    RemoteLease(store, print, 5.0).release()  # a lease that was given back is not waited for
    assert time.monotonic() - started < 5.0 and len(store.list("lease")) == 1


def test_a_writer_that_is_taken_over_before_its_last_request_publishes_nothing(bucket, tmp_path):
    """The former fault: the lease was checked, and the pointer written in a second step."""
    remote = write_stage(tmp_path / "mirror")
    first = RemoteLease(remote.store, print, 0.05)
    put_if = remote.store.put_if

    def put_late(*arguments) -> bool:
        remote.store.put_if = put_if
        first._stop_beats()  # its machine stands still
        RemoteLease(Store(RUN), print, 0.05).release()
        return put_if(*arguments)

    remote.store.put_if = put_late
    with pytest.raises(InputError, match="took this work folder over"):
        remote.publish("curate", first)
    pointer = json.loads(bucket.get_object(Bucket="corpus", Key="run/published.json")["Body"].read())
    assert (pointer["stages"], pointer["writer"]) == ({}, 2)


def test_a_folder_that_an_older_version_published_is_refused(bucket):
    bucket.put_object(Bucket="corpus", Key="run/index.json", Body=b'{"fingerprint": "f", "stage": "index"}')
    for call in (lambda: RemoteLease(Store(RUN), print, 0.05), lambda: fetched(local_mirror(RUN))):
        with pytest.raises(InputError, match=r"published by an older gristmill.*use another --workdir"):
            call()


def test_other_bytes_under_the_same_fingerprint_are_refused(bucket, tmp_path):
    remote = write_stage(tmp_path / "mirror")
    publish(remote)
    before = keys(bucket)
    publish(remote)
    assert [key for key in keys(bucket) if "/lease/" not in key] == [key for key in before if "/lease/" not in key]
    manifest = next(key for key in keys(bucket) if key.endswith(MANIFEST_NAME))
    bucket.put_object(Bucket="corpus", Key=manifest, Body=b"{}")
    with pytest.raises(InputError, match="holds other files for the same recipe and inputs"):
        publish(remote)


def test_a_manifest_that_names_a_file_outside_is_refused(bucket, tmp_path):
    publish(write_stage(tmp_path / "mirror"))
    key = next(key for key in keys(bucket) if key.endswith(MANIFEST_NAME))
    content = read_digested_json(bucket.get_object(Bucket="corpus", Key=key)["Body"].read())
    content["outputs"][0]["path"] = "../../outside"
    bucket.put_object(Bucket="corpus", Key=key, Body=digested_json(content))
    with pytest.raises(InputError, match=r"lists '\.\./\.\./outside', outside of it"):
        RemoteWork.of_mirror(local_mirror(RUN)).fetch()


@pytest.mark.parametrize("address", ["s3://no-such-bucket/run", "s3://corpus-that-is-not-there/a/b"])
def test_a_bucket_that_is_not_there(bucket, call, address):
    code, said = call("curate", "recipe.yaml", "--workdir", address, "--workers", 1)
    assert code == 1 and address in said and "check that the bucket exists" in said and "Traceback" not in said


def test_a_store_that_cannot_be_written_to_or_cannot_decide(bucket, call, monkeypatch):
    plain = s3fs.S3FileSystem._pipe_file

    async def ignores(self, path, data, mode, IfMatch=None):
        return await plain(self, path, data, mode="overwrite")

    async def creates_only(self, path, data, mode, IfMatch=None):
        return await plain(self, path, data, mode=mode)

    async def denied(self, path, data, mode):
        raise PermissionError("Access Denied")

    async def lacks(self, path, data, mode):
        raise NotImplementedError("no mode create")

    for stand_in, said in (
        (ignores, "ignores If-None-Match"),
        (creates_only, "ignores If-Match"),
        (denied, "Access Denied; check that the bucket exists, that it may be written to, and the credentials"),
        (lacks, "the store has no conditional writes"),
    ):
        monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", stand_in)
        with pytest.raises(InputError, match=said):
            Store(RUN).check_writable()


def test_a_store_that_does_not_answer_is_an_error_soon(bucket, monkeypatch):
    monkeypatch.setattr(addresses, "READ_SECONDS", 0.2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        store = Store(RUN)
        for call in (store.check_writable, lambda: store.put_new("lease/1", b"")):
            with pytest.raises(InputError, match="s3://corpus/run"):
                call()
    s3fs.S3FileSystem.clear_instance_cache()


CONTENT = b"0123456789" * 1000


def write_stub_stage(folder, name: str = "curate", output: str = "documents/lines.parquet") -> RemoteWork:
    """A complete stage in the mirror, whose one output is a stub of what a node wrote."""
    remote, digest = RemoteWork(folder, Store(RUN)), hashlib.sha256(CONTENT).hexdigest()
    remote.store.put_bytes(f"tasks/{digest}", CONTENT)
    (folder / name / output).parent.mkdir(parents=True)
    stub = Stub(f"tasks/{digest}", digest, xxhash.xxh3_128_hexdigest(CONTENT))
    stub.write(folder / name / output, len(CONTENT))
    write_manifest(folder / name, StageIdentity(name, 1), {}, {})
    return remote


def test_a_kill_between_publication_and_the_names_of_stubs_loses_nothing(bucket, monkeypatch):
    mirror = local_mirror(RUN)
    remote = write_stub_stage(mirror)
    with monkeypatch.context() as patch:
        patch.setattr(remote_work, "_name_published", lambda *_: None)  # as if the driver had died before it
        publish(remote)
    for name in remote.store.list("tasks"):  # by a driver on another machine
        remote.store.delete(name)
    remote.check_stubs(print)
    fetched(mirror)
    assert (mirror / "curate/documents/lines.parquet").read_bytes() == CONTENT


def test_stubs_of_objects_that_are_gone_are_made_again(bucket):
    """A stage that was never published, one that was set aside, an interrupted one and a cached file."""
    mirror, said = local_mirror(RUN), []
    for name in ("curate", "index.superseded-0123", ".train-0123", "tokenizer", "cache"):
        remote = write_stub_stage(mirror, name)
        if name[0] == "." or name == "cache":
            (mirror / name / MANIFEST_NAME).unlink()
    publish(remote, "tokenizer")
    remote.check_stubs(said.append)
    assert not said and len(list(stubs_below(mirror))) == 5
    for name in remote.store.list("tasks"):
        remote.store.delete(name)
    remote.check_stubs(said.append)
    assert [path.parts[-3] for path, _ in stubs_below(mirror)] == ["tokenizer"]
    assert [name for name in ("curate", "index.superseded-0123") if (mirror / name).exists()] == []
    assert len(said) == 2 and all("is gone; it is made again" in line for line in said)


@pytest.mark.parametrize("step", ["_write_sparse", "write_atomic"])
def test_a_stub_of_tokens_that_is_killed_on_its_way_to_blocks_stays_one(bucket, monkeypatch, step):
    monkeypatch.setattr(remote_work, "MIN_BLOCKS_BYTES", 1)
    mirror = local_mirror(RUN)
    remote = write_stub_stage(mirror, "index", "lines.bin")
    path = mirror / "index/lines.bin"
    os.link(path, mirror / "cached.bin")
    publish(remote, "index")
    with monkeypatch.context() as patch:
        patch.setattr(block_file, step, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            remote.fill("index")
    assert [found for found, _ in stubs_below(mirror)] == [mirror / "cached.bin", path]
    with pytest.raises(InputError, match=r"stands for .*index/.*lines\.bin in the store"):
        _map_file(path)
    remote.fill("index")
    assert [found for found, _ in stubs_below(mirror)] == [mirror / "cached.bin"]
    file = block_file.BlockFile(path, block_mark(path))
    file.load(5, 15)
    assert file.content[5:15].tobytes() == CONTENT[5:15]


def test_verify_says_which_files_it_did_not_read(bucket, call, tmp_path):
    mirror = local_mirror(RUN)
    publish(write_stub_stage(mirror))
    code, said = call("verify", mirror)
    assert code == 0 and f"1 of these files are in the store and were not read; `gristmill verify {RUN}`" in said, said
    shutil.copytree(mirror / "curate", tmp_path / "copy")
    code, said = call("verify", tmp_path / "copy")
    assert code == 1 and "1 files are stubs of objects in a store, without content" in said, said


def test_the_address_of_a_stage_is_a_folder_of_its_mirror(bucket):
    assert local_mirror(f"{RUN}/train/checkpoints/step-5") == local_mirror(RUN) / "train/checkpoints/step-5"
    assert local_mirror(f"{RUN}/curate/{MANIFEST_NAME}") == local_mirror(f"{RUN}/") / "curate"
    assert RemoteWork.of_mirror(local_mirror(f"{RUN}/curate")).store.address == RUN
    assert RemoteWork.of_mirror(local_mirror(RUN).parent) is None
    with pytest.raises(RecipeError, match="holds credentials"):
        local_mirror(f"s3://{KEY}:{SECRET}@corpus/run")


@pytest.mark.slow
def test_the_protocol_on_seaweedfs(tmp_path, monkeypatch):
    """Conditional writes, the lease, publication over and by a successor on another server than moto."""
    with seaweed_server(monkeypatch, tmp_path) as client:
        client.create_bucket(Bucket="corpus")
        Store(RUN).check_writable()
        test_a_second_writer_is_refused_and_a_dead_one_is_taken_over(client)
        for name in Store(RUN).list():
            Store(RUN).delete(name)
        test_a_writer_that_is_taken_over_before_its_last_request_publishes_nothing(client, tmp_path / "one")
        publish(write_stage(tmp_path / "two"))
        other = RemoteWork(tmp_path / "three", Store(RUN))
        assert other.fetch() == ["curate"]
        assert tree_digests(tmp_path / "three/curate") == tree_digests(tmp_path / "two/curate")

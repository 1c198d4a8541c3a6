"""`gristmill verify` on three small stages: every difference from the manifests, and no other."""

import pytest

from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import digested_json, fingerprint
from gristmill.foundation.lock import Lock, LockedSource, RawFile, write_lock
from gristmill.foundation.manifest import StageIdentity, read_manifest, write_manifest
from gristmill.pipelines.provenance.verify import verify

LOCK = Lock(sources=(LockedSource(name="s", request={}, files=(RawFile(name="x", bytes=1, sha256="0" * 64),)),))
OTHER = Lock(sources=(LockedSource(name="s", request={}, files=(RawFile(name="x", bytes=1, sha256="1" * 64),)),))


@pytest.fixture
def workdir(tmp_path):
    """curate <- tokenizer <- index, a file each."""
    inputs = {f"raw:{name}": digest for name, digest in LOCK.identity().items()}
    origin = {"lock": LOCK.model_dump(mode="json")}
    for stage in ("curate", "tokenizer", "index"):
        write_atomic(tmp_path / stage / "file", stage.encode())
        manifest = write_manifest(
            tmp_path / stage, StageIdentity(stage, 1, {"seed": 1}, inputs), {"documents": 3}, origin
        )
        inputs, origin = {stage: manifest.fingerprint}, {}
    write_lock(tmp_path / "lock.json", LOCK)
    return tmp_path


def rewrite_manifest(folder, **changed):
    """Alters the manifest and updates its digest."""
    content = read_manifest(folder).model_dump(mode="json") | changed
    (folder / "manifest.json").write_bytes(digested_json(content))


def test_an_unchanged_work_folder(workdir):
    found = verify(workdir)
    assert found.wrong == []
    assert [line.removeprefix(f"{workdir}/") for line in found.lines] == [
        f"{stage}: 1 files, identical" for stage in ("curate", "index", "tokenizer")
    ]
    assert verify(workdir / "index").wrong == []


@pytest.mark.parametrize("old_new", [(b'"seed":1', b'"seed":2'), (b'"documents":3', b'"documents":4'), (b"{", b" {")])
def test_a_flip_inside_a_manifest_is_named(workdir, old_new):
    path = workdir / "tokenizer/manifest.json"
    path.write_bytes(path.read_bytes().replace(*old_new, 1))
    wrong = verify(workdir).wrong
    assert len(wrong) == 1
    assert wrong[0].startswith(f"{path}: not a manifest (altered after it was written")


def test_a_changed_config_gives_another_fingerprint_than_the_one_it_states(workdir):
    rewrite_manifest(workdir / "curate", config={"seed": 2})
    wrong = verify(workdir).wrong
    assert len(wrong) == 1
    assert wrong[0].startswith(f"{workdir}/curate/manifest.json: fingerprint ")


def test_an_altered_input_stage_is_named_by_the_stage_after_it(workdir):
    """A stage with another config and a matching fingerprint is not the one the next stage was made from."""
    old = read_manifest(workdir / "tokenizer")
    forged = StageIdentity("tokenizer", 1, {"seed": 2}, old.inputs).fingerprint
    rewrite_manifest(workdir / "tokenizer", config={"seed": 2}, fingerprint=forged)
    wrong = verify(workdir).wrong
    assert len(wrong) == 1
    assert f"index/manifest.json: made from tokenizer {old.fingerprint}, but" in wrong[0]
    assert verify(workdir / "index").wrong == wrong


def test_a_lock_of_other_raw_files(workdir):
    write_lock(workdir / "lock.json", OTHER)
    assert "source s: it pins other raw files than" in verify(workdir).wrong[0]
    rewrite_manifest(workdir / "curate", origin={"lock": OTHER.model_dump(mode="json")})
    assert any("its inputs differ from the raw files that its lock pins" in line for line in verify(workdir).wrong)


def test_a_flip_inside_the_lock(workdir):
    path = workdir / "lock.json"
    path.write_bytes(path.read_bytes().replace(b'"bytes":1', b'"bytes":2'))
    assert verify(workdir).wrong == [
        f"{path}: not a lock (altered after it was written: its digest differs); remove it to pin the raw files again"
    ]


@pytest.mark.parametrize("name", ["stray", "notes/stray", "curate/stray", "curate/.file.77.tmp"])
def test_a_file_in_no_manifest_is_named(workdir, name):
    write_atomic(workdir / name, b"?")
    wrong = verify(workdir).wrong
    assert len(wrong) == 1
    assert str(workdir / name).startswith(wrong[0].split(": ")[0])
    assert "in no manifest" in wrong[0] or "not in the manifest" in wrong[0]


def test_incomplete_stages_logs_and_cache_are_no_error(workdir):
    for name in (f".train-{fingerprint(1)}/shard", "logs/times.jsonl", "cache/annotated/x"):
        write_atomic(workdir / name, b"?")
    found = verify(workdir)
    assert found.wrong == []
    assert "incomplete" in found.lines[-1]


def test_nothing_to_verify(tmp_path):
    with pytest.raises(InputError, match="nothing to verify"):
        verify(tmp_path)

"""Mutated manifests, locks, counts, ledgers, leases and checksum files: refused by name, or no byte changed; never a
traceback, never `identical`. Run one mutant alone: `check(place, case, number)` with what a failure prints."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.corpus.counts import COUNTS_NAME
from gristmill.data_pipeline.corpus.document_history import open_corpus, why
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.foundation import files
from gristmill.foundation.checksums import check_outputs, checksum_path, checksummed_path, matches_checksum
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import Lock, LockedSource, read_lock, write_lock
from gristmill.foundation.manifest import StageIdentity, read_manifest, write_manifest
from gristmill.pipelines.provenance.verify import verify
from gristmill.pipelines.workdir.remote import LEASE_NAME, lease
from tests.support.corpora import prose, run_curate, write_jsonl
from tests.support.mutations import mutate

SEED, IN_CI, SLOW = 13, 1_120, 60_000
LEDGER = "curate/ledger/books-00000.parquet"


@dataclass(frozen=True)
class Place:
    """A work folder with a curated corpus, and a document of it."""

    workdir: Path
    doc_id: str


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    workdir = tmp_path_factory.mktemp("work")
    write_jsonl(workdir.with_name("raw") / "books.jsonl", [{"text": prose(k % 30)} for k in range(40)] + [b"{"])
    books = SourceConfig(name="books", format="jsonl", paths=(str(workdir.with_name("raw") / "books.jsonl"),))
    run_curate([books], workdir, near_dedup=None)
    write_manifest(workdir / "curate", StageIdentity("curate", 1, {"seed": 1}), {}, {})
    write_lock(workdir / "lock.json", Lock(sources=(LockedSource(name="books", request={}, files=()),)))
    with checksummed_path(workdir / "cache/shard") as temporary:
        temporary.write_bytes(b"content")
    rows = pq.read_table(workdir / LEDGER).to_pylist()
    return Place(workdir, next(row["doc_id"] for row in rows if row["outcome"] == "kept"))


def ask_manifest(place: Place) -> None:
    """Whoever reads it is refused, and `verify` names it."""
    wrong = verify(place.workdir).wrong
    assert len(wrong) == 1 and "curate/manifest.json" in wrong[0]
    read_manifest(place.workdir / "curate")


def ask_lock(place: Place) -> None:
    wrong = verify(place.workdir).wrong
    assert len(wrong) == 1 and "lock.json" in wrong[0]
    read_lock(place.workdir / "lock.json")


def ask_outputs(place: Place) -> None:
    """What the commands why and explore, and a stage that takes the corpus as its input, do first."""
    wrong = verify(place.workdir / "curate").wrong
    assert len(wrong) == 1
    check_outputs(place.workdir / "curate")


def ask_why(place: Place) -> None:
    why(place.doc_id, place.workdir)


def ask_explore(place: Place) -> None:
    open_corpus(place.workdir)


def ask_lease(place: Place) -> None:
    """A lease is free once its holder is gone, whatever it says; while it is held, its words are quoted."""
    with lease(place.workdir):
        pass
    raise InputError("free")


def ask_checksum(place: Place) -> None:
    if not matches_checksum(place.workdir / "cache/shard"):
        raise InputError("made again")


CASES: dict[str, tuple[str, Callable[[Place], None]]] = {
    "manifest": ("curate/manifest.json", ask_manifest),
    "lock": ("lock.json", ask_lock),
    "counts": (f"curate/{COUNTS_NAME}", ask_outputs),
    "ledger": (LEDGER, ask_why),
    "explored ledger": (LEDGER, ask_explore),
    "counts of why": (f"curate/{COUNTS_NAME}", ask_why),
    "lease": (LEASE_NAME, ask_lease),
    "file with a checksum": ("cache/shard", ask_checksum),
}


def check(place: Place, case: str, number: int) -> None:
    name, ask = CASES[case]
    path = place.workdir / name
    content = path.read_bytes() if path.exists() else b"4711"
    mutant = mutate(content, np.random.default_rng([SEED, number]))
    path.write_bytes(mutant)
    try:
        if mutant != content:
            with pytest.raises(InputError):
                ask(place)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("case", CASES)
def test_a_changed_byte_is_never_taken_for_the_right_one(place, case, monkeypatch):
    monkeypatch.setattr(files, "sync", lambda path: None)
    for number in range(IN_CI // len(CASES)):
        check(place, case, number)
    assert verify(place.workdir).wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_many_more(place, case, monkeypatch):
    monkeypatch.setattr(files, "sync", lambda path: None)
    for number in range(IN_CI, IN_CI + SLOW // len(CASES)):
        check(place, case, number)


@pytest.mark.parametrize("case", ["ledger", "counts of why"])
def test_without_a_manifest_a_damaged_corpus_is_refused_or_read(place, case, monkeypatch):
    """Where nothing vouches for the files they may be misread, but never with a traceback."""
    name, ask = CASES[case]
    path, manifest = place.workdir / name, place.workdir / "curate/manifest.json"
    content, aside = path.read_bytes(), place.workdir / "aside"
    manifest.rename(aside)
    try:
        for number in range(40):
            path.write_bytes(mutate(content, np.random.default_rng([SEED, number])))
            try:
                ask(place)
            except InputError as error:
                assert str(place.workdir) in str(error)
    finally:
        path.write_bytes(content)
        aside.rename(manifest)


def test_seals_are_tried_too(place):
    """A mutated checksum file fits its file, or the file is made again: either way no error."""
    path = checksum_path(place.workdir / "cache/shard")
    content = path.read_bytes()
    for number in range(100):
        path.write_bytes(mutate(content, np.random.default_rng([SEED, number])))
        assert matches_checksum(place.workdir / "cache/shard") in (True, False)
    path.write_bytes(content)

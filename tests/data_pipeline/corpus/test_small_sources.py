"""Small sources are curated in batches, and what is written has the bytes of sources curated one by one."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline import run_curation
from gristmill.data_pipeline.annotate.tombstones import Tombstones
from gristmill.data_pipeline.corpus import small_sources
from gristmill.data_pipeline.corpus.shards import mapped_table
from gristmill.data_pipeline.corpus.small_sources import group_sources
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import CurationInputs, curate
from gristmill.foundation.errors import InputError
from gristmill.foundation.lock import Lock, LockedSource, RawFile
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from tests.support.corpora import prose, tree_digests, write_jsonl

NUMBER = 24
SHARED = "Please accept our cookies before you read on, it is the law of the land. " * 2


def records_of(number: int) -> list:
    """Some documents: kept, too short, copies of another source's, unreadable, with an address or a shared line."""
    records: list = [
        {"text": prose(10 * number + k), "url": f"https://host{number}.org/{k}"} for k in range(number % 4)
    ]
    records.append({"text": f"{prose(1000 + number)}\n{SHARED}\nWrite to a{number}@mail.org for more about it."})
    if number % 3 == 0:
        records.append({"text": prose(number // 6 * 100 + 5000)})  # a copy of that of another source
    if number % 5 == 0:
        records += [{"text": "two words"}, b"[1, 2]", {"text": f"{prose(1000 + number)} and more"}]
    return records


def sources_in(folder: Path) -> list[SourceConfig]:
    """NUMBER small sources of equal settings, and three others."""
    sources = []
    for number in range(NUMBER):
        records = [] if number == 7 else records_of(number)
        write_jsonl(folder / f"s{number}.jsonl", records)
        priority = 2 if number == 11 else 1
        path = str(folder / f"s{number}.jsonl")
        sources.append(SourceConfig(name=f"s{number}", format="jsonl", paths=(path,), priority=priority))
    write_jsonl(folder / "filtered.jsonl", records_of(5))
    sources.insert(
        3, SourceConfig(name="filtered", format="jsonl", paths=(str(folder / "filtered.jsonl"),), filters=())
    )
    return sources


def curated(sources: list[SourceConfig], folder: Path, workers: int = 1, **settings) -> dict[str, str]:
    """Digests of the corpus."""
    tombstones = settings.pop("tombstones", None)
    engine = LocalEngine(workers, Reporter.silent())
    lock = Lock(sources=tuple(resolve(sources, engine)))
    inputs = CurationInputs(
        sources, CurateConfig(**settings), 1, lock, folder / "curate", folder / "cache", engine, (), tombstones
    )
    curate(inputs)
    assert not list((folder / "cache" / "dedup").glob("*"))
    return tree_digests(folder / "curate")


def annotated(folder: Path) -> list[str]:
    return [path.name for path in (folder / "cache" / "annotated").glob("*.parquet")]


SETTINGS = {
    "default": {},
    "personal data, small shards": {"pii": {"email": "replace"}, "shard_bytes": 1500, "splits": {"validation": 0.2}},
    "edited texts": {"span_dedup": {"unit": "line", "min_count": 3}},
    "benchmarks": {"splits": {"validation": 0.2, "test": 0.2}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_batches_change_no_byte(name, tmp_path, monkeypatch):
    sources, settings = sources_in(tmp_path / "raw"), dict(SETTINGS[name])
    if name == "benchmarks":
        questions = [{"question": " ".join(prose(1000 + n).split()[20:60])} for n in (3, 4, 9)]
        quiz = write_jsonl(tmp_path / "quiz.jsonl", questions)
        settings["decontaminate"] = {"benchmarks": [{"name": "quiz", "paths": [str(quiz)], "fields": ["question"]}]}
    batched = curated(sources, tmp_path / "batched", **settings)
    assert sorted(name[0] for name in annotated(tmp_path / "batched")) == ["+", "f", "s"]  # s11 has another priority
    if name == "default":
        with monkeypatch.context() as patch:
            patch.setattr(small_sources, "MAX_BATCH_SOURCES", 5)
            assert curated(sources, tmp_path / "small", workers=2, **settings) == batched
        assert len(annotated(tmp_path / "small")) > 6
    monkeypatch.setattr(small_sources, "MIN_BATCHED_SOURCES", 1_000)
    assert curated(sources, tmp_path / "alone", **settings) == batched
    assert len(annotated(tmp_path / "alone")) == NUMBER + 1


def test_documents_taken_out_of_a_batch(tmp_path, monkeypatch):
    """Rows leave the batch's file, also all of a source's."""
    sources = sources_in(tmp_path / "raw")
    curated(sources, tmp_path / "work")
    ledger = tmp_path / "work" / "curate" / "ledger"
    gone = [
        pq.read_table(ledger / f"{name}-00000.parquet").column("doc_id").to_pylist() for name in ("s4", "s6", "s10")
    ]
    forgotten = [*gone[0], *gone[1][:1], gone[2][-1]]
    tombstones = Tombstones.empty().with_request("ids", forgotten, [])
    after = curated(sources, tmp_path / "work", tombstones=tombstones)
    assert pq.read_table(ledger / "s4-00000.parquet").num_rows == 0
    ids = {doc_id for path in ledger.glob("*.parquet") for doc_id in pq.read_table(path).column("doc_id").to_pylist()}
    assert ids.isdisjoint(forgotten) and len(ids) > 3 * NUMBER
    monkeypatch.setattr(small_sources, "MIN_BATCHED_SOURCES", 1_000)
    assert curated(sources, tmp_path / "alone", tombstones=tombstones) == after


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    """A batch that is whole is not written again; one of which a power cut took a file is."""
    sources = sources_in(tmp_path / "raw")
    expected = curated(sources, tmp_path / "clean")
    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(run_curation, "write_sketches", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            curated(sources, folder)
        shard = folder / "curate" / "documents" / "train" / "s5-00000.parquet"
        before = shard.stat().st_ino
        with pytest.raises(ZeroDivisionError):
            curated(sources, folder)
        assert shard.stat().st_ino == before
    (folder / "curate" / "ledger" / "s8-00000.parquet").write_bytes(b"")
    (folder / "curate" / "signals" / "train" / "s9-00000.parquet").unlink()
    (folder / "curate" / "documents" / "test" / "s0-00000.parquet").write_bytes(bytes(4000))  # has several names
    assert curated(sources, folder) == expected
    assert shard.stat().st_ino != before


def test_a_run_without_training_documents_leaves_the_ledgers(tmp_path):
    sources = [source for source in sources_in(tmp_path / "raw") if source.filters is None]
    with pytest.raises(InputError, match="loosen that rule"):
        curated(sources, tmp_path / "work", filters=[{"gopher_quality": {"min_words": 100_000}}])
    assert len(list((tmp_path / "work" / "curate" / "ledger").glob("*.parquet"))) == NUMBER


def groups_of(sizes: dict[str, int], **settings: str) -> list[tuple[str, ...]]:
    """Names of the groups of sources with these bytes. settings: of single sources."""
    sources = [SourceConfig(name=name, format="jsonl", paths=("x",)) for name in sizes]
    locked = [
        LockedSource(name=name, request={}, files=(RawFile(name=name, bytes=size, sha256="0" * 64),))
        for name, size in sizes.items()
    ]
    configs: list = [None] * len(sources)
    of_settings = [settings.get(source.name, "") for source in sources]
    return [group.names for group in group_sources(sources, locked, configs, of_settings, True)]


def test_what_is_batched():
    """Small sources with the same settings, in groups that a source more or less does not change."""
    sizes = {f"s{number}": 100_000 for number in range(400)} | {"large": 2_000_000}
    groups = groups_of(sizes, s3="other")
    assert ("large",) in groups and ("s3",) in groups
    batches = [set(group) for group in groups if len(group) > 1]
    assert set().union(*batches) == sizes.keys() - {"large", "s3"}
    assert all(len(batch) <= 80 for batch in batches)  # of 8 MB
    more = [set(group) for group in groups_of({"first": 10, **sizes}, s3="other")]
    assert len([batch for batch in batches if batch not in more]) == 1
    few = {f"s{number}": 100 for number in range(small_sources.MIN_BATCHED_SOURCES - 1)}
    assert groups_of(few) == [(name,) for name in few]


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0 and no more", b"\0" * 4096], ids=["empty", "cut off", "zeros"])
def test_a_damaged_table_is_named(content, tmp_path):
    path = tmp_path / "rows.arrow"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"rows\.arrow: no readable table .* run the same command again"):
        mapped_table(path)
    with pytest.raises(InputError, match=r"gone\.arrow"):
        mapped_table(tmp_path / "gone.arrow")

"""Near duplicates: worked examples, and the greedy rule applied by brute force in plain Python."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import edited, engine, found, padded, write_part
from pydantic import ValidationError

from gristmill.data_pipeline.dedup import candidates, near
from gristmill.data_pipeline.dedup.candidates import StoredDocuments
from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.minhash import shingles_of
from gristmill.data_pipeline.dedup.near import NearDedupConfig, Protected, near_duplicates
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles

# 32 bands of one row find every pair of similarity 0.5 but one in 2**32: all that is left is exact.
SURE = NearDedupConfig(ngram=2, bands=32, rows=1, threshold=0.5)


def by_brute_force(documents: list[tuple[int, str, str]], config: NearDedupConfig) -> dict[str, tuple[str, float]]:
    """{removed: (kept, similarity)} of (priority, doc_id, text), comparing everything with everything."""
    order = sorted(documents, key=lambda d: (d[0], -len(d[2].encode()), padded(d[1])))
    kept: list[tuple[str, set]] = []
    removed = {}
    for _, doc_id, text in order:
        mine = set(shingles_of(fold_text(text, config.unit), config.ngram, config.unit))
        scores = [(len(mine & theirs) / len(mine | theirs), other) for other, theirs in kept if mine]
        best = max((score for score, _ in scores), default=0.0)
        if mine and best >= config.threshold:
            removed[doc_id] = (next(other for score, other in scores if score == best), best)
        else:
            kept.append((doc_id, mine))
    return removed


def test_worked_example(tmp_path: Path):
    # Word pairs: {a b, b c, c d, d e} and {a b, b c, c d}: 3 of 4 shared.
    part = write_part(tmp_path / "p.parquet", {"1": "a b c d e", "2": "A b, c d.", "3": "x y z", "4": "", "5": ""})
    table = near_duplicates([part], SURE, engine(), tmp_path / "work")
    assert found(table) == {"2": ("1", 0.75)}


def test_star_only_no_removal_through_a_removed_document(tmp_path: Path):
    # 1 ~ 2 (0.6) and 2 ~ 3 (0.6) but 1 and 3 share a third: 2 is removed, so nothing speaks against 3.
    texts = {"1": "a b c d e f", "2": "b c d e f g", "3": "c d e f g h"}
    part = write_part(tmp_path / "p.parquet", texts)
    config = SURE.model_copy(update={"threshold": 0.6})
    assert found(near_duplicates([part], config, engine(), tmp_path / "work")) == {"2": ("1", 4 / 6)}


def test_priority_then_length_then_id_decide_who_stays(tmp_path: Path):
    parts = [
        write_part(tmp_path / "a.parquet", {"1": "a b c d e f"}, "low", priority=2),
        write_part(
            tmp_path / "b.parquet", {"3": "a b c d e", "2": "a b c d e", "4": "a b c d ee f"}, "high", priority=1
        ),
    ]
    table = near_duplicates(parts, SURE.model_copy(update={"threshold": 0.3}), engine(), tmp_path / "work")
    assert {removed: kept for removed, (kept, _) in found(table).items()} == {"1": "4", "2": "4", "3": "4"}


def test_dead_rows_neither_remove_nor_are_removed(tmp_path: Path):
    kept = [False, True, True, False]
    part = write_part(tmp_path / "p.parquet", dict.fromkeys("1234", "a b c d"), kept=kept)
    assert found(near_duplicates([part], SURE, engine(), tmp_path / "work")) == {"3": ("2", 1.0)}


def test_within_each_source(tmp_path: Path):
    parts = [
        write_part(tmp_path / "a.parquet", {"1": "a b c d", "2": "a b c d"}, "x"),
        write_part(tmp_path / "b.parquet", {"3": "a b c d"}, "y"),
    ]
    within = SURE.model_copy(update={"scope": "source"})
    assert found(near_duplicates(parts, SURE, engine(), tmp_path / "all")) == {"2": ("1", 1.0), "3": ("1", 1.0)}
    assert found(near_duplicates(parts, within, engine(), tmp_path / "within")) == {"2": ("1", 1.0)}


def test_character_shingles(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "我们是用户的朋友", "2": "我们是用户的朋", "3": "别的东西在这里"})
    config = SURE.model_copy(update={"unit": "character", "ngram": 3})
    assert found(near_duplicates([part], config, engine(), tmp_path / "work")) == {"2": ("1", 5 / 6)}


words = st.lists(st.sampled_from("abcdefgh"), max_size=9).map(" ".join)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 3), words), min_size=1, max_size=30),
    st.sampled_from(["word", "character"]),
    st.floats(0.6, 1.0),
    st.integers(1, 3),
)
def test_agrees_with_brute_force(tmp_path_factory, texts, unit, threshold, ngram):
    folder = tmp_path_factory.mktemp("law")
    config = NearDedupConfig(unit=unit, ngram=ngram, bands=24, rows=1, threshold=threshold)
    documents = [(priority, f"{i + 1:x}", text) for i, (priority, text) in enumerate(texts)]
    parts = [
        write_part(folder / f"{p}.parquet", {i: t for q, i, t in documents if q == p}, f"s{p}", priority=p)
        for p in {q for q, _, _ in documents}
    ]
    assert found(near_duplicates(parts, config, engine(), folder / "work")) == by_brute_force(documents, config)


def family_corpus(folder: Path, seed: int, num_families: int = 30) -> list[tuple[int, str, str]]:
    generator = np.random.default_rng(seed)
    documents = []
    for family in range(num_families):
        words = [f"w{generator.integers(500)}" for _ in range(60)]
        for _ in range(generator.integers(1, 5)):
            text = " ".join(edited(words, generator, int(generator.integers(0, 6))))
            documents.append((1 + family % 2, f"{len(documents) + 1:x}", text))
    return documents


def parts_of(folder: Path, documents: list[tuple[int, str, str]], num_parts: int, seed: int) -> list[DocumentFile]:
    generator = np.random.default_rng(seed)
    parts = []
    for priority in (1, 2):
        mine = [d for d in documents if d[0] == priority]
        generator.shuffle(mine)
        for number in range(num_parts):
            texts = {i: t for _, i, t in mine[number::num_parts]}
            parts.append(write_part(folder / f"{priority}-{number}.parquet", texts, f"s{priority}", priority))
    generator.shuffle(parts)
    return parts


def test_workers_files_and_their_order_change_nothing(tmp_path: Path):
    documents = family_corpus(tmp_path, 5)
    config = NearDedupConfig(ngram=3, bands=32, rows=3, threshold=0.6)
    one = near_duplicates(parts_of(tmp_path / "a", documents, 1, 0), config, engine(), tmp_path / "w1")
    many = near_duplicates(parts_of(tmp_path / "b", documents, 4, 1), config, engine(), tmp_path / "w2")
    two_workers = near_duplicates(parts_of(tmp_path / "c", documents, 3, 2), config, engine(2), tmp_path / "w3")
    assert len(one) >= 20
    assert one.equals(many)
    assert one.equals(two_workers)
    assert found(one) == by_brute_force(documents, config)


def test_batches_of_candidates_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parts = parts_of(tmp_path, family_corpus(tmp_path, 6), 2, 0)
    config = NearDedupConfig(ngram=3, bands=32, rows=3, threshold=0.6)
    whole = near_duplicates(parts, config, engine(), tmp_path / "w1")
    monkeypatch.setattr(near, "BATCH_SHINGLES", 200)
    cut = near_duplicates(parts, config, engine(), tmp_path / "w2")
    assert len(list((tmp_path / "w2").glob("verified-*"))) > 5
    assert whole.equals(cut)


def test_a_group_larger_than_memory_is_decided_block_by_block_as_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One band of one row: nearly all documents are one group, of which 60 shingles are in memory at a time."""
    documents = [(priority, doc_id, "a b c " + text) for priority, doc_id, text in family_corpus(tmp_path, 9)]
    parts = parts_of(tmp_path, documents, 3, 0)
    config = NearDedupConfig(ngram=2, bands=30, rows=1, threshold=0.6)
    whole = near_duplicates(parts, config, engine(), tmp_path / "w1")
    monkeypatch.setattr(near, "BLOCK_SHINGLES", 60)
    cut = near_duplicates(parts, config, engine(), tmp_path / "w2")
    assert len(whole) > 15 and whole.equals(cut)
    assert found(whole) == by_brute_force(documents, config)


GIANT = """
import sys
from pathlib import Path
from gristmill.data_pipeline.dedup import near
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.progress import Reporter

def megabytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

def run(block):
    near.BLOCK_SHINGLES = block
    files = [DocumentFile(Path(sys.argv[1]), "s", 1)]
    return near.near_duplicates(files, near.NearDedupConfig(), LocalEngine(1, Reporter.silent()), Path(sys.argv[2]))

whole = run(1 << 60)
for path in Path(sys.argv[2]).glob("*verified-*"):
    path.unlink()  # the verification alone is done again
before = megabytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew (proc(5))
cut = run(500_000)
assert cut.equals(whole)
print(len(cut), megabytes("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
def test_a_giant_group_is_verified_in_bounded_memory(tmp_path: Path):
    """100,000 copies of one text of 120 words, one in fifty edited beyond the threshold. The sets have 92 MB, which
    count once as pages of their mapped file and, if all were loaded, once more; two blocks have 8 MB. The members'
    records, buckets and decisions have about 100 MB."""
    generator = np.random.default_rng(3)
    words = [f"w{number}" for number in range(120)]
    edits = np.where(generator.random(100_000) < 0.02, 8, 1)
    ids = [padded(f"{number + 1:x}") for number in range(len(edits))]
    texts = [" ".join(edited(words, generator, int(number))) for number in edits]
    pq.write_table(pa.table({"doc_id": ids, "text": texts}), tmp_path / "p.parquet")
    program = [sys.executable, "-c", GIANT, str(tmp_path / "p.parquet"), str(tmp_path / "work")]
    removed, megabytes = subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()
    assert int(removed) > 90_000 and float(megabytes) < 92 + 8 + 120


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file but the checksum files, which remember inodes and times."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".seal"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_small_document_files_share_a_part_of_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = [3, 0, 4, 1, 5, 2]
    documents = StoredDocuments((None,) * 6, np.cumsum([0, *sizes]), np.zeros(6, bool))  # type: ignore[arg-type]
    monkeypatch.setattr(candidates, "KEY_DOCUMENTS", 4)
    assert candidates.key_runs(documents) == [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]  # of ceil(15 / 32) = 1
    monkeypatch.setattr(candidates, "KEY_PARTS", 1)
    assert candidates.key_runs(documents) == [(0, 3), (3, 5), (5, 6)]
    parts, config = parts_of(tmp_path, family_corpus(tmp_path, 7, 12), 4, 0), NearDedupConfig(ngram=3)
    shared = near_duplicates(parts, config, engine(), tmp_path / "shared")
    monkeypatch.setattr(candidates, "KEY_DOCUMENTS", 1)
    assert near_duplicates(parts, config, engine(), tmp_path / "alone").equals(shared) and len(shared)


def test_keys_are_removed_when_the_links_are_whole_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parts, config = parts_of(tmp_path, family_corpus(tmp_path, 7, 12), 2, 0), NearDedupConfig(ngram=3)
    whole = near_duplicates(parts, config, engine(), tmp_path / "work")
    left = {name.rpartition("-")[0].lstrip(".") for name in contents(tmp_path / "work") if name.endswith(".rec")}
    assert left == {"links", "candidates", "members", "sets", "verified"}
    monkeypatch.setattr(PartitionedFiles, "write", lambda *_: pytest.fail("written again"))
    assert near_duplicates(parts, config, engine(), tmp_path / "work").equals(whole)


def test_stopped_at_every_write_and_run_again_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parts = parts_of(tmp_path, family_corpus(tmp_path, 7, 12), 2, 0)
    config = NearDedupConfig(ngram=3, bands=6, rows=4, threshold=0.6)
    monkeypatch.setattr(near, "BATCH_SHINGLES", 400)
    monkeypatch.setattr("gristmill.data_pipeline.dedup.verify_candidates.MIN_TASK_CANDIDATES", 1)
    whole = near_duplicates(parts, config, engine(), tmp_path / "whole")
    write = PartitionedFiles.write
    writes = 0

    def stops_at_fourth(*arguments, **options):
        nonlocal writes
        writes += 1
        if writes == 4:
            raise KeyboardInterrupt
        return write(*arguments, **options)

    monkeypatch.setattr(PartitionedFiles, "write", stops_at_fourth)
    stops = 0
    while True:
        writes = 0
        try:
            resumed = near_duplicates(parts, config, engine(), tmp_path / "stopped")
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops >= 4
    assert resumed.equals(whole)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


PROGRAM = """
import sys, time
from pathlib import Path
from gristmill.data_pipeline.dedup import near
from gristmill.data_pipeline.ledger.document_file import DocumentFile
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.task_files import PartitionedFiles

plain = PartitionedFiles.write
def slowly(self, part, records, bounds):
    plain(self, part, records, bounds)
    print(self.path(part).name, flush=True)
    time.sleep(0.02)
PartitionedFiles.write = slowly
near.BATCH_SHINGLES = 400
folder = Path(sys.argv[1])
parts = [DocumentFile(path, "s" + path.name[0], int(path.name[0])) for path in sorted(folder.glob("*.parquet"))]
config = near.NearDedupConfig(ngram=3, bands=6, rows=4, threshold=0.6)
near.near_duplicates(parts, config, LocalEngine(1, Reporter.silent()), Path(sys.argv[2]))
print("done", flush=True)
"""


@pytest.mark.parametrize("killed_at", ["links-00000.rec", "candidates-00000.rec", "verified-00001.rec"])
def test_killed_in_the_middle_of_banding_and_of_verification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str
):
    made = parts_of(tmp_path, family_corpus(tmp_path, 8, 12), 2, 0)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == killed_at:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    monkeypatch.setattr(near, "BATCH_SHINGLES", 400)
    config = NearDedupConfig(ngram=3, bands=6, rows=4, threshold=0.6)
    parts = sorted(made, key=lambda part: part.path)
    resumed = near_duplicates(parts, config, engine(), tmp_path / "killed")
    assert resumed.equals(near_duplicates(parts, config, engine(), tmp_path / "whole"))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_other_work_in_the_folder_is_not_taken_for_ours(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "a b c d e", "2": "a b c d", "3": "a b c d"})
    assert len(near_duplicates([part], SURE, engine(), tmp_path / "work")) == 2
    fewer = DocumentFile(part.path, part.source, part.priority, np.array([True, False, False]))
    assert len(near_duplicates([fewer], SURE, engine(), tmp_path / "work")) == 0


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "a b c d e"})
    with pytest.raises(InputError, match=r"holds p\.parquet, which is not deduplication's; name an empty folder"):
        near_duplicates([part], SURE, engine(), tmp_path)
    assert part.path.exists()


def test_a_protected_corpus_removes_and_loses_nothing(tmp_path: Path):
    old = write_part(tmp_path / "old.parquet", {"a": "a b c d", "b": "a b c d", "c": "p q r s"}, priority=9)
    near_duplicates([old], SURE, engine(), tmp_path / "old")
    before = contents(tmp_path / "old" / "signatures")
    new = write_part(tmp_path / "new.parquet", {"1": "a b c d e", "2": "x y z", "3": "x y z zz"}, priority=1)
    side = Protected(tmp_path / "old" / "signatures", [old])
    table = near_duplicates([new], SURE, engine(), tmp_path / "work", protected=[side])
    assert found(table) == {"1": ("a", 0.75), "2": ("3", 2 / 3)}
    assert contents(tmp_path / "old" / "signatures") == before


@pytest.mark.parametrize("threshold", [0.0, -0.1, 1.01, float("nan")])
def test_threshold_outside_its_range(threshold: float):
    with pytest.raises(ValidationError, match="threshold"):
        NearDedupConfig(threshold=threshold)


def test_bands_that_do_not_divide_the_hashes():
    with pytest.raises(ValidationError, match=r"bands=9 x rows=13 does not divide hashes=128; try hashes=117"):
        NearDedupConfig(bands=9, rows=13, hashes=128)
    assert NearDedupConfig(bands=8, rows=8, hashes=128).scheme.hashes == 128


def test_a_store_of_another_scheme(tmp_path: Path):
    old = write_part(tmp_path / "old.parquet", {"a": "a b c d"})
    near_duplicates([old], SURE, engine(), tmp_path / "old")
    side = Protected(tmp_path / "old" / "signatures", [old])
    new = write_part(tmp_path / "new.parquet", {"1": "a b c d e"})
    with pytest.raises(InputError, match="signatures with ngram=2, but 5 is wanted"):
        near_duplicates([new], NearDedupConfig(), engine(), tmp_path / "work", protected=[side])
    assert not (tmp_path / "work").exists()  # before work starts


def test_bad_files(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": "a b c d e", "2": "a b"})
    with pytest.raises(InputError, match=r"missing\.parquet"):
        near_duplicates([DocumentFile(tmp_path / "missing.parquet", "s", 1)], SURE, engine(), tmp_path / "work")
    with pytest.raises(InputError, match=f"document {padded('1')} is given twice"):
        near_duplicates([part, part], SURE, engine(), tmp_path / "work")
    with pytest.raises(InputError, match="2 rows, but 3 values in the mask"):
        near_duplicates([DocumentFile(part.path, "s", 1, np.ones(3, bool))], SURE, engine(), tmp_path / "work")
    truncated = tmp_path / "t.parquet"
    truncated.write_bytes(part.path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"t\.parquet: no readable Parquet file"):
        near_duplicates([DocumentFile(truncated, "s", 1)], SURE, engine(), tmp_path / "work")
    strange = write_part(tmp_path / "s.parquet", {"not hex": "a b"})
    with pytest.raises(InputError, match="not hex' is not 32 hex digits"):
        near_duplicates([strange], SURE, engine(), tmp_path / "work")


def test_nothing_at_all(tmp_path: Path):
    empty = write_part(tmp_path / "p.parquet", {})
    assert len(near_duplicates([empty], SURE, engine(), tmp_path / "work")) == 0
    assert len(near_duplicates([], SURE, engine(), tmp_path / "none")) == 0

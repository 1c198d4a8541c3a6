"""Groups decided by an earlier run: the same duplicates as without it, and only changed groups are compared again."""

from dataclasses import replace

import numpy as np
import planted
import pytest

from gristmill.data_pipeline.dedup import near, verify_candidates
from gristmill.data_pipeline.dedup.exact import table_of
from gristmill.data_pipeline.dedup.near import EarlierRuns, NearDedupConfig, find_near_duplicates
from gristmill.foundation.errors import InputError

WORDS = np.array([f"w{number}" for number in range(500)])


@pytest.fixture
def documents() -> dict[str, str]:
    """30 groups of 4 documents: a text, and three copies with a word changed in each."""
    generator = np.random.default_rng(2)
    texts = {}
    for group in range(30):
        words = generator.choice(WORDS, 120)
        for copy in range(4):
            changed = words.copy()
            changed[copy * 25] = "changed"
            texts[f"{group:02x}{copy}"] = " ".join(changed)
    return texts


def duplicates(folder, name, documents, earlier, config=None):
    parts = [dict(list(documents.items())[start : start + 40]) for start in range(0, len(documents), 40)]
    files = [planted.write_part(folder / name / f"s-{number}.parquet", part) for number, part in enumerate(parts)]
    config = config or NearDedupConfig()
    return table_of(find_near_duplicates(files, config, planted.engine(), folder / f"work-{name}", earlier=earlier))


def test_changed_groups_alone_are_compared(tmp_path, documents, monkeypatch):
    earlier = EarlierRuns(tmp_path / "cache", {"s": "settings"})
    duplicates(tmp_path, "first", documents, earlier)
    compared = []
    whole = verify_candidates._Batch.read
    monkeypatch.setattr(
        verify_candidates._Batch,
        "read",
        lambda sets, number: (batch := whole(sets, number), compared.append(len(batch.members)))[0],
    )
    assert duplicates(tmp_path, "same", documents, earlier) == duplicates(tmp_path, "alone", documents, None)
    assert compared == [120]  # of the run without earlier ones
    left = {name: text for name, text in documents.items() if name not in ("001", "050")}
    compared.clear()
    assert duplicates(tmp_path, "fewer", left, earlier) == duplicates(tmp_path, "fewer-alone", left, None)
    assert compared == [3, 118]  # the group whose kept document has gone; the other lost a duplicate
    grown = {**documents, "ff": documents["070"] + " more"}
    assert duplicates(tmp_path, "grown", grown, earlier) == duplicates(tmp_path, "grown-alone", grown, None)


@pytest.fixture
def chains() -> dict[str, str]:
    """Texts that change by a few words from one to the next: a document is near its neighbours and no others, so what
    is removed depends on which of them are kept."""
    generator = np.random.default_rng(5)
    documents = {}
    for chain in range(4):
        words = generator.choice(WORDS, 150)
        for link in range(30):
            words[generator.choice(150, 3, replace=False)] = generator.choice(WORDS, 3)
            documents[f"{chain}{link:02x}"] = " ".join(words[: 150 - generator.integers(5)])
    return documents


CHAINED = NearDedupConfig(threshold=0.6)


def test_chains_that_lose_documents_are_decided_as_without_earlier_runs(tmp_path, chains):
    generator = np.random.default_rng(6)
    earlier = EarlierRuns(tmp_path / "cache", {"s": "settings"})
    removed = duplicates(tmp_path, "first", chains, earlier, CHAINED)
    assert 20 < removed.num_rows < 100
    names = np.array(list(chains))
    for number in range(12):
        gone = set(generator.choice(names, generator.integers(1, 12), replace=False).tolist())
        left = {name: text for name, text in chains.items() if name not in gone}
        with_earlier = duplicates(tmp_path, f"left{number}", left, earlier, CHAINED)
        assert with_earlier == duplicates(tmp_path, f"alone{number}", left, None, CHAINED)


def test_chains_that_lose_and_get_documents_are_decided_as_without_earlier_runs(tmp_path, chains, monkeypatch):
    """One run after the other, with few new documents each time: no run sorts the keys of all documents again."""
    generator = np.random.default_rng(7)
    earlier = EarlierRuns(tmp_path / "cache", {"s": "settings"})
    names = np.array(list(chains))
    present = set(generator.choice(names, 90, replace=False).tolist())
    duplicates(tmp_path, "first", {name: chains[name] for name in sorted(present)}, earlier, CHAINED)
    whole_runs = []
    compare_all = near._compare_all
    monkeypatch.setattr(near, "_compare_all", lambda *given: (whole_runs.append(given), compare_all(*given))[1])
    for number in range(12):
        present -= set(generator.choice(sorted(present), 8, replace=False).tolist())
        present |= set(generator.choice(sorted(set(names) - present), 8, replace=False).tolist())
        documents = {name: chains[name] for name in sorted(present)}
        with_earlier = duplicates(tmp_path, f"run{number}", documents, earlier, CHAINED)
        assert not whole_runs
        assert with_earlier == duplicates(tmp_path, f"alone{number}", documents, None, CHAINED)
        whole_runs.clear()


def test_a_run_that_goes_on_after_its_decisions_were_kept_writes_the_same(tmp_path, chains):
    earlier = EarlierRuns(tmp_path / "cache", {"s": "settings"})
    duplicates(tmp_path, "first", dict(list(chains.items())[:110]), earlier, CHAINED)
    removed = duplicates(tmp_path, "grown", chains, earlier, CHAINED)
    assert duplicates(tmp_path, "grown", chains, earlier, CHAINED) == removed


def test_a_new_document_that_is_there_already_is_refused(tmp_path, documents):
    earlier = EarlierRuns(tmp_path / "cache", {"s": "settings"})
    files = [
        planted.write_part(tmp_path / f"s-{number}.parquet", part)
        for number, part in enumerate((documents, {"aa0": "w1 w2"}))
    ]
    engine = planted.engine()
    find_near_duplicates(files, NearDedupConfig(), engine, tmp_path / "work", earlier=earlier)
    twin = planted.write_part(tmp_path / "t-2.parquet", {"000": documents["000"]})
    with pytest.raises(InputError, match="is given twice"):
        find_near_duplicates([*files, twin], NearDedupConfig(), engine, tmp_path / "work2", earlier=earlier)


def test_other_settings_of_a_source_or_of_the_step_know_nothing(tmp_path, documents):
    earlier = EarlierRuns(tmp_path / "cache", {"s": "settings"})
    duplicates(tmp_path, "first", documents, earlier)
    other_texts = {name: f"{text} {name} " * 3 for name, text in documents.items()}
    changed = replace(earlier, sources={"s": "other settings"})
    assert duplicates(tmp_path, "texts", other_texts, changed) == duplicates(tmp_path, "texts-alone", other_texts, None)
    config = NearDedupConfig(threshold=0.99)
    assert duplicates(tmp_path, "0.99", documents, earlier, config).num_rows == 0

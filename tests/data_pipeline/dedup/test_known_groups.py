"""Groups decided by an earlier run: the same duplicates as without it, and only changed groups are compared again."""

from dataclasses import replace

import numpy as np
import planted
import pytest

from gristmill.data_pipeline.dedup import verify_candidates
from gristmill.data_pipeline.dedup.exact import table_of
from gristmill.data_pipeline.dedup.near import EarlierRuns, NearDedupConfig, find_near_duplicates

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
    assert compared == [6, 118]
    grown = {**documents, "ff": documents["070"] + " more"}
    assert duplicates(tmp_path, "grown", grown, earlier) == duplicates(tmp_path, "grown-alone", grown, None)


def test_other_settings_of_a_source_or_of_the_step_know_nothing(tmp_path, documents):
    earlier = EarlierRuns(tmp_path / "cache", {"s": "settings"})
    duplicates(tmp_path, "first", documents, earlier)
    other_texts = {name: f"{text} {name} " * 3 for name, text in documents.items()}
    changed = replace(earlier, sources={"s": "other settings"})
    assert duplicates(tmp_path, "texts", other_texts, changed) == duplicates(tmp_path, "texts-alone", other_texts, None)
    config = NearDedupConfig(threshold=0.99)
    assert duplicates(tmp_path, "0.99", documents, earlier, config).num_rows == 0

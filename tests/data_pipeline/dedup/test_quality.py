"""What is found and what is spared: planted copies, the labelled sets, and natural editions of one book."""

import io
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import zstandard
from planted import edited, engine, found, padded, write_part

from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.minhash import shingles_of
from gristmill.data_pipeline.dedup.near import NearDedupConfig, near_duplicates


def exact_jaccard(left: str, right: str, ngram: int = 5) -> float:
    one, two = (set(shingles_of(fold_text(text), ngram)) for text in (left, right))
    return len(one & two) / len(one | two)


def test_planted_copies_go_if_and_only_if_they_are_similar_enough(tmp_path: Path):
    generator = np.random.default_rng(11)
    texts: dict[str, str] = {}
    for family in range(120):
        words = [f"w{generator.integers(4000)}" for _ in range(200)]
        texts[f"{2 * family + 1:x}"] = " ".join(words)
        texts[f"{2 * family + 2:x}"] = " ".join(edited(words, generator, int(generator.integers(0, 9))))
    pairs = {(f"{2 * k + 1:x}", f"{2 * k + 2:x}") for k in range(120)}
    wanted = {frozenset(pair) for pair in pairs if exact_jaccard(*(texts[i] for i in pair)) >= 0.8}
    part = write_part(tmp_path / "p.parquet", texts)
    removed = found(near_duplicates([part], NearDedupConfig(), engine(), tmp_path / "work"))
    assert {frozenset((doc_id, kept)) for doc_id, (kept, _) in removed.items()} == wanted
    assert len(wanted) > 40
    for doc_id, (kept, similarity) in removed.items():
        assert similarity == exact_jaccard(texts[doc_id], texts[kept])


def test_a_chain_of_small_changes_is_not_eaten(tmp_path: Path):
    # Each document is 0.8 similar to the one before; union-find over such pairs keeps one of twelve.
    words = [f"w{i}" for i in range(100)]
    chain = {}
    for step in range(12):
        chain[f"{step + 1:x}"] = " ".join(words)
        words = [*words[10:], *(f"x{step}-{i}" for i in range(10))]
    part = write_part(tmp_path / "p.parquet", chain)
    removed = found(near_duplicates([part], NearDedupConfig(), engine(), tmp_path / "work"))
    for doc_id, (kept, _) in removed.items():
        assert kept not in removed
        assert exact_jaccard(chain[doc_id], chain[kept]) >= 0.8
    survivors = [doc_id for doc_id in chain if doc_id not in removed]
    assert len(survivors) >= 6
    assert all(exact_jaccard(chain[one], chain[two]) < 0.8 for one, two in combinations(survivors, 2))


def labelled(path: Path) -> tuple[dict[str, str], set[frozenset[str]]]:
    """Texts by name, and the pairs named in the .truth file beside them."""
    texts = dict(line.split(" ", 1) for line in path.read_text("utf-8", "replace").splitlines() if " " in line)
    truth = {frozenset(line.split()) for line in path.with_suffix(".truth").read_text().splitlines() if line.strip()}
    return texts, truth


def test_the_labelled_sets_perfectly(tmp_path: Path, shared_data):
    for name in ("articles_100", "articles_1000"):
        texts, truth = labelled(shared_data(f"neardup/{name}.train"))
        ids = {f"{number + 1:x}": name for number, name in enumerate(texts)}
        documents = {doc_id: texts[name] for doc_id, name in ids.items()}
        part = write_part(tmp_path / f"{name}.parquet", documents)
        removed = found(near_duplicates([part], NearDedupConfig(), engine(), tmp_path / name))
        assert {frozenset((ids[doc_id], ids[kept])) for doc_id, (kept, _) in removed.items()} == truth


def test_editions_of_a_book(tmp_path: Path, shared_data):
    path = shared_data("corpora/rust_book.jsonl.zst")
    with zstandard.open(path, "rb") as file:
        texts = [json.loads(line)["text"] for line in io.TextIOWrapper(file, "utf-8")]
    documents = {f"{number + 1:x}": text for number, text in enumerate(texts)}
    part = write_part(tmp_path / "p.parquet", documents)
    removed = found(near_duplicates([part], NearDedupConfig(), engine(), tmp_path / "work"))
    sets = {doc_id: set(shingles_of(fold_text(text), 5)) for doc_id, text in documents.items()}
    order = sorted(documents, key=lambda i: (-len(documents[i].encode()), padded(i)))
    kept: list[str] = []
    expected = set()
    for doc_id in order:
        # Similarity is at most the ratio of the sizes; a text without words is no one's duplicate.
        near = [
            k for k in kept if min(len(sets[k]), len(sets[doc_id])) >= 0.8 * max(len(sets[k]), len(sets[doc_id]), 1)
        ]
        if any(len(sets[doc_id] & sets[k]) / len(sets[doc_id] | sets[k]) >= 0.8 for k in near):
            expected.add(doc_id)
        else:
            kept.append(doc_id)
    assert len(expected) >= 10
    assert set(removed) == expected

"""Near copies by kept signatures: every planted copy above the threshold is found, and none below it."""

import numpy as np
import planted

from gristmill.data_pipeline.dedup.near import NearDedupConfig
from gristmill.data_pipeline.dedup.near_copies import SignedTexts, near_copies
from gristmill.data_pipeline.dedup.signature_cache import SignatureCache
from gristmill.data_pipeline.dedup.signatures import sign_corpus

WORDS = np.array([f"w{number}" for number in range(4000)])
COPIES, OTHERS, LENGTH = 400, 2000, 200


def similarity_of(left: str, right: str) -> float:
    """Jaccard similarity of the word 5-grams, in plain Python."""
    sets = [{tuple(text.split()[i : i + 5]) for i in range(len(text.split()) - 4)} for text in (left, right)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def signed(file, folder):
    """A cache with the signatures of the file's documents."""
    scheme = NearDedupConfig().scheme
    cache = SignatureCache.of(folder / "cache", scheme)
    sign_corpus([file], scheme, planted.engine(), folder / "store", cache=cache)
    return cache


def test_every_planted_copy_above_the_threshold(tmp_path):
    generator = np.random.default_rng(5)
    wanted = [" ".join(generator.choice(WORDS, LENGTH)) for _ in range(20)]
    documents, expected = {}, {}
    for number in range(COPIES):
        words = wanted[number % 20].split()
        for place in generator.choice(LENGTH, int(generator.integers(0, 12)), replace=False).tolist():
            words[place] = "changed"
        documents[f"{number:x}"] = " ".join(words)
        expected[planted.padded(f"{number:x}")] = similarity_of(wanted[number % 20], documents[f"{number:x}"])
    documents |= {f"f{number:05x}": " ".join(generator.choice(WORDS, LENGTH)) for number in range(OTHERS)}
    file = planted.write_part(tmp_path / "part.parquet", documents)
    scheme = NearDedupConfig().scheme
    cache = signed(file, tmp_path)
    copies = near_copies(SignedTexts.of(wanted, scheme), [file], cache, 0.8, planted.engine())
    above = {doc_id: similarity for doc_id, similarity in expected.items() if similarity >= 0.8}
    assert 100 < len(above) < COPIES
    assert {copy.doc_id: round(copy.similarity, 9) for copy in copies} == {
        doc_id: round(similarity, 9) for doc_id, similarity in above.items()
    }


def test_texts_without_a_word_have_no_copies(tmp_path):
    file = planted.write_part(tmp_path / "part.parquet", {"1": "a b c d e f", "2": ""})
    scheme = NearDedupConfig().scheme
    cache = signed(file, tmp_path)
    assert near_copies(SignedTexts.of(["", " \n"], scheme), [file], cache, 0.8, planted.engine()) == []


def test_a_document_that_its_file_has_lost_is_no_copy(tmp_path):
    text = "one two three four five six seven"
    file = planted.write_part(tmp_path / "part.parquet", {"1": text, "2": "other words", "3": text})
    cache = signed(file, tmp_path)
    file = planted.write_part(tmp_path / "part.parquet", {"2": "other words", "3": text})
    texts = SignedTexts.of([text], NearDedupConfig().scheme)
    copies = near_copies(texts, [file], cache, 0.8, planted.engine())
    assert [(copy.row, copy.doc_id, copy.similarity) for copy in copies] == [(1, planted.padded("3"), 1.0)]


def test_signatures_that_a_stopped_run_did_not_keep_are_kept_by_the_next(tmp_path):
    file = planted.write_part(tmp_path / "part.parquet", {"1": "one two three four five six seven"})
    cache = signed(file, tmp_path)
    content = [path.read_bytes() for path in cache.paths("part")]
    for path in cache.paths("part"):
        path.unlink()
    assert [path.read_bytes() for path in signed(file, tmp_path).paths("part")] == content

"""The signature store: used by datasketch, merged, refused, and asked for the nearest documents."""

import json
from pathlib import Path

import pytest
from datasketch import MinHash, MinHashLSH, MinHashLSHForest
from planted import engine, padded, write_part

from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.data_pipeline.dedup.minhash import ShingleHash, shingles_of
from gristmill.data_pipeline.dedup.near import keep_signatures
from gristmill.data_pipeline.dedup.near_copies import minhashes, similar
from gristmill.data_pipeline.dedup.signatures import SignatureScheme, find_store, merge_stores, open_store, sign_corpus
from gristmill.foundation.errors import InputError

TEXTS = {
    "1": "The quick brown fox jumps over the lazy dog near the old mill.",
    "2": "The quick brown fox jumps over the lazy dog near the new mill.",
    "3": "Bread is made of flour, water, salt and yeast, and of patience.",
}
SCHEME = SignatureScheme(ngram=2)


def test_datasketch_takes_the_store(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS)
    store = sign_corpus([part], SCHEME, engine(), tmp_path / "store")
    index, forest = MinHashLSH(threshold=0.5, num_perm=128), MinHashLSHForest(num_perm=128)
    for doc_id, minhash in minhashes(store):
        index.insert(doc_id, minhash)
        forest.add(doc_id, minhash)
    forest.index()
    question = MinHash(128, hashfunc=ShingleHash())
    question.update_batch(shingles_of(fold_text(TEXTS["1"].upper()), 2))
    assert set(index.query(question)) == {padded("1"), padded("2")}
    assert set(forest.query(question, 2)) == {padded("1"), padded("2")}
    assert question.jaccard(dict(minhashes(store))[padded("1")]) == 1.0


def test_similar_measures_exactly(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS, source="tales")
    store = sign_corpus([part], SCHEME, engine(), tmp_path / "store")
    nearest = similar(TEXTS["1"], store, [part])
    # 12 pairs each; "the old", "old mill" against "the new", "new mill": 10 shared of 14.
    assert [(n.doc_id, n.source, n.similarity) for n in nearest] == [
        (padded("1"), "tales", 1.0),
        (padded("2"), "tales", 10 / 14),
    ]
    assert nearest[1].excerpt == TEXTS["2"]
    assert len(similar(TEXTS["1"], store, [part], limit=1)) == 1
    with pytest.raises(InputError, match="no word"):
        similar("...", store, [part])


def test_every_signature_or_datasketch_s_index_give_the_same(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS, source="tales")
    store = sign_corpus([part], SCHEME, engine(), tmp_path / "store")
    assert similar(TEXTS["1"], store, [part], exhaustive=True) == similar(TEXTS["1"], store, [part])


def test_a_curated_corpus_keeps_its_signatures(tmp_path: Path):
    corpus = tmp_path / "work/curate"
    write_part(corpus / "documents/train/old-tales-00000.parquet", {"1": TEXTS["1"]})
    write_part(corpus / "documents/test/bakery-00000.parquet", {"3": TEXTS["3"]})
    keep_signatures(corpus, SCHEME, engine())
    for folder in (corpus, tmp_path / "work", corpus / "signatures"):
        store = open_store(find_store(folder))
        nearest = similar(TEXTS["2"], store, store.document_files())
        assert [(n.doc_id, n.source, n.similarity) for n in nearest] == [(padded("1"), "old-tales", 10 / 14)]
    (corpus / "documents/test/bakery-00000.parquet").unlink()
    with pytest.raises(InputError, match=r"\(bakery-00000.parquet\) are not where they were"):
        store.document_files()
    with pytest.raises(InputError, match="no documents"):
        keep_signatures(tmp_path, SCHEME, engine())
    with pytest.raises(InputError, match="no signature store; curate that corpus with near_dedup"):
        find_store(tmp_path)


def test_a_merged_store_finds_the_documents_of_both(tmp_path: Path):
    for name, number in (("a", "1"), ("b", "2")):
        write_part(tmp_path / name / "documents/train/tales-00000.parquet", {number: TEXTS[number]})
        keep_signatures(tmp_path / name, SCHEME, engine())
    merged = merge_stores([tmp_path / "a/signatures", tmp_path / "b/signatures"], tmp_path / "deep/er/merged")
    assert [part.path for part in merged.document_files()] == [
        (tmp_path / name / "documents/train/tales-00000.parquet").resolve() for name in "ab"
    ]
    with pytest.raises(InputError, match="is not empty; name a new folder"):
        merge_stores([tmp_path / "a/signatures"], tmp_path / "deep/er/merged")


def test_merged_stores_hold_both(tmp_path: Path):
    one = write_part(tmp_path / "1.parquet", {"1": TEXTS["1"]})
    two = write_part(tmp_path / "2.parquet", {"2": TEXTS["2"]})
    stores = [sign_corpus([p], SCHEME, engine(), tmp_path / p.path.stem) for p in (one, two)]
    merged = merge_stores([store.folder for store in stores], tmp_path / "merged")
    assert [n.doc_id for n in similar(TEXTS["1"], merged, [one, two])] == [padded("1"), padded("2")]
    together = sign_corpus([one, two], SCHEME, engine(), tmp_path / "together")
    for path in sorted(together.folder.glob("[!.]*")):
        assert (merged.folder / path.name).read_bytes() == path.read_bytes()


def test_stores_that_cannot_be_merged(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", TEXTS)
    for name, scheme in (("a", SCHEME), ("b", SignatureScheme(ngram=3))):
        sign_corpus([part], scheme, engine(), tmp_path / name)
    with pytest.raises(InputError, match="ngram=3, but 2 is wanted"):
        merge_stores([tmp_path / "a", tmp_path / "b"], tmp_path / "m")
    with pytest.raises(InputError, match=f"document {padded('1')} is in another store"):
        merge_stores([tmp_path / "a", tmp_path / "a"], tmp_path / "m")


def test_no_store_or_another_version(tmp_path: Path):
    with pytest.raises(InputError, match="no signature store"):
        open_store(tmp_path)
    part = write_part(tmp_path / "p.parquet", TEXTS)
    store = sign_corpus([part], SCHEME, engine(), tmp_path / "store")
    path = store.folder / "store.json"
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps({**content, "scheme": {**content["scheme"], "scheme": "legacy"}}))
    with pytest.raises(InputError, match="a store of another scheme"):
        open_store(store.folder)

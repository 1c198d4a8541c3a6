"""Arms read what they share in one order; seeds read documents of their own; sources repeat as in the target run."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.data_pipeline.indexed.config import IndexConfig
from gristmill.data_pipeline.indexed.samples import TooFewTokens
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.pipelines.ablate import corpora
from gristmill.pipelines.ablate.paired_samples import DocumentDraw, PairedSamples, pieces_of

HERE = LocalEngine(1, Reporter.silent())
LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("paired")
    arm = write_arm(folder / "text", {number: document(number) for number in range(100)})
    corpora.train_tokenizer([arm], [["s"]], 0, folder / "tokenizer", HERE)
    return folder / "tokenizer"


def document(number: int, words: int = 30) -> str:
    """Words that stand in this document alone."""
    letters = np.random.default_rng(number).choice(list("abcdefghijklmnopqrstuvwxyz"), (words, 5))
    return " ".join("".join(word) for word in letters)


def write_arm(folder: Path, texts: dict[int, str]) -> Path:
    """A corpus folder. texts: number of the raw record -> text."""
    doc_ids = [hashlib.sha256(str(number).encode()).hexdigest()[:32] for number in texts]
    path = folder / "documents" / "train" / "s-00000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"doc_id": doc_ids, "text": list(texts.values())}), path)
    return folder


def samples(arm: Path, tokenizer: Path, draw: DocumentDraw) -> PairedSamples:
    corpora.write_index(arm, ["s"], tokenizer, 0, HERE)
    return PairedSamples(arm / "index", arm / "keys", LENGTH, draw, IndexConfig())


def stream(drawn: PairedSamples, num_samples: int) -> np.ndarray:
    return drawn.batch(range(num_samples))["tokens"].reshape(-1)


def test_an_edited_document_moves_no_other(tmp_path, tokenizer):
    """The arms' streams are equal but for the pieces of the document that one of them has edited, or lacks."""
    texts = {number: document(number) for number in range(100)}
    whole = samples(write_arm(tmp_path / "a", texts), tokenizer, DocumentDraw(7, 0.0, 1.0, 100))
    edited = samples(
        write_arm(tmp_path / "b", texts | {50: document(50, 20)}), tokenizer, DocumentDraw(7, 0.0, 1.0, 100)
    )
    lacking = samples(
        write_arm(tmp_path / "c", {number: text for number, text in texts.items() if number != 50}),
        tokenizer,
        DocumentDraw(7, 0.0, 1.0, 100),
    )
    first = pieces_in_order(whole)
    for other in (edited, lacking):
        common = [piece for piece in pieces_in_order(other) if piece in set(first)]
        assert len(common) > 0.98 * len(first) - 40
        assert common == [piece for piece in first if piece in set(common)]


def pieces_in_order(drawn: PairedSamples) -> list[bytes]:
    (source,) = drawn._streams
    starts, offsets = source._order(0)
    sizes = np.diff(offsets)
    return [source._tokens[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)]


def test_keys_stand_beside_their_documents(tmp_path, tokenizer):
    """The index shuffles documents; the seed's share of the circle is then of the raw records, in every arm."""
    texts = {number: document(number) for number in range(100)}
    backwards = dict(reversed(texts.items()))
    draw = DocumentDraw(1, 0.25, 0.2, 1)
    first = samples(write_arm(tmp_path / "a", texts), tokenizer, draw)
    second = samples(write_arm(tmp_path / "b", backwards), tokenizer, draw)
    assert pieces_in_order(first) == pieces_in_order(second)


def test_seeds_read_documents_of_their_own(tmp_path, tokenizer):
    arm = write_arm(tmp_path / "a", {number: document(number) for number in range(100)})
    whole = pieces_in_order(samples(arm, tokenizer, DocumentDraw(0, 0.0, 1.0, LENGTH)))
    read: list[bytes] = []
    for number in range(4):
        read += pieces_in_order(samples(arm, tokenizer, DocumentDraw(number, number / 4, 0.25, LENGTH)))
    assert len(read) == pytest.approx(len(whole), rel=0.1)
    assert len(set(read)) > 0.8 * len(whole)  # a place of the circle for each document: four parts are not quite equal


def test_an_epoch_holds_every_token_once_and_the_next_another_order(tmp_path, tokenizer):
    arm = write_arm(tmp_path / "a", {number: document(number) for number in range(10)})
    drawn = samples(arm, tokenizer, DocumentDraw(3, 0.0, 1.0, 10_000))
    (source,) = drawn._streams
    tokens = stream(drawn, 2 * source.num_windows)
    first, second = np.split(tokens, 2)
    everything = np.bincount(np.asarray(source._tokens), minlength=drawn.vocab_size)
    left_out = everything - np.bincount(first, minlength=drawn.vocab_size)
    assert left_out.min() >= 0 and left_out.sum() <= LENGTH
    assert not np.array_equal(first, second)


def test_a_source_is_subsampled_to_the_repetitions_of_the_target_run(tmp_path, tokenizer):
    arm = write_arm(tmp_path / "a", {number: document(number) for number in range(100)})
    tokens = 40 * LENGTH
    drawn = samples(arm, tokenizer, DocumentDraw(3, 0.0, 0.5, tokens, {"s": 4.0}))
    assert drawn.epochs(40)["s"] == pytest.approx(4.0, rel=0.5)
    plenty = samples(arm, tokenizer, DocumentDraw(3, 0.0, 0.5, tokens))
    assert plenty.epochs(40)["s"] < 1


def test_too_little_text_is_said(tmp_path, tokenizer):
    arm = write_arm(tmp_path / "a", {0: "a"})
    with pytest.raises(TooFewTokens, match="a sample needs 17; give the source more text"):
        samples(arm, tokenizer, DocumentDraw(0, 0.0, 1.0, 100))


def test_pieces_by_hand():
    starts, sizes, keys = pieces_of(np.array([10, 20]), np.array([15, 22]), np.array([5, 6], np.uint64), 2)
    assert starts.tolist() == [10, 12, 14, 20] and sizes.tolist() == [2, 2, 1, 2]
    assert len(set(keys.tolist())) == 4

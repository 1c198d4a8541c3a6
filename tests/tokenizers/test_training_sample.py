"""The tokenizer's training sample: shares of the blend, temperature, never more than there is."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.tokenizers import training_sample
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.training_sample import MAX_DOCUMENT_CHARACTERS, allocate_sample_budget, training_texts

HERE = LocalEngine(1, Reporter.silent())


class Elsewhere(LocalEngine):
    """Tasks and results are pickled, as on their way to a worker and back. descriptions: of its maps."""

    def __init__(self):
        super().__init__(2, Reporter.silent())
        self.descriptions = []

    def map(self, function, tasks, description, sizes=None, unit="tasks"):
        self.descriptions.append(description)
        return [pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(task))))) for task in tasks]


@pytest.fixture
def corpus(tmp_path):
    """news: 400 English and 100 German documents; code: 100 without a language. Every document has 100 bytes."""

    def write(source: str, rows: list[tuple[str, str | None]]) -> None:
        path = tmp_path / "documents" / "train" / f"{source}-00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"{source} {language} {number}".ljust(100, ".") for number, (_, language) in enumerate(rows)]
        table = pa.table({"text": texts, "language": pa.array([language for _, language in rows], pa.string())})
        pq.write_table(table, path, row_group_size=64)

    write("news", [("", "de" if number % 5 == 0 else "en") for number in range(500)])
    write("code", [("", None)] * 100)
    return tmp_path


def test_filling_worked_by_hand():
    assert allocate_sample_budget([0.5, 0.5], [100, 20], 80) == [60, 20]
    assert allocate_sample_budget([0.5, 0.3, 0.2], [100, 100, 100], 50) == [25, 15, 10]
    assert allocate_sample_budget([0.5, 0.5], [10, 20], 80) == [10, 20]


@given(
    parts=st.lists(st.tuples(st.floats(0.01, 1), st.integers(0, 1000)), min_size=1, max_size=8),
    total=st.integers(0, 4000),
)
def test_filling_gives_all_it_can_and_no_more(parts, total):
    shares, available = [share for share, _ in parts], [amount for _, amount in parts]
    given_ = allocate_sample_budget(shares, available, total)
    assert all(amount <= limit for amount, limit in zip(given_, available, strict=True))
    assert sum(given_) == pytest.approx(min(total, sum(available)), abs=len(parts) + 1)


def taken(corpus, sources=("news", "code"), **fields) -> dict[str, int]:
    config = TokenizerConfig(**{"sample_bytes": 10_000, **fields})
    return training_texts(corpus, sources, config, 1, HERE)[1]


def test_sources_have_their_share_of_the_text(corpus):
    sampled = taken(corpus)
    assert sampled["news"] / sampled["code"] == pytest.approx(5, rel=0.1)


def test_temperature_flattens_the_blend(corpus):
    flat = taken(corpus, temperature=2.0)
    assert flat["news"] / flat["code"] == pytest.approx(5**0.5, rel=0.05)
    assert taken(corpus, temperature=1000.0) == pytest.approx({"news": 5000, "code": 5000}, abs=100)


def test_languages_are_weighed_across_sources(corpus):
    """Their shares are those of the slices that were read: 400 of the 500 documents here."""
    by_language = taken(corpus, ["news"], group_by="language")
    assert by_language == {"de": pytest.approx(2000, abs=200), "en": pytest.approx(8000, abs=200)}
    flat = taken(corpus, ["news"], group_by="language", temperature=1000.0)
    assert flat == {"de": pytest.approx(5000, abs=200), "en": pytest.approx(5000, abs=200)}
    with_code = taken(corpus, group_by="language")
    assert with_code == {
        "de": pytest.approx(1667, abs=200),
        "en": pytest.approx(6667, abs=200),
        "unknown": pytest.approx(1667, abs=200),
    }


def test_what_one_source_lacks_the_others_give(corpus):
    assert taken(corpus, sample_bytes=40_000, temperature=1000.0) == {"news": 30_000, "code": 10_000}
    assert taken(corpus, sample_bytes=10**9) == {"news": 50_000, "code": 10_000}


def test_no_text_is_taken_twice_and_seeds_draw_others(corpus):
    config = TokenizerConfig(sample_bytes=10_000)
    first, again, other = (training_texts(corpus, ["news"], config, seed, HERE)[0] for seed in (1, 1, 2))
    assert len(set(first)) == len(first) == 100
    assert first == again
    assert set(first) != set(other)


def test_workers_read_the_same_sample(corpus, monkeypatch):
    expected = training_texts(corpus, ["news", "code"], TokenizerConfig(sample_bytes=20_000), 1, HERE)
    elsewhere = Elsewhere()
    for min_bytes, maps in ((training_sample.MIN_PARALLEL_BYTES, 0), (1, 1)):  # a small sample is read in this process
        monkeypatch.setattr(training_sample, "MIN_PARALLEL_BYTES", min_bytes)
        config = TokenizerConfig(sample_bytes=20_000)
        assert training_texts(corpus, ["news", "code"], config, 1, elsewhere) == expected
        assert elsewhere.descriptions == ["tokenizer: reading"] * maps


def test_one_huge_document_gives_an_excerpt(tmp_path):
    path = tmp_path / "documents" / "train" / "books-00000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["é" * 200_000]}), path)
    texts, amount = training_texts(tmp_path, ["books"], TokenizerConfig(), 1, HERE)
    assert [len(text) for text in texts] == [MAX_DOCUMENT_CHARACTERS]
    assert amount == {"books": 2 * MAX_DOCUMENT_CHARACTERS}


def test_a_source_without_documents_is_named(corpus):
    with pytest.raises(InputError, match="source 'gone' has no documents in the train split"):
        training_texts(corpus, ["gone"], TokenizerConfig(), 1, HERE)

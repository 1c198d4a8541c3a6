import pytest

from gristmill.data_pipeline.corpus.document_history import open_corpus
from gristmill.data_pipeline.curate_config import CurateConfig
from gristmill.data_pipeline.filters.threshold_sweep import parse_sweep, sweep
from gristmill.data_pipeline.readers.resolve import resolve
from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.data_pipeline.run_curation import annotated
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.lock import Lock
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.tasks.local import LocalEngine
from tests.support.corpora import prose, run_curate, write_jsonl

ENGINE = LocalEngine(1, Reporter.silent())


@pytest.fixture
def books(tmp_path) -> SourceConfig:
    """Texts of 24, 48, 72 ... 240 words."""
    write_jsonl(tmp_path / "books.jsonl", [{"text": prose(k, 24 * k)} for k in range(1, 11)])
    return SourceConfig(name="books", format="jsonl", paths=(str(tmp_path / "books.jsonl"),))


def test_a_sweep_counts_what_each_threshold_would_keep(books, tmp_path):
    lock = Lock(sources=tuple(resolve([books], ENGINE)))
    sources = annotated([books], CurateConfig(), lock, tmp_path / "cache", ENGINE)
    rows = sweep(sources, parse_sweep("gopher_quality.min_words=24:240:10"), ENGINE)
    # a line of 12 words and its full stop: plain words are the words
    assert [(row.threshold, row.documents, row.taken) for row in rows] == [
        (24.0 * k, 11 - k, k - 1) for k in range(1, 11)
    ]
    assert rows[0].bytes > rows[1].bytes > rows[9].bytes > 0
    with pytest.raises(RecipeError, match=r"did you mean 'gopher_quality.min_words'"):
        sweep(sources, parse_sweep("gopher_quality.min_word=1:2:2"), ENGINE)


def test_a_sweep_is_written_one_way():
    assert parse_sweep("a.b=0:1:3").thresholds == (0.0, 0.5, 1.0)
    for wrong in ("a.b=1:2", "a.b=x:2:3", "a.b=1:2:0", "nothing"):
        with pytest.raises(RecipeError, match="is not a sweep; write rule=low:high:n"):
            parse_sweep(wrong)


def test_a_corpus_answers_sql(books, tmp_path):
    run_curate([books], tmp_path)
    corpus = open_corpus(tmp_path)
    question = "SELECT count(*), sum(num_plain_words) FROM signals JOIN documents USING (doc_id) WHERE source = 'books'"
    assert corpus.execute(question).fetchall() == [(8, sum(24 * k for k in range(3, 11)))]
    outcomes = "SELECT outcome, rule, count(*) FROM ledger GROUP BY ALL ORDER BY ALL"
    assert corpus.execute(outcomes).fetchall() == [("kept", None, 8), ("removed", "gopher_quality.min_words", 2)]
    assert {row[0] for row in corpus.execute("SELECT DISTINCT split FROM documents").fetchall()} <= {
        "train",
        "validation",
        "test",
    }
    with pytest.raises(InputError, match="no ledger here"):
        open_corpus(tmp_path / "nowhere")


def test_the_corpus_of_a_folder_with_characters_of_globs_and_quotes(tmp_path):
    folder = tmp_path / "it's [1]* d?r{x}"
    (tmp_path / "raw").mkdir()
    write_jsonl(tmp_path / "raw/a.jsonl", [{"text": prose(k)} for k in range(20)])
    run_curate(
        [SourceConfig(name="s", format="jsonl", paths=(str(tmp_path / "raw/a.jsonl"),))], folder, near_dedup=None
    )
    count = open_corpus(folder).execute("SELECT count(*) FROM documents").fetchall()
    assert count == open_corpus(folder).execute("SELECT count(*) FROM ledger WHERE outcome = 'kept'").fetchall()

"""Texts of benchmarks for decontamination."""

import pytest

from gristmill.evaluation.tasks.benchmark_texts import BenchmarkText, benchmark_digest, benchmark_texts
from gristmill.foundation.errors import InputError, RecipeError

RECORD = '{"context": "The mill stands.", "hypothesis": "It fell.", "label": "c", "reasons": ["no", "word"], "n": 3}\n'


@pytest.fixture
def data(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "anli_r1_test.jsonl").write_text(RECORD)
    return tmp_path


def test_every_field_of_a_record_is_a_text_of_its_own(data):
    assert list(benchmark_texts([("anli_r1", ())], data)) == [
        BenchmarkText("anli_r1", 0, "premise", "The mill stands."),
        BenchmarkText("anli_r1", 0, "hypothesis", "It fell."),
        BenchmarkText("anli_r1", 0, "reasons", "no", is_answer=True),
        BenchmarkText("anli_r1", 0, "reasons", "word", is_answer=True),
    ]


def test_chosen_fields_and_what_is_not_there(data):
    chosen = list(benchmark_texts([("anli_r1", ["hypothesis"])], data))
    assert chosen == [BenchmarkText("anli_r1", 0, "hypothesis", "It fell.")]
    assert benchmark_digest(chosen) != benchmark_digest(list(benchmark_texts([("anli_r1", ())], data)))
    with pytest.raises(InputError, match=r"task anli_r1, record 0: no field 'question'; fields are \['hypothesis'"):
        list(benchmark_texts([("anli_r1", ["question"])], data))
    with pytest.raises(RecipeError, match="no task 'anli_r9'; the nearest is 'anli_r"):
        list(benchmark_texts([("anli_r9", ())], data))
    with pytest.raises(InputError, match="absent; this task reads"):
        list(benchmark_texts([("mtnlg", ())], data))


def test_pinned_sets_are_read(shared_data):
    root = shared_data("benchmarks/copa.jsonl.zst").parents[1]
    texts = list(benchmark_texts([("copa", ["premise"]), ("gristmill_winograd_wsc", ["context_options"])], root))
    assert len({(text.task, text.record) for text in texts}) == 100 + 273

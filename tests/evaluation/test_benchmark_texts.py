import pytest

from gristmill.evaluation.benchmark_texts import benchmark_texts


def test_all_strings_of_a_record_are_its_text(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    path = tmp_path / "benchmarks" / "anli_r1_test.jsonl"
    path.write_text(
        '{"context": "The mill stands.", "hypothesis": "It fell.", "label": "c", "reasons": ["no", "word"]}\n'
    )
    found = list(benchmark_texts(["gristmill_anli_r1"], tmp_path))
    assert found == [("anli_r1", "The mill stands.\nIt fell.\nc\nno\nword")]
    with pytest.raises(KeyError, match="no task 'anli_r9'"):
        list(benchmark_texts(["anli_r9"], tmp_path))


def test_pinned_sets_are_read(shared_data):
    root = shared_data("benchmarks/copa.jsonl.zst").parents[1]
    texts = list(benchmark_texts(["copa", "gristmill_winograd_wsc"], root))
    assert len(texts) == 100 + 273

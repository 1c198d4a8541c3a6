"""Edited questions and short ones with their answers: by hand, by laws, and on the shared benchmarks."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import engine, padded, write_part
from pydantic import ValidationError

from gristmill.data_pipeline.decontamination.config import (
    BenchmarkConfig,
    DecontaminateConfig,
    missing_fields,
    read_benchmark,
)
from gristmill.data_pipeline.decontamination.decontaminate import decontaminate
from gristmill.data_pipeline.decontamination.edits import WORD_BITS, align, max_score
from gristmill.data_pipeline.decontamination.matches import report_markdown
from gristmill.data_pipeline.decontamination.ngram_index import information, words_of

QUESTION = "Which of the seven rivers that cross the old kingdom has never once frozen over in any recorded winter"
PROSE = "The miller rose before dawn and walked down to the weir. " * 10


def benchmark(path: Path, records: list[dict], **settings) -> BenchmarkConfig:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return BenchmarkConfig(name="rivers", paths=(path,), **settings)


def found(folder: Path, config: BenchmarkConfig, documents: dict[str, str], **settings):
    part = write_part(folder / "p.parquet", documents)
    wanted = DecontaminateConfig(benchmarks=(config,), **settings)
    return decontaminate([part], wanted, engine(), folder / "work")


EDITS = {
    "substituted": QUESTION.replace("seven", "nine"),
    "inserted": QUESTION.replace("seven", "seven long"),
    "deleted": QUESTION.replace(" recorded", ""),
    "three substituted": f"What of the SEVEN, lakes --{QUESTION[25:]}".replace("recorded", "known"),
    "three in a row inserted": QUESTION.replace("kingdom", "kingdom of the Arl that"),
    "three in a row deleted": QUESTION.replace("cross the old ", ""),
}


def test_every_edit_is_found_where_it_stands_and_cut_out(tmp_path: Path):
    documents = {f"{k + 1:x}": f"{PROSE}Well: {text}? {PROSE}" for k, text in enumerate(EDITS.values())}
    rivers = benchmark(tmp_path / "b.jsonl", [{"q": QUESTION}], fields=("q",))
    result = found(tmp_path, rivers, {**documents, "a": PROSE, "b": f"{PROSE}{QUESTION}."}, margin=0)
    kinds = {row["doc_id"]: (row["kind"], row["matched"], row["of"]) for row in result.matches.to_pylist()}
    assert kinds == {
        padded("1"): ("edited", 18, 19),
        padded("2"): ("edited", 19, 19),
        padded("3"): ("edited", 18, 19),
        padded("4"): ("edited", 16, 19),
        padded("5"): ("edited", 19, 19),
        padded("6"): ("edited", 16, 19),
        padded("b"): ("verbatim", 7, 7),
    }
    pieces = result.pieces.to_pylist()
    assert len(pieces) == 2 * len(EDITS) + 1 and {piece["text"] for piece in pieces} == {PROSE.strip()}
    report = result.report["rivers"]
    assert (report["found"], report["verbatim"], report["documents"]) == (1, 1, 7)  # by the strongest kind
    switched_off = DecontaminateConfig(benchmarks=(rivers,), max_edits=0)
    part = write_part(tmp_path / "q.parquet", documents)
    off = decontaminate([part], switched_off, engine(), tmp_path / "off").matches.to_pylist()
    assert {row["doc_id"] for row in off} == {padded(k) for k in ("1", "2", "3")}  # they hold 13 words in a row


def test_half_of_a_question_is_no_copy(tmp_path: Path):
    """Seven of its words in a row, and its stop words, say nothing of a question of nineteen."""
    documents = {
        "1": f"{PROSE}has never once frozen over in any {PROSE}",
        "2": "of the that the has in any of the " * 30,
    }
    rivers = benchmark(tmp_path / "b.jsonl", [{"q": QUESTION}], fields=("q",))
    assert len(found(tmp_path, rivers, documents).hits) == 0


def test_a_template_in_ten_documents_is_a_common_phrase(tmp_path: Path):
    """Ten documents hold the same eleven words of a question, nine do not make them a common phrase."""
    asked = "Which of these old stone bridges in the northern valley was opened for the first time"
    documents = {
        f"{k + 1:x}": f"{PROSE}Which of these old stone bridges in the northern valley is {k}" for k in range(10)
    }
    rivers = benchmark(tmp_path / "b.jsonl", [{"q": asked}], fields=("q",))
    assert len(found(tmp_path, rivers, documents).hits) == 0
    (tmp_path / "nine").mkdir()
    assert len(found(tmp_path / "nine", rivers, dict(list(documents.items())[:9])).hits) == 9


def test_a_long_text_with_edits_is_told_from_a_part(tmp_path: Path):
    """Of 120 words: ten edited, half of them, and a sentence of twenty."""
    words = [f"word{k}" for k in range(120)]
    ten = ["other" if k % 12 == 0 and k else word for k, word in enumerate(words)]
    ten[24:27] = words[24:27]  # 13 words in a row stay
    documents = {"1": " ".join(ten), "2": " ".join(words[:20]), "3": " ".join(words)}
    rivers = benchmark(tmp_path / "b.jsonl", [{"q": " ".join(words)}], fields=("q",))
    rows = found(tmp_path, rivers, documents).matches.to_pylist()
    assert [row["kind"] for row in rows] == ["edited", "partial", "verbatim"]


SHORT = {"q": "What do tame otters eat?", "choices": ["crayfish and small eels", "old bread"], "gold": 0}


def test_short_questions_stand_whole_with_an_answer(tmp_path: Path):
    documents = {
        "1": f"{PROSE}WHAT do tame otters eat? A) old bread B) crayfish and small eels. {PROSE}",
        "2": f"{PROSE}What do tame otters eat? {PROSE}",
        "3": f"{PROSE}What do wild otters eat? Crayfish and small eels. {PROSE}",
        "4": f"{PROSE}What do tame otters eat? {PROSE * 2} crayfish and small eels",
        "5": f"{PROSE}What do tame otters eat? Crayfish -- and small eels! {PROSE}",
    }
    rivers = benchmark(tmp_path / "b.jsonl", [SHORT], fields=("q", "choices"))
    result = found(tmp_path, rivers, documents, margin=0)
    rows = [(row["doc_id"], row["kind"], row["field"], row["matched"], row["of"]) for row in result.matches.to_pylist()]
    assert rows == [(padded(k), "short", "q", 5, 5) for k in ("1", "5")]
    assert result.report["rivers"]["short"] == 1 and result.report["rivers"]["texts_too_short"] == 2
    assert "otters" not in " ".join(piece["text"] for piece in result.pieces.to_pylist())
    assert len(found(tmp_path, rivers, documents, answer_window=0).hits) == 0


def test_short_questions_that_say_too_little_are_counted(tmp_path: Path):
    """`Is it?` and `no`: five words of every text."""
    rivers = benchmark(tmp_path / "b.jsonl", [{"q": "Is it?", "a": ["no"]}, {"q": "Why?", "a": []}], fields=("q", "a"))
    result = found(tmp_path, rivers, {"1": "Is it? No." * 5})
    assert len(result.hits) == 0 and result.report["rivers"]["texts_too_short"] == 3


def test_fields_missing_in_some_records_are_counted_and_said(tmp_path: Path):
    records = [{"id": "a", "q": QUESTION}, {"id": "b"}, {"q": None, "hint": "x"}, {"id": "d", "q": "", "hint": "y"}]
    config = benchmark(tmp_path / "b.jsonl", records, fields=("q", "hint"), id_field="id")
    examples = read_benchmark(config)
    assert [(example.example, example.field) for example in examples if example.text] == [
        ("a", "q"),
        ("#2", "hint"),
        ("d", "hint"),
    ]
    assert missing_fields(examples) == {"rivers": {"q": 3, "hint": 2}}
    result = found(tmp_path, config, {"1": QUESTION})
    assert result.report["rivers"]["missing"] == {"q": 3, "hint": 2} and result.report["rivers"]["examples"] == 4
    assert "rivers: the field q is missing in 3 of 4 records." in report_markdown(result.report)


def test_which_fields_are_answers(tmp_path: Path):
    record = {"context_options": ["a b", "a c"], "choices": ["x"], "support": "y"}
    fields = tuple(record)
    roles = {e.field: e.is_answer for e in read_benchmark(benchmark(tmp_path / "b", [record], fields=fields))}
    assert roles == {"context_options": False, "choices": True, "support": False}
    named = benchmark(tmp_path / "b", [record], fields=fields, answers=("support",))
    assert {e.field for e in read_benchmark(named) if e.is_answer} == {"support"}
    with pytest.raises(ValidationError, match="the answer 'gold' is none of its fields"):
        benchmark(tmp_path / "b", [record], fields=fields, answers=("gold",))


def plain_alignment(text: list[str], nats: list[float], document: list[str], gap: float) -> float:
    """The best local alignment's score, by the whole table."""
    table = np.zeros((len(text) + 1, len(document) + 1))
    for i, word in enumerate(text, 1):
        for j, other in enumerate(document, 1):
            beside = table[i - 1, j - 1] + (nats[i - 1] if word == other else -gap)
            table[i, j] = max(0.0, beside, table[i - 1, j] - gap, table[i, j - 1] - gap)
    return float(table.max())


few_words = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)


@given(few_words, few_words, st.lists(st.integers(1, 9), min_size=9, max_size=9))
def test_alignment_agrees_with_the_whole_table(text, document, drawn):
    nats = np.array(drawn[: len(text)], np.float64)
    hashes = [words_of([" ".join(words)]).hashes for words in (text, document)]
    room = len(document) + 1
    row = np.empty(room), np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint64)
    score, first, last, words, _ = align(hashes[0], nats, hashes[1], 0, len(document), 1.0, *row)
    assert score == plain_alignment(text, nats.tolist(), document, 1.0)
    assert 0 <= first <= last <= len(document) and words <= min(len(text), last - first)
    assert score <= max_score(hashes[0], nats, hashes[1], np.empty(WORD_BITS // 64, np.uint64))


def test_the_bound_of_a_score_counts_the_words_that_occur():
    """Of a, b and c, of 3, 5 and 7 nats, the document has a and c."""
    text, document = (words_of([words]).hashes for words in ("a b c", "c x a"))
    bound = max_score(text, np.array([3.0, 5.0, 7.0]), document, np.empty(WORD_BITS // 64, np.uint64))
    assert bound == pytest.approx(10, abs=1e-5)


def test_information_of_words():
    """`the`, a stop word, stands once in 100 words of text, `zebra` once in 20,000; two more of each are counted."""
    nats = information(words_of(["the zebra the zebra"]))
    assert nats.tolist() == pytest.approx([-np.log((2 + 1000) / 100004), -np.log((2 + 5) / 100004)] * 2)


def test_no_worker_or_file_changes_what_is_found(tmp_path: Path):
    documents = {f"{k + 1:x}": f"{PROSE}{text}. {PROSE}" for k, text in enumerate([*EDITS.values()] * 2)}
    rivers = benchmark(tmp_path / "b.jsonl", [{"q": QUESTION}, SHORT], fields=("q", "choices"))
    config = DecontaminateConfig(benchmarks=(rivers,), common=100)
    ids = list(documents)
    one = [write_part(tmp_path / "p.parquet", documents)]
    several = [write_part(tmp_path / f"{k}.parquet", {i: documents[i] for i in ids[k::3]}) for k in (2, 0, 1)]
    whole = decontaminate(one, config, engine(), tmp_path / "one")
    cut = decontaminate(several, config, engine(2), tmp_path / "several")
    assert (whole.matches, whole.hits, whole.pieces, whole.report) == (cut.matches, cut.hits, cut.pieces, cut.report)
    assert len(whole.hits) == len(documents)


def test_edited_questions_of_shared_benchmarks(tmp_path: Path, shared_data):
    """The issue's bounds, on 300 questions of ARC and PIQA: of one word edited 95 % are found, of three 80 %."""
    names = {"arc_challenge": ("query", "choices"), "piqa": ("query", "choices")}
    paths = {name: shared_data(f"benchmarks/{name}.jsonl.zst") for name in names}
    benchmarks = tuple(BenchmarkConfig(name=name, paths=(paths[name],), fields=f) for name, f in names.items())
    examples = [example for config in benchmarks for example in read_benchmark(config) if not example.is_answer]
    generator = np.random.default_rng(3)
    long_enough = [example.text.split() for example in examples if len(example.text.split()) >= 9]
    for times, min_share in ((1, 0.95), (3, 0.8)):
        documents = {}
        for number in generator.permutation(len(long_enough))[:300].tolist():
            words = list(long_enough[number])
            for _ in range(times):
                at, other = int(generator.integers(len(words))), long_enough[int(generator.integers(300))][1]
                edit = int(generator.integers(3))
                words[at : at + (edit != 1)] = [] if edit == 2 else [other]
            documents[f"{len(documents) + 1:x}"] = f"{PROSE}{' '.join(words)} {PROSE}"
        part = write_part(tmp_path / f"{times}.parquet", documents)
        config = DecontaminateConfig(benchmarks=benchmarks, policy="annotate")
        hits = decontaminate([part], config, engine(), tmp_path / f"work{times}").hits
        assert len(hits) / len(documents) >= min_share

"""Decontamination: by hand, against a search in plain Python, and planted benchmark examples."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import engine, padded, write_part
from pydantic import ValidationError

from gristmill.data_pipeline.decontamination.config import (
    BenchmarkConfig,
    DecontaminateConfig,
    numbered_examples,
    read_benchmark,
)
from gristmill.data_pipeline.decontamination.decontaminate import decontaminate
from gristmill.data_pipeline.decontamination.matches import piece_id, report_markdown
from gristmill.data_pipeline.decontamination.ngram_index import build_index, search, words_of
from gristmill.data_pipeline.dedup.folding import fold_text
from gristmill.foundation.errors import InputError, RecipeError

QUESTION = "Which of the seven rivers that cross the old kingdom has never once frozen over in any recorded winter"
OTHER = "How many of the blue boxes that stand along the northern wall would have to be opened before noon today"
PROSE = "The miller rose before dawn and walked down to the weir. " * 10


def benchmark_file(path: Path, texts: list[str]) -> BenchmarkConfig:
    path.write_text("".join(json.dumps({"question": text, "choices": ["yes", "no"]}) + "\n" for text in texts))
    return BenchmarkConfig(name="rivers", paths=(path,), fields=("question",))


def config_of(folder: Path, texts: list[str], **settings) -> DecontaminateConfig:
    return DecontaminateConfig(benchmarks=(benchmark_file(folder / "bench.jsonl", texts),), **settings)


def plainly_found(texts: list[str], documents: list[str], longest: int, shortest: int) -> set[tuple[int, int, str]]:
    """(document, word, n-gram) of every n-gram of the texts in every document."""
    wanted = set()
    for text in texts:
        words = fold_text(text).split()
        size = min(longest, len(words))
        if size >= shortest:
            wanted |= {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}
    found = set()
    for number, document in enumerate(documents):
        words = fold_text(document).split()
        for size in {len(ngram) for ngram in wanted}:
            for i in range(len(words) - size + 1):
                if tuple(words[i : i + size]) in wanted:
                    found.add((number, i, " ".join(words[i : i + size])))
    return found


few_words = st.lists(st.sampled_from("abc"), max_size=14).map(" ".join)


@given(st.lists(few_words, max_size=4), st.lists(few_words, max_size=4), st.integers(2, 6), st.integers(2, 6))
def test_search_agrees_with_plain_python(texts, documents, one, two):
    longest, shortest = max(one, two), min(one, two)
    index = build_index(words_of(texts), longest, shortest)
    found = set()
    for number, ngram, word in search(index, words_of(documents)).T:
        words = fold_text(documents[number]).split()[word : word + index.lengths[ngram]]
        found.add((int(number), int(word), " ".join(words)))
    assert found == plainly_found(texts, documents, longest, shortest)


def test_split_worked_example(tmp_path: Path):
    text = f"{PROSE}Well: {QUESTION.upper()}? {PROSE}"
    part = write_part(tmp_path / "p.parquet", {"1": text, "2": PROSE})
    result = decontaminate([part], config_of(tmp_path, [QUESTION], margin=0), engine(), tmp_path / "work")
    kept = PROSE.strip()
    assert [(row["parent_id"], row["piece"], row["text"]) for row in result.pieces.to_pylist()] == [
        (padded("1"), 0, kept),
        (padded("1"), 1, kept),
    ]
    assert result.pieces.column("doc_id").to_pylist() == [piece_id(padded("1"), 0), piece_id(padded("1"), 1)]
    (hit,) = result.hits.to_pylist()
    removed = len(text) - 2 * len(kept)
    assert (hit["doc_id"], hit["outcome"], hit["pieces"], hit["characters"]) == (padded("1"), "split", 2, removed)
    cuts = result.removed_spans.to_pylist()
    assert sum(cut["length"] for cut in cuts) == sum(cut["bytes"] for cut in cuts) == removed
    first = cuts[0]
    assert text[first["start"] : first["start"] + first["length"]].strip() == f"Well: {QUESTION.upper()}?"
    assert (first["rule"], first["benchmark"], first["example"]) == ("decontaminate.split", "rivers", "0")
    row = result.matches.to_pylist()[0]
    assert (row["benchmark"], row["example"], row["field"], row["matched"], row["of"]) == (
        "rivers",
        "0",
        "question",
        7,
        7,
    )
    assert "WHICH OF THE SEVEN" in row["excerpt"]


@pytest.mark.parametrize(("policy", "outcome", "characters"), [("drop", "dropped", 1), ("annotate", "annotated", 0)])
def test_other_policies(tmp_path: Path, policy: str, outcome: str, characters: int):
    text = PROSE + QUESTION
    part = write_part(tmp_path / "p.parquet", {"1": text, "2": PROSE})
    result = decontaminate([part], config_of(tmp_path, [QUESTION], policy=policy), engine(), tmp_path / "work")
    assert [(r["doc_id"], r["outcome"], r["characters"]) for r in result.hits.to_pylist()] == [
        (padded("1"), outcome, characters * len(text))
    ]
    assert len(result.pieces) == 0


def test_more_than_ten_pieces_drop_the_document(tmp_path: Path):
    text = f"{QUESTION}. {PROSE}" * 11
    part = write_part(tmp_path / "p.parquet", {"1": text})
    config = config_of(tmp_path, [QUESTION], margin=0)
    assert decontaminate([part], config, engine(), tmp_path / "a").hits.to_pylist()[0]["outcome"] == "dropped"
    more = config_of(tmp_path, [QUESTION], margin=0, max_pieces=11)
    assert decontaminate([part], more, engine(), tmp_path / "b").hits.to_pylist()[0]["pieces"] == 11


def variants(text: str) -> dict[str, str]:
    words = text.split()
    return {
        "verbatim": text,
        "case": text.upper(),
        "punctuation": "-- " + ", ".join(words) + "!",
        "white space": "  \t ".join(words),
        "line break": "\n".join([" ".join(words[:9]), " ".join(words[9:])]),
        "one word edited": " ".join(["What", *words[1:]]),
    }


def test_planted_examples_are_found_in_every_disguise(tmp_path: Path):
    planted = {f"{i + 1:x}": f"{PROSE}{text}. {PROSE}" for i, text in enumerate(variants(QUESTION).values())}
    part = write_part(tmp_path / "p.parquet", {**planted, "a0": PROSE, "a1": "Nothing of that kind stands here."})
    result = decontaminate([part], config_of(tmp_path, [QUESTION, OTHER]), engine(), tmp_path / "work")
    assert set(result.hits.column("doc_id").to_pylist()) == {padded(doc_id) for doc_id in planted}
    numbers = result.report["rivers"]
    assert (numbers["examples"], numbers["found"], numbers["verbatim"], numbers["documents"]) == (2, 1, 1, 6)
    assert "WHICH OF" in report_markdown(result.report)


def test_a_document_that_shares_only_common_phrases_is_untouched(tmp_path: Path):
    phrase = "in the name of the people and of the law of this land we"
    documents = {f"{i + 1:x}": f"{PROSE} {phrase} number {i}" for i in range(10)}
    part = write_part(tmp_path / "p.parquet", documents)
    config = config_of(tmp_path, [f"{phrase} declare the bridge open to all who wish to cross it"])
    result = decontaminate([part], config, engine(), tmp_path / "work")
    assert len(result.hits) == 0
    assert result.report["rivers"]["common_ngrams"] == 2  # the phrase has 14 words
    nine = write_part(tmp_path / "q.parquet", dict(list(documents.items())[:9]))
    assert len(decontaminate([nine], config, engine(), tmp_path / "nine").hits) == 9


def test_short_examples(tmp_path: Path):
    ten, seven = "a ten word text that is short enough to be whole", "only seven words stand in this one"
    part = write_part(tmp_path / "p.parquet", {"1": f"so {ten} it is", "2": f"so {seven} it is", "3": ten[:-6]})
    config = config_of(tmp_path, [ten, seven], max_edits=0)
    result = decontaminate([part], config, engine(), tmp_path / "work")
    assert [row["doc_id"] for row in result.hits.to_pylist()] == [padded("1")]
    assert result.report["rivers"]["texts_too_short"] == 1


def test_questions_and_answers_by_themselves(tmp_path: Path):
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"id": "r7", "q": {"text": QUESTION}, "choices": [OTHER, "no"]}) + "\n")
    both = BenchmarkConfig(name="b", paths=(path,), fields=("q.text", "choices"), id_field="id")
    part = write_part(tmp_path / "p.parquet", {"1": OTHER, "2": QUESTION})
    result = decontaminate([part], DecontaminateConfig(benchmarks=(both,)), engine(), tmp_path / "work")
    found = [(row["doc_id"], row["example"], row["field"]) for row in result.matches.to_pylist()]
    assert found == [(padded("1"), "r7", "choices"), (padded("2"), "r7", "q.text")]


def test_texts_of_lm_eval_tasks_are_handed_in(tmp_path: Path):
    part = write_part(tmp_path / "p.parquet", {"1": QUESTION})
    config = DecontaminateConfig(tasks=("rivers_task",))
    examples = numbered_examples(
        [("rivers_task", 0, "question", OTHER, False), ("rivers_task", 1, "question", QUESTION, False)]
    )
    result = decontaminate([part], config, engine(), tmp_path / "a", examples)
    assert result.report["rivers_task"]["found"] == 1
    assert result.matches.to_pylist()[0]["example"] == "1"
    with pytest.raises(RecipeError, match="no texts of the task 'rivers_task' were handed over"):
        decontaminate([part], config, engine(), tmp_path / "b")


def test_workers_and_files_change_nothing(tmp_path: Path):
    documents = {f"{i + 1:x}": f"{PROSE}{text}. {PROSE}" for i, text in enumerate([*variants(QUESTION).values()] * 2)}
    ids = list(documents)
    config = config_of(tmp_path, [QUESTION], common=100)
    one = [write_part(tmp_path / "p.parquet", documents)]
    several = [write_part(tmp_path / f"{k}.parquet", {i: documents[i] for i in ids[k::3]}) for k in (2, 0, 1)]
    whole = decontaminate(one, config, engine(), tmp_path / "one")
    cut = decontaminate(several, config, engine(2), tmp_path / "several")
    assert (whole.matches, whole.hits, whole.pieces, whole.report) == (cut.matches, cut.hits, cut.pieces, cut.report)
    again = decontaminate(several, config, engine(), tmp_path / "several")
    assert again.pieces.equals(whole.pieces)


def test_bad_input(tmp_path: Path):
    with pytest.raises(ValidationError, match="min_ngram=8 is over ngram=5; try 5"):
        DecontaminateConfig(ngram=5)
    path = tmp_path / "b.jsonl"
    path.write_text('{"text": "x"}\n{"text": "y", "query": null}\n')
    with pytest.raises(InputError, match=r"b\.jsonl:1: no field 'query'; fields are \['text'\]"):
        read_benchmark(BenchmarkConfig(name="b", paths=(path,), fields=("query",)))
    path.write_text('{"query": ""}\n{"query": "  "}\n')
    with pytest.raises(InputError, match=r"b\.jsonl:1: no record has a text in the field 'query'"):
        read_benchmark(BenchmarkConfig(name="b", paths=(path,), fields=("query",)))
    path.write_text("plain\n")
    with pytest.raises(InputError, match=r"b\.jsonl:1: no JSON"):
        read_benchmark(BenchmarkConfig(name="b", paths=(path,), fields=("query",)))
    path.write_text("")
    with pytest.raises(InputError, match="the benchmark b has no text"):
        read_benchmark(BenchmarkConfig(name="b", paths=(path,), fields=("query",)))
    with pytest.raises(InputError, match=r"none\.jsonl: the benchmark cannot be read"):
        read_benchmark(BenchmarkConfig(name="b", paths=(tmp_path / "none.jsonl",), fields=("query",)))


HELLASWAG = ("context", "gold", "ending", "ending", "ending", "ending")


def test_records_of_several_lines(tmp_path: Path):
    path = tmp_path / "b.txt"
    path.write_text("A man sits.\n2\none\ntwo\nthree\nfour\nHe stands.\n\nfive\nsix\nseven\neight\n")
    config = BenchmarkConfig(name="b", paths=(path,), lines=HELLASWAG, fields=("context", "ending"))
    found = [(example.example, example.field, example.text) for example in read_benchmark(config)]
    assert found[:5] == [
        ("0", "context", "A man sits."),
        *(("0", "ending", t) for t in ("one", "two", "three", "four")),
    ]
    assert len(found) == 10 and found[5] == ("1", "context", "He stands.")
    path.write_text("A man sits.\n2\none\n")
    with pytest.raises(InputError, match=r"b\.txt: 3 lines are no whole number of records of 6"):
        read_benchmark(config)
    with pytest.raises(ValidationError, match="no line is called 'endings'"):
        BenchmarkConfig(name="b", paths=(path,), lines=HELLASWAG, fields=("endings",))
    with pytest.raises(ValidationError, match="lines are named and fields are not"):
        BenchmarkConfig(name="b", paths=(path,), lines=HELLASWAG)


def test_hellaswag_as_it_is_shipped(shared_data):
    path = shared_data("benchmarks/hellaswag_val.txt.bz2")
    config = BenchmarkConfig(name="hellaswag", paths=(path,), lines=HELLASWAG, fields=("context", "ending"))
    found = read_benchmark(config)
    assert len(found) == 5 * 10042 and len({example.example for example in found}) == 10042


def test_common_in_documents_or_in_places(tmp_path: Path):
    """A document that repeats a question ten times: Megatron's count hides it, GPT-3's does not."""
    part = write_part(tmp_path / "p.parquet", {"1": f"{PROSE}{QUESTION}. " * 10})
    for counted, hits in (("documents", 1), ("places", 0)):
        config = config_of(tmp_path, [QUESTION], common_in=counted, policy="annotate")
        assert len(decontaminate([part], config, engine(), tmp_path / counted).hits) == hits

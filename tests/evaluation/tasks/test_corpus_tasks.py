"""Bits per byte texts and cloze questions from held-out documents."""

from pathlib import Path

import pytest

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.workdir import HeldOutCorpus
from gristmill.evaluation.tasks import corpus_tasks
from gristmill.evaluation.tasks.corpus_tasks import (
    CONTEXT_BYTES,
    HeldOutDocument,
    answerable,
    bits_per_byte_texts,
    by_language,
    cloze_questions,
)
from gristmill.foundation.errors import InputError


def documents(count: int, lines: int = 30) -> dict[str, list[HeldOutDocument]]:
    return {
        source: [
            HeldOutDocument(
                doc_id=f"{source}{number}",
                source=source,
                text="\n".join(f"line {line} of document {number} of {source}, in full" for line in range(lines)),
            )
            for number in range(count)
        ]
        for source in ("prose", "code")
    }


def test_the_right_line_follows_and_the_wrong_ones_are_from_elsewhere():
    held_out = documents(6)
    by_id = {document.doc_id: document.text for found in held_out.values() for document in found}
    questions = cloze_questions(held_out, items=40, choices=4, seed=7)
    assert len(questions) == 40
    assert sum(question.source == "prose" for question in questions) == 20
    for question in questions:
        right = question.choices[question.gold]
        assert f"{question.context}\n{right}" in by_id[question.doc_id]
        assert len(question.context.encode()) <= CONTEXT_BYTES
        assert len(set(question.choices)) == 4
        for wrong in question.choices[: question.gold] + question.choices[question.gold + 1 :]:
            assert wrong not in by_id[question.doc_id]
            assert question.source in wrong


def test_the_same_seed_asks_the_same_and_golds_are_spread():
    held_out = documents(6)
    assert cloze_questions(held_out, 40, 4, seed=7) == cloze_questions(held_out, 40, 4, seed=7)
    assert cloze_questions(held_out, 40, 4, seed=7) != cloze_questions(held_out, 40, 4, seed=8)
    golds = [question.gold for question in cloze_questions(held_out, 200, 4, seed=7)]
    assert all(30 <= golds.count(gold) <= 70 for gold in range(4))


def test_questions_are_spread_over_the_documents():
    asked = [question.doc_id for question in cloze_questions(documents(6), items=12, choices=4, seed=1)]
    assert len(set(asked)) == 12


def test_one_document_gives_no_question():
    assert cloze_questions(documents(1), 10, 4, seed=1) == []


def test_cloze_without_a_question_is_left_out_and_said(monkeypatch):
    """Where another task is left; without one there is nothing to evaluate."""
    monkeypatch.setattr(corpus_tasks, "read_held_out", lambda curate: documents(1))
    corpus = HeldOutCorpus(Path("work/curate"), Path("work/index"), seed=1)
    config = EvaluateConfig(tasks=("bits_per_byte", "cloze"))
    left, said = answerable(config, corpus)
    assert (left.tasks, said[:54]) == (("bits_per_byte",), "cloze is left out: the held-out documents have no cloz")
    with pytest.raises(InputError, match=r"^work/curate: .*other tasks in evaluate\.tasks"):
        answerable(EvaluateConfig(tasks=("cloze",)), corpus)
    monkeypatch.setattr(corpus_tasks, "read_held_out", lambda curate: documents(6))
    assert answerable(config, corpus) == (config, "")


def test_texts_are_whole_lines_within_the_budget():
    found = bits_per_byte_texts(
        [HeldOutDocument("a", "s", "one\ntwo\nthree\n"), HeldOutDocument("b", "s", "four\n")], text_bytes=12
    )
    assert [text.text for text in found] == ["one\ntwo\n", "four"]
    long = bits_per_byte_texts([HeldOutDocument("a", "s", "é" * 100)], text_bytes=9)
    assert [text.text for text in long] == ["é" * 4]


def test_a_language_has_its_usual_script_where_some_documents_are_in_it():
    """Pages of code have mostly Latin letters in any language; a language written in another script than usual keeps
    that one."""
    texts = {
        "ko": ["tar xvf archive 압축을 풉니다", "압축을 풉니다 tar"],
        "sr": ["Mlin melje žito"],
        "md": ["a page"],
        "": ["12"],
    }
    documents = [HeldOutDocument("d", "s", text, language) for language, found in texts.items() for text in found]
    assert {name: len(found) for name, found in by_language({"s": documents}).items()} == {
        "ko_Hang": 2, "md_Latn": 1, "sr_Latn": 1, "unknown_Zyyy": 1,
    }  # fmt: skip

"""Cached results equal computed ones; a damaged cache is replaced."""

import sqlite3

import pytest

from gristmill.evaluation.scoring.language_model import LanguageModel
from gristmill.evaluation.scoring.request_cache import RequestCache, request_digest
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter


class Asked:
    def __init__(self, *arguments):
        self.args, self.task_name, self.doc_id = arguments, "quiz", len(arguments[0])


def test_cached_requests_are_not_run_again(tmp_path, small_causal_lm, byte_codec):
    pairs = [Asked("What is it?", " a cat"), Asked("What is it?", " a dog"), Asked("x" * 90, "long")]
    texts = [Asked("a text of some length")]
    prompts = [Asked(text, {"until": ["\n"], "max_gen_toks": 4}) for text in ("Q:", "y" * 63)]

    def ask(model: LanguageModel):
        return model.loglikelihood(pairs), model.loglikelihood_rolling(texts), model.generate_until(prompts)

    path = tmp_path / "cache" / "answers.sqlite"
    first = LanguageModel(small_causal_lm(), byte_codec, 500, Reporter.silent(), RequestCache(path))
    only_its_size = type("NoModel", (), {"sequence_length": 64, "vocab_size": 257, "device": None})
    second = LanguageModel(only_its_size, byte_codec, 500, Reporter.silent(), RequestCache(path))
    answers = ask(first)
    assert ask(second) == answers
    assert (second.read_tokens, first.read_tokens > 0) == (0, True)
    assert second.too_long == first.too_long and len(first.too_long) == 2


def test_questions_differ_by_all_their_parts():
    assert (
        len({request_digest("score", [1], [2]), request_digest("score", [1, 2], []), request_digest("text", [1], [2])})
        == 3
    )


def garbage(path):
    path.write_text("not a database, but long enough to look like something else entirely")


def half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def noise(path):
    content = path.read_bytes()
    path.write_bytes(content[:4096] + bytes(range(256)) * ((len(content) - 4096) // 256))


def other_table(path):
    changed(path, "DROP TABLE answers", "CREATE TABLE answers (a)")


def changed(path, *statements):
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("damage", [garbage, half, noise, other_table])
def test_a_damaged_cache_is_replaced_and_reported(tmp_path, damage):
    path, said = tmp_path / "answers.sqlite", []
    answers = {request_digest("score", [number]): [-0.5, True] for number in range(500)}
    cache = RequestCache(path)
    cache.add(answers)
    cache.close()
    damage(path)
    cache = RequestCache(path, said.append)
    found = cache.find([*answers])
    assert not found or found == answers
    cache.add(answers)
    assert cache.find([*answers]) == answers
    assert len(said) == 1 and "is damaged" in said[0] and "replaced by an empty one" in said[0]


@pytest.mark.parametrize("answer", ["garbage", "[1]", "3", "[null, true]", "[1.0, 2]", ""])
def test_an_answer_that_is_none_is_not_known(tmp_path, answer):
    cache = RequestCache(tmp_path / "answers.sqlite")
    cache.add({request_digest("score", [1]): [-0.5, True]})
    cache.close()
    changed(tmp_path / "answers.sqlite", f"UPDATE answers SET answer = '{answer}'")
    assert RequestCache(tmp_path / "answers.sqlite").find([request_digest("score", [1])]) == {}


def test_where_no_cache_can_be_kept_is_named(tmp_path):
    (tmp_path / "answers.sqlite").mkdir()
    with pytest.raises(InputError, match="the request cache cannot be written here"):
        RequestCache(tmp_path / "answers.sqlite")

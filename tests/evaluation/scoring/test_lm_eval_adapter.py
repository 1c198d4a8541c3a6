"""lm-eval's request types, and the requests that do not fit the sequence length."""

import sqlite3

import pytest
import torch
from lm_eval.api.instance import Instance

from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter, RequestCache, request_digest
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter


@pytest.fixture
def model(small_causal_lm, byte_tokenizer) -> LmEvalAdapter:
    return LmEvalAdapter(small_causal_lm(sequence_length=32), byte_tokenizer, 500, Reporter.silent())


def ask(kind: str, *arguments) -> list[Instance]:
    return [Instance(kind, {}, item, index) for index, item in enumerate(arguments)]


def logprob(model: LmEvalAdapter, context: list[int], continuation: list[int]) -> float:
    whole = (context + continuation)[-(model.max_length + 1) :]
    logits = model.causal_lm.head(model.causal_lm.hidden(torch.tensor([whole[:-1]]))[0])
    tail = torch.log_softmax(logits, -1)[-len(continuation) :]
    return tail[range(len(continuation)), continuation].sum().item()


def test_answers_are_scored_after_their_question(model):
    pairs = [("What is it?", " a cat"), ("What is it?", " a dog"), ("", "alone"), ("ends with space ", "word")]
    found = model.loglikelihood(ask("loglikelihood", *pairs))
    expected = [
        logprob(model, list(b"What is it?"), list(b" a cat")),
        logprob(model, list(b"What is it?"), list(b" a dog")),
        logprob(model, [256], list(b"alone")),
        logprob(model, list(b"ends with space"), list(b" word")),
    ]
    assert [value for value, _ in found] == pytest.approx(expected, abs=1e-9)


def test_requests_longer_than_the_sequence_length_are_skipped_with_a_reason(model):
    """32 tokens are read; the last of 33 is scored only."""
    requests = [
        Instance("loglikelihood", {}, ("x" * context, "y" * answer), 0, metadata=("quiz", number, 1))
        for number, (context, answer) in enumerate([(31, 2), (32, 2), (2, 40), (0, 32), (0, 33)])
    ]
    found = model.loglikelihood(requests)
    assert found[0][0] == pytest.approx(logprob(model, list(b"x" * 31), list(b"yy")), abs=1e-9)
    assert [found[number] for number in (1, 2, 4)] == [(0.0, False)] * 3 and found[3][0] < 0
    assert model.skipped == {
        ("quiz", 1): "its 33 tokens are more than the model's sequence length of 32",
        ("quiz", 2): "its 41 tokens are more than the model's sequence length of 32",
        ("quiz", 4): "its 33 tokens are more than the model's sequence length of 32",
    }


def test_an_answer_that_the_context_cut_off_is_not_counted(model):
    """Greedy text of random weights does not stop by itself; a stop string or the task's length ends it in time."""
    options = {"until": [], "max_gen_toks": 8, "do_sample": False}
    requests = [
        Instance("generate_until", {}, ("x" * size, dict(options)), 0, metadata=("quiz", number, 1))
        for number, size in enumerate([24, 25, 31, 32, 50])
    ]
    texts = model.generate_until(requests)
    assert [bool(text) for text in texts] == [True, True, True, False, False]
    assert model.skipped == {
        ("quiz", 1): "its prompt of 25 tokens left 7 for an answer, too few",
        ("quiz", 2): "its prompt of 31 tokens left 1 for an answer, too few",
        ("quiz", 3): "its prompt of 32 tokens fills the model's sequence length of 32",
        ("quiz", 4): "its prompt of 50 tokens fills the model's sequence length of 32",
    }
    model.skipped.clear()
    stopped = [
        Instance("generate_until", {}, ("x" * 25, {**options, "until": [texts[1][:1]]}), 0, metadata=("quiz", 5, 1))
    ]
    assert model.generate_until(stopped) == [""] and not model.skipped


def test_a_text_is_read_in_windows(model):
    text = "a text of seventy-four bytes, which is more than two windows of thirty-two"
    ids = list(text.encode())
    windows = [([256], ids[:32]), ([ids[31]], ids[32:64]), (ids[41:64], ids[64:])]
    expected = sum(logprob(model, *window) for window in windows)
    assert model.loglikelihood_rolling(ask("loglikelihood_rolling", (text,), ("",))) == [
        pytest.approx(expected, abs=1e-9),
        0.0,
    ]


def test_generation_stops_where_the_task_says(model):
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0}
    (text,) = model.generate_until(ask("generate_until", ("Q: one\nA:", options)))
    assert "\n" not in text and len(text) <= 8
    with pytest.raises(InputError, match="num_beams"):
        model.generate_until(ask("generate_until", ("Q", {"num_beams": 4})))


def test_a_continuation_without_a_token_is_refused(model):
    with pytest.raises(InputError, match="adds no token"):
        model.loglikelihood(ask("loglikelihood", ("context", "")))


# Cached results equal computed ones; a damaged cache is replaced.


class Asked:
    def __init__(self, *arguments):
        self.args, self.task_name, self.doc_id = arguments, "quiz", len(arguments[0])


def test_cached_requests_are_not_run_again(tmp_path, small_causal_lm, byte_tokenizer):
    pairs = [Asked("What is it?", " a cat"), Asked("What is it?", " a dog"), Asked("x" * 90, "long")]
    texts = [Asked("a text of some length")]
    prompts = [Asked(text, {"until": ["\n"], "max_gen_toks": 4}) for text in ("Q:", "y" * 63)]

    def ask(model: LmEvalAdapter):
        return model.loglikelihood(pairs), model.loglikelihood_rolling(texts), model.generate_until(prompts)

    path = tmp_path / "cache" / "answers.sqlite"
    first = LmEvalAdapter(small_causal_lm(), byte_tokenizer, 500, Reporter.silent(), RequestCache(path))
    only_its_size = type("NoModel", (), {"sequence_length": 64, "vocab_size": 257, "device": None})
    second = LmEvalAdapter(only_its_size, byte_tokenizer, 500, Reporter.silent(), RequestCache(path))
    answers = ask(first)
    assert ask(second) == answers
    assert (second.read_tokens, first.read_tokens > 0) == (0, True)
    assert second.skipped == first.skipped and len(first.skipped) == 2


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

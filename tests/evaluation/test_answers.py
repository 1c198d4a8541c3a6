import pytest

from gristmill.data_pipeline.engine.progress import Reporter
from gristmill.data_pipeline.errors import InputError
from gristmill.evaluation.answers import AnswerCache, question
from gristmill.evaluation.language_model import LanguageModel


class Asked:
    def __init__(self, *arguments):
        self.args, self.task_name, self.doc_id = arguments, "quiz", len(arguments[0])


def test_what_was_answered_is_not_asked_again(tmp_path, small_backbone, byte_codec):
    pairs = [Asked("What is it?", " a cat"), Asked("What is it?", " a dog"), Asked("x" * 90, "long")]
    texts = [Asked("a text of some length")]
    prompts = [Asked(text, {"until": ["\n"], "max_gen_toks": 4}) for text in ("Q:", "y" * 63)]

    def ask(model: LanguageModel):
        return model.loglikelihood(pairs), model.loglikelihood_rolling(texts), model.generate_until(prompts)

    path = tmp_path / "cache" / "answers.sqlite"
    first = LanguageModel(small_backbone(), byte_codec, 500, Reporter.silent(), AnswerCache(path))
    only_its_size = type("NoModel", (), {"context": 64, "vocab_size": 257, "device": None})
    second = LanguageModel(only_its_size, byte_codec, 500, Reporter.silent(), AnswerCache(path))
    answers = ask(first)
    assert ask(second) == answers
    assert (second.read_tokens, first.read_tokens > 0) == (0, True)
    assert second.too_long == first.too_long and len(first.too_long) == 2


def test_questions_differ_by_all_their_parts():
    assert len({question("score", [1], [2]), question("score", [1, 2], []), question("text", [1], [2])}) == 3


def test_a_file_that_is_no_cache_is_named(tmp_path):
    path = tmp_path / "answers.sqlite"
    path.write_text("not a database, but long enough to look like something else entirely")
    with pytest.raises(InputError, match="not a cache of answers"):
        AnswerCache(path)

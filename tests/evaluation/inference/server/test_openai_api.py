"""Chat templates: the tokenizer's, a given file, the plain one."""

import json
from pathlib import Path

import pytest

from gristmill.evaluation.convert.chat_template import PLAIN_STOPS, ChatTemplate, read_chat_template
from gristmill.evaluation.convert.model_tokenizer import ModelTokenizer
from gristmill.foundation.errors import InputError
from gristmill.tokenizers.tokenizer import load_tokenizer


def template_of(folder: Path, given: Path | None) -> ChatTemplate:
    return read_chat_template(folder, given, {})


MESSAGES = [{"role": "user", "content": "Who?"}]
OWN = "{% for m in messages %}<|end|>{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def test_the_plain_template(tokenizer_folder):
    template = template_of(tokenizer_folder, None)
    assert template.render(MESSAGES) == "user: Who?\n\nassistant:" and template.stops == PLAIN_STOPS


def test_the_tokenizers_template_and_its_control_symbols(tokenizer_folder):
    settings = tokenizer_folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": OWN}))
    template = template_of(tokenizer_folder, None)
    text = template.render(MESSAGES)
    assert text == "<|end|>user:Who?>" and template.stops == ()
    tokenizer = ModelTokenizer.of(load_tokenizer(tokenizer_folder), tokenizer_folder)
    assert tokenizer.encode_with_symbols(text) == [256, *tokenizer.encode("user:Who?>")]
    (tokenizer_folder / "chat_template.jinja").write_text("a file{{ messages[0].content }}")
    assert template_of(tokenizer_folder, None).render(MESSAGES) == "a fileWho?"


def test_bad_templates_are_refused(tokenizer_folder, tmp_path):
    given = tmp_path / "template.jinja"
    given.write_text("{% for %}")
    with pytest.raises(InputError, match="not valid Jinja"):
        template_of(tokenizer_folder, given)
    given.write_text("{{ raise_exception('no user') }}")
    with pytest.raises(InputError, match="refuses these messages: no user"):
        template_of(tokenizer_folder, given).render(MESSAGES)
    given.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InputError, match="refuses these messages"):
        template_of(tokenizer_folder, given).render(MESSAGES)
    with pytest.raises(InputError, match="cannot be read as text"):
        template_of(tokenizer_folder, tmp_path / "nowhere")


def test_the_default_of_a_list_of_named_templates_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(tmp_path, None, {"bos_token": "<s>"}).render([]) == "<s>plain"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(InputError, match=r"list without a template `default`.*tool_use.*--chat-template"):
        template_of(tmp_path, None)

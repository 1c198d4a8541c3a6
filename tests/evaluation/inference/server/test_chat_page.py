"""The page that talks to the model, in Chromium."""

import json
import urllib.request

import pytest

from tests.evaluation.inference.server.test_server import TOKEN, loaded, running  # noqa: F401 (a fixture)
from tests.support.chromium import UNREADABLE, chromium


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def say(browser, text):
    browser.ask(f"document.getElementById('said').value = {json.dumps(text)}")
    browser.ask("document.getElementById('send').click()")
    browser.wait_for("!document.getElementById('send').disabled", 60)


def test_the_page_needs_no_token_and_runs_no_script_of_others(loaded):  # noqa: F811
    with running(loaded) as (address, _), urllib.request.urlopen(address) as page:
        text, policy = page.read().decode(), page.headers["content-security-policy"]
    assert "script-src 'self'" in policy and "default-src 'none'" in policy
    assert text.count("<script") == 1 and '<script src="chat.js">' in text and "http" not in text


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_a_conversation(browser, loaded, mode):  # noqa: F811
    """Streamed, counted, with the probability of each token; a message is text whatever it holds."""
    with running(loaded) as (address, engine):
        browser.view(390, False)
        browser.open(address.replace("127.0.0.1", "localhost"))
        for name, value in (("mode", mode), ("tokens", "12"), ("temperature", "0")):
            browser.ask(f"document.getElementById('{name}').value = {json.dumps(value)}")
        say(browser, "The mill")
        assert browser.ask("document.querySelector('.turn.error').textContent").startswith(
            "the token is absent or wrong"
        )
        browser.ask("document.getElementById('clear').click()")
        browser.ask(f"document.getElementById('key').value = {json.dumps(TOKEN)}")
        say(browser, "<img src=x onerror=\"document.title = 'run'\">")
        turns = browser.ask("[...document.querySelectorAll('.turn')].map((turn) => turn.className)")
        assert turns == ["turn user", "turn assistant"]
        assert browser.ask("document.title") == "gristmill" and browser.ask("document.images.length") == 0
        assert "12 tokens" in browser.ask("document.getElementById('status').textContent")
        assert browser.ask(UNREADABLE) == []
        assert engine.requests == 0


def test_tokens_show_their_probability(browser, loaded):  # noqa: F811
    """A reply whose tokens are whole characters is divided into them."""
    with running(loaded, token=None) as (address, _):
        browser.open(address.replace("127.0.0.1", "localhost"))
        rows = [{"token": "mi", "logprob": -0.5, "top_logprobs": [{"token": "ri", "logprob": -2.0}]}]
        browser.ask("document.getElementById('talk').innerHTML = '<div id=reply>mi</div>'")
        browser.ask(f"annotate(document.getElementById('reply'), {json.dumps({'content': rows})})")
        assert browser.ask("document.querySelector('#reply span').title") == '60.7 %\n"ri" 13.5 %'

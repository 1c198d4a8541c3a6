"""Fields that clients of the OpenAI API send: tools, forms of the text, penalties, log-probabilities of streams."""

import json
import re
import subprocess
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.server.replies import Tool, read_calls
from gristmill.evaluation.inference.server.server import new_batch
from tests.evaluation.inference.server.test_server import TOKEN, asked, client, loaded, running, server

jsonschema = pytest.importorskip("jsonschema")
__all__ = ["client", "loaded", "server"]  # fixtures

SCHEMA = {
    "type": "object",
    "properties": {"mill": {"enum": ["wind", "water"]}, "bags": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mill", "bags"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "grind", "parameters": SCHEMA}}
CHAT = [{"role": "user", "content": "Grind"}]


def test_the_text_keeps_to_a_schema_a_pattern_and_a_choice(client) -> None:
    ask = client.chat.completions.create
    form = {"type": "json_schema", "json_schema": {"name": "mill", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        reply = ask(model="mill", messages=CHAT, response_format=form, max_tokens=90, seed=seed)
        if reply.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)
    found = client.completions.create(
        model="mill", prompt="a", max_tokens=30, extra_body={"guided_regex": "[ab]{3}[0-9]"}
    )
    assert re.fullmatch("[ab]{3}[0-9]", found.choices[0].text) and found.choices[0].finish_reason == "stop"
    for n in range(2):
        body = {"guided_choice": ["water", "wind mill"]}
        found = client.completions.create(model="mill", prompt="a", max_tokens=30, seed=n, extra_body=body)
        assert found.choices[0].text in ("water", "wind mill")


def biases(loaded, **by_letter: int) -> dict[str, int]:
    """The field logit_bias, by letter; `white` is all white space."""
    letters = [
        (letter, value) for name, value in by_letter.items() for letter in (" \n\t\r" if name == "white" else name)
    ]
    return {str(loaded.tokenizer.encode(letter)[0]): value for letter, value in letters}


def test_a_required_and_a_named_tool_are_called(client, loaded) -> None:
    named = {"type": "function", "function": {"name": "grind"}}
    options = {"model": "mill", "messages": CHAT, "tools": [TOOL], "max_tokens": 110, "temperature": 0}
    for choice in (named, "required"):
        bias = biases(loaded, white=-100)  # random weights would write white space for ever
        reply = client.chat.completions.create(**options, tool_choice=choice, logit_bias=bias).choices[0]
        (call,) = reply.message.tool_calls
        assert reply.finish_reason == "tool_calls" and reply.message.content is None and call.function.name == "grind"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    chunks = list(client.chat.completions.create(**options, tool_choice=named, logit_bias=bias, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert streamed.function.name == "grind" and json.loads(streamed.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "text, beside",
    [
        ('<tool_call>\n{"name": "grind", "arguments": {"bags": 2}}\n</tool_call>', ""),
        ('So:\n<tool_call>{"name": "grind", "arguments": {"bags": 2}}</tool_call>', "So:"),
        ('[TOOL_CALLS] [{"name": "grind", "arguments": {"bags": 2}}]', ""),
        ('<|python_tag|>{"name": "grind", "parameters": {"bags": 2}}', ""),
        ('{"name": "grind", "parameters": {"bags": 2}}', ""),
    ],
)
def test_calls_are_read_as_published_models_write_them(text: str, beside: str) -> None:
    rest, calls = read_calls(text, [Tool(**TOOL)], "auto")
    assert rest == beside and [call["function"]["name"] for call in calls] == ["grind"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"bags": 2}


@pytest.mark.parametrize("text", ['{"name": "other", "arguments": {}}', "<tool_call>{</tool_call>", "[1]", "grind(2)"])
def test_a_text_that_calls_no_tool_stays_text(text: str) -> None:
    assert read_calls(text, [Tool(**TOOL)], "auto") == (text, [])


def test_a_conversation_with_tool_messages_is_answered(server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "grind", "arguments": '{"bags": 2}'}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    messages = [*CHAT, answered, {"role": "tool", "tool_call_id": "1", "content": "done"}]
    status, reply = asked(server[0], "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert status == 200 and reply["choices"][0]["message"]["role"] == "assistant"
    status, reply = asked(server[0], "/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "max_tokens": 2})
    assert status == 400 and "no chat template, so it knows no tools" in reply["error"]["message"]


def test_penalties_biases_and_ends_hold(client, loaded) -> None:
    def text(**options) -> str:
        reply = client.completions.create(model="mill", prompt="The mill", max_tokens=24, temperature=0, **options)
        return reply.choices[0].text

    assert len(set(text(frequency_penalty=2, extra_body={"repetition_penalty": 5.0}))) > len(set(text()))
    y = biases(loaded, y=90)
    assert text(logit_bias=biases(loaded, z=100)) == "z" * 24
    assert text(logit_bias={"256": 100}) == ""
    assert text(logit_bias={"256": 100, **y}, extra_body={"min_tokens": 3}) == "yyy"
    assert text(logit_bias=y, extra_body={"stop_token_ids": [int(*y)]}) == ""


def test_every_streamed_piece_has_its_log_probabilities(client) -> None:
    options = {"model": "mill", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(prompt="The mill", logprobs=2, **options).choices[0].logprobs
    chunks = list(client.completions.create(prompt="The mill", logprobs=2, stream=True, **options))
    tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens]
    offsets = [
        place for chunk in chunks if chunk.choices[0].logprobs for place in chunk.choices[0].logprobs.text_offset
    ]
    assert tokens == whole.tokens and offsets == whole.text_offset
    assert sum(chunk.choices[0].logprobs is not None for chunk in chunks) > 1
    usage = {"include_usage": True}
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, stream=True, stream_options=usage, **options)
    *pieces, last = list(chat)
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in pieces if chunk.choices[0].logprobs) == 8
    assert last.choices == [] and last.usage.completion_tokens == 8 and pieces[0].usage is None


def test_fields_that_say_nothing_are_named_in_a_header(client) -> None:
    raw = client.completions.with_raw_response.create(
        model="mill", prompt="a", max_tokens=1, user="me", extra_body={"quux_level": 3, "metadata": {"a": "b"}}
    )
    assert raw.headers["X-Gristmill-Ignored-Fields"] == "metadata, quux_level, user"


def test_metrics_count_what_was_asked(client, server) -> None:
    list(client.completions.create(model="mill", prompt="The mill", max_tokens=5, temperature=0, stream=True))
    command = ["curl", "-s", "--noproxy", "*", "-H", f"Authorization: Bearer {TOKEN}", f"{server[0]}/metrics"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 'gristmill_replies_total{path="/v1/completions",status="200"} 1.0' in text
    assert "gristmill_prompt_tokens_total 9.0" in text and "gristmill_generated_tokens_total 5.0" in text
    assert "gristmill_time_to_first_token_seconds_count 1.0" in text and "gristmill_requests_open 0.0" in text


def test_streams_go_on_when_the_cache_is_full(loaded) -> None:
    """Four streams of 70 tokens in a cache of 96: the text is that of a large one, and metrics count it."""

    def texts(address: str) -> list[str]:
        bodies = [{"prompt": f"{name} mill", "max_tokens": 60, "seed": 5, "ignore_eos": True} for name in "abcd"]
        with ThreadPoolExecutor(4) as pool:
            replies = pool.map(partial(asked, address, "/v1/completions"), bodies)
            return [reply["choices"][0]["text"] for _, reply in replies]

    with running(loaded) as (address, _):
        expected = texts(address)
        reply = asked(address, "/v1/models")[1]
        assert reply["data"][0]["max_model_len"] == 128
    small = BatchLimits(4, cache_blocks=6)
    with running(loaded, make_batch=lambda: new_batch(loaded, small)) as (address, _):
        assert texts(address) == expected
        request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as opened:
            metrics = dict(line.rsplit(" ", 1) for line in opened.read().decode().splitlines() if line[0] != "#")
        assert float(metrics["gristmill_preemptions_total"]) > 0
        assert float(metrics["gristmill_cache_blocks_evicted_total"]) > 0
        assert 0 < float(metrics["gristmill_cache_blocks_used"]) <= float(metrics["gristmill_cache_blocks_limit"]) == 6
        status, reply = asked(address, "/v1/completions", {"prompt": "The mill", "max_tokens": 96})
        assert status == 400 and "do not fit the cache of 96 tokens; ask for fewer" in reply["error"]["message"]
        chat = {"messages": CHAT, "ignore_eos": True, "temperature": 0}  # goes on to the end of the cache
        assert asked(address, "/v1/chat/completions", chat)[1]["usage"]["total_tokens"] == 96
        assert asked(address, "/v1/models")[1]["data"][0]["max_model_len"] == 96


def test_pages_of_a_named_origin_may_ask(loaded) -> None:
    origin = "https://chat.example"
    with running(loaded, token=None, origins=(origin,)) as (address, _):
        url = f"{address}/v1/models"
        allowed, refused = (
            subprocess.run(
                ["curl", "-si", "--noproxy", "*", "-H", f"Origin: {name}", "-H", "Sec-Fetch-Site: cross-site", url],
                capture_output=True, text=True, check=True,
            ).stdout
            for name in (origin, "https://other.example")
        )  # fmt: skip
        assert allowed.startswith("HTTP/1.1 200") and f"access-control-allow-origin: {origin}" in allowed
        assert refused.startswith("HTTP/1.1 403")

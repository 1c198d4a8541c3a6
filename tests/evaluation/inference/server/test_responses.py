"""The Responses API by the openai client: the text of a chat with the same messages."""

import json

import pytest

from tests.evaluation.inference.server.test_server import asked, client, loaded, server

jsonschema = pytest.importorskip("jsonschema")
__all__ = ["client", "loaded", "server"]  # fixtures

OPTIONS = {"model": "mill", "temperature": 0, "max_output_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"bags": {"enum": [1, 2]}},
    "required": ["bags"],
    "additionalProperties": False,
}


def chat_text(client, messages) -> str:
    reply = client.chat.completions.create(model="mill", messages=messages, temperature=0, max_tokens=12)
    return reply.choices[0].message.content


def test_a_response_is_the_answer_of_a_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who grinds?"}]
    expected = chat_text(client, messages)
    response = client.responses.create(**OPTIONS, instructions="Be brief.", input="Who grinds?", metadata={"a": "b"})
    assert response.output_text == expected and response.metadata == {"a": "b"}
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 12 and response.usage.total_tokens == response.usage.input_tokens + 12
    ended = client.responses.create(**OPTIONS, input="Who grinds?", extra_body={"logit_bias": {"256": 100}})
    assert ended.status == "completed" and ended.incomplete_details is None and ended.output_text == ""


def test_an_answer_is_sent_back_as_it_came(client):
    first = client.responses.create(**OPTIONS, input="Who grinds?")
    question = {"role": "user", "content": [{"type": "input_text", "text": "And why?"}]}
    conversation = [{"role": "user", "content": "Who grinds?"}, *first.output, question]
    messages = [
        {"role": "user", "content": "Who grinds?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And why?"},
    ]
    assert client.responses.create(**OPTIONS, input=conversation).output_text == chat_text(client, messages)


def test_a_stream_has_the_events_of_openai(client):
    whole = client.responses.create(**OPTIONS, input="Who grinds?")
    stop = {"stop": [whole.output_text[6:8]]}
    with client.responses.stream(**OPTIONS, input="Who grinds?", extra_body=stop) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text.startswith(final.output_text) and final.output_text == "".join(deltas) and len(deltas) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events if "delta" not in event.type] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    *_, last = client.responses.create(**OPTIONS, input="Who grinds?", stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == 12


def test_a_stream_that_the_server_ends_has_failed(client, server):
    stream = client.responses.create(model="mill", input="Who grinds?", stream=True, extra_body={"ignore_eos": True})
    for event in stream:
        if event.type == "response.output_text.delta":
            server[1].stop()
    assert event.type == "response.failed" and "the server is stopping" in event.response.error.message


def test_the_text_keeps_to_a_schema(client):
    form = {"format": {"type": "json_schema", "name": "bags", "schema": SCHEMA, "strict": True}}
    response = client.responses.create(model="mill", input="How many?", max_output_tokens=90, text=form)
    if response.status == "completed":
        jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.text.format.schema_ == SCHEMA


ERRORS = {
    "no input": ({}, "input: Field required"),
    "no messages": ({"input": []}, "input: List should have at least 1 item"),
    "a picture": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type: "),
    "an earlier response": ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    "tools": ({"input": "a", "tools": [{"type": "web_search"}]}, "tools is not supported; leave it out"),
    "in the background": ({"input": "a", "background": True}, "background is not supported"),
    "several": ({"input": "a", "n": 2}, "n is not supported"),
    "the name of chats": ({"input": "a", "max_tokens": 2}, "max_tokens is not supported"),
    "a long text": ({"input": "a" * 200}, "shorten them"),
}


def test_fields_that_are_not_served_are_refused(server):
    for name, (body, words) in ERRORS.items():
        status, reply = asked(server[0], "/v1/responses", body)
        assert status == 400 and words in reply["error"]["message"], name


def test_fields_that_say_nothing_are_named_in_a_header(client):
    raw = client.responses.with_raw_response.create(**OPTIONS, input="a", reasoning={"effort": "low"}, store=False)
    assert raw.headers["X-Gristmill-Ignored-Fields"] == "reasoning, store"

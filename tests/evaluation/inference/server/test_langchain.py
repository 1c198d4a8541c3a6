"""LangChain's client against the server: chat, streams, tools, forms of the text, completions, embeddings."""

import pytest

from tests.evaluation.inference.server.test_client_fields import SCHEMA, biases
from tests.evaluation.inference.server.test_server import TOKEN, client, loaded, server

langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai to try LangChain's client")
__all__ = ["client", "loaded", "server"]  # fixtures

MESSAGES = [("system", "Be brief."), ("user", "Who grinds?")]
TOOL = {"type": "function", "function": {"name": "grind", "description": "Grinds.", "parameters": SCHEMA}}


@pytest.fixture
def place(server):
    return {"base_url": f"{server[0]}/v1", "api_key": TOKEN, "model": "mill", "max_retries": 0}


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_messages_are_answered_as_to_the_openai_client(place, client, responses):
    roles = [{"role": role, "content": text} for role, text in MESSAGES]
    options = {"model": "mill", "temperature": 0, "max_tokens": 12}
    expected = client.chat.completions.create(messages=roles, **options).choices[0].message.content
    chat = langchain.ChatOpenAI(**place, temperature=0, max_tokens=12, use_responses_api=responses)
    answer = chat.invoke(MESSAGES)
    assert answer.text == expected and answer.usage_metadata["output_tokens"] == 12
    pieces = list(chat.stream(MESSAGES))
    assert "".join(piece.text for piece in pieces) == expected and len(pieces) > 2


def test_a_tool_is_called_and_a_schema_kept(place, loaded):
    bias = {int(token): value for token, value in biases(loaded, white=-100).items()}
    chat = langchain.ChatOpenAI(**place, temperature=0, max_tokens=90, logit_bias=bias)
    (call,) = chat.bind_tools([TOOL], tool_choice="grind").invoke("Grind").tool_calls
    assert call["name"] == "grind" and call["args"].keys() == {"mill", "bags"}
    form = chat.with_structured_output({"title": "grind", **SCHEMA}, method="json_schema", strict=True)
    assert form.invoke("Grind").keys() == {"mill", "bags"}


def test_texts_are_continued_and_embedded(place, client):
    expected = client.completions.create(model="mill", prompt="The mill", max_tokens=8, temperature=0).choices[0].text
    assert langchain.OpenAI(**place, max_tokens=8, temperature=0).invoke("The mill") == expected
    # By default the client sends the token ids of OpenAI's own models.
    embeddings = langchain.OpenAIEmbeddings(**place, check_embedding_ctx_length=False)
    vectors = embeddings.embed_documents(["The mill", "turns"])
    assert [entry.embedding for entry in client.embeddings.create(model="mill", input=["The mill", "turns"]).data] == [
        pytest.approx(vector, abs=1e-6) for vector in vectors
    ]

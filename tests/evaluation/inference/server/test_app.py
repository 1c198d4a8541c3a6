"""Embeddings by the openai client are the hidden states of transformers."""

import base64

import numpy as np
import pytest
import torch

from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.load_model import load_for_evaluation
from gristmill.evaluation.inference.server.server import new_batch
from gristmill.evaluation.inference.workdir import CheckpointPaths
from tests.evaluation.inference.server.test_server import TOKEN, asked, running
from tests.support.published_layouts import write_layout

openai = pytest.importorskip("openai", reason="openai is not installed")
transformers = pytest.importorskip("transformers")
TEXTS = ["The mill turns all day.", "1234 bags of flour", "é", "The mill turns all night and it grinds grain."]


@pytest.fixture(scope="module")
def replica(tmp_path_factory):
    return write_layout(tmp_path_factory.mktemp("qwen2"), "qwen2", weights=True)


@pytest.fixture
def server(replica, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    loaded = load_for_evaluation(CheckpointPaths(replica), EvaluateConfig())
    with running(loaded, make_batch=lambda: new_batch(loaded, BatchLimits(2, cache_blocks=64))) as (address, _):
        yield address


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key=TOKEN, max_retries=0)


@pytest.fixture(scope="module")
def hidden_states(replica):
    """The final hidden states [T, D] of each text by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(replica)
    peer = transformers.AutoModelForCausalLM.from_pretrained(replica, dtype=torch.float32)
    with torch.inference_mode():
        outputs = [peer.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]
    return [hidden_TD.double().numpy() for hidden_TD in outputs]


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_are_pooled_hidden_states_of_transformers(client, hidden_states, pooling, form):
    pooled = [hidden_TD.mean(axis=0) if pooling == "mean" else hidden_TD[-1] for hidden_TD in hidden_states]
    ask = client.embeddings.create
    plain = {"pooling": pooling, "normalize": False}
    reply = ask(model="mill", input=TEXTS, encoding_format=form, dimensions=len(pooled[0]), extra_body=plain)
    vectors = [entry.embedding for entry in reply.data]
    if form == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), dtype="<f4") for vector in vectors]
    np.testing.assert_allclose(vectors, pooled, atol=2e-5)
    assert [entry.index for entry in reply.data] == [0, 1, 2, 3]
    assert reply.usage.prompt_tokens == sum(map(len, hidden_states)) == reply.usage.total_tokens
    unit = ask(model="mill", input=TEXTS[0], extra_body={"pooling": pooling}).data[0].embedding
    np.testing.assert_allclose(unit, pooled[0] / np.linalg.norm(pooled[0]), atol=2e-5)


def test_token_ids_are_taken_as_they_are(client, server, hidden_states):
    _, reply = asked(server, "/tokenize", {"prompt": TEXTS[1]})
    ask = client.embeddings.create
    vectors = [
        ask(model="mill", input=value).data[0].embedding for value in (TEXTS[1], reply["tokens"], [reply["tokens"]])
    ]
    np.testing.assert_allclose(vectors[1:], [vectors[0]] * 2, atol=1e-6)
    assert len(reply["tokens"]) == len(hidden_states[1])


ERRORS = {
    "no input": ({}, "input: Field required"),
    "no texts": ({"input": []}, "input has 0 texts; give 1 to"),
    "an empty list of ids": ({"input": [[]]}, "the prompt has 0 tokens"),
    "other dimensions": ({"input": "a", "dimensions": 3}, "dimensions is 3; this model's embeddings have"),
    "another form": ({"input": "a", "encoding_format": "hex"}, "encoding_format: "),
    "another pooling": ({"input": "a", "pooling": "max"}, "pooling: "),
    "a misspelt field": ({"input": "a", "dimension": 3}, "did you mean 'dimensions'"),
}


def test_bad_requests_are_told_what_to_do(server):
    for name, (body, words) in ERRORS.items():
        status, reply = asked(server, "/v1/embeddings", body)
        assert status == 400 and words in reply["error"]["message"], name


def test_embeddings_beside_streams_change_no_token(client):
    ask = client.completions.create
    options = {"model": "mill", "prompt": TEXTS[0], "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": 1}}
    expected = ask(**options).choices[0].text
    stream, text = ask(**options, stream=True), ""
    for chunk in stream:
        text += chunk.choices[0].text
        assert len(client.embeddings.create(model="mill", input=TEXTS[0]).data) == 1
    assert text == expected

"""The HTTP server with the openai client, lm-eval's local-completions and plain requests."""

import http.client
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from gristmill.evaluation.convert.chat_template import PLAIN, PLAIN_STOPS, ChatTemplate
from gristmill.evaluation.convert.model_tokenizer import ModelTokenizer
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.prompts import generate
from gristmill.evaluation.inference.load_model import load_for_evaluation
from gristmill.evaluation.inference.server import model_calls
from gristmill.evaluation.inference.server.app import make_app
from gristmill.evaluation.inference.server.generation_engine import GenerationEngine
from gristmill.evaluation.inference.server.model_calls import ServedModel
from gristmill.evaluation.inference.server.server import (
    ServerOptions,
    new_batch,
    serve,
)
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.evaluation.scoring.lm_eval_adapter import LmEvalAdapter
from gristmill.foundation.errors import (
    InputError,
    RecipeError,
)
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.listener import bound

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")
uvicorn = pytest.importorskip("uvicorn")

TOKEN = "a-long-token"
JSON_BODY = {"Content-Type": "application/json"}


@pytest.fixture
def loaded(random_checkpoint, tokenizer_folder):
    return load_for_evaluation(CheckpointPaths(random_checkpoint(), tokenizer_folder), EvaluateConfig())


@contextmanager
def running(loaded, max_requests=64, sequences=4, token=TOKEN, make_batch=None, body_seconds=60.0, origins=()):
    """Serves in a thread; yields the address and the engine."""
    engine = GenerationEngine(make_batch or (lambda: new_batch(loaded, BatchLimits(sequences))), max_requests)
    model = ServedModel("mill", engine, loaded.tokenizer, ChatTemplate(PLAIN, stops=PLAIN_STOPS), token, origins)
    server = uvicorn.Server(uvicorn.Config(make_app(model, body_seconds), log_level="warning", lifespan="off"))
    listener = bound("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    engine.start()
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", engine
    finally:
        server.should_exit = True
        thread.join()
        engine.stop()
        listener.close()


@pytest.fixture
def server(loaded, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", TOKEN)
    with running(loaded) as (address, engine):
        yield address, engine


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key=TOKEN, max_retries=0)


def asked(address, path, body=None, token=TOKEN, raw=None):
    """(status, JSON) of a plain request."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(address + path, data, headers), timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_completions_of_the_openai_client(client, loaded):
    prompts = ["The mill", "grinds grain in the night"]
    ours = [
        each.text
        for each in generate(
            loaded.causal_lm,
            loaded.tokenizer,
            [[256, *loaded.tokenizer.encode(text)] for text in prompts],
            GenerationSettings(12),
        )
    ]
    found = client.completions.create(model="mill", prompt=prompts, max_tokens=12, temperature=0)
    assert [choice.text for choice in found.choices] == ours
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.usage.completion_tokens <= 24 and found.usage.prompt_tokens == sum(map(len, prompts)) + 2
    pieces = {0: "", 1: ""}
    for chunk in client.completions.create(model="mill", prompt=prompts, max_tokens=12, temperature=0, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
    assert [pieces[0], pieces[1]] == ours
    sampled = [
        client.completions.create(
            model="mill",
            prompt=[5, 6, 7],
            max_tokens=9,
            temperature=1.5,
            top_p=0.9,
            seed=4,
            n=3,
            extra_body={"min_p": 0.001},
        )
        for _ in range(2)
    ]
    texts = [[choice.text for choice in each.choices] for each in sampled]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
    stop = ours[0][4:6]
    stopped = client.completions.create(model="mill", prompt=prompts[0], max_tokens=12, temperature=0, stop=[stop])
    assert stopped.choices[0].text == ours[0][: ours[0].find(stop)] and stopped.choices[0].finish_reason == "stop"


def test_chat_of_the_openai_client(client, loaded):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who grinds?"}]
    prompt = [256, *loaded.tokenizer.encode("system: Be brief.\n\nuser: Who grinds?\n\nassistant:")]
    expected = generate(loaded.causal_lm, loaded.tokenizer, [prompt], GenerationSettings(10, stops=PLAIN_STOPS))[0].text
    options = {"model": "mill", "messages": messages, "max_tokens": 10, "temperature": 0}
    found = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert found.choices[0].message.content == expected
    assert len(found.choices[0].logprobs.content) == found.usage.completion_tokens == 10
    assert len(found.choices[0].logprobs.content[0].top_logprobs) == 2
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == 10
    assert [model.id for model in client.models.list()] == ["mill"]


def test_lm_evals_local_completions_score_as_our_own_harness(server, loaded):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    models = pytest.importorskip("lm_eval.models.openai_completions")
    pytest.importorskip("tenacity", reason="lm-eval's API models need tenacity")
    theirs = models.LocalCompletionsAPI(
        base_url=f"{server[0]}/v1/completions", tokenizer_backend="remote", model="mill", max_length=128, batch_size=3,
        auth_token=TOKEN,
    )  # fmt: skip
    ours = LmEvalAdapter(loaded.causal_lm, loaded.tokenizer, 500, Reporter.silent())
    texts = [("The mill", " grinds"), ("The mill", " a"), ("", "night"), ("Who", "?"), ("ab", chr(233))]

    def requests(kind, arguments):
        return [instance(kind, {}, each, index, ("task", index, 1)) for index, each in enumerate(arguments)]

    expected = ours.loglikelihood(requests("loglikelihood", texts))
    found = theirs.loglikelihood(requests("loglikelihood", texts))
    for (logprob, greedy), (own_logprob, own_greedy) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(own_logprob, abs=1e-4) and greedy == own_greedy
    asks = [("The mill", {"until": ["\n"], "max_gen_toks": 8}), ("Who", {"until": ["\n"], "max_gen_toks": 8})]
    own = ours.generate_until(requests("generate_until", asks))
    assert theirs.generate_until(requests("generate_until", asks)) == own


def test_lm_evals_local_chat_completions_get_the_answers_of_the_openai_client(server, client):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    models = pytest.importorskip("lm_eval.models.openai_completions")
    api = pytest.importorskip("lm_eval.models.api_models", reason="lm-eval's API models need tenacity")
    theirs = models.LocalChatCompletion(
        base_url=f"{server[0]}/v1/chat/completions", model="mill", max_length=128, auth_token=TOKEN
    )
    chats = [[{"role": "user", "content": text}] for text in ("The mill", "Who grinds?")]
    options = {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}
    requests = [
        instance("generate_until", {}, (api.JsonChatStr(json.dumps(chat)), dict(options)), index, ("task", index, 1))
        for index, chat in enumerate(chats)
    ]
    asks = {"model": "mill", "max_tokens": 8, "temperature": 0, "stop": ["\n\n"]}
    answers = [client.chat.completions.create(messages=chat, **asks).choices[0].message.content for chat in chats]
    assert theirs.generate_until(requests) == answers


def test_echo_gives_the_log_probabilities_of_the_prompt(server):
    body = {"prompt": [[10, 11, 12], [13, 14]], "max_tokens": 0, "logprobs": 1, "echo": True, "temperature": 0}
    status, found = asked(server[0], "/v1/completions", body)
    assert status == 200
    first, second = (choice["logprobs"] for choice in found["choices"])
    assert first["token_logprobs"][0] is None and len(first["token_logprobs"]) == 3
    assert all(logprob < 0 for logprob in first["token_logprobs"][1:]) and len(second["tokens"]) == 2
    status, text = asked(server[0], "/v1/completions", {**body, "prompt": "abc", "max_tokens": 1})
    assert text["choices"][0]["text"].startswith("abc")
    assert text["choices"][0]["logprobs"]["tokens"][:3] == ["a", "b", "c"]
    assert text["choices"][0]["logprobs"]["text_offset"][:3] == [0, 1, 2]


ERRORS = {
    "no token": ("/v1/models", None, {"token": None}, 401, "token is absent or wrong"),
    "another token": ("/v1/models", None, {"token": "b"}, 401, "token is absent or wrong"),
    "no json": ("/v1/completions", None, {"raw": b"{"}, 400, "the body is not JSON"),
    "nested": ("/v1/completions", None, {"raw": b"[" * 100_000}, 400, "the body is not JSON"),
    "no object": ("/v1/completions", [1], {}, 400, "not a JSON object"),
    "no prompt": ("/v1/completions", {}, {}, 400, "prompt: Field required"),
    "no prompts": ("/v1/completions", {"prompt": []}, {}, 400, "prompt has 0 prompts"),
    "a misspelt field": ("/v1/completions", {"prompt": "a", "temprature": 1}, {}, 400, "did you mean 'temper"),
    "a long prompt": ("/v1/completions", {"prompt": "a" * 200}, {}, 400, "has 201 tokens; the model takes 1 to 127"),
    "a token beyond": ("/v1/completions", {"prompt": [999]}, {}, 400, "token 999; the model's vocabulary"),
    "half a character": ("/v1/completions", None, {"raw": b'{"prompt": "\\ud800"}'}, 400, "lone surrogate"),
    "another model": ("/v1/completions", {"prompt": "a", "model": "x"}, {}, 404, "this server has 'mill'"),
    "a large penalty": ("/v1/completions", {"prompt": "a", "presence_penalty": 3}, {}, 400, "presence_penalty: "),
    "a suffix": ("/v1/completions", {"prompt": "a", "suffix": "b"}, {}, 400, "is not supported; leave"),
    "a biased token beyond": ("/v1/completions", {"prompt": "a", "logit_bias": {"999": 1}}, {}, 400, "token 999"),
    "a schema that is none": (
        "/v1/completions", {"prompt": "a", "guided_json": {"type": "thing"}}, {}, 400, "json_schema cannot be used",
    ),
    "two forms": ("/v1/completions", {"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, {}, 400, "twice"),
    "a tool that is none": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"function": {"name": "f"}}}, {}, 400, "'f'",
    ),
    "no path": ("/v1/nothing", None, {}, 404, "no path /v1/nothing"),
    "another method": ("/v1/models", {}, {}, 405, "another method"),
    "too many": ("/v1/completions", {"prompt": ["a"] * 65}, {}, 429, "at most 64 may: try"),
    "best of a stream": ("/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, {}, 400, "best_of"),
    "no messages": ("/v1/chat/completions", {"messages": []}, {}, 400, "messages"),
    "a number of logprobs": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": 2}, {}, 400, "true or",
    ),
    "a picture": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {}, 400, ".content",
    ),
    "a long chat": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 200}]}, {}, 400, "shorten them",
    ),
    "ids that are none": ("/detokenize", {"tokens": [-1]}, {}, 400, "ids from 0 to 256"),
}  # fmt: skip


def test_bad_requests_get_an_error_that_says_what_to_do(server):
    for name, (path, body, options, status, words) in ERRORS.items():
        found, reply = asked(server[0], path, body, **options)
        assert found == status and words in reply["error"]["message"], name
    large = asked(server[0], "/v1/completions", raw=b" " * ((16 << 20) + 1))
    assert large[0] == 413 and "larger than" in large[1]["error"]["message"]
    assert asked(server[0], "/health", token=None) == (200, {"status": "ok", "requests": 0})


OTHER_SITES = {
    "a name that points here": ({"Host": "rebound.example:80"}, 403),
    "a page of another site": ({"Origin": "https://page.example"}, 403),
    "a name that begins like ours": ({"Origin": "http://localhost.page.example"}, 403),
    "a cross-site fetch": ({"Sec-Fetch-Site": "cross-site"}, 403),
    "a form": ({"Content-Type": "text/plain"}, 415),
    "our own page": (
        {"Host": "localhost:8000", "Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"},
        200,
    ),
    "an address of version 6": ({"Host": "[::1]:8000"}, 200),
}


@pytest.mark.parametrize("headers, status", OTHER_SITES.values(), ids=OTHER_SITES)
def test_pages_of_other_sites_are_refused_without_a_token(loaded, headers, status):
    """DNS rebinding: the page's own name points to 127.0.0.1, so the browser sends its name as the host."""
    with running(loaded, token=None) as (address, _):
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        body = json.dumps({"prompt": "The mill", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, JSON_BODY | headers)
        assert connection.getresponse().status == status
        if status == 403:
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            connection.request("GET", "/health", headers=headers)
            assert connection.getresponse().status == 403


def test_a_body_that_does_not_arrive_ends(loaded):
    with running(loaded, body_seconds=0.2) as (address, _):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{{".encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_many_control_symbols_are_tokenized(server, loaded):
    """A text of 5,000 ends: one id each, whatever Python's limit of recursion."""
    end = loaded.tokenizer.end_of_document
    status, reply = asked(server[0], "/tokenize", {"prompt": loaded.tokenizer.pieces[end] * 5000})
    assert (status, reply["tokens"]) == (200, [end] * 5000)


@pytest.mark.parametrize("slow", ["encode_with_symbols", "render", "_parsed"])
def test_health_is_answered_while_another_request_is_prepared(slow, loaded, monkeypatch):
    """Tokenizing, the chat template and the JSON of a large body do not run in the event loop."""
    entered, may_go_on = threading.Event(), threading.Event()
    owner = {"encode_with_symbols": ModelTokenizer, "render": ChatTemplate, "_parsed": model_calls}[slow]
    fast = getattr(owner, slow)

    def waits(*arguments):
        entered.set()
        assert may_go_on.wait(60)
        return fast(*arguments)

    monkeypatch.setattr(owner, slow, waits)
    chat = {"messages": [{"role": "user", "content": "The mill"}], "max_tokens": 1}
    path, body = ("/v1/chat/completions", chat) if slow == "render" else ("/tokenize", {"prompt": "The mill"})
    with running(loaded) as (address, _):
        replies = []
        thread = threading.Thread(target=lambda: replies.append(asked(address, path, body)))
        thread.start()
        assert entered.wait(60)
        try:
            assert asked(address, "/health", token=None)[0] == 200
        finally:
            may_go_on.set()
            thread.join()
        assert replies[0][0] == 200


def test_a_client_that_goes_away_leaves_the_batch(loaded):
    steps = threading.Semaphore(0)

    def slow_batch():
        batch = new_batch(loaded, BatchLimits(2))
        step = batch.step

        def waits(prompt_tokens):
            steps.acquire(timeout=30)
            return step(prompt_tokens)

        batch.step = waits
        return batch

    with running(loaded, make_batch=slow_batch) as (address, engine):
        for stream in (False, True):
            body = json.dumps({"prompt": "The mill", "max_tokens": 100, "stream": stream}).encode()
            host, port = address.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                head += "Content-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                wait_until(lambda: engine.requests == 1)
            for _ in range(600):
                if not engine.requests:
                    break
                steps.release()
                time.sleep(0.05)
            assert engine.requests == 0
        steps.release(1000)


def wait_until(happens):
    for _ in range(600):
        if happens():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen in 30 s")


def test_a_step_that_fails_ends_the_requests_of_its_batch_alone(loaded):
    breaks = iter([True])

    def batch_that_breaks_once():
        batch = new_batch(loaded, BatchLimits(1))
        step = batch.step

        def broken(prompt_tokens):
            while batch._waiting and not batch._running and next(breaks, False):
                batch._waiting.popleft()
                raise RuntimeError("the device is lost")
            return step(prompt_tokens)

        batch.step = broken
        return batch

    with running(loaded, make_batch=batch_that_breaks_once) as (address, _):
        found = [None, None]

        def ask(index):
            found[index] = asked(address, "/v1/completions", {"prompt": "The mill", "max_tokens": 3})

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _ in found) == [200, 500]
        failed = next(reply for status, reply in found if status == 500)
        assert "generation failed in this batch (RuntimeError: the device is lost)" in failed["error"]["message"]


def test_a_stream_that_outlasts_the_stop_ends_with_an_error(tmp_path, random_checkpoint, tokenizer_folder):
    """SIGTERM with no seconds left: an error event, [DONE], exit code 0."""
    listener = bound("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    source = CheckpointPaths(random_checkpoint(sequence_length=4096), tokenizer_folder)
    options = ServerOptions(port=port, name="mill", stop_seconds=0)
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(source, EvaluateConfig(), options, Reporter.silent())
    )
    process.start()
    address = f"http://127.0.0.1:{port}"
    wait_until(lambda: is_up(address))
    body = json.dumps({"prompt": "The mill", "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"{address}/v1/completions", body, JSON_BODY), timeout=60) as reply:
        reply.readline()
        os.kill(process.pid, signal.SIGTERM)
        *_, error, done = reply.read().decode().strip().split("\n\n")
    assert "server is stopping" in json.loads(error.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
    process.join(60)
    assert process.exitcode == 0


def test_it_stops_when_the_running_requests_have_ended(tmp_path, random_checkpoint, tokenizer_folder):
    """SIGTERM while a stream runs: the stream ends whole, and the process with code 0."""
    listener = bound("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    source, options = CheckpointPaths(random_checkpoint(), tokenizer_folder), ServerOptions(port=port, name="mill")
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(source, EvaluateConfig(), options, Reporter.silent())
    )
    process.start()
    address = f"http://127.0.0.1:{port}"
    wait_until(lambda: is_up(address))
    body = json.dumps({"prompt": "The mill", "max_tokens": 110, "stream": True, "seed": 1}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(f"{address}/v1/completions", body, JSON_BODY), timeout=60) as reply:
        reply.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert reply.read().endswith(b"data: [DONE]\n\n")
    process.join(60)
    assert process.exitcode == 0


def is_up(address):
    try:
        return asked(address, "/health")[0] == 200
    except OSError:
        return False


def test_a_port_in_use_and_an_open_address_are_refused():
    listener = bound("127.0.0.1", 0)
    with listener, pytest.raises(InputError, match=r"Address already in use.*choose another --port"):
        bound("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(RecipeError, match="set a token in GRISTMILL_API_TOKEN"):
        ServerOptions(host="0.0.0.0").check()
    with pytest.raises(RecipeError, match="the token is empty"):
        ServerOptions(token="").check()
    ServerOptions(host="0.0.0.0", token="x").check()
    ServerOptions(host="::1").check()


def test_a_model_by_its_name(server):
    status, model = asked(server[0], "/v1/models/mill")
    assert (status, model["id"]) == (200, "mill")
    status, answer = asked(server[0], "/v1/models/other")
    assert status == 404 and answer["error"]["code"] == "model_not_found"

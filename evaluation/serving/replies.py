"""Replies of the OpenAI API: completions, chat completions and their streamed chunks."""

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gristmill.evaluation.generation.request import Generation, RequestResult, TokenLogprob


class Vocabulary(Protocol):
    pieces: tuple[str, ...]

    def decode(self, ids: Sequence[int]) -> str: ...


class Replies:
    """The replies to one HTTP request, which have one id and one time."""

    def __init__(self, vocabulary: Vocabulary, model: str, chat: bool):
        self.vocabulary, self.model, self.chat = vocabulary, model, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:24]}"
        self.created = int(time.time())

    def whole(self, results: Sequence[RequestResult], prompts: Sequence[Sequence[int]], echoes: Sequence[str]) -> Any:
        """echoes: the text before each prompt's completions; empty without echo."""
        choices = []
        for result, echo in zip(results, echoes, strict=True):
            for generation in result.generations:
                choices.append(self._choice(len(choices), generation, echo, result.prompt_logprobs))
        name = "chat.completion" if self.chat else "text_completion"
        return self._reply(name, choices) | {"usage": usage(results, prompts)}

    def piece(self, index: int, text: str, first: bool) -> Any:
        """A streamed piece of the choice with this index."""
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        content = {"delta": delta} if self.chat else {"text": text}
        return self._chunk([{"index": index, **content, "logprobs": None, "finish_reason": None}])

    def end(self, index: int, generation: Generation, prompt_logprobs: Sequence[TokenLogprob] = ()) -> Any:
        """The last chunk of a choice: its finish reason, and the log-probabilities of all its tokens."""
        choice = self._choice(index, generation, "", prompt_logprobs)
        choice |= {"delta": {}} if self.chat else {"text": ""}
        choice.pop("message", None)
        return self._chunk([choice])

    def stream_usage(self, results: Sequence[RequestResult], prompts: Sequence[Sequence[int]]) -> Any:
        return self._chunk([]) | {"usage": usage(results, prompts)}

    def _chunk(self, choices: list[Any]) -> Any:
        return self._reply("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _reply(self, name: str, choices: list[Any]) -> Any:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, index: int, generation: Generation, echo: str, prompt_logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        tokens = [*prompt_logprobs, *generation.logprobs]
        logprobs = None
        if tokens:
            logprobs = self._chat_logprobs(tokens) if self.chat else self._completion_logprobs(tokens)
        text = echo + generation.text
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason(generation)}

    def _completion_logprobs(self, tokens: Iterable[TokenLogprob]) -> Any:
        """Of tokens with equal texts, such as halves of characters, top_logprobs has the likelier one."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for each in tokens:
            text = self._text(each.token)
            top = None
            if each.logprob is not None:
                top = {}
                for token, logprob in sorted([*each.top, (each.token, each.logprob)], key=lambda pair: -pair[1]):
                    top.setdefault(self._text(token), logprob)
            for name, value in zip(found, (text, each.logprob, top, offset), strict=True):
                found[name].append(value)
            offset += len(text)
        return found

    def _chat_logprobs(self, tokens: Iterable[TokenLogprob]) -> Any:
        def described(token: int, logprob: float | None) -> dict[str, Any]:
            text = self._text(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {**described(each.token, each.logprob), "top_logprobs": [described(*pair) for pair in each.top]}
                for each in tokens
            ]
        }

    def _text(self, token: int) -> str:
        """The text of a token, or the name of a control symbol, which has none."""
        if token >= len(self.vocabulary.pieces):
            return ""
        return self.vocabulary.decode([token]) or self.vocabulary.pieces[token]


def finish_reason(generation: Generation) -> str:
    return "length" if generation.ended == "length" else "stop"


def usage(results: Sequence[RequestResult], prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Token counts; a prompt counts once, whatever is drawn from it."""
    prompt_tokens = sum(map(len, prompts))
    new_tokens = sum(len(generation.tokens) for result in results for generation in result.generations)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def error_body(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}

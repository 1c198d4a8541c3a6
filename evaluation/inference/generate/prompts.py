"""Continuations of a list of prompts."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from pydantic import Field, ValidationError, model_validator

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.generate.batch import ContinuousBatch
from gristmill.evaluation.inference.generate.drafts import NO_DRAFTS, Drafting
from gristmill.evaluation.inference.generate.generation_request import (
    Generation,
    GenerationRequest,
    GenerationSettings,
    PieceStream,
    RequestOptions,
    RequestResult,
    TextStream,
    TokenLogprob,
)
from gristmill.evaluation.inference.generate.limits import BatchLimits
from gristmill.evaluation.inference.generate.sequence import TokenDecoder
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError, RecipeError, did_you_mean
from gristmill.foundation.files import file_digest, write_atomic
from gristmill.foundation.progress import Reporter
from gristmill.training.parallel.mesh import ALONE, Axis


@dataclass(frozen=True)
class BatchSize:
    """tokens: of the cache, at the length of the longest prompt and its continuation. drafting: of guessed tokens."""

    tokens: int = 8192
    drafting: Drafting = NO_DRAFTS


DEFAULT_SIZE = BatchSize()


def generate(
    causal_lm: CausalLM,
    decoder: TokenDecoder,
    prompts: Sequence[Sequence[int]],
    settings: GenerationSettings,
    size: BatchSize = DEFAULT_SIZE,
    stream: TextStream | None = None,
) -> list[Generation]:
    """One continuation for each prompt, in order; independent of the other prompts of the batch, up to rounding.

    `stream` is called with
    (prompt index, new text) as soon as no later token can change the text. A prompt as long as the model's sequence
    length raises InputError; a shorter one is continued up to that length."""
    if not prompts:
        return []
    requests = [GenerationRequest(tuple(prompt), settings, index) for index, prompt in enumerate(prompts)]
    for index, request in enumerate(requests):
        try:
            request.check(causal_lm.sequence_length, causal_lm.vocab_size)
        except InputError as error:
            raise InputError(str(error).replace("the prompt", f"prompt {index}", 1)) from None
    longest = max(map(len, prompts)) + settings.max_new_tokens
    sequences = max(1, min(len(requests), size.tokens // max(1, min(longest, causal_lm.sequence_length))))
    batch = ContinuousBatch(causal_lm, decoder, BatchLimits(sequences, min(size.tokens, 2048), drafting=size.drafting))
    index_of = {}
    for index in sorted(range(len(requests)), key=lambda index: (-len(requests[index].prompt), index)):
        index_of[batch.add(requests[index], _stream_of(stream, index))] = index
    generations: dict[int, Generation] = {}
    while not batch.is_idle:
        for result in batch.step():
            if result.error is not None:
                raise result.error
            generations[index_of[result.number]] = result.generations[0]
    return [generations[index] for index in range(len(requests))]


def _stream_of(stream: TextStream | None, index: int) -> PieceStream | None:
    return None if stream is None else lambda _, text, logprobs: stream(index, text)


# `gristmill generate --prompts FILE --output FILE`: continuations of the records of a JSON lines file.
#
# Results are appended to OUTPUT.partial in the order of the records; after a kill the same command goes on behind the
# last whole line. At the end the file gets its name.

WAITING = 4  # times the slots: requests that wait in the batch, so that those that fit together are found

Encode = Callable[[str], list[int]]


class PromptRecord(RequestOptions):
    """A record: its prompt as text or as token ids. id, metadata: copied to the result."""

    prompt: str | None = None
    tokens: tuple[int, ...] | None = Field(None, min_length=1)
    id: str | int | None = None
    metadata: Any = None

    @model_validator(mode="after")
    def has_one_prompt(self) -> Self:
        if (self.prompt is None) == (self.tokens is None):
            raise ValueError("give prompt (a text) or tokens (token ids), one of them")
        return self


@dataclass(frozen=True)
class PromptLine:
    """A line of the file: a record, or why it is none."""

    number: int
    record: PromptRecord | None
    error: str = ""


@dataclass(frozen=True)
class PromptFile:
    """prompts: JSON lines. output: the results, one line a record, in the same order."""

    prompts: Path
    output: Path

    def check(self) -> None:
        """Raises InputError or RecipeError before a model is loaded."""
        if not self.prompts.is_file():
            raise InputError(f"{self.prompts}: no such file; give a file of JSON lines such as {{'prompt': 'Once'}}")
        if self.output.exists():
            raise RecipeError(f"{self.output}: exists; name another file, or remove this one")
        if next(self.lines(), None) is None:
            raise InputError(f"{self.prompts}: has no record; write one JSON object a line")

    @property
    def partial(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial")

    def lines(self) -> Iterator[PromptLine]:
        """Lines that are not empty, numbered from 1."""
        with self.prompts.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> PromptLine:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return PromptLine(number, None, f"not a line of JSON in UTF-8 ({str(error)[:100]})")
    if not isinstance(record, dict):
        return PromptLine(number, None, f"not a JSON object but {type(record).__name__}; write {{'prompt': ...}}")
    try:
        return PromptLine(number, PromptRecord(**record))
    except ValidationError as error:
        return PromptLine(number, None, format_validation_error(error, PromptRecord))
    except TypeError as error:
        return PromptLine(number, None, str(error))


def format_validation_error(error: ValidationError, kind: type[Config]) -> str:
    """The first problem of a record or request: its field and how to fix it."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        hint = did_you_mean(name, kind.model_fields, "put data of your own in metadata")
        return f"unknown field {name!r}, {hint}"
    problem = str(first["msg"]).removeprefix("Value error, ")
    return f"{name}: {problem}" if name else problem


@dataclass(frozen=True)
class Writer:
    """run: what the results depend on beside the prompts, such as the model's digest. ranks: the processes that hold
    the model together, of which the first writes."""

    run: Mapping[str, object]
    reporter: Reporter
    ranks: Axis = ALONE

    @property
    def writes(self) -> bool:
        return self.ranks.rank == 0

    def from_first(self, read: Callable[[], Any]) -> Any:
        """Lines that the first rank reads, on all of them."""
        values = [read() if self.writes else None]
        if self.ranks.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


def generate_file(
    files: PromptFile,
    batch: ContinuousBatch,
    encode: Encode,
    default: GenerationSettings,
    writer: Writer,
) -> int:
    """Continues every record; returns how many have an error, which stands in their line of the output.

    encode: prompt -> token ids. A partial file of another run raises RecipeError, naming the difference."""
    header = json.loads(json.dumps({"prompts": file_digest(files.prompts), **writer.run}))
    done, errors = writer.from_first(lambda: _resume(files.partial, header))
    lines = list(files.lines())
    if not writer.writes:
        return sum("error" in result for result in _results(files, lines[done:], batch, encode, default))
    with files.partial.open("ab") as output, writer.reporter.meter("generating", len(lines), "records") as meter:
        meter.resume(done)
        for result in _results(files, lines[done:], batch, encode, default):
            errors += "error" in result
            output.write(json.dumps(result, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            output.flush()
            meter.advance()
    write_atomic(files.output, files.partial.read_bytes().split(b"\n", 1)[1])
    files.partial.unlink()
    return errors


def _results(
    files: PromptFile,
    lines: list[PromptLine],
    batch: ContinuousBatch,
    encode: Encode,
    default: GenerationSettings,
) -> Iterator[dict[str, Any]]:
    """Results in the order of the lines."""
    ready: dict[int, dict[str, Any]] = {}
    place_of: dict[int, int] = {}
    given = taken = 0
    while taken < len(lines):
        while given < len(lines) and len(place_of) < WAITING * batch.limits.sequences:
            line = lines[given]
            try:
                place_of[batch.add(_request(line, encode, default))] = given
            except InputError as error:
                ready[given] = _failed(files, line, error)
            given += 1
        for result in batch.step():
            place = place_of.pop(result.number)
            line = lines[place]
            ready[place] = _failed(files, line, result.error) if result.error else _succeeded(line, result)
        while taken in ready:
            yield ready.pop(taken)
            taken += 1


def _request(line: PromptLine, encode: Encode, default: GenerationSettings) -> GenerationRequest:
    """Draws depend on the seed and the line's number. Raises InputError for a line without a record."""
    if line.record is None:
        raise InputError(line.error)
    tokens = line.record.tokens
    if tokens is None:
        assert line.record.prompt is not None
        tokens = tuple(encode(line.record.prompt))
    return GenerationRequest(tokens, line.record.settings(default), line.number - 1)


def _named(line: PromptLine) -> dict[str, Any]:
    fields: dict[str, Any] = {"line": line.number}
    if line.record is not None:
        given = line.record.model_fields_set
        fields |= {name: getattr(line.record, name) for name in ("id", "metadata") if name in given}
    return fields


def _failed(files: PromptFile, line: PromptLine, error: InputError) -> dict[str, Any]:
    return {**_named(line), "error": f"{files.prompts.name}: line {line.number}: {error}"}


def _succeeded(line: PromptLine, result: RequestResult) -> dict[str, Any]:
    return {**_named(line), "completions": [_completion(generation) for generation in result.generations]}


def _completion(generation: Generation) -> dict[str, Any]:
    completion: dict[str, Any] = {
        "text": generation.text,
        "finish_reason": "length" if generation.ended == "length" else "stop",
        "tokens": list(generation.tokens),
    }
    if generation.logprobs:
        completion["logprobs"] = [_token_logprob(token) for token in generation.logprobs]
    return completion


def _token_logprob(scored: TokenLogprob) -> dict[str, Any]:
    """Six decimals: float32's own, which do not depend on the batch."""
    top = [[token, round(logprob, 6)] for token, logprob in scored.top]
    return {"token": scored.token, "logprob": None if scored.logprob is None else round(scored.logprob, 6), "top": top}


def _resume(partial: Path, header: dict[str, object]) -> tuple[int, int]:
    """(records done, errors among them) of a partial file, from which a torn last line is cut; starts a new one."""
    if not partial.exists():
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(json.dumps(header).encode() + b"\n")
        return 0, 0
    content = partial.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    first, *results = whole.splitlines() or [b"{}"]
    try:
        before = json.loads(first)
        errors = sum("error" in json.loads(line) for line in results)
    except ValueError as error:
        raise InputError(f"{partial}: not a partial output ({error}); remove it") from error
    if before != header:
        differ = sorted(name for name in header if before.get(name) != header[name]) if isinstance(before, dict) else []
        raise RecipeError(
            f"{partial}: is of a run with other {', '.join(differ) or 'settings'}; remove it to start anew, "
            "or repeat that run"
        )
    if len(whole) < len(content):
        with partial.open("r+b") as file:
            file.truncate(len(whole))
    return len(results), errors

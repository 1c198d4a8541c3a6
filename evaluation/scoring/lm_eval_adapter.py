"""lm-eval's LM interface over a CausalLM: texts in, log-likelihoods and continuations out."""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gristmill.evaluation.convert.model_tokenizer import GenerationDefaults, ModelTokenizer
from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.config import SamplingConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.generate.prompts import BatchSize, generate
from gristmill.evaluation.scoring.loglikelihood import Request, Score, score
from gristmill.foundation.errors import InputError
from gristmill.foundation.progress import Reporter
from gristmill.training.parallel.mesh import ALONE, Axis

# Disk cache of results by request, so that a second evaluation of a checkpoint runs no forward pass.

T = TypeVar("T")
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)  # the last: no such table or column
LOCK_TIMEOUT_SECONDS = 60.0  # for another process that is writing


class RequestCache:
    """One SQLite file for one model in one precision: the caller's name for it must say both.

    The key is a digest of token ids and settings, so a changed task, prompt or tokenizer misses the cache. A damaged
    file is replaced and reported to `info`; a file that cannot be opened raises InputError."""

    def __init__(self, path: Path, info: Callable[[str], None] = lambda sentence: None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.info = path, info
        self._connection = self._opened()

    def _opened(self) -> sqlite3.Connection:
        for last in (False, True):
            connection = None
            try:
                connection = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_SECONDS)
                connection.execute("CREATE TABLE IF NOT EXISTS answers (question BLOB PRIMARY KEY, answer TEXT)")
                connection.execute("SELECT question, answer FROM answers LIMIT 1")
                return connection
            except sqlite3.DatabaseError as error:
                if connection is not None:
                    connection.close()
                if last:
                    raise self._unusable(error) from error
                self._remove(error)
        raise AssertionError("the second pass returns or raises")

    def _unusable(self, error: Exception) -> InputError:
        return InputError(
            f"{self.path}: the request cache cannot be written here ({error}); remove it, or free disk space"
        )

    def _remove(self, error: sqlite3.DatabaseError) -> None:
        """Removes a damaged file. Raises InputError if the cause is a full disk or another writing process instead."""
        if error.sqlite_errorcode not in DAMAGE or not self.path.is_file():
            raise self._unusable(error) from error
        self.info(f"{self.path}: the request cache is damaged ({error}) and is replaced by an empty one")
        self.path.unlink()

    def _safely(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Runs the query; if the file is damaged, once more on an empty one."""
        try:
            return work(self._connection)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            self._remove(error)
            self._connection = self._opened()
            return work(self._connection)

    def find(self, questions: Sequence[bytes]) -> dict[bytes, Any]:
        """Cached results by request digest: pairs, as `add` takes them. Other values are ignored."""

        def look_up(connection: sqlite3.Connection) -> dict[bytes, Any]:
            known = {}
            for question in dict.fromkeys(questions):
                row = connection.execute("SELECT answer FROM answers WHERE question = ?", (question,)).fetchone()
                answer = None if row is None else _pair(row[0])
                if answer is not None:
                    known[question] = answer
            return known

        return self._safely(look_up)

    def add(self, answers: Mapping[bytes, Any]) -> None:
        rows = [(question, json.dumps(answer)) for question, answer in answers.items()]

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", rows)

        self._safely(write)

    def close(self) -> None:
        self._connection.close()


def _pair(text: Any) -> list[Any] | None:
    """[log-probability, is it the argmax?] or [text, was it truncated?]."""
    try:
        answer = json.loads(text)
    except (ValueError, TypeError):
        return None
    whole = isinstance(answer, list) and len(answer) == 2
    return answer if whole and isinstance(answer[0], float | str) and isinstance(answer[1], bool) else None


def request_digest(kind: str, *parts: Any) -> bytes:
    """SHA-256 of a request; parts are JSON values."""
    return hashlib.sha256(json.dumps([kind, *parts]).encode()).digest()


SKIPPED_ANSWER = (0.0, False)  # the placeholder of a request that was not run; it counts in no score
DEFAULT_NEW_TOKENS = 256  # lm-eval's own default for a task that sets no max_gen_toks


class TextTokenizer(Protocol):
    """The methods of a tokenizer that evaluation uses."""

    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class LmEvalAdapter(TemplateLM):
    """Runs lm-eval's three request types. Requests longer than the sequence length are skipped: `skipped` has the
    reason by task and document.

    cache: results of earlier requests. data: the data-parallel replicas, each of which runs a part of the
    documents."""

    def __init__(
        self,
        causal_lm: CausalLM,
        tokenizer: TextTokenizer,
        batch_tokens: int,
        reporter: Reporter,
        cache: RequestCache | None = None,
        data: Axis = ALONE,
    ):
        super().__init__()
        self._rank, self._world_size, self._group = data.rank, data.size, data.group
        self.causal_lm, self.batch_tokens, self.reporter = causal_lm, batch_tokens, reporter
        self.text_tokenizer = ModelTokenizer.of(tokenizer)
        self.cache = cache
        self.read_tokens = self.unpacked_tokens = 0
        self.skipped: dict[tuple[str, int], str] = {}
        self._device = causal_lm.device
        self._encoded: dict[str, list[int]] = {}

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.end_of_document

    @property
    def prefix_token_id(self) -> int:
        return self.text_tokenizer.prefix_token

    @property
    def max_length(self) -> int:
        return self.causal_lm.sequence_length

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """int[] of each replica -> int[replicas]."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor, group=self._group)
        return torch.stack(gathered)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        gathered: list[Any] | None = [None] * self.world_size if self.rank == dst else None
        dist.gather_object(obj, gathered, group=self._group, group_dst=dst)
        return gathered

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Token ids of a text, with the special tokens that its tokenizer adds unless add_special_tokens is False."""
        if add_special_tokens is False:
            return self.text_tokenizer.encode(string)
        known = self._encoded.get(string)
        return self.text_tokenizer.encode_bounded([string])[0] if known is None else known

    def _remember(self, texts: Sequence[str]) -> None:
        """Encodes each distinct text once, in one batch: the choices of a question share its text."""
        unique = list(dict.fromkeys(texts))
        self._encoded = dict(zip(unique, self.text_tokenizer.encode_bounded(unique), strict=True))

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        self._remember([text for request in requests for text in _texts(*request.args)])
        pairs = [self._encode_request(*request.args) for request in requests]
        self._encoded.clear()
        fitting = [index for index, pair in enumerate(pairs) if self._fits(requests[index], *pair[1:])]
        answers = [SKIPPED_ANSWER] * len(requests)
        for index, answer in zip(fitting, self._loglikelihood_tokens([pairs[i] for i in fitting]), strict=True):
            answers[index] = answer
        return answers

    def _fits(self, request: Instance, context: list[int], continuation: list[int]) -> bool:
        """Whether the request fits the sequence length. The last token is not an input and does not count."""
        tokens = len(context) + len(continuation) - 1
        if tokens > self.max_length:
            self._skip(request, f"its {tokens} tokens are more than the model's sequence length of {self.max_length}")
        return tokens <= self.max_length

    def _skip(self, request: Instance, reason: str) -> None:
        self.skipped.setdefault((request.task_name or "", request.doc_id or 0), reason)

    def _encode_request(self, context: str, continuation: str) -> tuple[tuple[str, str], list[int], list[int]]:
        """Encodes a request. Raises InputError if the continuation has no token of its own: a score of 0 would be the
        best."""
        if context:
            context_ids, continuation_ids = self._encode_pair(context, continuation)
        else:
            context_ids, continuation_ids = [self.prefix_token_id], self.tok_encode(continuation, False)
            if continuation_ids[:1] == context_ids:
                continuation_ids = continuation_ids[1:]
        if not continuation_ids:
            raise InputError(
                f"the continuation {continuation!r} after {context[-60:]!r} adds no token; "
                "end the context at a word, or give the continuation some text"
            )
        return (context, continuation), context_ids, continuation_ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        scored = [Request(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        return [
            (scored.logprob, scored.greedy) for scored in self._score(scored, "scoring answers", share_prefixes=True)
        ]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Full texts after the BOS or end-of-document token, in disjoint windows of the model's sequence length."""
        windows: list[Request] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            for pair in get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1):
                context, continuation = make_disjoint_window(pair)
                windows.append(Request(tuple(context), tuple(continuation)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, result in zip(owners, self._score(windows, "scoring texts", share_prefixes=False), strict=True):
            totals[owner] += result.logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generated answers. Skips prompts that fill the sequence length, and answers that it truncated before a stop
        string, the end of the document or max_gen_toks."""
        answers = [""] * len(requests)
        with self.reporter.meter("generating answers", len(requests), "answers") as meter:
            for settings, indices in _by_settings(requests, self.text_tokenizer.generation).items():
                prompts = {
                    index: self.tok_encode(requests[index].args[0]) or [self.prefix_token_id] for index in indices
                }
                fitting = [index for index in indices if self._fits_prompt(requests[index], len(prompts[index]))]
                generations = self._generate([prompts[index] for index in fitting], settings)
                for index, (text, cut_off) in zip(fitting, generations, strict=True):
                    answers[index] = text
                    if cut_off:
                        tokens = len(prompts[index])
                        reason = f"its prompt of {tokens} tokens left {self.max_length - tokens} for an answer, too few"
                        self._skip(requests[index], reason)
                meter.advance(len(indices))
        return answers

    def _fits_prompt(self, request: Instance, tokens: int) -> bool:
        if tokens >= self.max_length:
            self._skip(request, f"its prompt of {tokens} tokens fills the model's sequence length of {self.max_length}")
        return tokens < self.max_length

    def _generate(self, prompts: list[list[int]], settings: GenerationSettings) -> list[tuple[str, bool]]:
        """(text, was it truncated by the sequence length?). Only greedy text is cached."""

        def write(prompts: list[list[int]]) -> list[tuple[str, bool]]:
            generations = generate(
                self.causal_lm, self.text_tokenizer, prompts, settings, BatchSize(self._generation_tokens)
            )
            return [
                (made.text, made.ended == "length" and len(made.tokens) < settings.max_new_tokens)
                for made in generations
            ]

        if self.cache is None or settings.sampling.temperature > 0:
            return write(prompts)
        digests = [
            request_digest("write", prompt, settings.stops, settings.max_new_tokens, settings.sampling.model_dump())
            for prompt in prompts
        ]
        known = self.cache.find(digests)
        new = {digest: prompt for digest, prompt in zip(digests, prompts, strict=True) if digest not in known}
        answers = dict(zip(new, write([*new.values()]), strict=True))
        self.cache.add(answers)
        known |= answers
        return [(known[digest][0], known[digest][1]) for digest in digests]

    @property
    def _generation_tokens(self) -> int:
        """batch_tokens of generation; larger than in scoring, since most forward passes have one token per row."""
        return 8 * self.batch_tokens

    def _score(self, requests: list[Request], description: str, share_prefixes: bool) -> list[Score]:
        """Scores of the requests in order; duplicates run once, cached ones not at all."""
        digests = {request: request_digest("score", request.context, request.continuation) for request in requests}
        known = {} if self.cache is None else self.cache.find([*digests.values()])
        new = [request for request, digest in digests.items() if digest not in known]
        with self.reporter.meter(description, len(new), "requests") as meter:
            scores = score(self.causal_lm, new, self.batch_tokens, share_prefixes, meter.advance)
        self.read_tokens += scores.read_tokens
        self.unpacked_tokens += scores.unpacked_tokens
        answers = {
            digests[request]: (result.logprob, result.greedy) for request, result in zip(new, scores, strict=True)
        }
        if self.cache is not None:
            self.cache.add(answers)
        answers |= known
        return [Score(*answers[digests[request]]) for request in requests]


def _texts(context: str, continuation: str) -> tuple[str, str]:
    """The texts `_encode_pair` encodes: both together, and the context without trailing white space."""
    return context + continuation, context.rstrip()


def _by_settings(requests: Sequence[Instance], defaults: GenerationDefaults) -> dict[GenerationSettings, list[int]]:
    """Indices of requests by generation settings: those with equal settings are batched."""
    groups: dict[GenerationSettings, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(_settings(dict(request.args[1]), defaults), []).append(index)
    return groups


def _settings(options: dict, defaults: GenerationDefaults) -> GenerationSettings:
    """GenerationSettings from lm-eval's generation_kwargs; the rest is the publisher's, as in transformers.

    Raises InputError on an unsupported option."""
    until = options.pop("until", [])
    stops = (until,) if isinstance(until, str) else tuple(until)
    new_tokens = int(options.pop("max_gen_toks", options.pop("max_new_tokens", DEFAULT_NEW_TOKENS)))
    temperature = float(options.pop("temperature", 0.0))
    if not options.pop("do_sample", temperature > 0):
        temperature = 0.0
    known = {name: options.pop(name) for name in ("top_k", "top_p", "min_p", "repetition_penalty") if name in options}
    if options:
        raise InputError(f"generation_kwargs {sorted(options)} are not supported; remove them from the task")
    return GenerationSettings(new_tokens, SamplingConfig(**defaults.sampling_fields(temperature, **known)), stops)

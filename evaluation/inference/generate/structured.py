"""Structured output: tokens that a JSON schema, a regular expression or a grammar allows, by llguidance."""

import json
from typing import Any

import numpy as np

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.tokenizers.tokenizer import JSON_NAME

SCHEMA, REGEX, GRAMMAR = "json_schema", "regex", "grammar"


def schema_grammar(schema: Any) -> str:
    """The grammar of JSON texts that a schema allows. Raises InputError for a schema that is none."""
    return _grammar(SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def regex_grammar(pattern: str) -> str:
    return _grammar(REGEX, pattern)


def lark_grammar(text: str) -> str:
    return _grammar(GRAMMAR, text)


def choice_grammar(texts: list[str]) -> str:
    """The grammar of one of some texts."""
    return lark_grammar("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))


def _grammar(kind: str, text: str) -> str:
    library = _library()
    try:
        grammar = str(library.grammar_from(kind if kind != GRAMMAR else "lark", text))
        invalid, messages = library.LLMatcher.validate_grammar_with_warnings(grammar)
    except ValueError as error:
        raise InputError(f"the {kind} cannot be used: {error}") from error
    if invalid:
        raise InputError(f"the {kind} cannot be used: {' '.join(messages)[:300]}")
    return grammar


def _library() -> Any:
    try:
        import llguidance  # the extra `serve`
    except ModuleNotFoundError as error:
        raise RecipeError(
            "llguidance is not installed, which structured output needs; run "
            "`pip install -c constraints.txt 'gristmill[serve]'`"
        ) from error
    return llguidance


class GrammarTokenizer:
    """The vocabulary as llguidance reads it, made when the first request asks for structured output."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._grammar_tokenizer: Any = None

    def matcher(self, grammar: str) -> "GrammarMatcher":
        if self._grammar_tokenizer is None:
            self._grammar_tokenizer = self._built()
        return GrammarMatcher(_library().LLMatcher(self._grammar_tokenizer, grammar), self.tokenizer.vocab_size)

    def _built(self) -> Any:
        folder, ends = getattr(self.tokenizer, "folder", None), [*self.tokenizer.ends]
        if folder is not None and (folder / JSON_NAME).is_file():
            content = (folder / JSON_NAME).read_text("utf-8")
            return _library().LLTokenizer(content, n_vocab=self.tokenizer.vocab_size, eos_token=ends)
        wrapper = _library().TokenizerWrapper(_Spelling(self.tokenizer))
        return _library().LLTokenizer(wrapper, n_vocab=self.tokenizer.vocab_size, eos_token=ends)


class _Spelling:
    """Bytes of each token, for tokenizers without a tokenizer.json."""

    def __init__(self, tokenizer: Any):
        self.eos_token_id, self.bos_token_id = tokenizer.ends[0], None
        self.tokens = [_bytes_of(tokenizer, token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = [token for token, content in enumerate(self.tokens) if not content]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text))


def _bytes_of(tokenizer: Any, token: int) -> bytes:
    """SentencePiece writes a byte as <0x0A> and a space as U+2581."""
    piece = tokenizer.pieces[token]
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return b"" if not tokenizer.decode([token]) and "▁" not in piece else piece.replace("▁", " ").encode()


class GrammarMatcher:
    """Matcher of one text: which tokens may come next. At the grammar's end only an end token may."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher, self._size = matcher, vocab_size
        if matcher.is_error():
            raise InputError(f"structured output: {matcher.get_error()}")

    def allowed(self) -> np.ndarray:
        """bool[V]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little", count=len(bits) * 8)[: self._size].astype(bool)

    def accept(self, token: int) -> None:
        """Raises InputError where the token is not allowed."""
        if not self._matcher.consume_token(token):
            raise InputError(f"structured output: {self._matcher.get_error() or 'the token is not allowed'}")

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

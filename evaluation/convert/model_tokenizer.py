"""How a model is spoken to: its tokenizer, the tokens its texts begin and end with, its chat template and its defaults
of generation."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError
from sentencepiece import SentencePieceProcessor

from gristmill.evaluation.convert.chat_template import ChatTemplate, read_chat_template
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.tokenizers.tokenizer import (
    JSON_NAME,
    MODEL_NAME,
    SETTINGS_NAME,
    Tokenizer,
    load_tokenizer,
    read_settings,
)
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import pre_tokenizers

GENERATION_NAME = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class GenerationDefaults(Config):
    """Fields that the publisher states; None where it states nothing. do_sample: draw tokens where the caller does not
    say how; else greedy, as in transformers."""

    do_sample: bool = False
    temperature: float | None = Field(None, ge=0.0)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Defaults of a model or tokenizer folder; none without the file. Raises InputError for invalid values."""
        path = folder / GENERATION_NAME
        if not path.is_file():
            return cls()
        try:
            fields = json.loads(path.read_bytes())
            stated = {name: fields[name] for name in cls.model_fields if fields.get(name) is not None}
            return cls(**{name: value for name, value in stated.items() if (name, value) != ("top_k", 0)})
        except ValidationError as error:
            problem = error.errors()[0]
            raise InputError(
                f"{path}: {problem['loc'][0]}: {problem['msg']}; correct the field or fetch the file again"
            ) from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: not JSON with fields ({error}); fetch the file again") from error

    def sampling_fields(self, temperature: float | None = None, **given: Any) -> dict[str, Any]:
        """Fields of a SamplingConfig as the caller asks and, where it does not, as the publisher states.

        temperature: None is the publisher's where it samples, else 0 (greedy)."""
        if temperature is None:
            temperature = (self.temperature or 1.0) if self.do_sample else 0.0
        fields = {name: getattr(self, name) for name in SAMPLING_FIELDS[1:]}
        fields |= {name: value for name, value in given.items() if value is not None}
        return {"temperature": temperature, **{name: value for name, value in fields.items() if value is not None}}


SYMBOLS_NAME = "special_tokens_map.json"
# bos_token of the classes of transformers whose tokenizer_config.json may leave it out.
DEFAULT_BOS = {"Llama": "<s>", "CodeLlama": "<s>", "Gemma": "<bos>", "GPT2": "<|endoftext|>"}


@dataclass(frozen=True)
class TextBounds:
    """Special tokens around a text. prefix, suffix: those that the tokenizer adds when it encodes one. bos: None if it
    has none. ends: tokens that end a generated text, the tokenizer's first. starts_documents: every prompt begins with
    the end-of-document token, as documents do in the data that gristmill trains on. config_ids: bos_token_id and the
    like as the config.json of an imported folder has them, for an export."""

    ends: tuple[int, ...]
    bos: int | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    starts_documents: bool = False
    config_ids: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_documents(cls, end_of_document: int) -> Self:
        """Bounds of a model that gristmill trained: documents are separated by the end-of-document token."""
        return cls((end_of_document,), starts_documents=True)

    def to_json(self) -> dict[str, Any]:
        """The field `text` of model.json."""
        starts = {"starts_documents": True} if self.starts_documents else {}
        config_ids = {"config_ids": dict(self.config_ids)} if self.config_ids else {}
        affixes = {"prefix": [*self.prefix], "suffix": [*self.suffix]}
        return {"ends": [*self.ends], "bos": self.bos, **affixes, **starts, **config_ids}

    @classmethod
    def from_json(cls, fields: Any, path: Path, vocab_size: int) -> Self:
        """Raises InputError naming the file if the fields are not those of to_json, or no tokens."""
        try:
            affixes = tuple(fields["prefix"]), tuple(fields["suffix"])
            starts, config_ids = fields.get("starts_documents", False) is True, dict(fields.get("config_ids", {}))
            bounds = cls(tuple(fields["ends"]), fields["bos"], *affixes, starts, config_ids)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: text is damaged ({error}); import the model again") from error
        tokens = [*bounds.ends, *bounds.prefix, *bounds.suffix, *([] if bounds.bos is None else [bounds.bos])]
        wrong = next((token for token in tokens if type(token) is not int or not 0 <= token < vocab_size), None)
        if wrong is not None or not bounds.ends:
            raise InputError(f"{path}: text has {wrong}, not a token of the {vocab_size}; import the model again")
        return bounds


class ModelTokenizer:
    """A tokenizer with the bounds of a model's texts, and of the folder its chat template and its defaults of
    generation. `encode` gives the tokens of the text alone.

    folder: of the tokenizer; None where it has none. generation: None reads that folder's."""

    def __init__(
        self,
        tokenizer: Any,
        bounds: TextBounds,
        folder: Path | None = None,
        generation: GenerationDefaults | None = None,
    ):
        self.tokenizer, self.bounds, self.folder = tokenizer, bounds, folder
        if generation is None:
            generation = GenerationDefaults() if folder is None else GenerationDefaults.read(folder)
        self.generation = generation
        self._symbol_encoder: HuggingFaceTokenizer | None = None
        self.vocab_size: int = tokenizer.vocab_size
        self.end_of_document: int = tokenizer.end_of_document
        self.ends = bounds.ends
        self._bos_text = "" if bounds.bos is None or bounds.starts_documents else tokenizer.pieces[bounds.bos]

    @classmethod
    def of(cls, tokenizer: Any, folder: Path | None = None) -> Self:
        """The given tokenizer, with the bounds of gristmill's own documents if it has none."""
        if isinstance(tokenizer, cls):
            return tokenizer
        return cls(tokenizer, TextBounds.of_documents(tokenizer.end_of_document), folder)

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(self.tokenizer.pieces)

    @property
    def fingerprint(self) -> str:
        return str(self.tokenizer.fingerprint)

    @property
    def prefix_token(self) -> int:
        """The token before a text that is scored from its first token: BOS, else the end of a document."""
        return self.end_of_document if self.bounds.bos is None else self.bounds.bos

    @property
    def bounding_symbols(self) -> tuple[str, str]:
        """The texts of BOS and of the end of a document for chat templates; both are empty for a model that gristmill
        trained, whose documents begin by encode_prompt."""
        if self.bounds.starts_documents:
            return "", ""
        return self._bos_text, self.pieces[self.end_of_document]

    def id_of(self, piece: str) -> int | None:
        number: int | None = self.tokenizer.id_of(piece)
        return number

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self.tokenizer.encode_batch(texts))

    def encode_bounded(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text with the special tokens that the tokenizer adds; a text that begins with the BOS symbol gets no
        second one, as in lm-eval."""
        begin = [bool(self._bos_text) and text.startswith(self._bos_text) for text in texts]
        bare = [text[len(self._bos_text) :] if has_bos else text for text, has_bos in zip(texts, begin, strict=True)]
        prefix, suffix = self.bounds.prefix, self.bounds.suffix
        return [
            [self.prefix_token, *ids] if has_bos else [*prefix, *ids, *suffix]
            for ids, has_bos in zip(self.encode_batch(bare), begin, strict=True)
        ]

    def encode_prompt(self, text: str) -> list[int]:
        """A prompt to continue, with at least one token."""
        if self.bounds.starts_documents:
            return [self.end_of_document, *self.encode(text)]
        return self.encode_bounded([text])[0] or [self.prefix_token]

    def chat_template(self, given: Path | None = None) -> ChatTemplate:
        """The given file, else the model's own template, else the plain one."""
        folder = self.folder or Path("no-folder")
        return read_chat_template(folder, given, self._template_symbols())

    def encode_chat(self, text: str, template: ChatTemplate) -> list[int]:
        """The ids of a rendered conversation, whose control symbols stand for themselves. A template writes BOS itself,
        as in transformers."""
        ids = self.encode_with_symbols(text)
        if template.writes_symbols and not self.bounds.starts_documents:
            return ids or [self.prefix_token]
        return [*self.prompt_prefix, *ids]

    def encode_with_symbols(self, text: str) -> list[int]:
        """The ids of a text whose control symbols stand for themselves."""
        if not text:
            return []
        encoder = self._json_encoder()
        if encoder is not None:
            return list(encoder.encode(text, add_special_tokens=False).ids)
        numbers = {symbol: number for symbol in self._control_symbols() if (number := self.id_of(symbol)) is not None}
        if not numbers:
            return self.encode(text)
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, sorted(numbers, key=len, reverse=True)))})", text):
            ids += [numbers[part]] if part in numbers else self.encode(part) if part else []
        return ids

    def _json_encoder(self) -> HuggingFaceTokenizer | None:
        """The tokenizer.json as it is, which knows where white space beside a control symbol belongs to it."""
        path = None if self.folder is None else self.folder / JSON_NAME
        if self._symbol_encoder is None and path is not None and path.is_file():
            self._symbol_encoder = _chat_encoder(path)
        return self._symbol_encoder

    def _control_symbols(self) -> list[str]:
        """Control symbols of a tokenizer without a tokenizer.json: those that its settings name, BOS and the ends."""
        tokens = [token for token in (self.bounds.bos, *self.ends) if token is not None and token < self.vocab_size]
        named = [] if self.folder is None else symbols_of(self.folder).values()
        symbols = [*named, *(self.pieces[token] for token in tokens)]
        return [symbol for symbol in dict.fromkeys(symbols) if isinstance(symbol, str) and symbol]

    def _template_symbols(self) -> dict[str, Any]:
        """Variables of chat templates: the symbols that the settings name. BOS and the end of a document are empty for
        a model that gristmill trained, whose documents begin by encode_prompt."""
        begin, end = self.bounding_symbols
        stated = {} if self.folder is None or self.bounds.starts_documents else symbols_of(self.folder)
        return {"bos_token": begin, "eos_token": end, **stated}

    @property
    def prompt_prefix(self) -> tuple[int, ...]:
        """The tokens that encode_prompt puts before a text."""
        return (self.end_of_document,) if self.bounds.starts_documents else self.bounds.prefix


def load_model_tokenizer(
    folder: Path, ends: Sequence[int] = (), generation: GenerationDefaults | None = None
) -> ModelTokenizer:
    """The tokenizer of a Hugging Face folder, which adds the special tokens that transformers' AutoTokenizer adds.

    ends: other tokens that end a text of the model. generation: None reads the folder's."""
    tokenizer = load_tokenizer(folder)
    return ModelTokenizer(tokenizer, read_bounds(folder, tokenizer, ends), folder, generation)


SYMBOL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def symbols_of(folder: Path) -> dict[str, str]:
    """Special tokens by their names in transformers, from the settings of a tokenizer's folder."""
    settings, others = read_settings(folder / SETTINGS_NAME), read_settings(folder / SYMBOLS_NAME)
    names = [*SYMBOL_NAMES, *(settings.get("extra_special_tokens") or {})]
    extra = settings.get("extra_special_tokens")
    fields = {**others, **{name: settings[name] for name in SYMBOL_NAMES if name in settings}}
    fields |= extra if isinstance(extra, dict) else {}
    texts = {name: _symbol_text(fields.get(name)) for name in names}
    return {name: text for name, text in texts.items() if text is not None}


def _chat_encoder(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer.json as transformers reads it. Of Llama's classes it replaces the normalizer that writes a space
    before every piece of text between control symbols: without `legacy` only the whole text gets one."""
    encoder = HuggingFaceTokenizer.from_str(path.read_text("utf-8"))
    encoder.no_truncation()
    encoder.no_padding()
    settings = read_settings(path.with_name(SETTINGS_NAME))
    if str(settings.get("tokenizer_class", "")).startswith("Llama") and "Prepend" in str(encoder.normalizer):
        encoder.normalizer = None
        scheme = "always" if settings.get("legacy", False) else "first"
        encoder.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    return encoder


def _symbol_text(symbol: Any) -> str | None:
    symbol = symbol.get("content") if isinstance(symbol, dict) else symbol
    return symbol if isinstance(symbol, str) else None


def read_bounds(folder: Path, tokenizer: Tokenizer, ends: Sequence[int] = ()) -> TextBounds:
    """Bounds by the post-processor of tokenizer.json, which alone decides in transformers where there is one; else by
    add_bos_token and add_eos_token of tokenizer_config.json."""
    settings = read_settings(folder / SETTINGS_NAME)
    bos = _bos(folder, tokenizer, settings)
    all_ends = tuple(dict.fromkeys([tokenizer.end_of_document, *(end for end in ends if end < tokenizer.vocab_size)]))
    if (folder / JSON_NAME).is_file():
        prefix, suffix = _added_by_json(folder / JSON_NAME)
        if bos is None and prefix == all_ends and not suffix:  # an export of a model that gristmill trained
            return TextBounds.of_documents(tokenizer.end_of_document)
    else:
        prefix = (bos,) if bos is not None and settings.get("add_bos_token", False) else ()
        suffix = (tokenizer.end_of_document,) if settings.get("add_eos_token", False) else ()
    return TextBounds(all_ends, bos, prefix, suffix)


def _added_by_json(path: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens before, tokens after) that the post-processor puts around a text."""
    encoding = HuggingFaceTokenizer.from_str(path.read_text("utf-8")).encode("a", add_special_tokens=True)
    special = [bool(mark) for mark in encoding.special_tokens_mask]
    if all(special):
        return tuple(encoding.ids), ()
    first, last = special.index(False), len(special) - special[::-1].index(False)
    return tuple(encoding.ids[:first]), tuple(encoding.ids[last:])


def _bos(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> int | None:
    symbol = settings.get("bos_token", read_settings(folder / SYMBOLS_NAME).get("bos_token"))
    if "bos_token" not in settings and symbol is None:
        kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
        symbol = DEFAULT_BOS.get(kind)
        if symbol is None and not (folder / JSON_NAME).is_file() and (folder / MODEL_NAME).is_file():
            number = SentencePieceProcessor(model_proto=(folder / MODEL_NAME).read_bytes()).bos_id()
            return number if number >= 0 else None
    symbol = symbol.get("content") if isinstance(symbol, dict) else symbol
    return tokenizer.id_of(symbol) if isinstance(symbol, str) else None

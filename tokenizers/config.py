"""The recipe section `tokenizer`: train a tokenizer, or use a pretrained one."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config

TRANSFORM_FIELDS = ("case_marks", "split_digits", "split_operators", "split_spaces")


def _strategy(algorithm: str, *transforms: str) -> dict[str, Any]:
    return {"algorithm": algorithm, **{name: name in transforms for name in TRANSFORM_FIELDS}}


# Fields that byte_bpe does not have.
SENTENCEPIECE_FIELDS = (
    "case_marks", "split_operators", "split_spaces", "user_symbols", "character_coverage", "max_piece_length",
)  # fmt: skip

# The five strategies that mGPT compared (Shliazhko et al. 2022, arXiv:2204.07580): each of the middle three adds to the
# one before it.
PRESETS: dict[str, dict[str, Any]] = {
    "default": _strategy("bpe"),
    "case": _strategy("bpe", "case_marks"),
    "arithmetic": _strategy("bpe", "case_marks", "split_digits", "split_operators"),
    "combined": _strategy("bpe", "case_marks", "split_digits", "split_operators", "split_spaces"),
    "characters": _strategy("characters"),
}

# Arithmetic operators and relations of ASCII and Latin-1, and the minus sign.
OPERATORS = ("+", "-", "*", "/", "=", "<", ">", "^", "%", "±", "×", "÷", "−")
SPACE = " "
FIM_SYMBOLS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
BYTE_PIECES = 256


Goal = float | dict[str, float] | None


class TokenizerRequirements(Config):
    """Values that every language must reach, or the stage fails: a number for all, or one for each named language.

    Languages are those of the documents. parity: tokens over those of the same text in tokenizer.parity_language."""

    max_parity: Goal = Field(None, description="tokens over those of the same text in the reference language")
    max_fertility: Goal = Field(None, description="tokens per word")
    max_byte_fallback: Goal = Field(None, description="share of tokens that are one byte of a character")
    min_bytes_per_token: Goal = Field(None, description="UTF-8 bytes per token")

    def limit(self, name: str, language: str) -> float | None:
        """The goal of one language; None where there is none."""
        goal: Goal = getattr(self, name)
        return goal.get(language) if isinstance(goal, dict) else goal

    def languages(self) -> set[str]:
        """Those that are named."""
        goals = (getattr(self, name) for name in type(self).model_fields)
        return {language for goal in goals if isinstance(goal, dict) for language in goal}


class TokenizerConfig(Config):
    """pretrained: a SentencePiece .model, a Hugging Face tokenizer.json (or the folder or hub name that holds one) or a
    .tiktoken file of ranks; it is used unchanged, and the training fields do not apply.

    temperature: sampling temperature of the training blend: a share p becomes p**(1/temperature), normalized, so 1
    keeps the recipe's weights and large values approach equal shares."""

    algorithm: Literal["bpe", "unigram", "characters", "byte_bpe"] = Field(
        "bpe",
        description="SentencePiece models (bpe, unigram, characters), or byte_bpe: merges of bytes as Llama 3's",
    )
    superwords: float = Field(
        0.0,
        ge=0.0,
        lt=1.0,
        description="for byte_bpe: share of the merges, the last ones, that cross spaces",
    )
    vocab_size: int = Field(
        8192, gt=0, le=10_000_000, description="number of pieces, including the 256 bytes and the control symbols"
    )
    preset: Literal["default", "case", "arithmetic", "combined", "characters"] | None = Field(
        None, description="one of the five strategies of mGPT; sets the algorithm and the transforms together"
    )
    split_digits: bool = Field(True, description="every digit is a separate piece")
    split_operators: bool = Field(False, description="every arithmetic operator is a separate piece")
    split_spaces: bool = Field(False, description="every space is a separate piece")
    case_marks: bool = Field(False, description="encode a capital letter as a mark and the lower-case letter")
    user_symbols: tuple[str, ...] = Field((), description="strings that are always encoded as one piece")
    fim: bool = Field(False, description="reserve the fill-in-the-middle control symbols")
    character_coverage: float = Field(
        # SentencePiece refuses less than 0.98, after the sample is drawn.
        0.9995,
        ge=0.98,
        le=1.0,
        description="share of characters with a piece; the rest is encoded as bytes",
    )
    max_piece_length: int = Field(16, ge=1, le=512, description="maximum length of a piece in characters")
    sample_bytes: int = Field(16_000_000, gt=0, description="maximum amount of training text")
    temperature: float = Field(1.0, ge=1.0)
    group_by: Literal["source", "language"] = "source"
    parity_language: str = Field("en", description="the language that parity is relative to")
    requirements: TokenizerRequirements | None = Field(
        None, description="goals by language; the stage fails if one is missed"
    )
    pretrained: str | None = None
    pattern: str | None = Field(None, description="for tiktoken ranks: the pre-tokenization regular expression")
    end_of_document: str | None = Field(None, description="for a pretrained tokenizer: the end-of-document symbol")

    @property
    def symbols(self) -> tuple[str, ...]:
        """The strings that are always encoded as one piece: user_symbols, and those of the transforms."""
        operators = OPERATORS if self.split_operators else ()
        spaces = (SPACE,) if self.split_spaces else ()
        return tuple(dict.fromkeys((*self.user_symbols, *operators, *spaces)))

    @model_validator(mode="before")
    @classmethod
    def strategy_sets_its_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or str(fields.get("preset")) not in PRESETS:
            return fields
        for name, value in PRESETS[fields["preset"]].items():
            if fields.get(name, value) != value:
                raise ValueError(
                    f"preset={fields['preset']!r} means {name}={value!r}, but the recipe says "
                    f"{name}={fields[name]!r}; drop one of the two"
                )
        return {**fields, **PRESETS[fields["preset"]]}

    @model_validator(mode="after")
    def fields_belong_to_the_algorithm(self) -> Self:
        if self.algorithm != "byte_bpe" and self.superwords:
            raise ValueError("superwords are merges of byte_bpe; set algorithm: byte_bpe, or drop superwords")
        others = [name for name in SENTENCEPIECE_FIELDS if getattr(self, name) != type(self).model_fields[name].default]
        if self.algorithm == "byte_bpe" and others:
            raise ValueError(f"algorithm=byte_bpe has no {others[0]}; drop it, or set algorithm: bpe")
        return self

    @model_validator(mode="after")
    def symbols_are_usable(self) -> Self:
        for symbol in self.user_symbols:
            if not symbol or "▁" in symbol:
                raise ValueError(f"user symbol {symbol!r} is invalid; symbols must not be empty or contain '▁'")
        if len(set(self.user_symbols)) != len(self.user_symbols):
            raise ValueError("user_symbols names a symbol twice; name each once")
        return self

    @model_validator(mode="after")
    def vocabulary_holds_the_bytes(self) -> Self:
        reserved = BYTE_PIECES + 2 + len(self.symbols) + (len(FIM_SYMBOLS) if self.fim else 0)
        if self.pretrained is None and self.vocab_size <= reserved:
            raise ValueError(
                f"vocab_size={self.vocab_size} is too small for {reserved} reserved pieces "
                f"(256 bytes, control and user symbols, operators); try {max(512, 2 * reserved)} or more"
            )
        return self

    @model_validator(mode="after")
    def pattern_goes_with_ranks(self) -> Self:
        is_ranks = self.pretrained is not None and self.pretrained.endswith(".tiktoken")
        if self.pattern is not None and not is_ranks:
            raise ValueError("pattern is read with a .tiktoken file of ranks only; drop it")
        if self.end_of_document is not None and self.pretrained is None:
            raise ValueError("end_of_document names a symbol of a pretrained tokenizer; drop it, or set pretrained")
        return self


# Config of the proxy model that compares tokenizers. Does not import torch.


class ProxyConfig(Config):
    """Defaults: about a million parameters, a minute a model on one core. text_bytes: training text, the same for every
    tokenizer. held_out_bytes: of each language, at most. seeds: number of models per tokenizer."""

    layers: int = 2
    width: int = 64
    heads: int = 2
    sequence_length: int = 128
    batch: int = 16
    text_bytes: int = 2_000_000
    held_out_bytes: int = 20_000
    learning_rate: float = 3e-3
    seeds: int = 3

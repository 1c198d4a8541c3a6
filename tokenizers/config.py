"""What a recipe says about the tokenizer: train one, or use one that exists."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from gristmill.foundation.config import Config

# The five strategies that mGPT compared (Shliazhko et al. 2022, arXiv:2204.07580), as settings of ours.
STRATEGIES: dict[str, dict[str, Any]] = {
    "default": {"algorithm": "bpe", "split_digits": False, "case_marks": False},
    "case": {"algorithm": "bpe", "split_digits": False, "case_marks": True},
    "arithmetic": {"algorithm": "bpe", "split_digits": True, "case_marks": False},
    "combined": {"algorithm": "bpe", "split_digits": True, "case_marks": True},
    "characters": {"algorithm": "characters", "split_digits": True, "case_marks": False},
}

FIM_SYMBOLS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
BYTE_PIECES = 256


class TokenizerConfig(Config):
    """existing: a SentencePiece .model, a Hugging Face tokenizer.json (or the folder or hub name that holds one) or a
    .tiktoken file of ranks; it is used as it is, and every field that is about training must then be left alone.

    temperature flattens the blend the tokenizer is trained on: a share p becomes p**(1/temperature), normalised, so 1
    keeps the recipe's weights and large values make all groups equal."""

    algorithm: Literal["bpe", "unigram", "characters"] = "bpe"
    vocab_size: int = Field(
        8192, gt=0, le=10_000_000, description="pieces, the 256 bytes and the control symbols included"
    )
    strategy: Literal["default", "case", "arithmetic", "combined", "characters"] | None = Field(
        None, description="one of mGPT's five; sets algorithm, split_digits and case_marks together"
    )
    split_digits: bool = Field(True, description="every digit is a piece of its own")
    case_marks: bool = Field(False, description="capital letters become a mark and the small letter")
    user_symbols: tuple[str, ...] = Field((), description="strings that are always one piece")
    fim: bool = Field(False, description="reserve the control symbols of fill-in-the-middle")
    character_coverage: float = Field(0.9995, gt=0.9, le=1.0, description="the rest is spelt in bytes")
    longest_piece: int = Field(16, ge=1, le=512, description="in characters")
    sample_bytes: int = Field(16_000_000, gt=0, description="text the tokenizer is trained on, at most")
    temperature: float = Field(1.0, ge=1.0)
    group_by: Literal["source", "language"] = "source"
    existing: str | None = None
    pattern: str | None = Field(None, description="for tiktoken ranks: the regular expression that cuts text to words")
    end_of_document: str | None = Field(None, description="for an existing tokenizer: the symbol that ends a document")

    @model_validator(mode="before")
    @classmethod
    def strategy_sets_its_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.get("strategy") not in STRATEGIES:
            return fields
        for name, value in STRATEGIES[fields["strategy"]].items():
            if fields.get(name, value) != value:
                raise ValueError(
                    f"strategy={fields['strategy']!r} means {name}={value!r}, but the recipe says "
                    f"{name}={fields[name]!r}; drop one of the two"
                )
        return {**fields, **STRATEGIES[fields["strategy"]]}

    @model_validator(mode="after")
    def symbols_are_usable(self) -> Self:
        for symbol in self.user_symbols:
            if not symbol or "▁" in symbol:
                raise ValueError(f"user symbol {symbol!r} cannot be a piece; symbols are not empty and hold no '▁'")
        if len(set(self.user_symbols)) != len(self.user_symbols):
            raise ValueError("user_symbols names a symbol twice; name each once")
        return self

    @model_validator(mode="after")
    def vocabulary_holds_the_bytes(self) -> Self:
        reserved = BYTE_PIECES + 2 + len(self.user_symbols) + (len(FIM_SYMBOLS) if self.fim else 0)
        if self.existing is None and self.vocab_size <= reserved:
            raise ValueError(
                f"vocab_size={self.vocab_size} leaves no room beside {reserved} reserved pieces "
                f"(256 bytes, control and user symbols); try {max(512, 2 * reserved)} or more"
            )
        return self

    @model_validator(mode="after")
    def pattern_goes_with_ranks(self) -> Self:
        is_ranks = self.existing is not None and self.existing.endswith(".tiktoken")
        if self.pattern is not None and not is_ranks:
            raise ValueError("pattern is read with a .tiktoken file of ranks only; drop it")
        if self.end_of_document is not None and self.existing is None:
            raise ValueError("end_of_document names a symbol of an existing tokenizer; drop it, or set existing")
        return self

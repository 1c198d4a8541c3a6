"""Masked language modelling with sentence order prediction: BERT (arXiv 1810.04805) as Megatron-LM trains it."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.training.model.heads import ModelOutput
from gristmill.training.objectives.objective import Batch, Objective, ObjectiveInputs, Term, token_terms

SPECIAL_TOKENS = 3  # [CLS] first [SEP] second [SEP]
PURPOSE = 0x6D61736B  # "mask": keeps these draws apart from others with the same seed and k


class MaskedOptions(Config):
    """mask_rate of the tokens are predicted; of those 80 % become [MASK], random_share another token, and keep_share
    stay as they are."""

    mask_rate: float = Field(0.15, gt=0, lt=1)
    random_share: float = Field(0.1, ge=0, le=1)
    keep_share: float = Field(0.1, ge=0, le=1)
    whole_words: bool = Field(True, description="a word is masked with all its pieces")
    max_ngram: int = Field(3, ge=1, le=32, description="words that are masked together, at most")
    sentence_order: bool = Field(True, description="predict whether the two segments were swapped (arXiv 1909.11942)")
    start: str = "[CLS]"
    separator: str = "[SEP]"
    mask: str = "[MASK]"
    padding: str = "[PAD]"

    @model_validator(mode="after")
    def shares_leave_none_over(self) -> Self:
        if self.random_share + self.keep_share > 1 + 1e-9:
            raise ValueError(
                f"random_share {self.random_share:g} and keep_share {self.keep_share:g} are more than all masked "
                "tokens; lower one, so that their sum is at most 1"
            )
        return self


class Masked(Objective):
    """tokens: [CLS] first [SEP] second [SEP] and padding, which is a document of its own, so nothing attends to it.
    targets and weights: the original tokens, weight 1 at masked places. swapped: 1 where the segments are."""

    Options = MaskedOptions
    data = "sentence_pairs"

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        super().__init__(inputs, options)
        self.start, self.separator, self.mask, self.padding = (inputs.id_of(name) for name in self.pieces(options))
        self.length = inputs.model.sequence_length
        whole = options.whole_words
        self.begins = word_starts(inputs.pieces) if whole else np.ones(inputs.vocab_size, dtype=bool)

    @classmethod
    def pieces(cls, options: Any) -> Sequence[str]:
        return options.start, options.separator, options.mask, options.padding

    def sample(self, k: int) -> Mapping[str, np.ndarray]:
        pair = self.inputs.samples.pair(k)
        generator = np.random.default_rng([self.inputs.seed, PURPOSE, k])
        first, second = pair.first, pair.second
        original = np.full(self.length, self.padding, dtype=np.int64)
        real = len(first) + len(second) + SPECIAL_TOKENS
        original[:real] = np.concatenate([[self.start], first, [self.separator], second, [self.separator]])
        positions = np.arange(self.length)
        special = (positions == 0) | (positions == len(first) + 1) | (positions >= real - 1)
        tokens, weights = self._masked(original, special, generator)
        return {
            "tokens": tokens,
            "targets": original,
            "weights": weights,
            "segments": ((positions > len(first) + 1) & (positions < real)).astype(np.int64),
            "documents": (positions >= real).astype(np.int64),
            "swapped": np.array(pair.swapped, dtype=np.int64),
        }

    def _masked(
        self, original: np.ndarray, special: np.ndarray, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """(the tokens with masks, float32 weights)."""
        budget = max(1, round(self.options.mask_rate * int((~special).sum())))
        words = words_of(self.begins[original], special)
        places = choose_masked(words, budget, self.options.max_ngram, generator)
        tokens, weights = original.copy(), np.zeros(len(original), dtype=np.float32)
        weights[places] = 1.0
        kind = generator.random(len(places))
        others = generator.integers(0, self.inputs.vocab_size, len(places))
        kept = self.options.keep_share
        drawn = np.where(kind < kept + self.options.random_share, others, self.mask)
        tokens[places] = np.where(kind < kept, original[places], drawn)
        return tokens, weights

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        terms = token_terms("masked_tokens", model, batch)
        if self.options.sentence_order:
            order = F.cross_entropy(model.output("sentence_order").double(), batch["swapped"], reduction="none")
            terms.append(Term("sentence_order", order))
        return terms

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        predictions = {"targets": model.best_tokens()}
        if self.options.sentence_order:
            predictions["swapped"] = model.output("sentence_order").argmax(dim=-1)
        return predictions


# Which tokens are masked: whole words and n-grams of words, up to a share of the tokens.


def word_starts(pieces: Sequence[str]) -> np.ndarray:
    """bool[vocabulary]: pieces that begin a word. WordPiece marks the others (##ing), SentencePiece (▁) and byte-level
    BPE (Ġ) the beginnings; without any mark every piece is a word.

    ["▁mask", "ing", "▁"] -> [True, False, True]."""
    if any(piece.startswith("##") for piece in pieces):
        return np.array([not piece.startswith("##") for piece in pieces])
    for mark in ("▁", "Ġ"):
        if any(piece.startswith(mark) for piece in pieces):
            return np.array([piece.startswith(mark) for piece in pieces])
    return np.ones(len(pieces), dtype=bool)


def words_of(begins: np.ndarray, special: np.ndarray) -> np.ndarray:
    """int64[words, 2]: first token of each word and the one behind its last. begins, special: bool[tokens]; special
    tokens are in no word and end one.

    begins [1, 1, 0, 1], special [1, 0, 0, 0] -> [[1, 3], [3, 4]]."""
    after_special = np.concatenate([[True], special[:-1]])
    firsts = np.flatnonzero((begins | after_special) & ~special)
    stops = np.flatnonzero(begins | special | after_special)
    behind = np.searchsorted(stops, firsts, side="right")
    lasts = np.concatenate([stops, [len(begins)]])[behind]
    return np.stack([firsts, lasts], axis=1).astype(np.int64)


def choose_masked(words: np.ndarray, budget: int, max_ngram: int, generator: np.random.Generator) -> np.ndarray:
    """Positions of the masked tokens, sorted; at most `budget`, and fewer only where no whole word fits any more. Where
    every word is longer than the budget, one of the shortest is masked, so that a text with a word has a mask.

    Words are visited in random order, each as the first of n words with p(n) proportional to 1 / n up to max_ngram
    (SpanBERT's and Megatron-LM's rule); n is lowered until the n-gram fits, and a word is masked once."""
    chances = 1 / np.arange(1, max_ngram + 1)
    sizes = generator.choice(max_ngram, size=len(words), p=chances / chances.sum()) + 1
    taken = np.zeros(len(words), dtype=bool)
    left = budget
    order = generator.permutation(len(words))
    for first in order.tolist():
        if left == 0:
            break
        for size in range(min(int(sizes[first]), len(words) - first), 0, -1):
            tokens = int(words[first + size - 1, 1] - words[first, 0])
            adjacent = tokens == int((words[first : first + size, 1] - words[first : first + size, 0]).sum())
            if tokens <= left and adjacent and not taken[first : first + size].any():
                taken[first : first + size] = True
                left -= tokens
                break
    if budget and len(words) and not taken.any():
        lengths = words[order, 1] - words[order, 0]
        taken[order[int(lengths.argmin())]] = True
    masked = [np.arange(start, stop) for start, stop in words[taken].tolist()]
    return np.concatenate(masked) if masked else np.zeros(0, dtype=np.int64)


# Span corruption (T5, arXiv 1910.10683, section 3.1.4) for a model without an encoder.
#
# The sequence is the text with spans replaced by sentinels, then each sentinel with its span; only the second part is
# learned (as in UL2, arXiv 2205.05131).

SPAN_PURPOSE = 0x7370616E  # "span"


class SpanCorruptionOptions(Config):
    """sentinel: pattern of the sentinels' pieces, numbered from 0."""

    noise_density: float = Field(0.15, gt=0, lt=1, description="share of the tokens that are replaced")
    mean_span: float = Field(3.0, ge=1, description="mean length of a replaced span in tokens")
    sentinel: str = Field("<extra_id_{}>", description="name of sentinel {}; put them into tokenizer.user_symbols")


class SpanCorruption(Objective):
    """Every sample replaces the same number of tokens in the same number of spans, so that all have one length."""

    Options = SpanCorruptionOptions

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        super().__init__(inputs, options)
        self.raw, self.noise, self.spans = raw_length(inputs.model.sequence_length, options)
        if not 1 <= self.spans <= min(self.noise, self.raw - self.noise):
            raise RecipeError(
                f"train.objective: a sequence of {inputs.model.sequence_length} tokens has no room for spans; raise "
                "model.sequence_length or lower mean_span"
            )
        self.sentinels = np.array([inputs.id_of(options.sentinel.format(number)) for number in range(self.spans)])

    def sample(self, k: int) -> Mapping[str, np.ndarray]:
        drawn = self.inputs.samples.sample(k)
        text = np.append(drawn["tokens"], drawn["targets"][-1])[: self.raw].astype(np.int64)
        generator = np.random.default_rng([self.inputs.seed, SPAN_PURPOSE, k])
        noise_lengths = _parts(self.noise, self.spans, generator)
        kept_lengths = _parts(self.raw - self.noise, self.spans, generator)
        sequence, start = corrupted(text, kept_lengths, noise_lengths, self.sentinels)
        length = self.inputs.model.sequence_length
        sequence = np.append(sequence, np.full(length + 1 - len(sequence), self.inputs.end_of_document))
        weights = np.zeros(length, dtype=np.float32)
        weights[start - 1 : self.raw + 2 * self.spans - 1] = 1.0
        return {"tokens": sequence[:-1], "targets": sequence[1:], "weights": weights}

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        return token_terms("spans", model, batch)

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        return {"targets": model.best_tokens()}


def raw_length(sequence_length: int, options: SpanCorruptionOptions) -> tuple[int, int, int]:
    """(tokens of text, replaced tokens, spans) of the longest text that has, with two sentinels a span, at most
    sequence_length + 1 tokens."""
    for raw in range(sequence_length + 1, 0, -1):
        noise = min(max(round(raw * options.noise_density), 1), raw - 1)
        spans = max(round(noise / options.mean_span), 1)
        if raw + 2 * spans <= sequence_length + 1:
            return raw, noise, spans
    return 0, 0, 0


def corrupted(
    text: np.ndarray, kept_lengths: np.ndarray, noise_lengths: np.ndarray, sentinels: np.ndarray
) -> tuple[np.ndarray, int]:
    """(the sequence, where the part that is learned begins). Text a b c d e, kept [2, 1], replaced [1, 1], sentinels X
    and Y -> a b X d Y | X c Y e, 5."""
    inputs: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    place = 0
    for kept, noise, sentinel in zip(kept_lengths.tolist(), noise_lengths.tolist(), sentinels, strict=True):
        inputs += [text[place : place + kept], np.array([sentinel])]
        targets += [np.array([sentinel]), text[place + kept : place + kept + noise]]
        place += kept + noise
    return np.concatenate([*inputs, *targets]), sum(map(len, inputs))


def _parts(total: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """`total` as `count` random lengths of at least 1."""
    edges = np.sort(generator.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], edges, [total]]))

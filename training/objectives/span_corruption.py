"""Span corruption (T5, arXiv 1910.10683, section 3.1.4) for a model without an encoder.

The sequence is the text with spans replaced by sentinels, then each sentinel with its span; only the second part is
learned (as in UL2, arXiv 2205.05131)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field
from torch import Tensor

from gristmill.foundation.config import Config
from gristmill.foundation.errors import RecipeError
from gristmill.training.model.heads import ModelOutput
from gristmill.training.objectives.objective import Batch, Objective, ObjectiveInputs, Term, token_terms

PURPOSE = 0x7370616E  # "span"


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
        generator = np.random.default_rng([self.inputs.seed, PURPOSE, k])
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

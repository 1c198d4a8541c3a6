"""The interface of a training objective: three functions. docs/objectives.md teaches them with worked examples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.foundation.config import Config
from gristmill.training.batches import Samples
from gristmill.training.loss import upcast_dtype
from gristmill.training.model.output import ModelOutput
from gristmill.training.model_config import ModelConfig

# B samples of a micro-batch

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Term:
    """One summand of the loss: weight x (sum over the global batch) / (count over the global batch).

    sum: float[B], one number for each sample. count: name of the batch field whose sum over the global batch divides;
    None: the number of samples. weight 0: logged only. The first term is the run's `loss`."""

    name: str
    sum: Tensor
    count: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class TermSpec:
    """A term without its sum: the same in every batch of a run."""

    name: str
    count: str | None
    weight: float

    def counts(self, batch: Batch) -> Tensor:
        """What each sample adds to the count, float64[B]."""
        if self.count is None:
            return torch.ones(len(batch["samples"]), dtype=torch.float64)
        return batch[self.count].reshape(len(batch["samples"]), -1).sum(dim=1, dtype=torch.float64)


@dataclass(frozen=True)
class ObjectiveInputs:
    """What an objective is made from. samples: the indexed corpus of one split (None without one); mask_documents: as
    the recipe's section `index` has it. seed: of the recipe. held_out: it makes validation samples."""

    samples: Samples | None
    model: ModelConfig
    vocab_size: int
    end_of_document: int
    seed: int
    mask_documents: bool = False
    held_out: bool = False


class NoOptions(Config):
    """An objective without options."""


class Objective:
    """sample: the fields of sample k. loss: the terms of a micro-batch. predict: what the model answers to it.

    A subclass defines the three functions, and where it has settings an `Options` class for `train.objective_options`.
    Sums over samples are the only link between samples, so that no layout changes the loss."""

    Options: type[Config] = NoOptions
    # True where the first term is the negative log-likelihood of all text, so that the logs have bits per byte.
    bits_per_byte = False

    def __init__(self, inputs: ObjectiveInputs, options: Any):
        self.inputs, self.options = inputs, options

    def sample(self, k: int) -> Mapping[str, np.ndarray]:
        """Sample k by field, a pure function of k. Every sample has the same fields, shapes and dtypes.

        `tokens` int64[T], or [R, T] for R rows, goes into the model, with `positions`, `documents` and `segments` of
        the same shape where they are given. All other fields are for `loss` and `predict`. `samples` is reserved."""
        raise NotImplementedError

    def loss(self, model: ModelOutput, batch: Batch) -> Sequence[Term]:
        """The terms of a micro-batch, the same ones in every call. batch: the fields, each [B, ...]."""
        raise NotImplementedError

    def predict(self, model: ModelOutput, batch: Batch) -> Mapping[str, Tensor]:
        """Predictions by name, each [B, ...]."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Identifies the data; a run resumes on equal data only."""
        return "" if self.inputs.samples is None else self.inputs.samples.fingerprint

    def source_of(self, k: int) -> str:
        """The source of sample k, by which validation losses are listed."""
        return "all" if self.inputs.samples is None else self.inputs.samples.source_of(k)


@dataclass(frozen=True)
class LossFunction:
    """The loss of an objective as the engine computes it at the end of the model: float[B, terms]."""

    objective: Objective
    terms: tuple[TermSpec, ...]

    def __call__(self, model: ModelOutput, batch: Batch) -> Tensor:
        sums = [term.sum for term in self.objective.loss(model, batch)]
        dtype = torch.promote_types(sums[0].dtype, upcast_dtype(sums[0]))
        return torch.stack([each.to(dtype) for each in sums], dim=1)

    @property
    def weighs_tokens(self) -> bool:
        """Whether the loss is a mean over tokens by the field `weights`, which experts' side losses follow."""
        return self.terms[0].count == "weights"


def no_sum(batch: Batch) -> Tensor:
    """float[B] zeros, for a term that this batch has nothing for."""
    return torch.zeros(len(batch["tokens"]), device=batch["tokens"].device)

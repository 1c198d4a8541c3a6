"""Losses of the documents of some training samples, by a checkpoint: which of them is behind a spike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gristmill.evaluation.inference.causal_lm import CausalLM
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.load_model import load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.pipelines.provenance.trace import Tracer
from gristmill.training.checkpoint.checkpoint import step_folder, steps_in

BATCH_TOKENS = 8_192
HEAD_TOKENS = 1_024  # whose logits are in memory at once


@dataclass(frozen=True)
class DocumentLoss:
    """Loss of a document's tokens in some samples, in nats a token. excess: what they add to the sum of the losses over
    as many tokens of the median document."""

    doc_id: str
    source: str
    tokens: int
    loss: float
    excess: float


def checkpoint_before(train: Path, step: int) -> Path:
    """The newest checkpoint of the run that had not made this step, else the oldest. Raises InputError without one."""
    steps = sorted(steps_in(train / "checkpoints"))
    if not steps:
        raise InputError(f"{train / 'checkpoints'}: no checkpoint; name one with --checkpoint")
    return step_folder(train / "checkpoints", max((saved for saved in steps if saved < step), default=steps[0]))


def document_losses(tracer: Tracer, samples: Sequence[int], checkpoint: Path) -> list[DocumentLoss]:
    """The documents of these samples by how much they add to the loss, the most first.

    Raises RecipeError where samples are no windows of a causal model."""
    if tracer.train.objective != "causal":
        raise RecipeError(f"train.objective: {tracer.train.objective}: losses by document need the objective causal")
    if tracer.recipe.index.fim_rate:
        raise RecipeError("index.fim_rate moves tokens inside documents: losses by document need a rate of 0")
    model = load_for_evaluation(CheckpointPaths(checkpoint), EvaluateConfig(tasks=())).causal_lm
    sums: dict[tuple[str, str], list[float]] = {}
    for k, losses, weights in _token_losses(model, tracer, samples):
        place = -1  # of the token among the targets: a window's first token is none
        for span in tracer.documents_of(range(k, k + 1)):
            of_span = slice(max(place, 0), place + span.stop - span.start)
            counted = weights[of_span] > 0
            total = sums.setdefault((span.doc_id, span.source), [0.0, 0])
            total[0] += float(losses[of_span][counted].sum())
            total[1] += int(counted.sum())
            place += span.stop - span.start
    return ranked(sums)


def ranked(sums: dict[tuple[str, str], list[float]]) -> list[DocumentLoss]:
    """By document and source, the sum of its losses and its tokens -> the documents, the largest excess first.

    {("a", "s"): [4, 2], ("b", "s"): [30, 5], ("c", "s"): [2, 1]} -> b (6 a token, 20 over
    5 times the median of 2), a, c."""
    means = {key: total / tokens for key, (total, tokens) in sums.items() if tokens}
    median = float(np.median(list(means.values()))) if means else 0.0
    losses = [
        DocumentLoss(doc_id, source, int(sums[doc_id, source][1]), mean, (mean - median) * sums[doc_id, source][1])
        for (doc_id, source), mean in means.items()
    ]
    return sorted(losses, key=lambda loss: (-loss.excess, loss.doc_id))


def _token_losses(
    model: CausalLM, tracer: Tracer, samples: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(sample, loss of each target float64[T], its weight float32[T])."""
    rows = max(1, BATCH_TOKENS // tracer.sequence_length)
    for first in range(0, len(samples), rows):
        numbers = list(samples[first : first + rows])
        batch = {name: torch.from_numpy(np.array(values)) for name, values in tracer.samples.batch(numbers).items()}
        with torch.inference_mode():
            losses = _losses(model, batch, tracer.recipe.index.mask_documents).double().numpy()
        yield from zip(numbers, losses, batch["weights"].numpy(), strict=True)


def _losses(model: CausalLM, batch: dict[str, Tensor], mask_documents: bool) -> Tensor:
    """float32[B, T]: the negative logarithm of each target's probability."""
    tokens_BT, targets_N = batch["tokens"], batch["targets"].reshape(-1)
    if mask_documents:
        documents_BT = batch["documents"]
        same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
        visible_BTT = same_BTT & torch.ones(tokens_BT.shape[1], tokens_BT.shape[1], dtype=torch.bool).tril()
        hidden_BTD = model.hidden(tokens_BT, batch["positions"], visible_BTT)
    else:
        hidden_BTD = model.hidden(tokens_BT)
    hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
    parts = [
        torch.nn.functional.cross_entropy(model.head(hidden).float(), targets, reduction="none")
        for hidden, targets in zip(hidden_ND.split(HEAD_TOKENS), targets_N.split(HEAD_TOKENS), strict=True)
    ]
    return torch.cat(parts).view_as(tokens_BT)

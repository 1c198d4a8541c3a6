"""Scores of a model on the held-out samples of its own objective: the terms of the loss, and its predictions.

A prediction that has the name and shape of an integer field of the batch is scored against that field: the share of
equal ones, beside the share of the most frequent value; of two classes also F1 of class 1."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gristmill.evaluation.results.statistics import accuracy_chance_test, mean_error, ratio_error
from gristmill.evaluation.results.table import ScoreRow, write_results
from gristmill.training.engine.passes import GradientAccumulation
from gristmill.training.model.transformer import Transformer
from gristmill.training.objectives.check import checked_loss
from gristmill.training.objectives.objective import Objective, collate, user_errors_named

TASK = "objective"
BATCH_TOKENS = 8192  # of one forward pass


@dataclass
class Answers:
    """Predictions of one kind that count, and what they should be."""

    predicted: list[np.ndarray] = field(default_factory=list)
    wanted: list[np.ndarray] = field(default_factory=list)

    def add(self, predicted: Tensor, wanted: Tensor, weights: Tensor | None) -> None:
        counted = torch.ones_like(wanted, dtype=torch.bool) if weights is None else weights > 0
        self.predicted.append(predicted[counted].cpu().numpy())
        self.wanted.append(wanted[counted].cpu().numpy())

    def rows(self, name: str) -> Iterator[ScoreRow]:
        predicted, wanted = np.concatenate(self.predicted), np.concatenate(self.wanted)
        if not len(wanted):
            return
        right = predicted == wanted
        values, counts = np.unique(wanted, return_counts=True)
        chance = float(counts.max() / len(wanted))
        yield ScoreRow(
            task=TASK,
            num_fewshot=0,
            count=len(wanted),
            metric=f"{name}: accuracy",
            score=float(right.mean()),
            error=mean_error(right.tolist()),
            higher_is_better=True,
            chance=chance,
            verdict=accuracy_chance_test(int(right.sum()), [chance] * len(right)),
        )
        if set(values.tolist()) | set(np.unique(predicted).tolist()) <= {0, 1}:
            yield ScoreRow(TASK, 0, len(wanted), f"{name}: F1", f1(predicted, wanted), None, True, _f1_of_ones(wanted))


@dataclass
class OwnMetrics:
    """The objective's own metrics."""

    values: dict[str, list[float]] = field(default_factory=dict)
    chances: dict[str, list[float]] = field(default_factory=dict)
    waiting: list[Mapping[str, Tensor]] = field(default_factory=list)

    def add(self, objective: Objective, k: int, prediction: Mapping[str, Tensor]) -> None:
        """Scores samples that belong together when the last of them is there. k rises by one from call to call."""
        self.waiting.append(prediction)
        together = objective.scored_with(k)
        if k + 1 < together.stop:
            return
        predictions, self.waiting = self.waiting, []
        first = together.start
        for into, metrics in (
            (self.values, objective.scores(first, predictions)),
            (self.chances, objective.chances(first)),
        ):
            for name, value in metrics.items():
                into.setdefault(name, []).append(value)

    def rows(self) -> list[ScoreRow]:
        return [
            ScoreRow(TASK, 0, len(values), name, float(np.mean(values)), mean_error(values), True, self._chance(name))
            for name, values in self.values.items()
        ]

    def _chance(self, name: str) -> float | None:
        return float(np.mean(self.chances[name])) if name in self.chances else None


def f1(predicted: np.ndarray, wanted: np.ndarray) -> float:
    """2 x right / (predicted + wanted) of class 1. predicted [1, 1, 0], wanted [1, 0, 0] -> 2/3."""
    both = float(((predicted == 1) & (wanted == 1)).sum())
    total = float((predicted == 1).sum() + (wanted == 1).sum())
    return 2 * both / total if total else 0.0


def evaluate_objective(model: Transformer, objective: Objective, count: int) -> list[ScoreRow]:
    """A row for each term of the loss and each scored prediction, over samples 0 to count - 1."""
    loss = checked_loss(objective)
    batch_samples = max(1, BATCH_TOKENS // model.config.sequence_length)
    passes = GradientAccumulation(model, batch_samples, loss)
    device = next(model.parameters()).device
    sums: list[Tensor] = []
    counts: dict[str, list[float]] = {term.name: [] for term in loss.terms}
    answers: dict[str, Answers] = {}
    own = OwnMetrics()
    for first in range(0, count, batch_samples):
        batch = collate(objective, range(first, min(first + batch_samples, count)))
        for term in loss.terms:
            counts[term.name] += term.counts(batch).tolist()
        del batch["samples"]  # without them there is no dropout
        batch = {name: values.to(device) for name, values in batch.items()}
        sums.append(passes.evaluate(batch).double().cpu())
        with user_errors_named("predict or scores fails"):
            predicted = passes.evaluate(batch, objective.predict)
            for row in range(len(batch["tokens"])):
                own.add(objective, first + row, {name: values[row] for name, values in predicted.items()})
        for name, prediction in predicted.items():
            wanted = batch.get(name)
            if wanted is None or wanted.dtype != torch.int64 or wanted.shape != prediction.shape:
                continue
            weights = batch.get("weights")
            valid_weights = weights if weights is not None and weights.shape == wanted.shape else None
            answers.setdefault(name, Answers()).add(prediction, wanted, valid_weights)
    rows = [_term_row(name, torch.cat(sums)[:, number], counts[name]) for number, name in enumerate(counts)]
    return rows + [row for name, answer in answers.items() for row in answer.rows(name)] + own.rows()


def write_objective_scores(folder: Path, rows: list[ScoreRow], count: int) -> None:
    """results.json, table.md and table.html."""
    notes = [
        f"the objective's own loss and predictions on {count} held-out samples",
        "chance of an accuracy: the most frequent answer, always given; of F1: class 1, always given",
    ]
    summary = {"results": {row.metric: {"score": row.score} for row in rows}}
    write_results(folder, summary, {}, rows, notes)


def _term_row(name: str, sums: Tensor, counts: list[float]) -> ScoreRow:
    total = sum(counts)
    score = float(sums.sum() / total) if total else math.nan
    return ScoreRow(TASK, 0, len(counts), name, score, ratio_error(sums.tolist(), counts), False, None)


def _f1_of_ones(wanted: np.ndarray) -> float:
    return f1(np.ones_like(wanted), wanted)

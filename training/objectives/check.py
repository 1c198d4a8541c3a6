"""Checks an objective before the first step: its samples, and its loss and predictions on a tiny model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.heads import FrozenHead, TeacherStage
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import INPUT_FIELDS, ComputeOptions, Transformer
from gristmill.training.objectives.objective import (
    LossFunction,
    Objective,
    Term,
    TermSpec,
    collate,
    defined_at,
    errors_named,
    range_problem,
    wrong,
)

# The tiny model has the recipe's vocabulary, sequence length and outputs, so every shape that an objective sees is the
# run's but the width.
WIDTH = 8
SAMPLES = 2  # more than one, so that a result for the whole batch is told from one for each sample


def checked_loss(objective: Objective, z_loss: float = 0.0, has_teacher: bool = False) -> LossFunction:
    """The objective's loss with its terms. Raises RecipeError, with the file and line of an exception, if samples, loss
    or predictions are not what the interface asks for (`Objective`)."""
    inputs = objective.inputs
    batch = _checked_batch(objective)
    model = _tiny_model(inputs.model, inputs.vocab_size, z_loss)
    if has_teacher:
        assert model.head is not None
        model.teacher = TeacherStage(model.tensor, FrozenHead(model.head.scoring, model.head.weight.detach()))
        rows = batch["tokens"].flatten(1, -2) if batch["tokens"].dim() > 2 else batch["tokens"].unsqueeze(1)
        batch["teacher"] = torch.zeros(*rows.shape[:3], WIDTH)
    terms = _call(model, batch, objective, "loss")
    specs = _checked_terms(objective, terms, batch)
    with errors_named("loss has no gradient", defined_at(type(objective), "loss")):
        weighed = [term.weight * term.sum.sum() for term in terms if term.weight and term.sum.requires_grad]
        if not weighed:
            raise wrong(
                objective, "loss", "no term with a weight depends on the model; give one that does a weight above 0"
            )
        sum(weighed).backward()
    with torch.no_grad():
        _check_predictions(objective, _call(model, batch, objective, "predict"))
    loss = LossFunction(objective, specs)
    if inputs.model.has_experts and not loss.weighs_tokens:
        raise wrong(
            objective,
            "loss",
            "the model has experts, whose side losses are means over the tokens by the field `weights`; count the "
            "first term by it, or leave model.moe out",
        )
    return loss


def _checked_batch(objective: Objective) -> dict[str, Tensor]:
    """A batch of the first samples, after their fields were checked."""
    drawn = [_drawn(objective, k) for k in range(SAMPLES)]
    for k, sample in enumerate(drawn):
        _check_repeats(objective, k, sample)
    for name in drawn[0].keys() | drawn[1].keys():
        first, second = (sample.get(name) for sample in drawn)
        if first is None or second is None:
            raise wrong(
                objective,
                "sample",
                f"sample(0) and sample(1) do not both have the field {name!r}; give every sample all fields",
            )
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            raise wrong(
                objective,
                "sample",
                f"field {name!r} is {first.dtype}{list(first.shape)} in sample(0) and "
                f"{second.dtype}{list(second.shape)} in sample(1); pad it to one shape",
            )
    batch = collate(objective, range(SAMPLES))
    if any(not np.array_equal(batch[name][0].numpy(), values) for name, values in drawn[0].items()):
        raise wrong(objective, "sample", "sample(1) changes the arrays that sample(0) returned; return new ones")
    return batch


def check_sample(objective: Objective, k: int) -> None:
    """Raises RecipeError if sample k is wrong, such as the last of a run, for which an objective may have no data."""
    first, last = _drawn(objective, 0), _drawn(objective, k)
    shapes = [{name: (values.dtype, values.shape) for name, values in sample.items()} for sample in (first, last)]
    if shapes[0] != shapes[1]:
        raise wrong(
            objective, "sample", f"sample({k}) has the fields {shapes[1]}, sample(0) {shapes[0]}; give the same"
        )


def _drawn(objective: Objective, k: int) -> dict[str, np.ndarray]:
    """Sample k, its arrays copied."""
    with errors_named(f"sample({k}) fails", defined_at(type(objective), "sample")):
        sample = objective.sample(k)
    problem = sample_problem(sample, objective.inputs.model, objective.inputs.vocab_size)
    if problem is not None:
        raise wrong(objective, "sample", f"sample({k}) {problem}")
    return {name: values.copy() for name, values in sample.items()}


def _check_repeats(objective: Objective, k: int, before: Mapping[str, np.ndarray]) -> None:
    """Raises RecipeError unless sample k, drawn again, has the values it had before."""
    redrawn = _drawn(objective, k)
    differ = [name for name in before if name not in redrawn or not np.array_equal(before[name], redrawn[name])]
    if differ:
        raise wrong(
            objective,
            "sample",
            f"sample({k}) has another field {differ[0]!r} when it is drawn again; it must depend on k alone: draw "
            "random numbers from np.random.default_rng([self.inputs.seed, k])",
        )


def _tiny_model(config: ModelConfig, vocab_size: int, z_loss: float) -> Transformer:
    shape: dict[str, Any] = {
        "layers": 1,
        "width": WIDTH,
        "heads": 1,
        "kv_heads": 1,
        "head_width": WIDTH,
        "ffn_hidden_size": WIDTH,
        "moe": None,
    }
    shape["transformers"] = None
    patterns: dict[str, Any] = {"mixer": "attention", "pattern": None, "mixers": {}, "mlp": "gelu", "window": None}
    patterns |= {"norm_order": "pre", "rope_layers": None, "rope_width": 0}
    tiny = ModelConfig.model_validate(config.model_dump() | shape | patterns)
    model = Transformer(tiny, vocab_size, options=ComputeOptions(z_loss=z_loss))
    initialize(model, 0, torch.device("cpu"), torch.float32)
    return model


def _call(model: Transformer, batch: Mapping[str, Tensor], objective: Objective, name: str) -> Any:
    """Result of loss or predict for the batch."""

    def output(made: Any, fields: Mapping[str, Tensor]) -> Any:
        place = defined_at(type(objective), name)
        with errors_named(f"{name} fails on a batch with the fields {sorted(fields)}", place):
            return getattr(objective, name)(made, fields)

    model.output = output
    return model(batch["tokens"], **batch)


def _checked_terms(objective: Objective, terms: Any, batch: Mapping[str, Tensor]) -> tuple[TermSpec, ...]:
    if not isinstance(terms, Sequence) or not terms or not all(isinstance(term, Term) for term in terms):
        raise wrong(objective, "loss", f"returns {type(terms).__name__}; return a list of Term, at least one")
    names = [term.name for term in terms]
    if not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise wrong(objective, "loss", f"returns two terms of one name, or one without: {names}; give each its own")
    for term in terms:
        problem = _term_problem(term, batch)
        if problem is not None:
            raise wrong(objective, "loss", f"term {term.name!r}: {problem}")
    return tuple(TermSpec(term.name, term.count, float(term.weight)) for term in terms)


def _term_problem(term: Term, batch: Mapping[str, Tensor]) -> str | None:
    if not isinstance(term.sum, Tensor) or tuple(term.sum.shape) != (SAMPLES,) or term.sum.is_complex():
        shape = list(term.sum.shape) if isinstance(term.sum, Tensor) else type(term.sum).__name__
        return f"sum is {shape} for a batch of {SAMPLES}; give one number for each sample"
    if isinstance(term.weight, bool) or not isinstance(term.weight, int | float) or not math.isfinite(term.weight):
        return f"weight is {term.weight!r}; give a number"
    if term.count is not None and term.count not in batch:
        made = sorted(batch.keys() - {"samples", "teacher"})
        return f"counts by the field {term.count!r}, which sample(k) does not make; it makes {made}"
    return None


def _check_predictions(objective: Objective, predictions: Any) -> None:
    if not isinstance(predictions, Mapping) or not predictions:
        raise wrong(
            objective, "predict", f"returns {type(predictions).__name__}; return a dict of tensors, at least one"
        )
    for name, value in predictions.items():
        if not isinstance(value, Tensor) or value.dim() < 1 or len(value) != SAMPLES:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise wrong(
                objective,
                "predict",
                f"{name!r} is {shape} for a batch of {SAMPLES}; its first dimension is the samples'",
            )


# What a sample must be: its fields, their shapes and their ranges.

RESERVED = ("samples", "teacher")  # the engine adds them to a batch
NUMBERS = "biuf"  # numpy's kinds that become tensors: booleans, integers, floats


def sample_problem(sample: Any, model: ModelConfig, vocab_size: int) -> str | None:
    """Problem of the sample, or None: "has no `tokens`; ..."."""
    if not isinstance(sample, Mapping) or not all(isinstance(value, np.ndarray) for value in sample.values()):
        return f"returns {type(sample).__name__}; return a dict of numpy arrays"
    for name, values in sample.items():
        if not isinstance(name, str) or name in RESERVED:
            return f"has a field {name!r}, which the engine adds itself or which is no text; rename it"
        if values.dtype.kind not in NUMBERS or values.dtype == np.longdouble:
            return f"field {name!r} is {values.dtype}; give booleans, integers or floats"
    if "tokens" not in sample:
        return f"has the fields {sorted(sample)} and no `tokens`; add them as int64[T]"
    length, tokens = model.sequence_length, sample["tokens"]
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2) or tokens.shape[-1] != length or not tokens.size:
        return (
            f"tokens are {tokens.dtype}{list(tokens.shape)}; give integers [{length}] (the model's sequence_length), "
            f"or [R, {length}] for R rows"
        )
    for name in INPUT_FIELDS:
        if name in sample and (sample[name].shape != tokens.shape or sample[name].dtype.kind not in "iu"):
            form = f"{sample[name].dtype}{list(sample[name].shape)}"
            return f"{name} are {form}, tokens {list(tokens.shape)}; give one integer for each"
    return range_problem(sample, model, vocab_size)

"""Checks an objective before the first step: its samples, and its loss and predictions on a tiny model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gristmill.foundation.errors import RecipeError
from gristmill.training.batches import collate
from gristmill.training.model.head import FrozenHead
from gristmill.training.model.initialization import initialise
from gristmill.training.model.output import TeacherStage
from gristmill.training.model.transformer import INPUT_FIELDS, ComputeOptions, Transformer
from gristmill.training.model_config import ModelConfig
from gristmill.training.objectives.load import errors_named
from gristmill.training.objectives.objective import LossFunction, Objective, Term, TermSpec

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
        model.teacher = TeacherStage(model.tensor, FrozenHead(model.head.scoring, model.head.weight.detach()))
        rows = batch["tokens"].flatten(1, -2) if batch["tokens"].dim() > 2 else batch["tokens"].unsqueeze(1)
        batch["teacher"] = torch.zeros(*rows.shape[:3], WIDTH)
    terms = _call(model, batch, objective.loss, "loss")
    specs = _checked_terms(terms, batch)
    with errors_named("loss has no gradient"):
        weighed = [term.weight * term.sum.sum() for term in terms if term.weight and term.sum.requires_grad]
        if not weighed:
            raise _wrong("no term of loss with a weight depends on the model; give one that does a weight above 0")
        sum(weighed).backward()
    with torch.no_grad():
        _check_predictions(_call(model, batch, objective.predict, "predict"))
    loss = LossFunction(objective, specs)
    if inputs.model.has_experts and not loss.weighs_tokens:
        raise _wrong(
            "the model has experts, whose side losses are means over the tokens by the field `weights`; count the "
            "first term by it, or leave model.moe out"
        )
    return loss


def _checked_batch(objective: Objective) -> dict[str, Tensor]:
    """A batch of the first samples, after their fields were checked."""
    drawn = []
    for k in range(SAMPLES):
        with errors_named(f"sample({k}) fails"):
            drawn.append(objective.sample(k))
        _check_sample(k, drawn[k], objective.inputs.model, objective.inputs.vocab_size)
    for name in drawn[0].keys() | drawn[1].keys():
        first, second = (sample.get(name) for sample in drawn)
        if first is None or second is None:
            raise _wrong(f"sample(0) and sample(1) do not both have the field {name!r}; give every sample all fields")
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            raise _wrong(
                f"field {name!r} is {first.dtype}{list(first.shape)} in sample(0) and "
                f"{second.dtype}{list(second.shape)} in sample(1); pad it to one shape"
            )
    return collate(objective, range(SAMPLES))


def _check_sample(k: int, sample: Any, model: ModelConfig, vocab_size: int) -> None:
    if not isinstance(sample, Mapping) or not all(isinstance(value, np.ndarray) for value in sample.values()):
        raise _wrong(f"sample({k}) returns {type(sample).__name__}; return a dict of numpy arrays")
    if "tokens" not in sample:
        raise _wrong(f"sample({k}) has the fields {sorted(sample)} and no `tokens`; add them as int64[T]")
    if "samples" in sample:
        raise _wrong(f"sample({k}) has a field `samples`, which the engine adds itself; rename it")
    tokens = sample["tokens"]
    length = model.sequence_length
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2) or tokens.shape[-1] != length:
        raise _wrong(
            f"sample({k}): tokens are {tokens.dtype}{list(tokens.shape)}; give integers [{length}] (the model's "
            f"sequence_length), or [R, {length}] for R rows"
        )
    limits = {"tokens": vocab_size, "segments": model.segments or 1, "positions": length}
    for name, limit in limits.items():
        values = sample.get(name)
        if values is not None and (values.min() < 0 or values.max() >= limit):
            raise _wrong(f"sample({k}): {name} run from {values.min()} to {values.max()}, allowed are 0 to {limit - 1}")
    for name in INPUT_FIELDS:
        if name in sample and sample[name].shape != tokens.shape:
            raise _wrong(
                f"sample({k}): {name} are {list(sample[name].shape)}, tokens {list(tokens.shape)}; one for each"
            )


def _tiny_model(config: ModelConfig, vocab_size: int, z_loss: float) -> Transformer:
    shape = {"layers": 1, "width": WIDTH, "heads": 1, "kv_heads": 1, "head_width": WIDTH, "hidden": WIDTH, "moe": None}
    patterns = {"mixer": "attention", "mlp": "gelu", "window": None, "norm_order": "pre"}
    tiny = ModelConfig.model_validate(config.model_dump() | shape | patterns)
    model = Transformer(tiny, vocab_size, options=ComputeOptions(z_loss=z_loss))
    initialise(model, 0, torch.device("cpu"), torch.float32)
    return model


def _call(model: Transformer, batch: Mapping[str, Tensor], function: Any, name: str) -> Any:
    """What loss or predict returns for the batch."""

    def output(made: Any, fields: Mapping[str, Tensor]) -> Any:
        with errors_named(f"{name} fails on a batch with the fields {sorted(fields)}"):
            return function(made, fields)

    model.output = output
    return model(batch["tokens"], **batch)


def _checked_terms(terms: Any, batch: Mapping[str, Tensor]) -> tuple[TermSpec, ...]:
    if not isinstance(terms, Sequence) or not terms or not all(isinstance(term, Term) for term in terms):
        raise _wrong(f"loss returns {type(terms).__name__}; return a list of Term, at least one")
    names = [term.name for term in terms]
    if len(set(names)) < len(names):
        raise _wrong(f"loss returns two terms of one name: {names}; give each its own")
    for term in terms:
        if not isinstance(term.sum, Tensor) or tuple(term.sum.shape) != (SAMPLES,):
            shape = list(term.sum.shape) if isinstance(term.sum, Tensor) else type(term.sum).__name__
            raise _wrong(
                f"term {term.name!r}: sum is {shape} for a batch of {SAMPLES}; give one number for each sample"
            )
        if term.count is not None and term.count not in batch:
            raise _wrong(
                f"term {term.name!r} counts by the field {term.count!r}, which sample(k) does not make; it makes "
                f"{sorted(batch.keys() - {'samples', 'teacher'})}"
            )
    return tuple(TermSpec(term.name, term.count, float(term.weight)) for term in terms)


def _check_predictions(found: Any) -> None:
    if not isinstance(found, Mapping) or not found:
        raise _wrong(f"predict returns {type(found).__name__}; return a dict of tensors, at least one")
    for name, value in found.items():
        if not isinstance(value, Tensor) or value.dim() < 1 or len(value) != SAMPLES:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise _wrong(f"predict: {name!r} is {shape} for a batch of {SAMPLES}; its first dimension is the samples'")


def _wrong(problem: str) -> RecipeError:
    return RecipeError(f"train.objective: {problem}")

"""What a sample must be: its fields, their shapes and their ranges."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gristmill.training.model.transformer import INPUT_FIELDS
from gristmill.training.model_config import ModelConfig

RESERVED = ("samples", "teacher")  # the engine adds them to a batch
NUMBERS = "biuf"  # numpy's kinds that become tensors: booleans, integers, floats


def sample_problem(sample: Any, model: ModelConfig, vocab_size: int) -> str | None:
    """What is wrong, or None: "has no `tokens`; ..."."""
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
            found = f"{sample[name].dtype}{list(sample[name].shape)}"
            return f"{name} are {found}, tokens {list(tokens.shape)}; give one integer for each"
    return range_problem(sample, model, vocab_size)


def range_problem(fields: Mapping[str, Any], model: ModelConfig, vocab_size: int) -> str | None:
    """Whether an input of the model is outside its table. fields: arrays or tensors of a sample or of a batch."""
    limits = {"tokens": vocab_size, "segments": model.segments or 1, "positions": model.sequence_length}
    for name, limit in limits.items():
        values = fields.get(name)
        if values is not None and (values.min() < 0 or values.max() >= limit):
            return f"{name} run from {values.min()} to {values.max()}, allowed are 0 to {limit - 1}"
    return None

"""The architectures of transformers that our models can be written as and read from."""

from gristmill.evaluation.models.conversion.bloom import BLOOM
from gristmill.evaluation.models.conversion.family import Family
from gristmill.evaluation.models.conversion.gpt2 import GPT2
from gristmill.evaluation.models.conversion.llama import LLAMA
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig

FAMILIES = (LLAMA, GPT2, BLOOM)


def family_for(config: ModelConfig) -> Family:
    """The family that can say all that the config says. Raises InputError naming what each has no place for."""
    reasons = []
    for family in FAMILIES:
        unmet = family.unsupported(config)
        if not unmet:
            return family
        reasons.append(f"{family.architecture} has no {', no '.join(unmet)}")
    raise InputError(f"this model cannot be written for transformers: {'; '.join(reasons)}")


def family_named(model_type: str) -> Family:
    """The family a config.json names. Raises InputError if it is none of ours."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise InputError(f"model_type {model_type!r} cannot be read; gristmill reads {known}")

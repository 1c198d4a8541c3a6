"""Hugging Face architectures that our models can be exported to and imported from."""

from gristmill.evaluation.models.conversion.bert import BERT, MEGATRON_BERT
from gristmill.evaluation.models.conversion.bert_tasks import BERT_TASKS
from gristmill.evaluation.models.conversion.bloom import BLOOM
from gristmill.evaluation.models.conversion.family import Family
from gristmill.evaluation.models.conversion.gpt2 import GPT2
from gristmill.evaluation.models.conversion.llama import LLAMA
from gristmill.evaluation.models.conversion.llama_relatives import MISTRAL, QWEN2, QWEN3, STARCODER2
from gristmill.evaluation.models.conversion.mamba2 import MAMBA2, NEMOTRON_H
from gristmill.evaluation.models.conversion.moe import MIXTRAL, OLMOE, QWEN3_MOE
from gristmill.foundation.errors import InputError
from gristmill.training.model_config import ModelConfig

DENSE = (LLAMA, MISTRAL, QWEN2, QWEN3, STARCODER2, GPT2, BLOOM)
MIXTURES = (MIXTRAL, QWEN3_MOE, OLMOE)
HYBRIDS = (MAMBA2, NEMOTRON_H)
FAMILIES = (*DENSE, *MIXTURES, *HYBRIDS, MEGATRON_BERT, BERT, *BERT_TASKS)


def family_for(config: ModelConfig) -> Family:
    """The family that supports every field of the config. Raises InputError naming the fields that each lacks."""
    reasons = []
    for family in FAMILIES:
        unmet = family.unsupported(config)
        if not unmet:
            return family
        reasons.append(f"{family.architecture} has no {', no '.join(unmet)}")
    raise InputError(f"this model cannot be written for transformers: {'; '.join(reasons)}")


def family_named(model_type: str, architecture: str = "") -> Family:
    """The family that a config.json names: that of the architecture, else the first of the model type.

    Raises InputError if the model type is not supported."""
    candidates = [family for family in FAMILIES if family.model_type == model_type]
    if not candidates:
        known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
        raise InputError(f"model_type {model_type!r} cannot be read; gristmill reads {known}")
    return next((family for family in candidates if family.architecture == architecture), candidates[0])

"""Hugging Face architectures that our models can be exported to and imported from."""

from gristmill.evaluation.convert.hf.architecture import ModelFamily, UnsupportedConfig
from gristmill.evaluation.convert.hf.bert import BERT, BERT_TASKS, MEGATRON_BERT
from gristmill.evaluation.convert.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from gristmill.evaluation.convert.hf.gemma import GEMMA, GEMMA_2, GEMMA_3
from gristmill.evaluation.convert.hf.gpt import GPT2, GPT_NEOX, GPTJ
from gristmill.evaluation.convert.hf.llama import LLAMA
from gristmill.evaluation.convert.hf.llama_relatives import (
    GRANITE,
    MISTRAL,
    NEMOTRON,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)
from gristmill.evaluation.convert.hf.mamba2 import MAMBA2, NEMOTRON_H
from gristmill.evaluation.convert.hf.moe import MIXTRAL, OLMOE, QWEN3_MOE
from gristmill.evaluation.convert.hf.nanochat import NANOCHAT
from gristmill.evaluation.convert.hf.olmo_phi import OLMO, OLMO_2, OLMO_3, PHI_1, PHI_3
from gristmill.evaluation.convert.hf.opt_bloom_falcon import BLOOM, FALCON, OPT
from gristmill.foundation.errors import InputError, nearest_name
from gristmill.training.config.model import ModelConfig

LLAMAS = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI_3,
    SMOLLM3,
    GRANITE,
    OLMO,
    OLMO_2,
    OLMO_3,
    GEMMA,
    GEMMA_2,
    GEMMA_3,
    NANOCHAT,
)
LAYER_NORMS = (STARCODER2, GPT2, BLOOM, GPT_NEOX, GPTJ, PHI_1, OPT, FALCON, NEMOTRON)
MIXTURES = (MIXTRAL, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3)
HYBRIDS = (MAMBA2, NEMOTRON_H)
FAMILIES = (*LLAMAS, *LAYER_NORMS, *MIXTURES, *HYBRIDS, MEGATRON_BERT, BERT, *BERT_TASKS)


def family_for(config: ModelConfig, architecture: str | None = None, preferred: str | None = None) -> ModelFamily:
    """The first family that supports every field of the config, or the one of that architecture. preferred: an
    architecture that is taken if it supports the config. Raises InputError naming the fields that each lacks."""
    reasons = []
    families = [family for family in FAMILIES if architecture in (None, family.architecture)]
    if not families:
        known = [family.architecture for family in FAMILIES]
        hint = nearest_name(architecture or "", known, cutoff=0.4)
        raise InputError(f"no architecture {architecture!r}; {f'did you mean {hint}?' if hint else ', '.join(known)}")
    for family in sorted(families, key=lambda family: family.architecture != preferred):
        unmet = family.unsupported(config)
        if not unmet:
            return family
        reasons.append(f"{family.architecture} has no {', no '.join(unmet)}")
    raise InputError(f"this model cannot be written for transformers: {'; '.join(reasons)}")


def family_named(model_type: str, architecture: str = "") -> ModelFamily:
    """The family that a config.json names: that of the architecture, else the first of the model type.

    Raises InputError if the model type is not supported."""
    candidates = [family for family in FAMILIES if family.model_type == model_type]
    if not candidates:
        known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
        raise UnsupportedConfig(f"model_type {model_type!r} cannot be read; gristmill reads {known}")
    return next((family for family in candidates if family.architecture == architecture), candidates[0])

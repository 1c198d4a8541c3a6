"""Hugging Face model folders: write a checkpoint as one, and read one as a model.

Weights are safetensors, never pickles, and no code of the folder is run. transformers itself is not needed."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from gristmill.evaluation.convert.chat_template import LEGACY_NAME, NAMED_TEMPLATES, TEMPLATE_NAME
from gristmill.evaluation.convert.hf.architecture import ModelFamily, UnsupportedConfig
from gristmill.evaluation.convert.hf.bert import BERT, BERT_TASKS, MEGATRON_BERT
from gristmill.evaluation.convert.hf.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from gristmill.evaluation.convert.hf.gpt import GPT2, GPT_NEOX, GPTJ
from gristmill.evaluation.convert.hf.llama import LLAMA, MIXTRAL, NANOCHAT, OLMOE, QWEN3_MOE
from gristmill.evaluation.convert.hf.llama_relatives import (
    GEMMA,
    GEMMA_2,
    GEMMA_3,
    GRANITE,
    MISTRAL,
    NEMOTRON,
    QWEN2,
    QWEN3,
    SMOLLM3,
    STARCODER2,
)
from gristmill.evaluation.convert.hf.mamba2 import MAMBA2, NEMOTRON_H
from gristmill.evaluation.convert.hf.olmo_phi import OLMO, OLMO_2, OLMO_3, PHI_1, PHI_3
from gristmill.evaluation.convert.hf.opt_bloom_falcon import BLOOM, FALCON, OPT
from gristmill.evaluation.convert.lora_adapter import AdaptedWeights
from gristmill.evaluation.convert.model_tokenizer import GENERATION_NAME, TextBounds
from gristmill.evaluation.convert.safetensors_folder import (
    SafetensorsFolder,
    WeightSource,
    converted_source,
    write_weights,
)
from gristmill.foundation.errors import InputError, nearest_name
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.tokenizers.tokenizer import JSON_NAME
from gristmill.training.checkpoint.checkpoint import SavedModelConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import TOKEN_TABLE, fill, parameter_dtype
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import ComputeOptions, Transformer
from tokenizers import Tokenizer as HuggingFaceTokenizer

# Hugging Face architectures that our models can be exported to and imported from.

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


CONFIG_NAME = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_NAME,
    LEGACY_NAME,
    GENERATION_NAME,
)


def write_huggingface(
    folder: Path,
    model: Transformer,
    end_of_document: int | TextBounds,
    tokenizer: Path | None = None,
    labels: Sequence[str] = (),
    family: ModelFamily | None = None,
) -> str:
    """Writes config.json, weights and the tokenizer's files; returns the architecture's name. Same model, same bytes.

    end_of_document: the token, or all bounds of the model's texts. labels: names of the classes, of a
    classification. family: None is the first that supports the model.
    Raises InputError if no architecture of transformers represents the model."""
    config, family = exported_form(model.config, family.architecture if family else None)
    named = {**dict(model.named_parameters()), **saved_buffers(model)}
    tensors = {name: value.detach().cpu() for name, value in named.items()}
    if config is not model.config:
        tensors = folded_tensors(model, tensors)
    write_weights(folder, family.to_hf(config, tensors))
    bounds = TextBounds((end_of_document,)) if isinstance(end_of_document, int) else end_of_document
    begin = bounds.ends[0] if bounds.starts_documents else bounds.bos
    ends = bounds.ends[0] if len(bounds.ends) == 1 else [*bounds.ends]
    fields = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": model.vocab_size,
        "bos_token_id": begin,
        "pad_token_id": None,  # some architectures have a default outside of a small vocabulary
        "eos_token_id": ends,
        "dtype": str(model.dtype).removeprefix("torch."),
        **family.write(config),
        **bounds.config_ids,
    }
    generation = {"bos_token_id": begin, "eos_token_id": ends}
    write_atomic(folder / GENERATION_NAME, json.dumps(generation, indent=2, sort_keys=True).encode() + b"\n")
    if labels:
        fields["id2label"] = {str(number): label for number, label in enumerate(labels)}
        fields["label2id"] = {label: number for number, label in enumerate(labels)}
    write_atomic(folder / CONFIG_NAME, json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n")
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
        if bounds.starts_documents and (folder / JSON_NAME).is_file():
            start_documents(folder / JSON_NAME, bounds.ends[0])
    return family.architecture


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies the files that say how the model is spoken to: tokenizer, chat templates, defaults of generation.

    Raises InputError if there is neither tokenizer.json nor tokenizer.model."""
    if not any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise InputError(f"{source / TOKENIZER_FILES[0]}: absent; name the folder of the stage `tokenizer`")
    target.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if (source / NAMED_TEMPLATES).is_dir():
        (target / NAMED_TEMPLATES).mkdir(exist_ok=True)
        for path in sorted((source / NAMED_TEMPLATES).glob("*.jinja")):
            shutil.copyfile(path, target / NAMED_TEMPLATES / path.name)


def start_documents(path: Path, end_of_document: int) -> None:
    """Makes the post-processor of a tokenizer.json put the end-of-document token before every text, so that
    transformers generates from the tokens that `gristmill generate` does."""
    content = json.loads(path.read_bytes())
    vocabulary = HuggingFaceTokenizer.from_str(json.dumps(content)).get_vocab(with_added_tokens=True)
    symbol = next(piece for piece, token in vocabulary.items() if token == end_of_document)
    begin = {"SpecialToken": {"id": symbol, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, second],
        "special_tokens": {symbol: {"id": symbol, "ids": [end_of_document], "tokens": [symbol]}},
    }
    write_atomic(path, canonical_json(content) + b"\n")


def is_huggingface(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_file()


def own_source(folder: Path) -> WeightSource | UnsupportedConfig:
    """The model of a Hugging Face folder, or why gristmill's own model cannot be it. Raises InputError where the folder
    is damaged."""
    if not has_family(folder):
        return UnsupportedConfig("gristmill has no table of its weights")
    try:
        return open_huggingface(folder)
    except UnsupportedConfig as error:
        return error


def has_family(folder: Path) -> bool:
    """Whether gristmill's own model has the architecture of the folder."""
    fields = _read_config(folder)
    architectures = fields.get("architectures") or []
    return any(
        family.model_type == fields.get("model_type") and (not architectures or family.architecture in architectures)
        for family in FAMILIES
    )


def open_huggingface(folder: Path, adapter: Path | None = None) -> WeightSource:
    """The model of a Hugging Face folder. adapter: the folder of a LoRA adapter, which is added to its weights. Raises
    InputError naming what is absent, unsupported or damaged."""
    fields = _read_config(folder)
    family = _family_of(folder, fields)
    try:
        config = ModelConfig(**family.read(fields))
        vocab_size, end_of_document = int(fields["vocab_size"]), next(iter(_ends(folder / CONFIG_NAME)), 0)
        if vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}")
    except KeyError as error:
        raise InputError(
            f"{folder / CONFIG_NAME}: has no field {error}; it is not a config of {family.architecture}"
        ) from error
    except ValidationError as error:
        first_error = error.errors()[0]
        problem = f"{'.'.join(map(str, first_error['loc']))}: {first_error['msg']}".removeprefix(": ")
        raise InputError(
            f"{folder / CONFIG_NAME}: not a valid model config ({problem}); fetch the file again"
        ) from error
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise InputError(f"{folder / CONFIG_NAME}: not a valid model config ({error}); fetch the file again") from error
    base = SafetensorsFolder(folder)
    weights = base if adapter is None else AdaptedWeights(base, adapter, config.tied_embeddings)
    return converted_source(
        folder, family, config, (vocab_size, end_of_document), (weights, weights.meta, weights.files)
    )


def read_huggingface(
    folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Transformer, SavedModelConfig]:
    """The model of a Hugging Face folder and its config. Raises InputError naming what is absent or unsupported."""
    return read_source(open_huggingface(folder), device, dtype)


def read_source(
    source: WeightSource, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Transformer, SavedModelConfig]:
    """The model with its weights, and its config."""
    config, vocab_size = source.config, source.vocab_size
    model = Transformer(config, vocab_size, options=ComputeOptions(dtype))
    buffers = saved_buffers(model)
    tensors: dict[str, Tensor] = {}
    for name, value in source.stream():
        if name in buffers:
            buffers[name].copy_(value)
        else:
            tensors[name] = value.to(device, parameter_dtype(name, config, dtype))
    fill(model, lambda name, _: tensors[name])
    saved_config = SavedModelConfig.of(config, vocab_size, source.end_of_document)
    return model.eval().requires_grad_(False), saved_config


def _family_of(folder: Path, fields: Mapping[str, Any]) -> ModelFamily:
    architectures = fields.get("architectures") or [""]
    if not isinstance(architectures, list):
        raise InputError(f"{folder / CONFIG_NAME}: architectures is no list; fetch the file again")
    return family_named(fields.get("model_type", ""), architectures[0])


def ends_of_document(folder: Path) -> tuple[int, ...]:
    """The tokens that config.json and generation_config.json say end a text; none, one or several."""
    return tuple(dict.fromkeys([*_ends(folder / CONFIG_NAME), *generation_ends(folder)]))


def generation_ends(folder: Path) -> tuple[int, ...]:
    """The tokens at which transformers stops to generate: those of generation_config.json, else of config.json."""
    if not is_huggingface(folder):
        return ()
    generation = folder / GENERATION_NAME
    return (_ends(generation) if generation.is_file() else ()) or _ends(folder / CONFIG_NAME)


CONFIG_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_ids(folder: Path) -> dict[str, Any]:
    """Fields of config.json that name special tokens, as they are there."""
    fields = _read_json(folder / CONFIG_NAME) if is_huggingface(folder) else {}
    return {name: fields[name] for name in CONFIG_IDS if name in fields}


def _ends(path: Path) -> tuple[int, ...]:
    end = _read_json(path).get("eos_token_id")
    ends = end if isinstance(end, list) else [] if end is None else [end]
    if not all(type(token) is int for token in ends):
        problem = f"eos_token_id is {str(end)[:80]}, not a token id or a list of them"
        raise InputError(f"{path}: not a valid model config ({problem}); fetch the file again")
    return tuple(ends)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    if folder.is_file():
        raise InputError(
            f"{folder}: is a file; name the folder that holds {CONFIG_NAME}, safetensors and the tokenizer"
        )
    return _read_json(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path}: absent; a Hugging Face folder holds {CONFIG_NAME} and safetensors") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); fetch the file again") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path}: is not a JSON object; fetch the file again")
    return fields


# The norm of an untied embedding, folded into its table for architectures that have no such norm.
#
# The norm reads nothing but the token's row, so the table of normed rows gives the same model.


def exported_form(
    config: ModelConfig, architecture: str | None = None, preferred: str | None = None
) -> tuple[ModelConfig, ModelFamily]:
    """The config that is written and its family: the model as it is, or where no family has it, with the embedding's
    norm folded. Raises InputError, naming the fields that each family lacks, where neither can be written."""
    try:
        return config, family_for(config, architecture, preferred)
    except InputError:
        if not is_foldable(config):
            raise
        folded = _without_norm(config)
        return folded, family_for(folded, architecture, preferred)


def is_foldable(config: ModelConfig) -> bool:
    """Whether the norm is of the token's row alone, and the row of no other use."""
    alone = config.positions != "learned" and not config.segments
    return config.embedding_norm is True and not config.tied_embeddings and alone


@torch.no_grad()
def folded_tensors(model: Transformer, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the model without the norm, whose rows are normed."""
    assert model.embedding_norm is not None
    table = tensors[TOKEN_TABLE].to(next(model.embedding_norm.parameters(), tensors[TOKEN_TABLE]).device)
    scaled = table if model.embedding_scale == 1 else table * model.embedding_scale
    kept = {name: value for name, value in tensors.items() if not name.startswith("embedding_norm.")}
    return kept | {TOKEN_TABLE: model.embedding_norm(scaled).to(table.dtype).cpu()}


def _without_norm(config: ModelConfig) -> ModelConfig:
    fields = config.model_dump(exclude_unset=True) | {"embedding_norm": False}
    return ModelConfig.model_validate(fields | {"scales": config.scales.model_dump() | {"embedding": 1.0}})

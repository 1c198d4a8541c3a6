"""Export a checkpoint as a Hugging Face folder, and import one."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gristmill.evaluation.convert.gguf_file import huggingface_of_gguf, is_gguf
from gristmill.evaluation.convert.hf.architecture import UnsupportedConfig
from gristmill.evaluation.convert.huggingface import (
    config_ids,
    copy_tokenizer,
    exported_form,
    generation_ends,
    is_huggingface,
    open_huggingface,
    write_huggingface,
)
from gristmill.evaluation.convert.lora_adapter import base_name, is_adapter
from gristmill.evaluation.convert.megatron_core import is_megatron_core, open_megatron_core
from gristmill.evaluation.convert.megatron_lm import (
    is_megatron_deepspeed,
    megatron_files,
    open_megatron_deepspeed,
    read_megatron_345m,
)
from gristmill.evaluation.convert.model_tokenizer import ModelTokenizer, load_model_tokenizer
from gristmill.evaluation.convert.safetensors_folder import WeightSource, check_shapes
from gristmill.evaluation.inference.load_model import check_tokenizer, load_checkpoint_tokenizer
from gristmill.evaluation.inference.workdir import CheckpointPaths, Workdir
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest, write_atomic
from gristmill.foundation.manifest import Manifest, read_manifest
from gristmill.tokenizers.tokenizer import JSON_NAME
from gristmill.training.checkpoint.checkpoint import (
    CheckpointContent,
    SavedModelConfig,
    load_model,
    read_model_config,
    saved_tensors,
    step_folder,
)
from gristmill.training.checkpoint.save import save_streamed
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import Transformer
from gristmill.training.objectives.objective_names import label_name

CLASS_NAMES = {"classification": "labels", "source_classification": "sources"}  # the options that hold them
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    tokenizer: Path | None = None,
    precision: str | None = None,
    scores: Path | None = None,
    architecture: str | None = None,
) -> str:
    """Writes a Hugging Face folder with weights, tokenizer and a model card; returns the name of its architecture.

    checkpoint: of any layout, a step's folder or a run. architecture: by default the one that the checkpoint was
    imported from, or the first that represents the model. precision: by default that of the imported folder, fp32 for a
    model that gristmill trained. scores: a results folder whose table goes into the card; by
    default that of the run. Raises InputError if transformers has no architecture for the model."""
    if scores is not None and not (scores / "table.md").is_file():
        raise InputError(f"{scores}: has no table.md; name a folder that `gristmill evaluate` wrote")
    checkpoint, folder = CheckpointPaths(checkpoint, tokenizer).resolve()
    saved_config, own_tokenizer = read_model_config(checkpoint), load_checkpoint_tokenizer(checkpoint, folder)
    check_tokenizer(
        folder,
        own_tokenizer,
        saved_config["vocab_size"],
        saved_config["end_of_document"],
        "padded_rows" in saved_config,
    )
    origin = read_manifest(checkpoint).metadata
    model, config = load_model(checkpoint, dtype=DTYPES[precision or origin.get("dtype", "fp32")])
    _, family = exported_form(config, architecture, preferred=origin.get("imported"))
    workdir = Workdir.of_checkpoint(checkpoint)
    labels = class_names(workdir)
    architecture = write_huggingface(output, model, own_tokenizer.bounds, folder, labels, family)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = model_card(checkpoint, architecture, parameters, workdir, scores) + text_section(own_tokenizer, output)
    write_atomic(output / "README.md", card.encode())
    return architecture


def import_checkpoint(folder: Path, output: Path, base: Path | None = None) -> Path:
    """Converts a Hugging Face folder, a GGUF file, or a Megatron checkpoint with a tokenizer.json, to a gristmill
    checkpoint, OUTPUT/checkpoints/step-00000000, to evaluate or train; its tokenizer goes to OUTPUT/tokenizer. Nothing
    is downloaded, and no code of the folder is run. base: of a folder with a LoRA adapter, the Hugging Face folder of
    the model it was trained on."""
    if is_gguf(folder):
        with huggingface_of_gguf(folder) as converted:
            return import_checkpoint(converted, output)
    adapter = _adapter(folder, base)
    if adapter is not None and base is not None:
        has_tokenizer = any((adapter / name).is_file() for name in (JSON_NAME, "tokenizer.model"))
        return _import_checkpoint(base, output, adapter, adapter if has_tokenizer else base)
    return _import_checkpoint(folder, output, None, folder)


def _adapter(folder: Path, base: Path | None) -> Path | None:
    """The folder if it holds an adapter. Raises InputError where it comes without a base, or a base without it."""
    if not is_adapter(folder):
        if base is not None:
            raise InputError(f"{folder}: no LoRA adapter (adapter_config.json), so there is nothing to add to a --base")
        return None
    if base is None:
        raise InputError(
            f"{folder}: a LoRA adapter of {base_name(folder)[:200]}; name the Hugging Face folder of that model by "
            "--base"
        )
    if not is_huggingface(base):
        raise InputError(f"{base}: no Hugging Face folder; --base takes one with config.json and safetensors")
    return folder


def _import_checkpoint(folder: Path, output: Path, adapter: Path | None, tokenizer_folder: Path) -> Path:
    """Writes the checkpoint of a model folder, with the adapter added. tokenizer_folder: holds its tokenizer."""
    try:
        source = open_weights(folder) if adapter is None else open_huggingface(folder, adapter)
    except UnsupportedConfig as error:
        raise InputError(
            f"{error}; gristmill evaluate and generate run the folder with transformers' code, and "
            f"model: {{transformers: {folder}}} trains it"
        ) from error
    tokenizer = load_model_tokenizer(tokenizer_folder, generation_ends(folder))
    check_tokenizer(tokenizer_folder, tokenizer, source.vocab_size, tokenizer.end_of_document, padded=True)
    saved_config = SavedModelConfig.of(source.config, source.vocab_size, tokenizer.end_of_document)
    saved_config["padded_rows"] = source.vocab_size - tokenizer.vocab_size
    saved_config["text"] = replace(tokenizer.bounds, config_ids=config_ids(folder)).to_json()
    model = Transformer(source.config, source.vocab_size)
    named, buffers = dict(model.named_parameters()), saved_buffers(model)
    streamed = {
        name: named[name].to(source.dtypes.get(name, torch.float32)) if name in named else buffers[name].to("meta")
        for name in source.names
    }
    tensors = saved_tensors(streamed, {name: value for name, value in buffers.items() if name not in streamed})
    content = CheckpointContent(tensors, saved_config)
    with ThreadPoolExecutor(1) as pool:  # digests are taken beside the conversion, which reads the same files
        digests = {path.name: pool.submit(file_digest, path) for path in source.files}
        stream = ((f"model.{name}", tensor) for name, tensor in source.stream())
        save_streamed(
            output / "checkpoints",
            0,
            content,
            stream,
            lambda: {
                "imported": source.architecture,
                "dtype": _dtype_name(source),
                "files": {name: digest.result() for name, digest in digests.items()},
            },
        )
    copy_tokenizer(tokenizer_folder, output / "tokenizer")
    return step_folder(output / "checkpoints", 0)


def _dtype_name(source: WeightSource) -> str:
    """The precision of most of the folder's numbers: fp32, bf16 or fp16."""
    counts = Counter(source.dtypes.values())
    return PRECISIONS.get(counts.most_common(1)[0][0], "fp32") if counts else "fp32"


def model_card(
    checkpoint: Path, architecture: str, parameters: int, workdir: Workdir | None, scores: Path | None
) -> str:
    """README.md of an exported model: provenance down to the raw files' fingerprints, and scores."""
    stages = workdir.manifests() if workdir is not None else {}
    lines = [
        "---", "library_name: transformers", "tags: [gristmill]", "---", "",
        f"# {_recipe(stages).get('name', checkpoint.name)}", "",
        f"{architecture}, {parameters:,} parameters, exported by gristmill from {checkpoint.name}.", "",
    ]  # fmt: skip
    if workdir is None or not stages:
        return "\n".join([*lines, "There are no manifests beside the checkpoint, so its provenance is unknown.", ""])
    lines += ["## Provenance", "", "| stage | fingerprint | inputs |", "|---|---|---|"]
    for name, stage in stages.items():
        inputs = ", ".join(f"{key} {value[:12]}" for key, value in sorted(stage.inputs.items()))
        lines.append(f"| {name} | `{stage.fingerprint}` | {inputs} |")
    lines += ["", *_metadata(stages), *_scores(scores or workdir.stage("evaluate"))]
    lines += ["## Recipe", "", "```json", json.dumps(_recipe(stages), indent=1, sort_keys=True), "```", ""]
    return "\n".join(lines)


def text_section(tokenizer: ModelTokenizer, folder: Path) -> str:
    """The section of the model card about the tokens around a text."""
    if not tokenizer.prompt_prefix:
        return "\n## Text\n\nNo token is put before a text.\n"
    symbols = " ".join(f"`{tokenizer.pieces[token]}` (token {token})" for token in tokenizer.prompt_prefix)
    adds = "the tokenizer puts it there" if (folder / JSON_NAME).is_file() else "put it there yourself"
    return f"\n## Text\n\nEvery text begins with {symbols}: {adds}.\n"


def class_names(workdir: Workdir | None) -> list[str]:
    """Names of the classes, if the recipe's objective is a classification."""
    train: dict[str, Any] = (_recipe(workdir.manifests()).get("train") if workdir is not None else None) or {}
    field = CLASS_NAMES.get(str(train.get("objective")))
    return [label_name(label) for label in train["objective_options"][field]] if field else []


def _recipe(stages: dict[str, Manifest]) -> dict[str, Any]:
    for name in ("train", "curate"):
        if name in stages and "recipe" in stages[name].origin:
            recipe: dict[str, Any] = stages[name].origin["recipe"]
            return recipe
    return {}


def _metadata(stages: dict[str, Manifest]) -> list[str]:
    """Counts of the stages: documents and bytes of the corpus, tokens and loss of the training."""
    lines = ["## Counts", ""]
    for name in ("curate", "train"):
        if name in stages:
            lines += [f"{name}:", "```json", json.dumps(stages[name].metadata, indent=1, sort_keys=True), "```", ""]
    return lines


def _scores(folder: Path) -> list[str]:
    path = folder / "table.md"
    return ["## Scores", "", path.read_text("utf-8"), ""] if path.is_file() else []


def require_empty(output: Path) -> None:
    """Raises InputError if the output folder exists and is not empty."""
    if output.exists() and any(output.iterdir()):
        raise InputError(f"{output}: not empty; name a new folder, or remove this one")


# Opens a folder with a model in any of the formats that `gristmill import` reads.


def open_weights(folder: Path) -> WeightSource:
    """A Hugging Face folder, NVIDIA's megatron-gpt2-345m or megatron-bert-345m, a Megatron-DeepSpeed BLOOM, or a
    distributed checkpoint of Megatron-Core. Raises InputError naming what is absent, unsupported or damaged."""
    if is_megatron_deepspeed(folder):
        return open_megatron_deepspeed(folder)
    if is_megatron_core(folder):
        return open_megatron_core(folder)
    if not is_huggingface(folder) and (files := megatron_files(folder)):
        return _open_megatron_345m(files)
    return open_huggingface(folder)


def _open_megatron_345m(files: list[Path]) -> WeightSource:
    checkpoint = read_megatron_345m(files)
    check_shapes(files[0], checkpoint.config, checkpoint.vocab_size, checkpoint.tensors)
    names, stream = tuple(checkpoint.tensors), checkpoint.tensors.items
    return WeightSource(
        checkpoint.name, checkpoint.config, checkpoint.vocab_size, 0, tuple(files), names, lambda: iter(stream())
    )

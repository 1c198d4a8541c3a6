"""Weights that are truncated, renamed, extra, of another shape or type are refused in one sentence, in every family."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.evaluation.convert.huggingface import copy_tokenizer, open_huggingface, read_huggingface
from gristmill.evaluation.import_export import import_checkpoint
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import read_manifest
from gristmill.training.checkpoint.checkpoint import load_model
from tests.support.huggingface_shapes import LLAMA_SHAPE

transformers = pytest.importorskip("transformers")
huggingface_models = pytest.importorskip("tests.support.huggingface_models")
ONE_OF_EACH = {type(config): config for config in huggingface_models.CONFIGS.values()}


@pytest.fixture(params=ONE_OF_EACH.values(), ids=lambda config: config.model_type)
def folder(request, tmp_path: Path) -> Path:
    huggingface_models.random_model(request.param).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def refused(folder: Path, said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        open_huggingface(folder)
    assert "\n" not in str(error.value)


def test_every_damage_is_named(folder):
    path = folder / "model.safetensors"
    content, tensors = path.read_bytes(), load_file(path)
    victim = sorted(name for name, value in tensors.items() if value.dim() == 2)[-1]
    for damaged in (content[: len(content) // 2], content[:9], b"", content[:8] + b"\xff" + content[9:]):
        path.write_bytes(damaged)
        refused(folder, r"model\.safetensors: not readable as safetensors .*; fetch the file again")
    others = {name: value for name, value in tensors.items() if name != victim}
    for changed, said in (
        ({**others, f"{victim}.old": tensors[victim]}, f"the weights lack {victim}; this .* is incomplete"),
        ({**tensors, "model.layers.7.spare.weight": torch.ones(2)}, r"hold model\.layers\.7\.spare\.weight \(1 such\)"),
        ({**others, victim: torch.ones(5, 7)}, r"config and weights differ|do not fit the config"),
        ({**others, victim: tensors[victim].to(torch.float8_e4m3fn)}, f"{victim} has the type F8_E4M3"),
    ):
        save_file(changed, path)
        refused(folder, said)


def in_two_files(folder: Path) -> tuple[dict, dict]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    index = {name: file for file, held in files.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tensors, index


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(**LLAMA_SHAPE | {"vocab_size": 257, "eos_token_id": 256})
    huggingface_models.random_model(config).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_sharded_folder_and_its_index_must_agree(llama):
    tensors, index = in_two_files(llama)
    first = min(index)
    other = {"model-1.safetensors": "model-2.safetensors", "model-2.safetensors": "model-1.safetensors"}[index[first]]
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index | {first: other}}))
    refused(llama, f"lacks {first}|holds {first}")
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    read_huggingface(llama)
    save_file({name: tensors[name] for name in tensors}, llama / "model-2.safetensors")
    refused(llama, r"model-2\.safetensors: holds .*, as model-1\.safetensors does")
    (llama / "model-2.safetensors").unlink()
    refused(llama, r"model-2\.safetensors: absent, but model\.safetensors\.index\.json names it")


def test_an_import_is_streamed_and_records_what_it_read(llama, tmp_path, tokenizer_folder):
    in_two_files(llama)
    copy_tokenizer(tokenizer_folder, llama)
    imported = import_checkpoint(llama, tmp_path / "in")
    metadata = read_manifest(imported).metadata
    assert metadata["imported"] == "LlamaForCausalLM"
    expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in llama.glob("*.safetensors")}
    assert metadata["files"] == expected and len(expected) == 2
    again = import_checkpoint(llama, tmp_path / "again")
    files = sorted(path.relative_to(imported) for path in imported.rglob("*") if path.is_file())
    assert all((imported / name).read_bytes() == (again / name).read_bytes() for name in files)
    tokens = torch.arange(40).unsqueeze(0)
    assert torch.equal(load_model(imported)[0](tokens), read_huggingface(llama)[0](tokens))

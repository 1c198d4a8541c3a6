"""Exported models give transformers' logits and greedy texts; imported ones give ours."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gristmill.evaluation.commands import generate_text
from gristmill.evaluation.convert.huggingface import copy_tokenizer, write_huggingface
from gristmill.evaluation.import_export import export_checkpoint, import_checkpoint
from gristmill.evaluation.inference.config import EvaluateConfig
from gristmill.evaluation.inference.generate.generation_request import GenerationSettings
from gristmill.evaluation.inference.load_model import load_checkpoint_tokenizer, load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths
from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import StageIdentity, write_manifest
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.training.checkpoint.checkpoint import load_model
from tests.support.bos_models import write_model
from tests.support.huggingface_shapes import LLAMA_SHAPE
from tests.support.tokenizer_folders import ADOPTED, CONFIGS, write_tokenizer_folder

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_out_and_in_again_is_the_same_model(tmp_path, random_checkpoint, tokenizer_folder, family):
    checkpoint = random_checkpoint(family)
    export_checkpoint(checkpoint, tmp_path / "out")
    imported = import_checkpoint(tmp_path / "out", tmp_path / "in")
    before = load_for_evaluation(CheckpointPaths(checkpoint), EvaluateConfig())
    after = load_for_evaluation(CheckpointPaths(imported), EvaluateConfig())
    tokens = torch.randint(0, 257, (2, 30), generator=torch.Generator().manual_seed(0))
    assert torch.equal(before.causal_lm.model(tokens), after.causal_lm.model(tokens))
    assert before.tokenizer.fingerprint == after.tokenizer.fingerprint


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_a_checkpoint_of_pool_leaves_and_comes_back(tmp_path, checkpoint_of_layout, tokenizer_folder, family):
    """Saved on 2 data x 2 tensor x 2 pipeline ranks, the vocabulary cut unevenly; through transformers and in again."""
    checkpoint = checkpoint_of_layout(family, data=2, tensor=2, pipeline=2)
    export_checkpoint(checkpoint, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours, _ = load_model(checkpoint)
    tokens = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(tokens).logits
        assert torch.allclose(ours(tokens), expected, atol=1e-5)
        theirs.save_pretrained(tmp_path / "theirs")
        copy_tokenizer(tokenizer_folder, tmp_path / "theirs")
        imported, _ = load_model(import_checkpoint(tmp_path / "theirs", tmp_path / "in"))
        assert torch.allclose(imported(tokens), expected, atol=1e-5)


def test_a_padded_table_is_imported_and_evaluated(tmp_path, random_checkpoint, tokenizer_folder):
    write_huggingface(tmp_path / "out", load_model(random_checkpoint(vocab_size=320))[0], 256, tokenizer_folder)
    imported = import_checkpoint(tmp_path / "out", tmp_path / "in")
    causal_lm = load_for_evaluation(CheckpointPaths(imported), EvaluateConfig()).causal_lm
    assert (causal_lm.vocab_size, causal_lm.model.vocab_size) == (257, 320)


def test_the_card_tells_the_provenance(tmp_path, random_checkpoint, tokenizer_folder):
    checkpoint = random_checkpoint("llama", name="train/checkpoints")
    for stage, metadata in (("curate", {"documents": 12}), ("train", {"loss": 2.5})):
        (tmp_path / stage).mkdir(exist_ok=True)
        identity = StageIdentity(stage, 1, {}, {"raw:books": "abc"})
        write_manifest(tmp_path / stage, identity, metadata, {"recipe": {"name": "mill"}})
    (tmp_path / "evaluate").mkdir()
    (tmp_path / "evaluate" / "table.md").write_text("| task | score |\n")
    assert export_checkpoint(checkpoint, tmp_path / "out") == "LlamaForCausalLM"
    card = (tmp_path / "out" / "README.md").read_text()
    for told in ("# mill", "raw:books abc", '"documents": 12', '"loss": 2.5', "| task | score |"):
        assert told in card
    export_checkpoint(checkpoint, tmp_path / "again")
    for path in sorted((tmp_path / "out").iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_greedy_generation_is_that_of_transformers(tmp_path, random_checkpoint, tokenizer_folder, family):
    checkpoint = random_checkpoint(family)
    export_checkpoint(checkpoint, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompts = ["The mill", "x", "Grain goes in and flour", ""]
    found = generate_text(CheckpointPaths(checkpoint), prompts, GenerationSettings(24))
    tokenizer = load_tokenizer(tokenizer_folder)
    for prompt, result in zip(prompts, found, strict=True):
        ids = torch.tensor([[256, *tokenizer.encode(prompt)]])
        expected = theirs.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=256)[0, ids.shape[1] :]
        assert list(result.tokens) == [token for token in expected.tolist() if token != 256]


def continued_by_transformers(folder, prompts, new_tokens) -> list[tuple[list[int], list[int]]]:
    """By prompt, its ids by the folder's tokenizer and the tokens that its model continues them with, greedily."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    continued = []
    for prompt in prompts:
        batch = tokenizer(prompt, return_tensors="pt")
        ids = batch["input_ids"][0].tolist()
        tokens = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=ids[0])[0].tolist()
        continued.append((ids, tokens[len(ids) :]))
    return continued


@pytest.mark.parametrize("kind", ["plain", "with a post-processor"])
def test_transformers_generates_our_texts_from_the_exported_folder(tmp_path, random_checkpoint, tokenizer_folder, kind):
    """Text for text: the exported tokenizer begins a document as `gristmill generate` does, and so does its import."""
    if kind != "plain":
        path = tokenizer_folder / "tokenizer.json"
        content = json.loads(path.read_text())
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        path.write_text(json.dumps(content | {"post_processor": level}))
    checkpoint = random_checkpoint("llama")
    export_checkpoint(checkpoint, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    imported = import_checkpoint(tmp_path / "out", tmp_path / "in")
    prompts = ["The mill", "x", "Grain goes in and flour", ""]
    continued = continued_by_transformers(tmp_path / "out", prompts, 24)
    assert all(ids[0] == 256 for ids, _ in continued)
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for _, tokens in continued]
    for source in (checkpoint, tmp_path / "out", imported):
        texts = [answer.text for answer in generate_text(CheckpointPaths(source), prompts, GenerationSettings(24))]
        assert texts == expected
    assert model.generate(max_new_tokens=1, pad_token_id=256)[0, 0] == 256  # without a prompt
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Every text begins with `<|end|>` (token 256): the tokenizer puts it there." in card


@pytest.mark.parametrize("kind", [*CONFIGS, *ADOPTED])
def test_transformers_generates_our_texts_with_every_kind_of_tokenizer(tmp_path, random_checkpoint, kind):
    """Of the stage `tokenizer` by each algorithm, and adopted ones whose own bounds give way to those of documents."""
    tokenizer = load_tokenizer(write_tokenizer_folder(tmp_path / "tokenizer", kind))
    checkpoint = random_checkpoint("llama", vocab_size=tokenizer.vocab_size, end_of_document=tokenizer.end_of_document)
    export_checkpoint(checkpoint, tmp_path / "out")
    imported = import_checkpoint(tmp_path / "out", tmp_path / "in")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prompts = ["the Mill", "x", "Grain goes in  and flour", ""]
    continued = continued_by_transformers(tmp_path / "out", prompts, 12)
    assert [ids for ids, _ in continued] == [
        [tokenizer.end_of_document, *tokenizer.encode(prompt)] for prompt in prompts
    ]
    expected = [[token for token in tokens if token != tokenizer.end_of_document] for _, tokens in continued]
    for source in (checkpoint, tmp_path / "out", imported):
        answers = generate_text(CheckpointPaths(source), prompts, GenerationSettings(12))
        assert [list(answer.tokens) for answer in answers] == expected
        texts = [answer.text for answer in answers]
        texts_of_theirs = [theirs.decode(tokens, skip_special_tokens=True) for tokens in expected]
        # Of bytes that are no UTF-8, transformers also replaces those of their run that are.
        assert all(text == their or "\ufffd" in text for text, their in zip(texts, texts_of_theirs, strict=True))
        assert any(text == their != "" for text, their in zip(texts, texts_of_theirs, strict=True))


def test_a_prompt_that_does_not_fit_is_named(random_checkpoint, tokenizer_folder):
    with pytest.raises(InputError, match="has 201 tokens, the model takes 127; shorten it"):
        generate_text(CheckpointPaths(random_checkpoint()), ["y" * 200], GenerationSettings(4))


def test_an_imported_model_leaves_as_what_it_was(tmp_path, tokenizer_folder):
    """Phi-3 is a Llama in other tensors."""
    config = transformers.Phi3Config(**LLAMA_SHAPE | {"vocab_size": 257, "eos_token_id": 256})
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path / "theirs")
    copy_tokenizer(tokenizer_folder, tmp_path / "theirs")
    imported = import_checkpoint(tmp_path / "theirs", tmp_path / "in")
    assert export_checkpoint(imported, tmp_path / "back") == "Phi3ForCausalLM"
    weights = (tmp_path / "theirs" / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == weights
    assert export_checkpoint(imported, tmp_path / "llama", architecture="LlamaForCausalLM") == "LlamaForCausalLM"
    with pytest.raises(InputError, match="GPT2LMHeadModel has no positions='rope'"):
        export_checkpoint(imported, tmp_path / "gpt2", architecture="GPT2LMHeadModel")
    with pytest.raises(InputError, match="no architecture 'Phi3'; did you mean Phi3ForCausalLM"):
        export_checkpoint(imported, tmp_path / "wrong", architecture="Phi3")


def test_import_keeps_precision_padding_ends_and_template(tmp_path: Path) -> None:
    """bfloat16, 2,385 rows of padding, three end tokens of generation_config.json, chat_template.jinja."""
    folder = write_model(tmp_path / "model", "llama", vocab_size=258 + 2385)
    tensors = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 10, 65]}')
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    imported = import_checkpoint(folder, tmp_path / "in")
    assert load_for_evaluation(CheckpointPaths(imported), EvaluateConfig()).tokenizer.ends == (257, 10, 65)
    assert sum(path.stat().st_size for path in imported.rglob("*.distcp")) < 1.5 * sum(
        value.nbytes for value in tensors.values()
    )
    export_checkpoint(imported, tmp_path / "out")
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    assert exported["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [257, 10, 65]
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 257)
    for place in (tmp_path / "in/tokenizer", tmp_path / "out"):
        template = load_checkpoint_tokenizer(imported, place).chat_template()
        assert template.render([{"role": "user", "content": "Hi"}]) == "<s>Hi"

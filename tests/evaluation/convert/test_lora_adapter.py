"""LoRA adapters: imported models have the logits of peft's merged ones, and what cannot be added is refused."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gristmill.evaluation.convert.huggingface import open_huggingface, read_source
from gristmill.evaluation.import_export import import_checkpoint
from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import load_model
from tokenizers import Tokenizer, models, pre_tokenizers

VOCAB = 272
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def base_model(kind="llama", **changes):
    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)).eval()
    return LlamaForCausalLM(LlamaConfig(**LLAMA | changes)).eval()


def adapted(folder, options, kind="llama", **changes):
    """Saves a base model and an adapter with random matrices; returns the logits of peft's merged model."""
    model = base_model(kind, **changes)
    model.save_pretrained(folder / "base")
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return model.merge_and_unload()(tokens()).logits


def tokens():
    return torch.arange(40).reshape(2, 20) * 5


LINEAR = ["q_proj", "v_proj", "down_proj"]
CASES = {
    "plain": ("llama", {"r": 4, "lora_alpha": 16, "target_modules": LINEAR}),
    "all linear": ("llama", {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rank-stabilized": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": LINEAR, "use_rslora": True}),
    "ranks by module": (
        "llama",
        {
            "r": 4, "lora_alpha": 8, "target_modules": LINEAR, "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.q_proj": 64, "down_proj": 3},
        },
    ),
    "embedding": ("llama", {"r": 2, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"]}),
    "whole modules": (
        "llama", {"r": 2, "lora_alpha": 8, "target_modules": LINEAR, "modules_to_save": ["lm_head", "norm"]},
    ),
    "transposed": ("gpt2", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_merged_model(case, tmp_path):
    kind, options = CASES[case]
    expected_BTV = adapted(tmp_path, options, kind)
    model, _ = read_source(open_huggingface(tmp_path / "base", tmp_path / "adapter"))
    torch.testing.assert_close(model(tokens()), expected_BTV, atol=2e-5, rtol=2e-5)
    plain, _ = read_source(open_huggingface(tmp_path / "base"))
    assert (plain(tokens()) - expected_BTV).abs().max() > 0.01


def write_tokenizer(folder):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *(f"{a}{b}" for a in "abcd" for b in "efgh")][: VOCAB - 1]
    merges = [(piece[0], piece[1]) for piece in pieces[256:]]
    tokenizer = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": VOCAB - 1, "bos_token_id": None}))


def test_an_imported_adapter_is_a_checkpoint_like_any_other(tmp_path):
    """The tokenizer is that of the base where the adapter has none; the base's folder is only read."""
    expected_BTV = adapted(tmp_path, CASES["plain"][1])
    write_tokenizer(tmp_path / "base")
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    checkpoint = import_checkpoint(tmp_path / "adapter", tmp_path / "out", tmp_path / "base")
    model, _ = load_model(checkpoint)
    torch.testing.assert_close(model(tokens()), expected_BTV, atol=2e-5, rtol=2e-5)
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before


def test_a_base_is_asked_for_by_its_name(tmp_path):
    adapted(tmp_path, CASES["plain"][1])
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "mill/llama-2"}))
    with pytest.raises(InputError, match=r"LoRA adapter of mill/llama-2; name .* by --base"):
        import_checkpoint(tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(InputError, match="no LoRA adapter"):
        import_checkpoint(tmp_path / "base", tmp_path / "out", tmp_path / "base")
    with pytest.raises(InputError, match="--base takes one with config"):
        import_checkpoint(tmp_path / "adapter", tmp_path / "out", tmp_path)


REFUSED = {
    "use_dora": (True, "use_dora is True.*merge_and_unload"),
    "peft_type": ("IA3", "peft_type is IA3"),
    "bias": ("all", "bias is all"),
    "r": (0, "r is 0, not a positive number"),
    "lora_alpha": ("8", "lora_alpha is '8'"),
    "rank_pattern": ({"(a+)+b": 2}, "not the name of a module"),
    "alpha_pattern": (["q_proj"], "no table of numbers"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_an_addition_cannot_do_is_refused(field, tmp_path):
    adapted(tmp_path, CASES["plain"][1])
    value, message = REFUSED[field]
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {field: value}))
    with pytest.raises(InputError, match=message):
        open_huggingface(tmp_path / "base", tmp_path / "adapter")


def test_damaged_and_foreign_adapters_are_refused(tmp_path):
    adapted(tmp_path, CASES["plain"][1])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    for changed, message in (
        ({name: value for name, value in tensors.items() if name != first}, "one matrix of two"),
        (tensors | {first: tensors[first][:, :8].contiguous()}, "does not give .*q_proj.weight of"),
        (tensors | {first: tensors[first][:2].contiguous()}, "has rank 2, and adapter_config.json says 4"),
        (tensors | {first.replace("layers.0", "layers.9"): tensors[first].clone()}, "the base model has no weight"),
        ({name.removeprefix("base_model."): value for name, value in tensors.items()}, "does not begin with"),
    ):
        save_file(changed, path)
        with pytest.raises(InputError, match=message):
            open_huggingface(tmp_path / "base", tmp_path / "adapter")
    path.write_bytes(b"x" * 100)
    with pytest.raises(InputError, match="not readable as safetensors"):
        open_huggingface(tmp_path / "base", tmp_path / "adapter")
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(InputError, match="pickled weights"):
        open_huggingface(tmp_path / "base", tmp_path / "adapter")


def test_a_table_that_is_embedding_and_head_is_not_changed_for_one_of_them(tmp_path):
    adapted(tmp_path, CASES["embedding"][1], tie_word_embeddings=True)
    with pytest.raises(InputError, match="as embedding and as head"):
        open_huggingface(tmp_path / "base", tmp_path / "adapter")

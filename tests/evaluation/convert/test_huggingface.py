"""Reading and writing Hugging Face model folders, and the errors of unsupported or damaged ones."""

import json

import pytest
import torch

from gristmill.evaluation.convert import safetensors_folder
from gristmill.evaluation.convert.huggingface import read_huggingface, write_huggingface
from gristmill.evaluation.import_export import export_checkpoint, import_checkpoint
from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import load_model

transformers = pytest.importorskip("transformers")

FAMILIES = [
    ("llama", {}),
    ("llama", {"tied_embeddings": True, "biases": True, "head_width": 16, "rope_base": 5000.0}),
    ("gpt2", {}),
    ("gpt2", {"tied_embeddings": False, "ffn_hidden_size": 48}),
    ("bloom", {}),
    ("bloom", {"heads": 6, "width": 48, "tied_embeddings": False}),
]
TOKENS = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "fields"), FAMILIES)
def test_logits_are_those_of_transformers_and_the_way_back_is_exact(tmp_path, random_checkpoint, family, fields):
    model, _ = load_model(random_checkpoint(family, **fields))
    architecture = write_huggingface(tmp_path / "out", model, end_of_document=256)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == architecture
    ours, card = read_huggingface(tmp_path / "out")
    with torch.inference_mode():
        assert torch.allclose(model(TOKENS), theirs(TOKENS).logits, atol=1e-5)
        assert torch.equal(model(TOKENS), ours(TOKENS))
    assert card["end_of_document"] == 256


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"embedding_norm": True, "qk_norm": True, "tied_embeddings": False}, "Qwen3ForCausalLM"),
        ({"embedding_norm": True, "norm_plus_one": True, "mlp": "relu2", "norm": "layernorm"}, "NemotronForCausalLM"),
        ({"embedding_norm": True, "scales": {"embedding": 3.0}}, "LlamaForCausalLM"),
    ],
)
def test_a_norm_of_the_embedding_is_folded_into_the_table(tmp_path, random_checkpoint, fields, expected):
    model, _ = load_model(random_checkpoint("llama", **fields))
    with torch.no_grad():
        model.embedding_norm.weight.mul_(torch.linspace(0.5, 2.0, 32))
    assert write_huggingface(tmp_path / "out", model, end_of_document=256) == expected
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.inference_mode():
        assert torch.allclose(model(TOKENS), theirs(TOKENS).logits, atol=1e-5)
    assert model.config.embedding_norm and not read_huggingface(tmp_path / "out")[0].config.embedding_norm


def test_a_norm_of_a_tied_embedding_is_not_folded(tmp_path, random_checkpoint):
    model, _ = load_model(random_checkpoint("llama", embedding_norm=True, tied_embeddings=True))
    with pytest.raises(InputError, match="LlamaForCausalLM has no embedding_norm=True"):
        write_huggingface(tmp_path / "out", model, end_of_document=256)


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(
            vocab_size=99, hidden_size=32, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6,
        ),
        transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
    ],
    ids=["llama", "gpt2", "bloom"],
)  # fmt: skip
def test_a_model_of_transformers_gives_the_same_logits_here(tmp_path, config):
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    ours, card = read_huggingface(tmp_path)
    tokens = TOKENS % 99
    with torch.inference_mode():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5)
    assert card["vocab_size"] == 99


def test_large_models_are_cut_into_shards(tmp_path, random_checkpoint, monkeypatch):
    model, _ = load_model(random_checkpoint("llama"))
    monkeypatch.setattr(safetensors_folder, "SHARD_BYTES", 20_000)
    write_huggingface(tmp_path / "out", model, end_of_document=256)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    ours, _ = read_huggingface(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.inference_mode():
        assert torch.equal(ours(TOKENS), model(TOKENS))
        assert torch.allclose(theirs(TOKENS).logits, model(TOKENS), atol=1e-5)


def test_what_transformers_has_no_place_for_is_named(tmp_path, random_checkpoint):
    model, _ = load_model(random_checkpoint("llama", logit_softcap=5.0, window=8))
    with pytest.raises(InputError, match=r"LlamaForCausalLM has no logit_softcap=5\.0, no window=8"):
        write_huggingface(tmp_path / "out", model, end_of_document=256)


def test_bad_folders_say_what_is_wrong(tmp_path, random_checkpoint):
    with pytest.raises(InputError, match=r"config\.json: absent"):
        read_huggingface(tmp_path)
    model, _ = load_model(random_checkpoint("llama"))
    folder = tmp_path / "out"
    write_huggingface(folder, model, end_of_document=256)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(InputError, match="not readable as safetensors"):
        read_huggingface(folder)
    weights.unlink()
    with pytest.raises(InputError, match="pickled weights"):
        read_huggingface(folder)
    weights.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(InputError, match=r"lack model\.layers\.2\."):
        read_huggingface(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(InputError, match=r"hold model\.layers\.1\."):
        read_huggingface(folder)
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(InputError, match="hidden_act='gelu'; gristmill imports hidden_act='silu' only"):
        read_huggingface(folder)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(InputError, match="model_type 'mamba' cannot be read; gristmill reads llama"):
        read_huggingface(folder)


@pytest.fixture
def exported(tmp_path, random_checkpoint, tokenizer_folder):
    export_checkpoint(random_checkpoint(), tmp_path / "exported", tokenizer_folder)
    return tmp_path / "exported"


def test_exported_weights_have_the_mode_of_other_files(exported):
    modes = {path.name: path.stat().st_mode for path in exported.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_file_in_the_place_of_a_folder_is_named(exported, tmp_path):
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(InputError, match="a file; name the folder that holds"):
            import_checkpoint(exported / name, tmp_path / "in")


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": "many"},
        {"vocab_size": -3},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"max_position_embeddings": 0},
        {"rms_norm_eps": "big"},
        {"eos_token_id": "x"},
        {"num_hidden_layers": 10**9},
    ],
)
def test_a_config_that_makes_no_model_is_one_sentence(exported, tmp_path, fields):
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(
        InputError, match=r"config\.json: not a valid model config \(.*\); fetch the file again"
    ) as error:
        import_checkpoint(exported, tmp_path / "in")
    assert "\n" not in str(error.value)


def test_positions_that_are_stated_in_two_ways_are_refused(exported, tmp_path):
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps({**config, "rope_scaling": {"type": "yarn", "factor": 4.0}}))
    with pytest.raises(InputError, match="rope_type='yarn' and rope_type='default'"):
        import_checkpoint(exported, tmp_path / "in")


@pytest.mark.parametrize("content", ["[", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_of_weights_is_named(exported, tmp_path, content):
    (exported / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InputError, match=r"index\.json: not a weight index .*; fetch the file again"):
        import_checkpoint(exported, tmp_path / "in")

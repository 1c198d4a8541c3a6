"""Mixtral, Qwen3-MoE, OLMoE and DeepSeek of transformers: the same logits here, and the same bytes on the way back."""

import json

import pytest
import torch

from gristmill.evaluation.convert.huggingface import copy_tokenizer, read_huggingface, write_huggingface
from gristmill.evaluation.convert.safetensors_folder import WEIGHTS_NAME
from gristmill.evaluation.import_export import import_checkpoint
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.evaluation.inference.quantize import quantize
from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import load_model
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from tests.support.decoding import read_in_pieces

transformers = pytest.importorskip("transformers")

huggingface_models = pytest.importorskip("tests.support.huggingface_models")
CONFIGS = huggingface_models.MIXTURES
TOKENS = torch.randint(0, 99, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONFIGS)
def theirs(request, tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    model.save_pretrained(tmp_path / "theirs")
    return model


def test_logits_are_equal_and_the_way_back_is_byte_for_byte(theirs, tmp_path):
    ours, card = read_huggingface(tmp_path / "theirs")
    with torch.inference_mode():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    architecture = write_huggingface(tmp_path / "back", ours, card["end_of_document"])
    assert architecture == type(theirs).__name__
    assert (tmp_path / "back" / WEIGHTS_NAME).read_bytes() == (tmp_path / "theirs" / WEIGHTS_NAME).read_bytes()
    again, _ = read_huggingface(tmp_path / "back")
    assert again.config == ours.config
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.inference_mode():
        torch.testing.assert_close(reloaded(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=0)


def test_generation_with_a_cache_is_generation_without(theirs, tmp_path):
    """Token by token, each routed alone, as the whole sequence at once."""
    ours, _ = read_huggingface(tmp_path / "theirs", dtype=torch.float64)
    model = LocalCausalLM(ours, 64)
    with torch.inference_mode():
        whole, found = model.hidden(TOKENS[:, :12]), read_in_pieces(model, TOKENS, range(1, 13))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("moe", "says"),
    [
        ({"shared_experts": 1}, "MixtralForCausalLM has no moe.shared_experts=1"),
        ({"bias_update_rate": 1e-3}, "moe.bias_update_rate=0.001"),
        ({"experts": (4, 8)}, "no moe with experts by layer"),
        ({"residual": True}, "no moe.residual=True"),
    ],
)
def test_what_no_architecture_has_is_named(tmp_path, moe, says):
    config = ModelConfig(layers=2, width=16, heads=2, sequence_length=16, moe={"experts": 4} | moe)
    model = Transformer(config, 31)
    initialize(model, 1, torch.device("cpu"), torch.float32)
    with pytest.raises(InputError) as error:
        write_huggingface(tmp_path / "out", model, end_of_document=0)
    assert says in str(error.value)
    with pytest.raises(InputError, match="int8 weights are not built for experts"):
        quantize(model, "int8", first_token=0)


def test_a_missing_expert_is_named(theirs, tmp_path):
    path = tmp_path / "theirs" / "config.json"
    fields = json.loads(path.read_text())
    name = next(name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in fields)
    path.write_text(json.dumps(fields | {name: fields[name] + (fields.get("n_group") or 1)}))
    with pytest.raises(InputError, match=r"the weights lack model\.layers\.[01]\..*experts\."):
        read_huggingface(tmp_path / "theirs")


def test_the_routers_bias_is_imported_too(tmp_path, tokenizer_folder):
    """DeepSeek-V3's bias of the choice of experts is a buffer, here and there."""
    config = CONFIGS["deepseek_v3"]
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    biases = {name: buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias")}
    for buffer in biases.values():
        torch.nn.init.normal_(buffer)
    theirs.resize_token_embeddings(257)
    theirs.save_pretrained(tmp_path / "theirs")
    copy_tokenizer(tokenizer_folder, tmp_path / "theirs")
    imported, _ = load_model(import_checkpoint(tmp_path / "theirs", tmp_path / "imported"))
    assert len(biases) == 2
    for name, value in biases.items():
        assert torch.equal(imported.layers[name.split(".")[2]].mlp.router.balance_bias, value)


def test_latent_attention_decodes_with_quantized_weights(tmp_path):
    huggingface_models.random_model(huggingface_models.CONFIGS["deepseek_dense"]).save_pretrained(tmp_path)
    ours, _ = read_huggingface(tmp_path, dtype=torch.float64)
    quantize(ours, "int8", first_token=0)
    model = LocalCausalLM(ours, 64)
    with torch.inference_mode():
        whole, found = model.hidden(TOKENS[:, :6]), read_in_pieces(model, TOKENS, (5, 6))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)

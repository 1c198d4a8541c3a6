"""Llama 3.x, Mistral, Qwen2, Qwen3 and StarCoder2 of transformers: the same logits here, and the same bytes back."""

import json

import pytest
import torch

from gristmill.evaluation.models.huggingface import WEIGHTS_NAME, read_huggingface, write_huggingface
from gristmill.evaluation.models.local_causal_lm import LocalCausalLM
from gristmill.foundation.errors import InputError
from gristmill.training.costs.model_shape import shape_of
from gristmill.training.costs.parameters import parameter_count
from tests.support.huggingface_shapes import LLAMA_SHAPE

transformers = pytest.importorskip("transformers")

SHAPE = LLAMA_SHAPE
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def rope(kind: str, **fields) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0, **fields}}


CONFIGS = {
    "llama3": transformers.LlamaConfig(**SHAPE, **rope("llama3", **LLAMA3)),
    "llama_linear": transformers.LlamaConfig(**SHAPE, **rope("linear"), tie_word_embeddings=True),
    "llama_yarn": transformers.LlamaConfig(**SHAPE, **rope("yarn", **YARN)),
    "llama_yarn_own_factor": transformers.LlamaConfig(**SHAPE, **rope("yarn", **YARN, attention_factor=1.5)),
    "llama_attention_bias": transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=7, head_dim=16),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen2_windows": transformers.Qwen2Config(**SHAPE, **WINDOWS, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_bias": transformers.Qwen3Config(**SHAPE, **WINDOWS, head_dim=16, attention_bias=True),
    "starcoder2": transformers.Starcoder2Config(**SHAPE, sliding_window=7, tie_word_embeddings=True),
}
TOKENS = torch.randint(0, 99, (2, 40), generator=torch.Generator().manual_seed(0))


def random_model(config) -> torch.nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture(params=CONFIGS)
def theirs(request, tmp_path):
    model = random_model(CONFIGS[request.param])
    model.save_pretrained(tmp_path / "theirs")
    return model


def test_logits_are_equal_and_the_way_back_is_byte_for_byte(theirs, tmp_path):
    ours, saved = read_huggingface(tmp_path / "theirs")
    with torch.inference_mode():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    assert parameter_count(shape_of(ours.config, 99)) == sum(value.numel() for value in theirs.parameters())
    assert write_huggingface(tmp_path / "back", ours, saved["end_of_document"]) == type(theirs).__name__
    assert (tmp_path / "back" / WEIGHTS_NAME).read_bytes() == (tmp_path / "theirs" / WEIGHTS_NAME).read_bytes()
    assert read_huggingface(tmp_path / "back")[0].config == ours.config
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.inference_mode():
        torch.testing.assert_close(reloaded(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=0)


def test_gradients_are_equal(theirs, tmp_path):
    theirs = theirs.double()
    ours, _ = read_huggingface(tmp_path / "theirs", dtype=torch.float64)
    ours.requires_grad_(True)
    for model in (ours, theirs):
        output = model(TOKENS)
        logits = output if model is ours else output.logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    expected = theirs.model.embed_tokens.weight.grad
    torch.testing.assert_close(ours.embedding.weight.grad, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_token_by_token_is_the_whole_sequence_at_once(theirs, tmp_path):
    ours, _ = read_huggingface(tmp_path / "theirs", dtype=torch.float64)
    model = LocalCausalLM(ours, 64)
    with torch.inference_mode():
        whole, state, found = model.hidden(TOKENS[:, :12]), None, []
        for index in range(12):
            seen, positions = torch.ones(2, 1, index + 1) > 0, torch.full((2, 1), index)
            hidden, state = model.extend(TOKENS[:, index : index + 1], positions, seen, state)
            found.append(hidden)
    torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama3", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "no field 'factor'"),
        ("llama3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "some layers"),
        (
            "llama3",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ("llama3", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2_windows", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("starcoder2", {"use_bias": False}, "use_bias"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path, name, changes, said):
    folder = tmp_path / "theirs"
    random_model(CONFIGS[name]).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(InputError, match=said):
        read_huggingface(folder)

"""Every decoder family of transformers that we read: the same logits and gradients here, and the same bytes back."""

import copy
import json

import pytest
import torch

from gristmill.evaluation.convert.huggingface import family_for, read_huggingface, write_huggingface
from gristmill.evaluation.convert.safetensors_folder import WEIGHTS_NAME
from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.foundation.errors import InputError
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count
from tests.support.decoding import read_in_pieces

transformers = pytest.importorskip("transformers")
huggingface_models = pytest.importorskip("tests.support.huggingface_models")

CONFIGS, random_model = huggingface_models.CONFIGS, huggingface_models.random_model
SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
TOKENS = torch.randint(0, 99, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=CONFIGS, scope="module")
def family_model(request, tmp_path_factory):
    """(a model of transformers, the folder where it is saved)."""
    model, folder = random_model(CONFIGS[request.param]), tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model, folder


def test_logits_are_equal_and_the_way_back_is_byte_for_byte(family_model, tmp_path):
    theirs, folder = family_model
    ours, saved = read_huggingface(folder)
    with torch.inference_mode():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    assert parameter_count(shape_of(ours.config, 99)) == sum(value.numel() for value in theirs.parameters())
    family = family_for(ours.config, type(theirs).__name__)
    write_huggingface(tmp_path / "back", ours, saved["end_of_document"], family=family)
    assert (tmp_path / "back" / WEIGHTS_NAME).read_bytes() == (folder / WEIGHTS_NAME).read_bytes()
    assert read_huggingface(tmp_path / "back")[0].config == ours.config
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    with torch.inference_mode():
        torch.testing.assert_close(reloaded(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=0)


def test_gradients_are_equal(family_model):
    theirs, folder = copy.deepcopy(family_model[0]).double(), family_model[1]
    ours, _ = read_huggingface(folder, dtype=torch.float64)
    ours.requires_grad_(True)
    for model in (ours, theirs):
        output = model(TOKENS)
        logits = output if model is ours else output.logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    expected = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.embedding.weight.grad, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_token_by_token_is_the_whole_sequence_at_once(family_model):
    ours, _ = read_huggingface(family_model[1], dtype=torch.float64)
    model = LocalCausalLM(ours, 64)
    with torch.inference_mode():
        whole, found = model.hidden(TOKENS[:, :12]), read_in_pieces(model, TOKENS, range(1, 13))
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("llama3", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "no field 'factor'"),
        ("llama3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "some layers"),
        ("llama3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama_yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ("deepseek_dense", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_dense", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
        ("qwen2_windows", {"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ("starcoder2", {"use_bias": False}, "use_bias"),
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("gptj", {"rotary_dim": None}, "rotary_dim"),
        ("phi", {"partial_rotary_factor": 0.1, "rope_parameters": None}, "0 features of each head"),
        ("phi3", {"rope_scaling": {"type": "su"}, "rope_parameters": None}, "rope_type='su'"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim=16 for hidden_size=32"),
        ("opt", {"activation_function": "gelu"}, "activation_function='gelu'"),
        ("olmo3_yarn", {"rope_parameters": {"sliding_attention": SCALED}}, "layers with a window"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ("smollm3", {"no_rope_layers": [1]}, "1 no_rope_layers for 3 layers"),
        ("falcon_7b", {"alibi": True}, "alibi=True"),
        ("falcon_40b", {"parallel_attn": False}, "no published Falcon"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("nanochat", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama3", {"model_type": "jamba"}, "model_type 'jamba' cannot be read"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path, name, changes, said):
    folder = tmp_path / "theirs"
    random_model(CONFIGS[name]).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(fields | changes))
    with pytest.raises(InputError, match=said):
        read_huggingface(folder)

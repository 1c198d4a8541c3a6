"""The model equals independent ones: transformers' Llama and GPT-2, and written-out attention."""

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gristmill.evaluation.inference.local_causal_lm import LocalCausalLM
from gristmill.training.calibrate.measure_layers import causal_loss
from gristmill.training.config.layout import CHUNK_LOGITS
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.attention.attention import attend
from gristmill.training.model.attention.metadata import block_masks, causal_masks
from gristmill.training.model.init import initialize
from gristmill.training.model.modules import Dropout
from gristmill.training.model.transformer import ComputeOptions, Transformer
from tests.support.decoding import read_in_pieces

VOCAB, CONTEXT = 61, 24
LLAMA = {"layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn_hidden_size": 48, "sequence_length": CONTEXT}
GPT2 = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "sequence_length": CONTEXT,
    "positions": "learned",
    "norm": "layernorm",
    "mlp": "gelu",
    "biases": True,
    "tied_embeddings": True,
}


def model_of(settings: dict) -> Transformer:
    model = Transformer(ModelConfig(**settings), VOCAB, options=ComputeOptions(torch.float64))
    initialize(model, 3, torch.device("cpu"), torch.float64)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # norms and biases as well, which start at ones and zeros
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(rows: int = 2, length: int = CONTEXT) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


def test_llama_is_the_llama_of_transformers() -> None:
    model = model_of(LLAMA)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    other = LlamaForCausalLM(config).double().eval()
    names = {
        "mixer.query": "self_attn.q_proj",
        "mixer.key": "self_attn.k_proj",
        "mixer.value": "self_attn.v_proj",
        "mixer.output": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
        "mixer_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    theirs = {
        "model.embed_tokens.weight": model.embedding.weight,
        "model.norm.weight": model.final_norm.weight,
        "lm_head.weight": model.head.weight,
    }
    ours = dict(model.named_parameters())
    for layer in range(3):
        for our_name, their_name in names.items():
            theirs[f"model.layers.{layer}.{their_name}.weight"] = ours[f"layers.{layer}.{our_name}.weight"]
    other.load_state_dict(theirs)
    torch.testing.assert_close(model(tokens()), other(tokens()).logits, rtol=1e-6, atol=1e-6)  # their norm is float32


def test_gpt2_is_the_gpt2_of_transformers() -> None:
    model = model_of(GPT2)
    config = GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4)
    other = GPT2LMHeadModel(config).double().eval()
    ours = dict(model.named_parameters())
    theirs = {"transformer.wte.weight": ours["embedding.weight"], "transformer.wpe.weight": ours["positions.weight"]}
    for kind in ("weight", "bias"):
        theirs[f"transformer.ln_f.{kind}"] = ours[f"final_norm.{kind}"]
        for layer in range(2):
            here, there = f"layers.{layer}", f"transformer.h.{layer}"
            packed = torch.cat([ours[f"{here}.mixer.{part}.{kind}"] for part in ("query", "key", "value")])
            theirs[f"{there}.attn.c_attn.{kind}"] = packed.T  # GPT-2 stores matrices the other way round
            theirs[f"{there}.attn.c_proj.{kind}"] = ours[f"{here}.mixer.output.{kind}"].T
            theirs[f"{there}.mlp.c_fc.{kind}"] = ours[f"{here}.mlp.up.{kind}"].T
            theirs[f"{there}.mlp.c_proj.{kind}"] = ours[f"{here}.mlp.down.{kind}"].T
            theirs[f"{there}.ln_1.{kind}"] = ours[f"{here}.mixer_norm.{kind}"]
            theirs[f"{there}.ln_2.{kind}"] = ours[f"{here}.mlp_norm.{kind}"]
    missing, unexpected = other.load_state_dict(theirs, strict=False)
    assert missing == ["lm_head.weight"] or not missing, missing
    assert not unexpected
    other.tie_weights()
    torch.testing.assert_close(model(tokens()), other(tokens()).logits)


@pytest.mark.parametrize("settings", [LLAMA, GPT2, LLAMA | {"window": (5), "qk_norm": True}])
def test_new_tokens_on_a_state_score_as_in_one_go(settings: dict) -> None:
    model = model_of(settings)
    hidden = read_in_pieces(LocalCausalLM(model, CONTEXT), tokens(), (10, 11, CONTEXT))
    torch.testing.assert_close(model.head(hidden), model(tokens()))


@pytest.mark.parametrize("settings", [LLAMA, GPT2])
def test_documents_in_one_sample_are_as_if_alone(settings: dict) -> None:
    model = model_of(settings)
    row = tokens(1)
    positions = torch.cat([torch.arange(9), torch.arange(15)]).unsqueeze(0)
    documents = (torch.arange(CONTEXT) >= 9).long().unsqueeze(0)
    together = model(row, positions=positions, documents=documents)
    torch.testing.assert_close(together, torch.cat([model(row[:, :9]), model(row[:, 9:])], dim=1))


def test_a_window_looks_back_so_far_and_no_farther() -> None:
    model = model_of(LLAMA | {"layers": 1, "window": 3})
    changed = tokens()
    changed[:, 4] = (changed[:, 4] + 1) % VOCAB
    differs = (model(tokens()) != model(changed)).any(dim=2).any(dim=0)
    assert differs.nonzero().flatten().tolist() == [4, 5, 6]


def test_block_masks_of_gpus_are_the_masks_of_cpus() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 16, 8, generator=generator)
    key, value = (torch.randn(2, 2, 16, 8, generator=generator) for _ in range(2))
    documents = (torch.arange(16) >= torch.tensor([[5], [11]])).long()
    for window in (None, 3):
        for given in (None, documents):
            here = causal_masks([window], 16, given, torch.device("cpu"))[window]
            there = block_masks([window], 16, given, torch.device("cpu"))[window]
            assert (here is None) == (there is None)
            expected = attend(query, key, value, here, 0.3)
            torch.testing.assert_close(attend(query, key, value, there, 0.3), expected)


def test_softcap_bounds_the_logits() -> None:
    logits = model_of(LLAMA | {"logit_softcap": 0.5})(tokens())
    assert logits.abs().max() < 0.5
    plain = model_of(LLAMA)(tokens())
    torch.testing.assert_close(logits, 0.5 * torch.tanh(plain / 0.5))


def test_first_values_depend_on_seed_and_name_alone() -> None:
    small, large = (Transformer(ModelConfig(**(LLAMA | {"layers": layers})), VOCAB) for layers in (1, 3))
    for model, seed in ((small, 1), (large, 1)):
        initialize(model, seed, torch.device("cpu"), torch.float32)
    name = "layers.0.mixer.query.weight"
    assert torch.equal(dict(small.named_parameters())[name], dict(large.named_parameters())[name])
    ratio = dict(small.named_parameters())["layers.0.mlp.down.weight"].std().item() * 2**0.5 / 0.02
    assert ratio == pytest.approx(1, abs=0.1)  # outputs of layers: 0.02 / sqrt(2 layers)


@pytest.mark.parametrize(("softcap", "z_loss"), [(None, 0.0), (3.0, 0.0), (None, 0.1), (3.0, 0.1)])
def test_losses_are_cross_entropy_with_its_gradient(monkeypatch, softcap: float | None, z_loss: float) -> None:
    monkeypatch.setitem(CHUNK_LOGITS["cpu"], 8, 5 * VOCAB)  # many chunks
    model = Transformer(
        ModelConfig(**LLAMA, logit_softcap=softcap), VOCAB, options=ComputeOptions(torch.float64, z_loss=z_loss)
    )
    initialize(model, 3, torch.device("cpu"), torch.float64)
    model.head.weight.data *= 30
    weights = torch.rand(2, CONTEXT, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = tokens().roll(-1, dims=1)
    model.output = causal_loss(z_loss > 0)
    losses = model(tokens(), tokens=tokens(), targets=targets, weights=weights)
    losses.sum().backward()
    model.output = None
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = model(tokens())
    likelihoods = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none") * weights
    z_losses = z_loss * logits.logsumexp(dim=2).square() * weights
    (likelihoods + z_losses).sum().backward()
    terms = [likelihoods.sum(dim=1), z_losses.sum(dim=1)] if z_loss else [likelihoods.sum(dim=1)]
    torch.testing.assert_close(losses, torch.stack(terms, dim=1))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad)


def test_dropout_keeps_its_share_and_needs_no_random_state() -> None:
    positions = torch.arange(512)
    dropout = Dropout(0.25, seed=5, samples_B=torch.arange(8), positions_T=positions, features_D=torch.arange(64))
    ones = torch.ones(8, 512, 64)
    dropped = dropout(ones, layer=1, site=0)
    assert dropped.mean().item() == pytest.approx(1, abs=0.01)
    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.002)
    assert torch.equal(dropped, dropout(ones, layer=1, site=0))
    assert not torch.equal(dropped, dropout(ones, layer=2, site=0))
    half = Dropout(0.25, seed=5, samples_B=torch.arange(8), positions_T=positions[256:], features_D=torch.arange(64))
    assert torch.equal(half(ones[:, 256:], 1, 0), dropped[:, 256:])
    kept = (dropped > 0).double().flatten(0, 1)
    correlation = torch.corrcoef(kept.T) - torch.eye(64, dtype=torch.float64)
    assert correlation.abs().max() < 6 / 4096**0.5  # 6 deviations of 4096 independent draws

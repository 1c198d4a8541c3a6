"""BLOOM in Megatron-DeepSpeed's layer files, cut over 1, 2 and 4 tensor ranks: the model of transformers comes back."""

import argparse
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gristmill.evaluation.convert.huggingface import copy_tokenizer
from gristmill.evaluation.import_export import import_checkpoint, open_weights
from gristmill.foundation.errors import InputError
from gristmill.training.checkpoint.checkpoint import load_model

transformers = pytest.importorskip("transformers")

HEADS, LAYERS = 12, 2  # no power of two: ALiBi's second series of slopes
COLUMN = ("query_key_value.weight", "query_key_value.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias")
ROW = ("dense.weight", "dense_4h_to_h.weight")


def bloom():
    config = transformers.BloomConfig(vocab_size=320, hidden_size=48, n_layer=LAYERS, n_head=HEADS, seq_length=128)
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def shard(name: str, whole: Tensor, ranks: int, rank: int) -> Tensor:
    if name.endswith(ROW):
        return whole.chunk(ranks, 1)[rank].clone()
    if name.endswith((*COLUMN, "word_embeddings.weight")):
        return whole.chunk(ranks, 0)[rank].clone()
    return whole + (0.25 if rank % 2 else -0.25) * (ranks > 1)  # copies that differ: their mean is the whole


def write(folder: Path, model, ranks: int) -> None:
    folder.mkdir(exist_ok=True)
    tensors = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()}
    files: dict[int, dict[str, Tensor]] = {1: {}}
    for name, value in tensors.items():
        if name.startswith("h."):
            _, layer, rest = name.split(".", 2)
            files.setdefault(3 + int(layer), {})[rest] = value
        elif name.startswith("ln_f."):
            files.setdefault(3 + LAYERS + 1, {})[name.removeprefix("ln_f.")] = value
        elif name != "lm_head.weight":
            files[1][name.replace("_layernorm.", ".norm.")] = value
    for number, held in files.items():
        for rank in range(ranks):
            content = {name: shard(name, value, ranks, rank) for name, value in held.items()}
            torch.save(content, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
    arguments = argparse.Namespace(
        num_layers=LAYERS, hidden_size=48, num_attention_heads=HEADS, seq_length=128, layernorm_epsilon=1e-5
    )
    torch.save({"args": arguments, "module": None}, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_model_comes_back_from_any_number_of_ranks(tmp_path, tokenizer_folder, ranks):
    theirs = bloom()
    write(tmp_path / "bloom", theirs, ranks)
    copy_tokenizer(tokenizer_folder, tmp_path / "bloom")
    ours, _ = load_model(import_checkpoint(tmp_path / "bloom", tmp_path / "in"))
    tokens = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(), r"mp_rank_00_model_states\.pt: absent"),
        (lambda folder: (folder / "layer_04-model_01-model_states.pt").unlink(), "layer_04-model_01.*absent"),
        (lambda folder: [path.unlink() for path in folder.glob("layer_04-*")], r"the weights lack transformer\.h\.1"),
        (lambda folder: cut(folder / "layer_03-model_00-model_states.pt"), "layer_03-model_00.*cannot be read"),
        (lambda folder: change(folder / "layer_03-model_01-model_states.pt", "mlp.dense_h_to_4h.bias"), "lacks mlp"),
        (lambda folder: change(folder / "layer_03-model_00-model_states.pt", "", "spare"), "lacks spare"),
        (lambda folder: torch.save({"args": Runs()}, folder / "mp_rank_00_model_states.pt"), "cannot be read.*print"),
        (lambda folder: torch.save({"args": 3}, folder / "mp_rank_00_model_states.pt"), "args do not describe"),
    ],
)
def test_damage_is_named(tmp_path, damage, said):
    write(tmp_path / "bloom", bloom(), 2)
    damage(tmp_path / "bloom")
    with pytest.raises(InputError, match=said) as error:
        open_weights(tmp_path / "bloom")
    assert "\n" not in str(error.value)


class Runs:
    def __reduce__(self):
        return (print, ("this must not run",))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


def change(path: Path, lost: str = "", added: str = "") -> None:
    content = torch.load(path)
    content = {name: value for name, value in content.items() if name != lost}
    torch.save(content | ({added: torch.ones(2)} if added else {}), path)

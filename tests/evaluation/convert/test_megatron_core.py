"""Distributed checkpoints in Megatron-Core's form, as torch writes them and cut into chunks by hand."""

import argparse
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gristmill.evaluation.import_export import open_weights
from gristmill.foundation.errors import InputError
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer

SIZE: dict[str, Any] = {
    "layers": 3,
    "width": 32,
    "heads": 4,
    "ffn_hidden_size": 48,
    "head_width": 8,
    "sequence_length": 16,
}
MODELS = {
    "llama": ModelConfig(**SIZE, kv_heads=2),
    "nemotron": ModelConfig(
        **SIZE, kv_heads=2, norm="layernorm", norm_plus_one=True, mlp="relu2", rope_width=4, tied_embeddings=True
    ),
    "qwen": ModelConfig(**SIZE, kv_heads=4, biases="qkv", qk_norm=True, rope_base=1e6),
    "gpt": ModelConfig(
        **SIZE, kv_heads=4, positions="learned", norm="layernorm", mlp="gelu", biases=True, tied_embeddings=True
    ),
}


def arguments_of(config: ModelConfig) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=config.layers, hidden_size=config.width, num_attention_heads=config.heads,
        group_query_attention=config.kv_heads != config.heads, num_query_groups=config.kv_heads,
        kv_channels=config.head_dim, ffn_hidden_size=config.ffn_hidden_size,
        max_position_embeddings=config.sequence_length,
        normalization="RMSNorm" if config.norm == "rmsnorm" else "LayerNorm", norm_epsilon=config.norm_epsilon,
        apply_layernorm_1p=config.norm_plus_one, swiglu=config.mlp == "swiglu", squared_relu=config.mlp == "relu2",
        add_bias_linear=config.biases is True, add_qkv_bias=config.biases == "qkv", qk_layernorm=config.qk_norm,
        position_embedding_type="learned_absolute" if config.positions == "learned" else "rope",
        rotary_base=config.rope_base, rotary_percent=(config.rope_width or config.head_dim) / config.head_dim,
        untie_embeddings_and_output_weights=not config.tied_embeddings, params_dtype=torch.bfloat16,
    )  # fmt: skip


def layer_tensors(ours: dict[str, Tensor], config: ModelConfig, layer: int, fused: bool) -> dict[str, Tensor]:
    """One layer by Megatron-Core's names, put together head by head."""
    found: dict[str, Tensor] = {}
    group, width = config.heads // config.kv_heads, config.head_dim
    for leaf in ("weight", "bias"):
        part = {name: ours.get(f"layers.{layer}.{name}.{leaf}") for name in PARTS}
        if part["mixer.query"] is not None:
            rows = []
            for index in range(config.kv_heads):
                rows.append(part["mixer.query"][index * group * width : (index + 1) * group * width])
                rows += [part[name][index * width : (index + 1) * width] for name in ("mixer.key", "mixer.value")]
            found[f"self_attention.linear_qkv.{leaf}"] = torch.cat(rows)
        gated = [part[name] for name in ("mlp.gate", "mlp.up") if part[name] is not None]
        others = {
            "self_attention.linear_proj": part["mixer.output"],
            "mlp.linear_fc1": torch.cat(gated) if gated else None,
            "mlp.linear_fc2": part["mlp.down"],
            "self_attention.q_layernorm": part["mixer.query_norm"],
            "self_attention.k_layernorm": part["mixer.key_norm"],
        }
        found |= {f"{name}.{leaf}": value for name, value in others.items() if value is not None}
        for name, plain, linear in (
            ("mixer_norm", "input_layernorm", "self_attention.linear_qkv"),
            ("mlp_norm", "pre_mlp_layernorm", "mlp.linear_fc1"),
        ):
            if part[name] is not None:
                found[f"{linear}.layer_norm_{leaf}" if fused else f"{plain}.{leaf}"] = part[name]
    return found


PARTS = (
    "mixer.query", "mixer.key", "mixer.value", "mixer.output", "mixer.query_norm", "mixer.key_norm", "mixer_norm",
    "mlp_norm", "mlp.gate", "mlp.up", "mlp.down",
)  # fmt: skip


def as_core(model: Transformer, fused: bool, stacked: bool) -> dict[str, Tensor]:
    ours = {name: value.detach() for name, value in model.named_parameters()}
    layers = [layer_tensors(ours, model.config, layer, fused) for layer in range(model.config.layers)]
    if stacked:
        found = {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    else:
        found = {f"decoder.layers.{i}.{name}": value for i, layer in enumerate(layers) for name, value in layer.items()}
    names = {"embedding": "embedding.word_embeddings", "positions": "embedding.position_embeddings"}
    names |= {"final_norm": "decoder.final_layernorm", "head": "output_layer"}
    for own, theirs in names.items():
        found |= {f"{theirs}.{leaf}": ours[f"{own}.{leaf}"] for leaf in ("weight", "bias") if f"{own}.{leaf}" in ours}
    return found


def write_rest(folder: Path, config: ModelConfig) -> None:
    torch.save({"args": arguments_of(config), "iteration": 10, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def write_chunks(folder: Path, tensors: dict[str, Tensor], ranks: int) -> None:
    """Each tensor in chunks of one layer, if stacked, and of a tensor rank's rows; a file for each rank."""
    stored: dict[MetadataIndex, _StorageInfo] = {}
    stated: dict[str, TensorStorageMetadata] = {}
    files = [io.BytesIO() for _ in range(ranks)]
    for key, whole in tensors.items():
        stacked = key.startswith("decoder.layers.")
        rows = whole.shape[int(stacked)]
        cuts = [(rank, rank * rows // ranks, (rank + 1) * rows // ranks) for rank in range(ranks)]
        chunks = []
        for layer in range(whole.shape[0]) if stacked else (0,):
            for rank, start, end in cuts if rows % ranks == 0 else [(0, 0, rows)]:
                part = whole[layer : layer + 1, start:end] if stacked else whole[start:end]
                offsets = torch.Size(([layer, start] if stacked else [start]) + [0] * (whole.dim() - 1 - stacked))
                begin = files[rank].tell()
                torch.save(part.clone(), files[rank])
                place = _StorageInfo(f"__{rank}_0.distcp", begin, files[rank].tell() - begin)
                stored[MetadataIndex(key, offsets)] = place
                chunks.append(ChunkStorageMetadata(offsets, part.shape))
        stated[key] = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    for rank, file in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(stated, storage_data=stored)))


@pytest.fixture(params=MODELS)
def model(request) -> Transformer:
    made = Transformer(MODELS[request.param], 60)
    initialize(made, 1, torch.device("cpu"), torch.float32)
    for parameter in made.parameters():  # norms and biases too
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return made


def check(folder: Path, model: Transformer) -> None:
    source = open_weights(folder)
    gelu = {"gelu": "tanh"} if model.config.mlp == "gelu" else {"gelu": source.config.gelu}
    assert source.config == ModelConfig.model_validate(model.config.model_dump() | gelu)
    assert (source.architecture, source.vocab_size) == ("GPTModel", 60)
    found = dict(source.stream())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(found[name], value.detach()), name


@pytest.mark.parametrize("stacked", [True, False])
def test_a_model_that_torch_saved_comes_back(model, stacked, tmp_path):
    state = {**as_core(model, fused=stacked, stacked=stacked), "optimizer.state.exp_avg.output_layer": torch.ones(4)}
    state["decoder.layers.self_attention.core_attention._extra_state"] = io.BytesIO(b"bytes")
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    write_rest(tmp_path, model.config)
    check(tmp_path, model)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_chunks_of_layers_and_tensor_ranks_are_joined(model, ranks, tmp_path):
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    write_chunks(folder, as_core(model, fused=True, stacked=True), ranks)
    write_rest(folder, model.config)
    check(tmp_path, model)


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


def lose_chunk(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    del metadata.storage_data[next(iter(metadata.storage_data))]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Runs())), r"builtins\.print is not allowed"),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04"), r"\.metadata: cannot be read"),
        (lambda folder: torch.save({"args": Runs()}, folder / "common.pt"), r"common\.pt: cannot be read.*print"),
        (lambda folder: torch.save({}, folder / "common.pt"), "has no args"),
        (lambda folder: (folder / "__1_0.distcp").unlink(), r"__1_0\.distcp: absent"),
        (lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "backend is 'zarr'"),
        (lose_chunk, "no plain chunk of decoder"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"x"), "cannot be read"),
    ],
)
def test_damage_and_foreign_code_are_refused(damage, said, tmp_path, capfd):
    made = Transformer(MODELS["llama"], 60)
    initialize(made, 1, torch.device("cpu"), torch.float32)
    write_chunks(tmp_path, as_core(made, fused=True, stacked=True), 2)
    write_rest(tmp_path, made.config)
    damage(tmp_path)
    with pytest.raises(InputError, match=said):
        dict(open_weights(tmp_path).stream())
    assert "this must not run" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("num_experts", 8, "num_experts is 8"), ("position_embedding_type", "mrope", "mrope"), ("hidden_size", 33, "33")],
)
def test_what_is_not_supported_is_said(field, value, said, tmp_path):
    made = Transformer(MODELS["llama"], 60)
    initialize(made, 1, torch.device("cpu"), torch.float32)
    write_chunks(tmp_path, as_core(made, fused=True, stacked=True), 1)
    write_rest(tmp_path, made.config)
    arguments = argparse.Namespace(**vars(arguments_of(made.config)) | {field: value})
    torch.save({"args": arguments}, tmp_path / "common.pt")
    with pytest.raises(InputError, match=said):
        open_weights(tmp_path)

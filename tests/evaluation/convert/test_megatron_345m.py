"""The layout of NVIDIA's megatron-bert-345m and megatron-gpt2-345m: random models, written in all three orders of
queries, keys and values, and on several tensor ranks."""

import argparse
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from torch import Tensor

from gristmill.evaluation.convert.hf.bert import MEGATRON_BERT
from gristmill.evaluation.convert.megatron_lm import LAYER_NAMES, ZIPPED_NAME, megatron_files, read_megatron_345m
from gristmill.evaluation.import_export import export_checkpoint, import_checkpoint, open_weights
from gristmill.foundation.errors import InputError
from gristmill.tokenizers.tokenizer import load_tokenizer
from gristmill.training.checkpoint.checkpoint import read_model_config, step_folder
from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from tests.training.model.test_bert import REARRANGED, VOCAB, batch, drawn_model, theirs_of
from tests.training.objectives.test_bert_runs import bert_run
from tokenizers import Tokenizer as HuggingFaceTokenizer

HEADS, WIDTH = 4, 8


def packed(parts: list[Tensor], version: float, count: int = HEADS) -> Tensor:
    """Each [heads x width, ...]; the inverse of what the reader does, written out by hand."""
    heads = [part.unflatten(0, (count, WIDTH)) for part in parts]
    if version < 1.0:
        return torch.cat(parts)
    return torch.stack(heads, dim=2 if version < 2.0 else 1).flatten(0, 2)


def as_nvidias(model: Transformer, version: float) -> dict[str, Any]:
    ours = {name: value.detach().float() for name, value in model.named_parameters()}
    layers = {f"final_layernorm.{leaf}": ours[f"final_norm.{leaf}"] for leaf in ("weight", "bias")}
    for number in range(model.config.layers):
        for leaf in ("weight", "bias"):
            for theirs, name in LAYER_NAMES.items():
                layers[f"layers.{number}.{theirs}.{leaf}"] = ours[f"layers.{number}.{name}.{leaf}"]
            parts = [ours[f"layers.{number}.mixer.{name}.{leaf}"] for name in ("query", "key", "value")]
            layers[f"layers.{number}.attention.query_key_value.{leaf}"] = packed(parts, version)
    tables = {"word_embeddings": "embedding", "position_embeddings": "positions", "tokentype_embeddings": "segments"}
    language = {
        "embedding": {theirs: {"weight": ours[f"{name}.weight"]} for theirs, name in tables.items()},
        "transformer": layers,
        "pooler": {f"dense.{leaf}": ours[f"outputs.pooler.{leaf}"] for leaf in ("weight", "bias")},
    }
    head = {"bias": ours["head.bias"]}
    for leaf in ("weight", "bias"):
        head[f"dense.{leaf}"] = ours[f"head.transform.{leaf}"]
        head[f"layernorm.{leaf}"] = ours[f"head.transform.norm.{leaf}"]
    order = {leaf: ours[f"outputs.linear.sentence_order.{leaf}"] for leaf in ("weight", "bias")}
    arguments = argparse.Namespace(num_attention_heads=HEADS, layernorm_epsilon=1e-12, bias_gelu_fusion=False)
    content = {"model": {"language_model": language, "lm_head": head, "binary_head": order}, "args": arguments}
    return content | ({"checkpoint_version": version} if version else {})


@pytest.mark.parametrize("version", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_model_comes_back_from_every_layout(version: float, zipped: bool, tmp_path: Path) -> None:
    model = drawn_model(REARRANGED, "exact")
    torch.save(as_nvidias(model, version), tmp_path / "model_optim_rng.pt")
    if zipped:
        with zipfile.ZipFile(tmp_path / "megatron_bert_345m_v0.1_cased.zip", "w") as archive:
            archive.write(tmp_path / "model_optim_rng.pt", ZIPPED_NAME)
        (tmp_path / "model_optim_rng.pt").unlink()
    found = read_megatron_345m(megatron_files(tmp_path))
    assert (found.name, found.vocab_size) == ("megatron-bert", VOCAB)
    assert found.config == type(found.config).model_validate(model.config.model_dump() | {"ffn_hidden_size": 128})
    for name, value in model.named_parameters():
        assert torch.equal(found.tensors[name], value.detach().float()), name


def test_what_is_read_computes_what_transformers_does(tmp_path: Path) -> None:
    model = drawn_model(REARRANGED, "exact")
    torch.save(as_nvidias(model, 2.0), tmp_path / "model_optim_rng.pt")
    tensors = read_megatron_345m([tmp_path / "model_optim_rng.pt"]).tensors
    other, fields = theirs_of("rearranged", model), batch()
    other.load_state_dict({n: v.double() for n, v in MEGATRON_BERT.to_hf(model.config, tensors).items()}, strict=False)
    mask = (fields["documents"] == 0).long()
    found = other(input_ids=fields["tokens"], attention_mask=mask, token_type_ids=fields["segments"])
    ours = model(fields["tokens"], **fields)
    torch.testing.assert_close(ours[mask == 1], found.prediction_logits[mask == 1], rtol=0, atol=1e-5)


GPT = ModelConfig(
    layers=2,
    width=32,
    heads=HEADS,
    sequence_length=16,
    positions="learned",
    norm="layernorm",
    mlp="gelu",
    biases=True,
    tied_embeddings=True,
)


def as_gpts(model: Transformer, version: float, ranks: int) -> list[dict[str, Any]]:
    """The content of each tensor rank's file: matrices cut by hand as Megatron-LM cuts them."""
    ours = {name: value.detach() for name, value in model.named_parameters()}

    def cut(name: str, dim: int | None, rank: int) -> Tensor:
        return ours[name] if dim is None else ours[name].chunk(ranks, dim)[rank]

    contents = []
    for rank in range(ranks):
        layers = {f"final_layernorm.{leaf}": ours[f"final_norm.{leaf}"] for leaf in ("weight", "bias")}
        for number in range(model.config.layers):
            for leaf in ("weight", "bias"):
                cuts = {"mixer.output": 1 if leaf == "weight" else None, "mlp.up": 0}
                cuts |= {"mlp.down": cuts["mixer.output"]}
                for theirs, name in LAYER_NAMES.items():
                    place = f"layers.{number}.{name}.{leaf}"
                    layers[f"layers.{number}.{theirs}.{leaf}"] = cut(place, cuts.get(name), rank)
                parts = [cut(f"layers.{number}.mixer.{name}.{leaf}", 0, rank) for name in ("query", "key", "value")]
                layers[f"layers.{number}.attention.query_key_value.{leaf}"] = packed(parts, version, HEADS // ranks)
        tables = {"word_embeddings": ("embedding", 0), "position_embeddings": ("positions", None)}
        embedding = {theirs: {"weight": cut(f"{name}.weight", dim, rank)} for theirs, (name, dim) in tables.items()}
        language = {"embedding": embedding, "transformer": layers}
        arguments = argparse.Namespace(num_attention_heads=HEADS, layernorm_epsilon=1e-5)
        contents.append(
            {"model": {"language_model": language}, "args": arguments}
            | ({"checkpoint_version": version} if version else {})
        )
    return contents


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("version", [0.0, 1.0, 3.0])
def test_a_gpt_comes_back_from_every_layout_and_any_number_of_ranks(version: float, ranks: int, tmp_path: Path) -> None:
    model = Transformer(GPT, 60)
    initialize(model, 1, torch.device("cpu"), torch.float32)
    for rank, content in enumerate(as_gpts(model, version, ranks)):
        place = tmp_path / f"release/mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        torch.save(content, place / "model_optim_rng.pt")
    source = open_weights(tmp_path)
    assert (source.architecture, source.vocab_size, len(source.files)) == ("megatron-gpt2", 60, ranks)
    assert source.config == ModelConfig.model_validate(GPT.model_dump() | {"ffn_hidden_size": 128})
    found = dict(source.stream())
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(found[name], value.detach()), name


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"model": {}}, "not a megatron-gpt2 or megatron-bert checkpoint"),
        ([1, 2], "holds list, not a checkpoint"),
        ({"model": Runs()}, r"cannot be read as model_optim_rng\.pt .*print"),
    ],
)
def test_other_files_are_refused(content: Any, says: str, tmp_path: Path, capfd: Any) -> None:
    torch.save(content, tmp_path / "model_optim_rng.pt")
    with pytest.raises(InputError, match=says):
        read_megatron_345m([tmp_path / "model_optim_rng.pt"])
    assert "this must not run" not in capfd.readouterr().out


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK no archive")
    (tmp_path / "b.pt").write_bytes(pickle.dumps({"model": 1})[:-3])
    for name in ("a.zip", "b.pt"):
        with pytest.raises(InputError, match="cannot be read as"):
            read_megatron_345m([tmp_path / name])


def word_pieces(cased: bool) -> HuggingFaceTokenizer:
    """As BERT's tokenizer.json: no end of document, and no settings beside it. 51 pieces, as many as SyntheticPairs."""
    symbols = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")
    pieces = [*symbols, "the", "The", "mill", "##er", *(f"##{number}" for number in range(42))]
    made = HuggingFaceTokenizer(WordPiece({piece: k for k, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = BertNormalizer(lowercase=not cased), BertPreTokenizer()
    made.add_special_tokens(list(symbols))
    return made


@pytest.mark.parametrize("cased", [True, False])
def test_a_published_model_is_imported_and_trained_on(cased: bool, tmp_path: Path) -> None:
    """Its table has padding rows behind the tokenizer's pieces: 29,056 rows for 28,996 pieces, here 61 for 51."""
    model = drawn_model(REARRANGED, "exact")
    folder = tmp_path / "published"
    folder.mkdir()
    torch.save(as_nvidias(model, 0.0), folder / "model_optim_rng.pt")
    word_pieces(cased).save(str(folder / "tokenizer.json"))
    imported = import_checkpoint(folder, tmp_path / "in")
    tokenizer = load_tokenizer(tmp_path / "in/tokenizer")
    assert tokenizer.encode("The miller") == ([6, 7, 8] if cased else [5, 7, 8])
    assert tokenizer.pieces[tokenizer.end_of_document] == "[SEP]"
    assert read_model_config(imported)["padded_rows"] == 10
    settings = {"init_from": str(imported), "tokens": 2 * 8 * 24, "batch_tokens": 8 * 24, "checkpoint": {"every": 2}}
    run = bert_run(tmp_path / "run", model=model.config.model_dump(), end_of_document=2, **settings)
    run._resume()
    for name, value in model.named_parameters():
        assert torch.equal(run.model.parameters[name].float(), value.float()), name
    run.train()
    trained = step_folder(tmp_path / "run/checkpoints", 2)
    assert read_model_config(trained)["padded_rows"] == 10
    export_checkpoint(trained, tmp_path / "out", tmp_path / "in/tokenizer")
    assert load_file(tmp_path / "out/model.safetensors")["bert.embeddings.word_embeddings.weight"].shape == (61, 32)

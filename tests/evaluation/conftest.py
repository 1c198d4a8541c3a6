"""Fixtures: a random small transformer, its checkpoints, and a byte tokenizer."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gristmill.training.checkpoint.checkpoint import (
    CheckpointContent,
    SavedModelConfig,
    save,
    saved_tensors,
    step_folder,
)
from gristmill.training.config.layout import LayoutConfig
from gristmill.training.config.model import ModelConfig
from gristmill.training.config.train import TrainConfig
from gristmill.training.engine.local_model import build_local_model
from gristmill.training.model.decoding_cache import SlotRows
from gristmill.training.model.init import fill, shard_like
from gristmill.training.model.moe.router import saved_buffers
from gristmill.training.model.transformer import ComputeOptions, Transformer
from gristmill.training.parallel.mesh import build_mesh, single_process
from tests.support.forked_pool import ForkedPool
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# B rows, T tokens, D width, H heads, K head width, V vocabulary


class ByteTokenizer:
    """Token i is byte i; 256 ends a document."""

    vocab_size = 257
    end_of_document = 256
    ends = (256,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class SmallCausalLM:
    """Causal attention with learned positions, in float64 so that exact ways of computing agree exactly."""

    def __init__(
        self, vocab_size: int = 257, sequence_length: int = 64, width: int = 16, heads: int = 2, layers: int = 2
    ):
        generator = torch.Generator().manual_seed(0)
        self.vocab_size, self.sequence_length, self.heads = vocab_size, sequence_length, heads
        self.device = torch.device("cpu")

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

        self.embedding, self.position = draw(vocab_size, width) * 4, draw(sequence_length, width)
        self.layers = [(draw(3 * width, width), draw(width, width), draw(width, width)) for _ in range(layers)]
        self.output = draw(vocab_size, width) * 4

    reads_trees, skips_padding = True, False

    def hidden(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        visible_BTT: Tensor | None = None,
        wanted_N: Tensor | None = None,
    ) -> Tensor:
        size = tokens_BT.shape[1]
        if positions_BT is None or visible_BTT is None:
            positions_BT = torch.arange(size).expand(tokens_BT.shape)
            visible_BTT = torch.ones(size, size, dtype=torch.bool).tril().expand(len(tokens_BT), size, size)
        x_BTD = self.embedding[tokens_BT] + self.position[positions_BT]
        for qkv, mix, channel in self.layers:
            query, key, value = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (x_BTD @ qkv.T).chunk(3, dim=-1)
            )
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, visible_BTT[:, None])
            x_BTD = x_BTD + mixed.transpose(1, 2).flatten(2) @ mix.T
            x_BTD = x_BTD + torch.tanh(x_BTD @ channel.T)
        hidden_BTD = nn.functional.layer_norm(x_BTD, x_BTD.shape[-1:])
        return hidden_BTD if wanted_N is None else hidden_BTD.flatten(0, 1)[wanted_N]

    def head(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND @ self.output.T

    paged_cache = True

    def slot_token_bytes(self) -> int:
        return 0

    def new_cache(self, slots: int) -> "ListCache":
        return ListCache(slots)

    def read(self, tokens_BT: Tensor, rows: SlotRows, cache: "ListCache") -> Tensor:
        """Reads every sequence anew, from a list of its tokens."""
        hidden = torch.zeros(*tokens_BT.shape, self.output.shape[1], dtype=torch.float64)
        for row, slot in enumerate(rows.slots_B.tolist()):
            seen = rows.positions_BT[row] >= 0
            first = int(rows.positions_BT[row][seen][0])
            cache.tokens[slot] = cache.tokens[slot][:first] + tokens_BT[row][seen].tolist()
            hidden[row, seen] = self.hidden(torch.tensor([cache.tokens[slot]]))[0, first:]
        return hidden


class ListCache:
    """The tokens of each slot."""

    def __init__(self, slots: int):
        self.tokens: list[list[int]] = [[] for _ in range(slots)]

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.tokens[target] = self.tokens[source][:tokens]

    def swap(self, first: int, second: int, first_tokens: int, second_tokens: int) -> None:
        own, other = self.tokens[first][:first_tokens], self.tokens[second][:second_tokens]
        self.tokens[first], self.tokens[second] = other, own

    def release(self, slot: int, tokens: int) -> None:
        self.tokens[slot] = self.tokens[slot][:tokens]

    def select(self, rows: Sequence[int]) -> None:
        pass


@pytest.fixture
def small_causal_lm() -> type[SmallCausalLM]:
    """Makes a random small model: small_causal_lm(vocab_size=5, sequence_length=24)."""
    return SmallCausalLM


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


END = "<|end|>"
SHAPES = {
    "llama": {"kv_heads": 2},
    "experts": {"kv_heads": 2, "moe": {"experts": (0, 4), "top_k": 2, "ffn_hidden_size": 16, "bias_update_rate": 0.1}},
    "gpt2": {
        "positions": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "biases": True,
        "tied_embeddings": True,
    },
    "bloom": {
        "positions": "alibi",
        "embedding_norm": True,
        "norm": "layernorm",
        "mlp": "gelu",
        "biases": True,
        "tied_embeddings": True,
    },
}


def random_model(config: ModelConfig, vocab_size: int, dtype: torch.dtype = torch.float32) -> Transformer:
    """Every parameter is drawn, norms and biases too, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(1)
    model = Transformer(config, vocab_size, options=ComputeOptions(dtype))
    spread = {1: 0.1, 2: 0.15, 3: 0.15}

    def draw(name: str, parameter: Tensor) -> Tensor:
        value = torch.randn(parameter.shape, generator=generator) * spread[parameter.dim()]
        return (value + ("norm" in name and name.endswith("weight"))).to(dtype)

    fill(model, draw)
    return model.eval()


def save_on_mesh(root: Path, config: ModelConfig, vocab_size: int, layout: LayoutConfig, step: int) -> None:
    """What each process of a layout does: its part of `random_model`'s values, saved with the others'."""
    mesh = build_mesh(layout, config.num_kv_heads, torch.device("cpu"))
    train = TrainConfig(tokens=1, batch_tokens=1, precision="fp32", layout=layout)
    parts = build_local_model(config, vocab_size, train, mesh, seed=0)
    drawn = {name: value.detach() for name, value in random_model(config, vocab_size).named_parameters()}
    with torch.no_grad():
        for name, parameter in parts.parameters.items():
            parameter.copy_(shard_like(drawn[name], parameter))
    tensors = {f"model.{name}": parameter.detach() for name, parameter in parts.parameters.items()}
    save(root, step, CheckpointContent(tensors, SavedModelConfig.of(config, vocab_size, 256)), mesh)


@pytest.fixture
def checkpoint_of_layout(tmp_path: Path, pool: ForkedPool) -> Callable[..., Path]:
    """The same, saved by the processes of a layout: checkpoint_of_layout("gpt2", tensor=2, data=2, pipeline=2)."""

    def make(family: str, vocab_size: int = 257, step: int = 3, **axes: int) -> Path:
        config = ModelConfig(**({"layers": 4, "width": 32, "heads": 4, "sequence_length": 128} | SHAPES[family]))
        layout = LayoutConfig(**axes)
        root = tmp_path / "checkpoints"
        pool.run(layout.world_size, save_on_mesh, root, config, vocab_size, layout, step)
        return step_folder(root, step)

    return make


@pytest.fixture
def random_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Saves a random model of a family: random_checkpoint("llama", layers=2) -> its step folder."""

    def make(
        family: str = "llama",
        name: str = "checkpoints",
        vocab_size: int = 257,
        step: int = 3,
        end_of_document: int = 256,
        **fields,
    ) -> Path:
        settings = {"layers": 2, "width": 32, "heads": 4, "sequence_length": 128} | SHAPES[family] | fields
        config = ModelConfig(**settings)
        model = random_model(config, vocab_size)
        tensors = saved_tensors(dict(model.named_parameters()), saved_buffers(model))
        save(
            tmp_path / name,
            step,
            CheckpointContent(tensors, SavedModelConfig.of(config, vocab_size, end_of_document)),
            single_process(),
        )
        return step_folder(tmp_path / name, step)

    return make


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A tokenizer.json of the 256 bytes and an end of document, which both gristmill and transformers read."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, END: 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def broken_checkpoint(tmp_path: Path) -> Path:
    """A whole checkpoint of a training that diverged: one weight is not a number."""
    config = ModelConfig(layers=1, width=16, heads=2, sequence_length=128)
    model = random_model(config, 257)
    with torch.no_grad():
        model.final_norm.weight[0] = float("nan")
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    save(tmp_path / "broken", 1, CheckpointContent(tensors, SavedModelConfig.of(config, 257, 256)), single_process())
    return step_folder(tmp_path / "broken", 1)


@pytest.fixture
def hans(tmp_path: Path) -> Path:
    """A data folder with nine made records of HANS, in the published fields."""
    records = [
        {
            "sentence1": f"The miller {number} ran.",
            "sentence2": "He ran.",
            "gold_label": ["entailment", "non"][number % 2],
        }
        for number in range(9)
    ]
    path = tmp_path / "data" / "benchmarks" / "hans_evaluation.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path / "data"

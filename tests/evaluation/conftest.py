"""A random small transformer, written out plainly, and a tokenizer of bytes: what evaluation's own tests run on."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

# B rows, T tokens, S tokens before them and they, D width, H heads, K head width, V vocabulary


class ByteCodec:
    """Token i is byte i; 256 ends a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class SmallBackbone:
    """Causal attention with learned positions, in float64 so that exact ways of computing agree exactly."""

    def __init__(self, vocab_size: int = 257, context: int = 64, width: int = 16, heads: int = 2, layers: int = 2):
        generator = torch.Generator().manual_seed(0)
        self.vocab_size, self.context, self.heads = vocab_size, context, heads
        self.device = torch.device("cpu")

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])

        self.embedding, self.position = draw(vocab_size, width) * 4, draw(context, width)
        self.layers = [(draw(3 * width, width), draw(width, width), draw(width, width)) for _ in range(layers)]
        self.output = draw(vocab_size, width) * 4

    def hidden(
        self, tokens_BT: Tensor, positions_BT: Tensor | None = None, visible_BTT: Tensor | None = None
    ) -> Tensor:
        size = tokens_BT.shape[1]
        if positions_BT is None or visible_BTT is None:
            positions_BT = torch.arange(size).expand(tokens_BT.shape)
            visible_BTT = torch.ones(size, size, dtype=torch.bool).tril().expand(len(tokens_BT), size, size)
        return self.extend(tokens_BT, positions_BT, visible_BTT, None)[0]

    def head(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND @ self.output.T

    def extend(
        self, tokens_BT: Tensor, positions_BT: Tensor, visible_BTS: Tensor, state: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x_BTD = self.embedding[tokens_BT] + self.position[positions_BT]
        grown = []
        for index, (qkv, mix, channel) in enumerate(self.layers):
            query, key, value = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (x_BTD @ qkv.T).chunk(3, dim=-1)
            )
            if state is not None:
                key = torch.cat([state[index][0], key], dim=2)
                value = torch.cat([state[index][1], value], dim=2)
            grown.append((key, value))
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, visible_BTS[:, None])
            x_BTD = x_BTD + mixed.transpose(1, 2).flatten(2) @ mix.T
            x_BTD = x_BTD + torch.tanh(x_BTD @ channel.T)
        return nn.functional.layer_norm(x_BTD, x_BTD.shape[-1:]), grown


@pytest.fixture
def small_backbone() -> type[SmallBackbone]:
    """Makes a random small model: small_backbone(vocab_size=5, context=24)."""
    return SmallBackbone


@pytest.fixture
def byte_codec() -> ByteCodec:
    return ByteCodec()

"""A GPT in the shape of nanoGPT (github.com/karpathy/nanoGPT), in plain PyTorch: a peer of `train_step.py` and
`recipes.py`.

One product for query, key and value, torch's fused attention, GELU, LayerNorm, learned positions, a tied table, the
cross entropy of all logits, autocast for bf16, fused AdamW. Linear layers have no biases."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B batch, T tokens, D width, H heads, K head width


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(x_BTD).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed_BHTK = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed_BHTK.transpose(1, 2).contiguous().flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class NanoGPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean cross entropy."""
        index_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.embedding(tokens_BT) + self.positions(index_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.final_norm(x_BTD))
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())


def from_gristmill(weights: dict[str, Tensor], layers: int, heads: int) -> NanoGPT:
    """The peer with gristmill's weights, by the names of gristmill's parameters."""
    vocab, width = weights["embedding.weight"].shape
    model = NanoGPT(layers, width, heads, len(weights["positions.weight"]), vocab)
    renamed = {
        "embedding.weight": weights["embedding.weight"],
        "head.weight": weights["embedding.weight"],
        "positions.weight": weights["positions.weight"],
    }
    for leaf in ("weight", "bias"):
        renamed[f"final_norm.{leaf}"] = weights[f"final_norm.{leaf}"]
        for i in range(layers):
            renamed[f"blocks.{i}.attention_norm.{leaf}"] = weights[f"layers.{i}.mixer_norm.{leaf}"]
            renamed[f"blocks.{i}.mlp_norm.{leaf}"] = weights[f"layers.{i}.mlp_norm.{leaf}"]
    for i in range(layers):
        mixer = f"layers.{i}.mixer"
        qkv = [weights[f"{mixer}.{name}.weight"] for name in ("query", "key", "value")]
        renamed[f"blocks.{i}.attention.qkv.weight"] = torch.cat(qkv)
        renamed[f"blocks.{i}.attention.output.weight"] = weights[f"{mixer}.output.weight"]
        renamed[f"blocks.{i}.up.weight"] = weights[f"layers.{i}.mlp.up.weight"]
        renamed[f"blocks.{i}.down.weight"] = weights[f"layers.{i}.mlp.down.weight"]
    model.load_state_dict(renamed)
    return model


# The recipe that nanoGPT has for small models, config/train_shakespeare_char.py over the defaults of train.py: AdamW at
# 1e-3 with betas 0.9 and 0.99, decay 0.1 on matrices, 100 of 5,000 steps of warm-up, a cosine to a tenth, norms of
# gradients clipped at 1; without its dropout, which is for many epochs. model.py: weights N(0, 0.02), projections into
# the residual stream over sqrt(2 layers). (GPT-2's in train.py: 6e-4, 0.9 and 0.95, 2,000 of 600,000 steps.)


@torch.no_grad()
def initialize(model: NanoGPT) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith(("output.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(model.blocks)) if residual else 0.02)


def optimizers(model: NanoGPT, rate: float) -> list[torch.optim.Optimizer]:
    """rate: times that of the recipe."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [group(matrices, 1e-3 * rate) | {"weight_decay": 0.1}, group(vectors, 1e-3 * rate)]
    return [torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0, fused=True)]


def group(parameters: Iterable[nn.Parameter], rate: float) -> dict[str, Any]:
    return {"params": list(parameters), "lr": rate, "initial_lr": rate}


def rate_factor(progress: float) -> float:
    """Share of the peak rate, by the share of the run that is done before the step."""
    warm_up = 100 / 5_000
    if progress < warm_up:
        return progress / warm_up
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))) / 2

"""A GPT in the shape of nanoGPT (github.com/karpathy/nanoGPT), in plain PyTorch: the peer of `train_step.py`.

One product for query, key and value, torch's fused attention, GELU, LayerNorm, learned positions, a tied table, the
cross entropy of all logits, autocast for bf16, fused AdamW. Linear layers have no biases."""

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

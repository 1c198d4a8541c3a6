"""The recipe of nanochat (github.com/karpathy/nanochat) in plain PyTorch, as its base model was trained in
October 2025 (nanochat/gpt.py and nanochat/muon.py, as at commits 025c432 and 23c5171): a peer of `recipes.py`. What
came later (value embeddings, scales of the stream, NorMuon, a long cooldown) is not in it.

Rotary positions, then norms of queries and keys; squared ReLU; norms without parameters, one of the embedding; no
biases; untied tables; logits capped at 15. Projections into the residual stream and the head begin at zero, the
embedding at N(0, 1), other matrices at min(1, sqrt(out / in)) / sqrt(in). Muon on the layers; AdamW on the tables at
rates for a width of 768, times sqrt(768 / width). No warm-up; the last fifth falls linearly to zero."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from peers.nanogpt import group
from torch import Tensor, nn

# B batch, T tokens, D width, H heads, K head width

SOFTCAP = 15.0
WARMDOWN = 0.2
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz quintic


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def turn(x_BTHK: Tensor, cosine_T1K: Tensor, sine_T1K: Tensor) -> Tensor:
    first, second = x_BTHK.chunk(2, dim=-1)
    parts = (first * cosine_T1K + second * sine_T1K, second * cosine_T1K - first * sine_T1K)
    return torch.cat(parts, dim=-1)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(
        self, x_BTD: Tensor, cosine: Tensor, sine: Tensor, first_value_BTHK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(stream, values). first_value_BTHK: of the first layer, of which the values become the mean with these."""
        normed_BTD = norm(x_BTD)
        query, key, value_BTHK = (
            part(normed_BTD).unflatten(-1, (self.heads, -1)) for part in (self.query, self.key, self.value)
        )
        query, key = (norm(turn(part, cosine, sine)) for part in (query, key))
        mixed_BTHK = value_BTHK if first_value_BTHK is None else (value_BTHK + first_value_BTHK) / 2
        parts = (part.transpose(1, 2) for part in (query, key, mixed_BTHK))
        attended_BHTK = F.scaled_dot_product_attention(*parts, is_causal=True)
        x_BTD = x_BTD + self.output(attended_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.relu(self.up(norm(x_BTD))).square()), value_BTHK


class NanoChat(nn.Module):
    """value_residual: each layer's values are the mean with the first layer's (Zhou et al. 2024, arXiv 2410.17897),
    which nanochat has not."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int, value_residual: bool = False):
        super().__init__()
        self.value_residual = value_residual
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        frequencies = 10000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(context), frequencies)[:, None]
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        nn.init.normal_(self.embedding.weight)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                rows, columns = module.weight.shape
                nn.init.normal_(module.weight, std=min(1.0, math.sqrt(rows / columns)) / math.sqrt(columns))
        nn.init.zeros_(self.head.weight)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            nn.init.zeros_(layer.output.weight)
            nn.init.zeros_(layer.down.weight)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """The mean cross entropy."""
        length = tokens_BT.shape[1]
        x_BTD = norm(self.embedding(tokens_BT))
        first: Tensor | None = None
        for layer in self.layers:
            x_BTD, value = layer(x_BTD, self.cosine[:length], self.sine[:length], first)
            first = value if first is None and self.value_residual else first
        logits = SOFTCAP * torch.tanh(self.head(norm(x_BTD)) / SOFTCAP)
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())

    def optimizers(self, rate: float) -> list[torch.optim.Optimizer]:
        """rate: times the rates of the recipe."""
        scale = rate * (self.embedding.weight.shape[1] / 768) ** -0.5
        tables = [group(self.head.parameters(), 0.004 * scale), group(self.embedding.parameters(), 0.2 * scale)]
        adamw = torch.optim.AdamW(tables, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
        return [adamw, Muon(self.layers.parameters(), 0.02 * rate)]


class Muon(torch.optim.Optimizer):
    """Momentum rises from 0.85 to 0.95 over 300 steps; a step is the orthogonal factor of Nesterov's momentum, times
    sqrt(max(1, rows / columns))."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float):
        super().__init__(parameters, {"lr": rate, "initial_lr": rate})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        share = min(self.steps / 300, 1.0)
        momentum = 0.85 * (1 - share) + 0.95 * share
        self.steps += 1
        for members in self.param_groups:
            for parameter in members["params"]:
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - momentum)
                direction = orthogonal(parameter.grad.lerp(buffer, momentum))
                rows, columns = parameter.shape
                parameter.sub_(direction, alpha=members["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def rate_factor(progress: float) -> float:
    """Share of the peak rate, by the share of the run that is done before the step."""
    return min(1.0, (1 - progress) / WARMDOWN)

"""Associative recall and a phonebook, small enough for one core: which mixers can look up what they have read.

Associative recall (as arXiv 2312.05605 and 2405.21060 use it): pairs of a key and a value, then the keys in another
order, each to be answered with its value. Phonebook (arXiv 2406.07887): names of two tokens with numbers of two
digits, then some of the names again. Pairs are drawn anew for every sample, so nothing can be learned by heart."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.training.config.model import ModelConfig
from gristmill.training.model.init import initialize
from gristmill.training.model.transformer import Transformer
from gristmill.training.planner.costs.model_shape import shape_of
from gristmill.training.planner.costs.parameters import parameter_count

WIDTH, BATCH = 64, 64


@dataclass(frozen=True)
class Task:
    """entries: of the longest samples; queries: how many of them are asked for. name and value: tokens of each, and how
    many tokens there are to draw each from."""

    title: str
    entries: int
    queries: int
    name: int
    names: int
    value: int
    values: int

    @property
    def vocabulary(self) -> int:
        return self.name * self.names + self.values

    @property
    def length(self) -> int:
        return (self.entries + self.queries) * (self.name + self.value)

    def samples(self, rows: int, entries: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens int64[B, T], bool[B, T]: is the token part of a value that is asked for), with so many entries."""
        every = torch.rand(rows, self.names**self.name, generator=generator).argsort(dim=1)[:, :entries]
        names = torch.stack(
            [every // self.names**place % self.names + place * self.names for place in range(self.name)], dim=2
        )
        first = self.name * self.names
        values = torch.randint(first, first + self.values, (rows, entries, self.value), generator=generator)
        entries_BEF = torch.cat([names, values], dim=2)
        asked = torch.rand(rows, entries, generator=generator).argsort(dim=1)[:, : self.queries]
        again_BQF = entries_BEF.gather(1, asked.unsqueeze(2).expand(-1, -1, entries_BEF.shape[2]))
        tokens_BT = torch.cat([entries_BEF, again_BQF], dim=1).flatten(1)
        wanted_T = torch.arange(tokens_BT.shape[1]) % (self.name + self.value) >= self.name
        wanted_T[: entries * (self.name + self.value)] = False
        return tokens_BT, wanted_T.expand(rows, -1)


RECALL = Task("recall", entries=16, queries=8, name=1, names=16, value=1, values=64)
PHONEBOOK = Task("phonebook", entries=8, queries=4, name=2, names=8, value=2, values=10)
COMPARISONS: tuple[tuple[Task, tuple[str, ...]], ...] = (
    (RECALL, ("attention", "SSD", "hybrid", "TCNCA", "chunked attention")),
    (PHONEBOOK, ("attention", "SSD", "hybrid")),
)
STEPS = 2500
CHUNK = 8  # tokens of TCNCA's chunks
MAMBA2 = {"head_width": 32, "state": 1}  # one number a channel is too small for 16 pairs


def models(task: Task) -> dict[str, ModelConfig]:
    """Of two mixers and two MLPs each, with as many parameters, to half a percent, as the largest."""
    length = -(-task.length // CHUNK) * CHUNK
    tcnca: dict[str, Any] = {"kernel": 5, "dilation": 4, "blocks": 3, "chunk": CHUNK}
    patterns: dict[str, tuple[str, dict[str, Any]]] = {
        "attention": ("*-*-", {}),
        "SSD": ("M-M-", {"mamba2": MAMBA2}),
        "hybrid": ("M-*-", {"mamba2": MAMBA2}),
        "TCNCA": ("T-T-", {"tcnca": tcnca}),
        "chunked attention": ("T-T-", {"tcnca": tcnca | {"kernel": 1, "blocks": 1, "depth": 1}}),
    }

    def model(name: str, hidden: int) -> ModelConfig:
        pattern, mixers = patterns[name]
        shape = {
            "layers": len(pattern),
            "width": WIDTH,
            "heads": 2,
            "positions": "alibi",
            "sequence_length": length,
            "init_std": 0.125,
        }
        return ModelConfig.model_validate(
            shape | {"pattern": pattern, "mixers": mixers, "mlp": "gelu", "ffn_hidden_size": hidden}
        )

    def parameters(config: ModelConfig) -> int:
        return parameter_count(shape_of(config, task.vocabulary))

    largest = max(parameters(model(name, WIDTH)) for name in patterns)
    found = {}
    for name in patterns:
        spare = largest - parameters(model(name, WIDTH))
        found[name] = model(name, WIDTH + round(spare / (4 * WIDTH)))
    return found


def accuracy(task: Task, config: ModelConfig, steps: int, seed: int) -> float:
    """Share of the asked values (every token of them) that a model answers after so many steps, on unseen samples
    with all entries; training samples have 2 entries or more, so that the short ones are learned first. Training ends
    early where nearly all are right."""
    model = Transformer(config, task.vocabulary)
    initialize(model, seed, torch.device("cpu"), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 - step / steps))
    generator, unseen = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1_000_000 + seed)
    for step in range(steps):
        if step and step % 100 == 0 and _right(task, model, unseen) > 0.995:
            break
        entries = int(torch.randint(2, task.entries + 1, (), generator=generator))
        tokens_BT, wanted_BT = task.samples(BATCH, entries, generator)
        logits_BTV = model(tokens_BT[:, :-1])
        loss = F.cross_entropy(logits_BTV[wanted_BT[:, 1:]], tokens_BT[:, 1:][wanted_BT[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
    return _right(task, model, unseen, batches=8)


@torch.no_grad()
def _right(task: Task, model: Transformer, generator: torch.Generator, batches: int = 1) -> float:
    shares = []
    for _ in range(batches):
        tokens_BT, wanted_BT = task.samples(BATCH, task.entries, generator)
        right_BT = model(tokens_BT[:, :-1]).argmax(dim=-1) == tokens_BT[:, 1:]
        asked = right_BT[wanted_BT[:, 1:]].view(-1, task.value)
        shares.append(asked.all(dim=1).float().mean().item())
    return sum(shares) / batches

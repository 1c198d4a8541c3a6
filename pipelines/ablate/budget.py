"""The size of an ablation's models and the length of their runs, from a budget in seconds or operations."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.ablate.runs import measured_rate

# (layers, width, sequence length, sequences of a step): .1 to 5 million parameters with small vocabularies, which a CPU
# trains in minutes to hours, and 14 to 90 million with a vocabulary of 8,192, for a GPU.
SIZES = (
    (2, 64, 128, 8),
    (2, 128, 256, 16),
    (3, 192, 256, 16),
    (4, 256, 256, 16),
    (5, 320, 256, 16),
    (6, 384, 512, 32),
    (8, 512, 512, 64),
    (12, 768, 1024, 64),
)
HEAD_WIDTH = 32
TOKENS_PER_PARAMETER = 4.0  # below which a smaller model is taken: arms are compared, not trained to the end
MAX_EPOCHS = 4.0  # of the smallest arm (Muennighoff et al. 2023, arXiv 2305.16264)
MIN_STEPS = 20
# Tried on the baseline, the highest not the one with the lowest loss: noise between seeds grows faster with the rate
# than the loss falls. A tenth of the words moved, two repetitions of five seeds (.13M parameters, 122,880 tokens of
# books, 2026-11-26): effect and standard error +.0077 .0039 and +.0047 .0020 at 1.6e-2, the rate of the lowest loss,
# +.0099 .0016 and +.0083 .0008 at 8e-3, +.0084 .0012 and +.0088 .0007 at 4e-3.
RATES = (2e-3, 4e-3, 8e-3)
TUNING_SHARE = 0.25  # of a run's tokens
LOW_RATE = 0.1  # of the tuned rate: verdicts at both must agree (arXiv 2512.24503)
COOLDOWN_SHARE = 0.2  # of a run's tokens, the phase in which the rate falls
SCORING_SHARE = 0.2  # of the time, for scoring and starting


@dataclass(frozen=True)
class ProxySize:
    """The model of every run of an experiment."""

    layers: int
    width: int
    sequence_length: int
    batch_sequences: int
    vocabulary: int

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "layers": self.layers,
            "width": self.width,
            "heads": self.width // HEAD_WIDTH,
            "sequence_length": self.sequence_length,
            "tied_embeddings": True,
            "init_std": round(0.6 * self.width**-0.5, 3),
        }

    @property
    def parameters(self) -> int:
        """Number in the layers and the tied table: 4 width^2 of attention and 8 width^2 of a gated MLP a layer."""
        return self.layers * 12 * self.width**2 + self.vocabulary * self.width

    @property
    def batch_tokens(self) -> int:
        return self.sequence_length * self.batch_sequences


@dataclass(frozen=True)
class Budget:
    """seconds or flops: of all runs, one of them None. seeds: models of each arm and rate. cooldown: arms share all but
    the last COOLDOWN_SHARE of a run."""

    seconds: float | None
    flops: float | None
    seeds: int
    cooldown: bool = False

    def num_runs(self, num_arms: int) -> float:
        """Whole runs that an experiment is worth, those that tune the rate included."""
        arms = num_arms * COOLDOWN_SHARE + 1 - COOLDOWN_SHARE if self.cooldown else num_arms
        return arms * self.seeds * 2 + len(RATES) * TUNING_SHARE


def choose_size(
    budget: Budget, num_arms: int, vocabulary: int, smallest: int, engine: Engine, folder: Path
) -> tuple[ProxySize, int]:
    """(the largest model that sees enough tokens within the budget, the tokens of each run). smallest: training tokens
    of the smallest arm. Remembered in `folder`, so that a command that was stopped goes on with the same."""
    path = folder / f"size-{fingerprint([asdict(budget), num_arms, vocabulary])[:12]}.json"
    if path.is_file():
        stored = json.loads(path.read_bytes())
        return ProxySize(**stored["size"]), stored["tokens"]
    chosen = largest_size(
        vocabulary,
        smallest,
        lambda size: affordable_tokens(budget, size, num_arms, engine, folder),
    )
    write_atomic(path, canonical_json({"size": asdict(chosen[0]), "tokens": chosen[1]}))
    return chosen


def largest_size(vocabulary: int, smallest: int, affordable: Callable[[ProxySize], float]) -> tuple[ProxySize, int]:
    """affordable: tokens of a run of this size within the budget."""
    best: tuple[ProxySize, int] | None = None
    for fields in SIZES:
        size = ProxySize(*fields, vocabulary)
        tokens = min(affordable(size), MAX_EPOCHS * smallest)
        if best is not None and tokens < TOKENS_PER_PARAMETER * size.parameters:
            break
        best = size, max(MIN_STEPS, int(tokens / size.batch_tokens)) * size.batch_tokens
    assert best is not None
    return best


def affordable_tokens(budget: Budget, size: ProxySize, num_arms: int, engine: Engine, folder: Path) -> float:
    num_runs = budget.num_runs(num_arms)
    if budget.flops is not None:
        return budget.flops / (6 * size.parameters * num_runs)
    assert budget.seconds is not None
    workers = [
        (size.fields, size.vocabulary, size.batch_tokens, folder / "rate" / f"{size.width}-{number}", number)
        for number in range(engine.workers)
    ]
    rate = min(engine.map(measured_rate, workers, "ablate: measuring this machine"))
    return budget.seconds * (1 - SCORING_SHARE) * engine.workers * rate / num_runs

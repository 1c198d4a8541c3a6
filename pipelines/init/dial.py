"""One dial for the size of a run: minutes, depth, or floating-point operations, with this machine's measured rate.

Width is 64 times the depth, as in nanochat (karpathy/nanochat, scripts/base_train.py); tokens are 20 a parameter
(Hoffmann et al. 2022, arXiv 2203.15556, table 3) where time and text allow."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.foundation.errors import RecipeError

DEPTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
WIDTH_PER_LAYER, HEAD_WIDTH = 64, 64
TOKENS_PER_PARAMETER = 20
MAX_EPOCHS = 4  # repeated text is nearly as good as new up to here (Muennighoff et al. 2023, arXiv 2305.16264)
SMALL_EPOCHS = 40  # a corpus too small for a run of this length is repeated so often, at most
BYTES_PER_TOKEN = 3.3  # of a vocabulary of a few thousand pieces
# Seconds of a run beside training steps, on a core of the kind this was measured on: stages start, libraries load,
# checkpoints are written, held-out text is scored.
FIXED_SECONDS = 13.0
CURATION_BYTES_PER_SECOND = 12e6  # text through the default filters, deduplication, tokenizer and index, two workers
TRAINING_SHARE = 0.95  # of the time that is left: the rest is validation and checkpoints


@dataclass(frozen=True)
class ModelSize:
    depth: int
    vocabulary: int
    sequence_length: int

    @property
    def width(self) -> int:
        return WIDTH_PER_LAYER * self.depth

    @property
    def fields(self) -> dict[str, Any]:
        heads = self.width // HEAD_WIDTH
        return {
            "layers": self.depth,
            "width": self.width,
            "heads": heads,
            "sequence_length": self.sequence_length,
            "tied_embeddings": True,
            "init_std": round(0.6 * self.width**-0.5, 3),
        }

    @property
    def parameters(self) -> int:
        """Parameters of the layers and the tied table: 4 width^2 of attention and 8 width^2 of a gated MLP a layer."""
        return self.depth * 12 * self.width**2 + self.vocabulary * self.width


@dataclass(frozen=True)
class Choice:
    """seconds: forecast of the whole run. epochs: how often the text is read. why: one line for the recipe's reader."""

    size: ModelSize
    tokens: int
    batch_tokens: int
    tokens_per_second: float
    seconds: float
    epochs: float
    why: str

    @property
    def flops(self) -> float:
        """6 N D (Kaplan et al. 2020, arXiv 2001.08361, table 1)."""
        return 6.0 * self.size.parameters * self.tokens


def optimizer_of(size: ModelSize) -> dict[str, Any]:
    """Muon on the matrices (Jordan et al. 2024) and AdamW on the rest, at the rates that were best for the demo's width
    of 192: 11 % less validation loss after 500,000 tokens than AdamW at its best rate."""
    return {"name": "muon", "learning_rate": float(f"{8e-3 * (192 / size.width) ** 0.5:.2e}")}


def batch_of(size: ModelSize) -> int:
    """Tokens of a step: 16 sequences for the smallest models, more for larger ones."""
    return size.sequence_length * (16 if size.depth < 6 else 32)


def measured_rate(size: ModelSize, precision: str) -> float:
    """Tokens a second of the run's own training step, on random text (init/rate.py)."""
    from gristmill.foundation.progress import Reporter  # torch takes seconds to load
    from gristmill.pipelines.init.rate import steps_per_second

    with tempfile.TemporaryDirectory() as folder:
        rate = steps_per_second(
            size.fields,
            size.vocabulary,
            {"batch_tokens": batch_of(size), "precision": precision, "optimizer": optimizer_of(size)},
            Path(folder),
            Reporter.silent(),
        )
    return rate * batch_of(size)


def choose_by_minutes(minutes: float, text_bytes: float, vocabulary: int, precision: str) -> Choice:
    """The deepest model that sees TOKENS_PER_PARAMETER within the time, or the shallowest if none does."""
    overhead = FIXED_SECONDS + text_bytes / CURATION_BYTES_PER_SECOND
    seconds = (60 * minutes - overhead) * TRAINING_SHARE
    if seconds < 10:
        raise RecipeError(
            f"--minutes {minutes:g}: reading and curating {text_bytes / 1e6:.1f} MB takes about {overhead:.0f} s; give "
            f"at least {(overhead + 20) / 60:.1f} minutes, or a smaller folder"
        )
    best: Choice | None = None
    for depth in DEPTHS:
        size = ModelSize(depth, vocabulary, _sequence_length(depth))
        rate = measured_rate(size, precision)
        possible = seconds * rate
        enough = TOKENS_PER_PARAMETER * size.parameters
        if best is not None and possible < enough:
            break
        best = _choice(size, min(possible, _most_tokens(text_bytes)), rate, overhead, text_bytes)
        if possible < 2.2 * enough:  # the next depth costs more than twice
            break
        if _most_tokens(text_bytes) < enough:
            break
    assert best is not None
    return best


def choose_by_depth(depth: int, text_bytes: float, vocabulary: int, precision: str) -> Choice:
    size = ModelSize(depth, vocabulary, _sequence_length(depth))
    overhead = FIXED_SECONDS + text_bytes / CURATION_BYTES_PER_SECOND
    tokens = min(TOKENS_PER_PARAMETER * size.parameters, _most_tokens(text_bytes))
    return _choice(size, tokens, measured_rate(size, precision), overhead, text_bytes)


def choose_by_flops(flops: float, text_bytes: float, vocabulary: int, precision: str) -> Choice:
    """C = 6 N D with D = 20 N, so N = sqrt(C / 120): the deepest model of at most so many parameters."""
    sizes = [ModelSize(depth, vocabulary, _sequence_length(depth)) for depth in DEPTHS]
    fitting = [size for size in sizes if size.parameters <= (flops / (6 * TOKENS_PER_PARAMETER)) ** 0.5]
    size = fitting[-1] if fitting else sizes[0]
    overhead = FIXED_SECONDS + text_bytes / CURATION_BYTES_PER_SECOND
    tokens = min(flops / (6 * size.parameters), _most_tokens(text_bytes))
    return _choice(size, tokens, measured_rate(size, precision), overhead, text_bytes)


def _sequence_length(depth: int) -> int:
    return 256 if depth < 6 else 512


def _most_tokens(text_bytes: float) -> float:
    return SMALL_EPOCHS * text_bytes / BYTES_PER_TOKEN


def _choice(size: ModelSize, tokens: float, rate: float, overhead: float, text_bytes: float) -> Choice:
    batch = batch_of(size)
    tokens = max(batch * 20, int(tokens) // batch * batch)
    epochs = tokens / max(1.0, text_bytes / BYTES_PER_TOKEN)
    per_parameter = tokens / size.parameters
    why = f"{tokens / 1e6:.2f}M tokens, {per_parameter:.1f} a parameter, {epochs:.1f} times the text"
    if epochs > MAX_EPOCHS:
        why += f"; text read over {MAX_EPOCHS} times teaches less each time: more text would serve better"
    seconds = overhead + tokens / rate / TRAINING_SHARE
    return Choice(size, int(tokens), batch, rate, seconds, epochs, why)

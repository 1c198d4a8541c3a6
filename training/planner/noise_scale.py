"""Gradient noise scale, the batch size in tokens beyond which a larger batch saves few steps (McCandlish et al. 2018,
arXiv 1812.06162, appendix A.1).

    E |G_B|^2 = |G|^2 + S / B        G_B: gradient of a batch of B tokens. G, S: true gradient, variance of a token's

Two batch sizes give both numbers; the scale is S / |G|^2. One measurement is noisy, so means over many are
divided. Without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.training.config.train import GRADIENT_NOISE

MIN_MEASUREMENTS = 5


@dataclass(frozen=True)
class GradientNoise:
    """signal: estimate of |G|^2, which may be negative. noise: of S, in tokens times a square of gradients."""

    signal: float
    noise: float

    @classmethod
    def of_norms(cls, small: float, small_tokens: float, large: float, large_tokens: float) -> "GradientNoise":
        """From gradient norms. |G|^2 = 1, S = 12: norms 2 of 4 tokens and sqrt(2) of 12 give (1, 12)."""
        signal = (large_tokens * large**2 - small_tokens * small**2) / (large_tokens - small_tokens)
        return cls(signal, (small**2 - large**2) / (1 / small_tokens - 1 / large_tokens))


def noise_scale(measurements: Sequence[GradientNoise]) -> float | None:
    """Tokens; of the later half of the measurements, for it grows while the loss falls. None where there are too few,
    or they are all noise."""
    if len(measurements) < MIN_MEASUREMENTS:
        return None
    later = measurements[len(measurements) // 2 :]
    signal, noise = (sum(values) for values in zip(*((value.signal, value.noise) for value in later), strict=True))
    return noise / signal if signal > 0 and noise > 0 else None


def measurements_of(lines: Sequence[Mapping[str, Any]]) -> list[GradientNoise]:
    """Those of the lines of metrics.jsonl."""
    return [GradientNoise(**line[GRADIENT_NOISE]) for line in lines if GRADIENT_NOISE in line]


def batch_advice(lines: Sequence[Mapping[str, Any]], batch_tokens: int) -> str | None:
    """A sentence on the batch of a run beside its noise scale; None where that was not measured often enough."""
    scale = noise_scale(measurements_of(lines))
    if scale is None:
        return None
    beside = f"gradient noise scale about {scale:,.0f} tokens, batch_tokens {batch_tokens:,}"
    if batch_tokens <= scale:
        return beside
    return f"{beside}: beyond it, so fewer tokens a step would train as far with fewer tokens in all"

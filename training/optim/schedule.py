"""The learning rate as a function of the tokens trained on, so that it does not depend on the batch size or on
resumption."""

import math

from gristmill.training.optimizer_config import RampConfig, ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, tokens: int, total_tokens: int) -> float:
    """The share of the peak rate for the step that ends at `tokens`. Warm-up is linear from 0, then:

    cosine, linear: down to final_ratio at the end. constant: 1. inverse_sqrt: sqrt(warm-up / tokens).
    wsd: 1 until the last decay_share of the run, then down to final_ratio in decay_shape (arXiv 2404.06395)."""
    total_tokens = schedule.over_tokens or total_tokens
    warmup = schedule.warmup_share * total_tokens
    if tokens < warmup:
        return tokens / warmup
    progress = min(1.0, (tokens - warmup) / max(1.0, total_tokens - warmup))
    if schedule.shape == "constant":
        return 1.0
    if schedule.shape == "inverse_sqrt":
        return math.sqrt(max(warmup, 1.0) / tokens)
    if schedule.shape == "wsd":
        left = (total_tokens - tokens) / (schedule.decay_share * total_tokens)
        return _fall(schedule.decay_shape, 1 - max(0.0, min(1.0, left)), schedule.final_ratio)
    return _fall(schedule.shape, progress, schedule.final_ratio)


def _fall(shape: str, progress: float, final: float) -> float:
    """From 1 at progress 0 to `final` at progress 1."""
    if shape == "exponential":
        return max(final, 1e-3) ** progress  # an exponential never reaches a final rate of 0: 1/1000 instead
    remaining = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "one_minus_sqrt": 1 - math.sqrt(progress),
    }[shape]
    return final + (1 - final) * remaining


def batch_tokens_at(ramp: RampConfig | None, full: int, tokens: int) -> int:
    """The size of the batch drawn after `tokens` of training.

    start 4, increment 4, over 90, full 16 -> 4 until 30 tokens, 8 until 60, 12 until 90, then 16."""
    if ramp is None or tokens >= ramp.over_tokens:
        return full
    rungs = math.ceil((full - ramp.start_tokens) / ramp.increment_tokens)
    return min(full, ramp.start_tokens + ramp.increment_tokens * (tokens * rungs // ramp.over_tokens))

"""Pattern strings: the layers of a hybrid model, one letter each, with the letters of Megatron-LM. Without torch."""

from functools import lru_cache
from typing import NamedTuple

from gristmill.training.mixer_registry import symbols

STAGE = "|"


class PatternLayer(NamedTuple):
    """What a letter stands for. A layer of a pattern is a mixer alone, an MLP alone, or a mixture of experts alone."""

    mixer: str
    has_mlp: bool
    has_experts: bool


def pattern_problem(pattern: str, layers: int) -> str | None:
    """What is wrong with the pattern of a model with so many layers; None if nothing is."""
    letters = {**symbols(), "-": "MLP", "E": "experts", STAGE: "next stage"}
    wrong = next((letter for letter in pattern if letter not in letters), None)
    if wrong is not None:
        known = ", ".join(f"{letter} ({meaning})" for letter, meaning in letters.items())
        return f"pattern has the letter {wrong!r}; letters are {known}"
    count = len(pattern) - pattern.count(STAGE)
    if count != layers:
        return f"pattern has {count} layers and layers={layers}; set layers: {count}, or change the pattern"
    if not all(pattern.split(STAGE)):
        return "pattern has a stage without a layer; put letters on both sides of each |"
    return None


@lru_cache(maxsize=64)
def pattern_layers(pattern: str) -> tuple[PatternLayer, ...]:
    """ "M*-|E" -> mamba2, attention, an MLP, experts."""
    mixers = symbols()
    return tuple(
        PatternLayer(mixers.get(letter, "none"), letter in "-E", letter == "E") for letter in pattern if letter != STAGE
    )


def pattern_stages(pattern: str) -> tuple[int, ...]:
    """The first layer of each stage but the first. "M-|M*-|M-" -> (2, 5)."""
    stages = pattern.split(STAGE)
    return tuple(sum(len(stage) for stage in stages[:index]) for index in range(1, len(stages)))

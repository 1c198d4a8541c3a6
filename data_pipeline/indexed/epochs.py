"""How often a run sees each source: from token counts, weights and the tokens of the run, before anything is drawn."""

from collections.abc import Mapping, Sequence

from gristmill.data_pipeline.indexed.config import PhaseConfig

# Up to 4 epochs of repeated data change the loss little against as much new data; from there on its value falls
# (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", arXiv:2305.16264, abstract).
MAX_EPOCHS_UNWARNED = 4.0


def blend_weights(weights: Mapping[str, float | None], tokens: Mapping[str, int]) -> dict[str, float]:
    """The weights as they are given, or, where none is, each source's share of the tokens.

    ({"a": None, "b": None}, {"a": 300, "b": 100}) -> {"a": 0.75, "b": 0.25}. Raises ValueError if only some are
    given: whether a missing one means 1, a share of the tokens or what the others leave cannot be told."""
    check_all_or_none(weights)
    total = sum(tokens.values())
    return {name: tokens[name] / total if weight is None else weight for name, weight in weights.items()}


def check_all_or_none(weights: Mapping[str, float | None]) -> None:
    given = [name for name, weight in weights.items() if weight is not None]
    missing = [name for name, weight in weights.items() if weight is None]
    if given and missing:
        raise ValueError(
            f"source {given[0]!r} has a weight and source {missing[0]!r} has none; give every source a weight, or "
            "none: then each is drawn in proportion to its tokens"
        )


def tokens_drawn(
    weights: Mapping[str, float], train_tokens: int, phases: Sequence[PhaseConfig] = ()
) -> dict[str, float]:
    """Tokens that a run of `train_tokens` takes from each source; phases replace the weights, as in a run.

    ({"a": 3.0, "b": 1.0}, 400) -> {"a": 300.0, "b": 100.0}."""
    drawn = dict.fromkeys(weights, 0.0)
    stretches: list[tuple[int, Mapping[str, float]]] = [(phase.from_tokens, phase.weights) for phase in phases]
    stretches = stretches or [(0, weights)]
    ends = [start for start, _ in stretches[1:]] + [train_tokens]
    for (start, shares), end in zip(stretches, ends, strict=True):
        present = {name: share for name, share in shares.items() if name in drawn}
        for name, share in present.items():
            drawn[name] += max(0, min(end, train_tokens) - start) * share / sum(present.values())
    return drawn


def epochs_by_source(
    tokens: Mapping[str, int],
    weights: Mapping[str, float | None],
    train_tokens: int,
    phases: Sequence[PhaseConfig] = (),
) -> dict[str, float]:
    """How often a run of `train_tokens` sees the tokens of each source; sources without tokens are left out.

    tokens {"a": 100, "b": 10}, weights 3 and 1, 400 tokens -> {"a": 3.0, "b": 10.0}."""
    drawn = tokens_drawn(blend_weights(weights, tokens), train_tokens, phases)
    return {name: drawn[name] / tokens[name] for name in tokens if tokens[name]}


def repeat_warnings(epochs: Mapping[str, float], tokens: Mapping[str, int], train_tokens: int) -> list[str]:
    """A line for each source that is seen more than 4 times, with the numbers and what to change."""
    return [
        f"warning: source {name!r} has {tokens[name]:,} tokens and is seen {times:.1f} times in a run of "
        f"{train_tokens:,}; text repeated more than {MAX_EPOCHS_UNWARNED:g} times teaches little: give it a share of "
        f"{MAX_EPOCHS_UNWARNED * tokens[name] / train_tokens:.2%} or less, train on fewer tokens, or add text"
        for name, times in epochs.items()
        if times > MAX_EPOCHS_UNWARNED
    ]

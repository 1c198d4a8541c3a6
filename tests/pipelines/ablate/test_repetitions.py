"""How often the recipe's own run reads each source, which the small runs repeat."""

from types import SimpleNamespace

import pytest

from gristmill.pipelines.ablate.experiment import Material


def material(tokens: dict[str, int], weights: dict[str, float | None], train_tokens: int | None) -> Material:
    train = None if train_tokens is None else SimpleNamespace(tokens=train_tokens)
    index = SimpleNamespace(mix=None)
    arm = SimpleNamespace(recipe=SimpleNamespace(train=train, source_weights=weights, index=index))

    class Stub(Material):
        def tokens(self, arm: int) -> dict[str, int]:
            return tokens

    return Stub([arm], None, [], [], None)


@pytest.mark.parametrize(
    ("weights", "train_tokens", "repetitions"),
    [
        ({"web": 0.5, "books": 0.5}, 1000, {"books": 5.0}),  # web has 1,000 tokens and gives 500, books has 100
        ({"web": None, "books": None}, 2200, {"web": 2.0, "books": 2.0}),
        ({"web": 1.0, "books": 1.0}, 100, {}),
        ({"web": 1.0, "books": 1.0}, None, {}),
    ],
)
def test_sources_that_the_run_reads_more_than_once(weights, train_tokens, repetitions):
    assert material({"web": 1000, "books": 100}, weights, train_tokens).repetitions(0) == pytest.approx(repetitions)

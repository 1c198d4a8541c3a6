"""Rows from bits: which sets are scored, which vote, and the documents that differ most."""

import numpy as np
import pytest

from gristmill.pipelines.ablate.compare_arms import (
    ALL_DOCUMENTS,
    NOT_COUNTED,
    baseline_bits,
    compare_arms,
    differing_documents,
    scored_sets,
)
from gristmill.pipelines.ablate.corpora import HeldOut, Texts

RATES = (0.01, 0.001)
SEEDS = 4


def held_out(documents: int = 40) -> HeldOut:
    texts = tuple(f"document {number:03d}" for number in range(2 * documents))
    sets = {"held out of a": tuple(range(documents)), "target b": tuple(range(documents, 2 * documents))}
    return HeldOut(Texts(texts, ("",) * len(texts)), sets)


def bits_of(held: HeldOut, effect: float) -> dict[tuple[int, int, float], np.ndarray]:
    """The arm costs `effect` bits a byte more, with little noise."""
    rng = np.random.default_rng(1)
    return {
        (arm, seed, rate): held.texts.num_bytes * (1 + effect * arm + rng.normal(0, 1e-3, len(held.texts.texts)))
        for arm in (0, 1)
        for seed in range(SEEDS)
        for rate in RATES
    }


def test_a_row_for_each_set_and_for_all_documents_together():
    held = held_out()
    rows, notes = compare_arms(["baseline", "arm1"], held, bits_of(held, 0.1), RATES, SEEDS)
    assert [(row.set_name, row.decision) for row in rows] == [
        (ALL_DOCUMENTS, "worse"), ("held out of a", "worse"), ("target b", "worse")
    ]  # fmt: skip
    assert rows[0].tuned.effect == pytest.approx(0.1, abs=1e-3) and notes == []
    assert baseline_bits(held, bits_of(held, 0.1), RATES[0], SEEDS)["target b"] == pytest.approx(1, abs=1e-3)


def test_small_sets_are_noted():
    held = HeldOut(held_out().texts, {"held out of a": tuple(range(40)), "target b": (50, 51)})
    assert scored_sets(held) == (
        {"held out of a": tuple(range(40))}, ["target b: 2 documents, too few to score by themselves"]
    )  # fmt: skip


def test_a_task_that_decides_by_chance_is_shown_and_does_not_vote():
    """And it takes no part in the correction for the number of comparisons."""
    questions = [("question", "answer")] * 30
    alone, held = held_out(), held_out().with_tasks({"boolq": questions, "arc_easy": questions})
    rows, _ = compare_arms(["baseline", "arm1"], held, bits_of(held, 0.1), RATES, SEEDS)
    decisions = {row.set_name: row.decision for row in rows}
    assert decisions["task boolq"] == NOT_COUNTED and decisions["task arc_easy"] == "worse"
    assert rows[0].set_name == ALL_DOCUMENTS and rows[0].tuned.documents == len(alone.texts.texts)


def test_the_documents_that_differ_most():
    held = held_out()
    bits = bits_of(held, 0.0)
    for seed in range(SEEDS):
        bits[1, seed, RATES[0]][7] += 30
        bits[1, seed, RATES[0]][60] -= 30
    worst, best = differing_documents(["baseline", "arm1"], held, bits, RATES[0], SEEDS, count=1)
    assert (worst.excerpt, best.excerpt) == ("document 007", "document 060")
    assert worst.effect == pytest.approx(30 / 12, abs=0.01) and best.effect == pytest.approx(-30 / 12, abs=0.01)

"""From the bits of every held-out text under every model to the rows of the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.evaluation.results.ablation import ArmScores, Decision, Effect, decide, effects
from gristmill.pipelines.ablate.corpora import MIN_DOCUMENTS, HeldOut

ALL_DOCUMENTS = "all held-out documents"
NOT_COUNTED = "does not vote"
MAX_EXCERPT = 160  # characters of a document in the report

Bits = Mapping[tuple[int, int, float], np.ndarray]  # (arm, place of the seed, rate) -> float64[texts]


@dataclass(frozen=True)
class ArmComparison:
    """One arm on one set of held-out texts: its verdict, and its effects at the tuned rate and at a tenth."""

    arm: str
    set_name: str
    decision: str
    p: float
    tuned: Effect
    low: Effect


@dataclass(frozen=True)
class DifferingDocument:
    """effect: bits per byte of the arm less those of the baseline, mean of the seeds; error: its standard error."""

    arm: str
    effect: float
    error: float
    excerpt: str


def scored_sets(held_out: HeldOut) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """(name -> numbers of its texts, for sets large enough; notes on the others). Documents of several sets are a set
    of their own."""
    chosen = {name: places for name, places in held_out.sets.items() if len(places) >= MIN_DOCUMENTS}
    notes = [
        f"{name}: {len(places)} documents, too few to score by themselves"
        for name, places in held_out.sets.items()
        if name not in chosen
    ]
    documents = {name for name in chosen if name not in held_out.tasks}
    if len(documents) > 1:
        chosen = {ALL_DOCUMENTS: held_out.documents} | chosen
    return chosen, notes


def compare_arms(
    names: Sequence[str], held_out: HeldOut, bits: Bits, rates: tuple[float, float], seeds: int
) -> tuple[list[ArmComparison], list[str]]:
    """(a row for each arm and set, notes on sets that are too small). names: of the arms, the baseline first. Corrected
    over all rows that vote."""
    chosen, notes = scored_sets(held_out)
    num_bytes = held_out.texts.num_bytes
    by_rate: list[list[Effect]] = []
    for rate in rates:
        of_rate: list[Effect] = []
        for places in chosen.values():
            scale = held_out.scale(places)
            scored = [
                ArmScores(
                    name,
                    np.stack([bits[number, seed, rate][list(places)] for seed in range(seeds)]) * scale,
                    num_bytes[list(places)] * scale,
                )
                for number, name in enumerate(names)
            ]
            of_rate += effects(scored[0], scored[1:])
        by_rate.append(of_rate)
    sets = [set_name for set_name in chosen for _ in names[1:]]
    voting = [number for number, set_name in enumerate(sets) if held_out.votes(set_name)]
    decided: dict[int, tuple[Decision, float]] = {}
    if voting:
        decided = dict(
            zip(voting, decide([[of_rate[number] for number in voting] for of_rate in by_rate]), strict=True)
        )
    rows = []
    for number, (set_name, tuned, low) in enumerate(zip(sets, *by_rate, strict=True)):
        decision, p = decided.get(number, (NOT_COUNTED, max(tuned.p, low.p)))
        rows.append(ArmComparison(tuned.arm, set_name, decision, p, tuned, low))
    return rows, notes


def baseline_bits(held_out: HeldOut, bits: Bits, rate: float, seeds: int) -> dict[str, float]:
    """Set -> bits per byte of the baseline at the tuned rate, over its seeds."""
    num_bytes = held_out.texts.num_bytes
    mean = np.mean([bits[0, seed, rate] for seed in range(seeds)], axis=0)
    return {
        name: float(mean[list(places)] @ held_out.scale(places) / (num_bytes[list(places)] @ held_out.scale(places)))
        for name, places in scored_sets(held_out)[0].items()
    }


def differing_documents(
    names: Sequence[str], held_out: HeldOut, bits: Bits, rate: float, seeds: int, count: int = 3
) -> list[DifferingDocument]:
    """Documents of each arm that it makes most worse, then most better, in bits per byte beyond what noise between
    seeds would give: ranked by the mean over seeds divided by its standard error plus the median error."""
    places = np.array(held_out.documents, np.int64)
    num_bytes = np.maximum(1.0, held_out.texts.num_bytes[places])
    documents = []
    for number, name in enumerate(names[1:], start=1):
        differences_SD = np.stack(
            [(bits[number, seed, rate] - bits[0, seed, rate])[places] / num_bytes for seed in range(seeds)]
        )
        effects_D = differences_SD.mean(axis=0)
        errors_D = differences_SD.std(axis=0, ddof=1) / seeds**0.5
        order = np.argsort(effects_D / (errors_D + np.median(errors_D) + 1e-12), kind="stable")
        for place in [*order[::-1][:count], *order[:count]]:
            text = " ".join(held_out.texts.texts[places[place]].split())
            excerpt = text if len(text) <= MAX_EXCERPT else text[: MAX_EXCERPT - 1] + "…"
            documents.append(DifferingDocument(name, float(effects_D[place]), float(errors_D[place]), excerpt))
    return documents

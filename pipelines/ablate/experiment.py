"""An ablation from end to end: curate the arms, share what is equal, train, score, decide.

    curate each arm -> one held-out set, taken out of every arm -> one tokenizer -> an index for each arm
    -> tune the learning rate on the baseline -> arms x seeds x two rates -> effects and verdicts

Every step writes files under the work folder and is skipped where they stand, so the same command goes on after a
stop."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.evaluation.results.ablation import MIN_SEEDS, ArmScores, Effect, decide, effects
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.ablate import corpora
from gristmill.pipelines.ablate.arms import Arm, missing_sources
from gristmill.pipelines.ablate.runs import RunTask, measured_rate, run
from gristmill.pipelines.init.dial import ModelSize, batch_of
from gristmill.tokenizers.tokenizer import load_tokenizer

DEPTHS = (2, 3, 4, 5)  # 64 channels a layer: .3 to 5 million parameters with small vocabularies
TOKENS_PER_PARAMETER = 4.0  # below which a shallower model is taken: arms are compared, not trained to the end
MAX_EPOCHS = 4.0  # of the smallest arm (Muennighoff et al. 2023, arXiv 2305.16264)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)  # tried on the baseline; DataDecide's models of 4 to 8M use 1.1e-2 to 1.4e-2
TUNING_SHARE = 0.25  # of a run's tokens
LOW_RATE = 0.1  # of the tuned rate: verdicts at both must agree (arXiv 2512.24503)
SCORING_SHARE = 0.15  # of the time, for scoring and starting


@dataclass(frozen=True)
class Plan:
    """seeds: models of each arm and rate, counted from first_seed. seconds or flops: the budget of all runs. documents:
    held out of each arm, at most. targets: files of texts that the user wants to be good at."""

    folder: Path
    seeds: int = 3
    first_seed: int = 0
    seconds: float | None = 1800.0
    flops: float | None = None
    documents: int = 400
    targets: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ArmComparison:
    """One arm on one set of held-out documents: its verdict, and its effects at the tuned rate and at a tenth."""

    arm: str
    set_name: str
    decision: str
    p: float
    tuned: Effect
    low: Effect


@dataclass(frozen=True)
class AblationResult:
    """rates: the tuned learning rate and a tenth of it. notes: what a reader of the verdicts must know."""

    arms: list[Arm]
    rows: list[ArmComparison]
    model: dict[str, Any]
    parameters: int
    tokens: int
    rates: tuple[float, float]
    seeds: int
    notes: list[str]
    curves: dict[str, list[np.ndarray]]
    baseline_bits: dict[str, float]
    flops: float


def experiment(arms: Sequence[Arm], curated: Sequence[Path], plan: Plan, engine: Engine) -> AblationResult:
    """curated: the corpus folder of each arm. Raises InputError or RecipeError before training for what cannot be
    compared."""
    if plan.seeds < MIN_SEEDS:
        raise RecipeError(f"--seeds {plan.seeds}: at least {MIN_SEEDS} are needed to know how much seeds matter")
    say = engine.reporter.say
    held_out = corpora.hold_out(arms, curated, plan.targets, plan.documents)
    identity = fingerprint(
        [
            list(held_out.texts),
            [arm.recipe.model_dump(mode="json", include={"sources", "curate", "seed"}) for arm in arms],
        ]
    )
    shared = plan.folder / f"shared-{identity[:12]}"
    seed = arms[0].recipe.seed
    notes = missing_sources(arms)
    sources: list[list[str]] = []
    for arm, corpus in zip(arms, curated, strict=True):
        names = [source.name for source in arm.recipe.sources if source.held_out is None]
        copies = corpora.write_without_copies(corpus, names, held_out, shared / arm.name)
        say(f"ablate: {arm.name}: {copies} copies of held-out documents taken out of training")
        sources.append(corpora.sources_with_text(shared / arm.name, names))
        if not sources[-1]:
            raise InputError(f"{arm.name}: no training text is left; its recipe keeps nothing")
    folders = [shared / arm.name for arm in arms]
    corpora.train_tokenizer(folders, sources, seed, shared / "tokenizer", engine)
    for folder, names in zip(folders, sources, strict=True):
        corpora.write_index(folder, names, shared / "tokenizer", seed, folder / "index", engine)
    trainable = [tokens_of(folder / "index") for folder in folders]
    vocabulary = load_tokenizer(shared / "tokenizer").vocab_size
    size, tokens = choose_size(plan, len(arms), vocabulary, min(trainable), engine, shared)
    batch = batch_of(size)
    say(
        f"ablate: {len(arms)} arms x {plan.seeds} seeds x 2 learning rates: models of {size.parameters / 1e6:.2f}M "
        f"parameters, {tokens / 1e6:.2f}M tokens each"
    )
    notes += repetition_notes(arms, trainable, tokens)

    def task(arm: int, seed: int, rate: float, num_tokens: int) -> RunTask:
        texts = hashlib.sha256(canonical_json(list(held_out.texts))).hexdigest()
        weights = arms[arm].recipe.source_weights
        key = fingerprint([arms[arm].name, weights, size.fields, num_tokens, batch, rate, seed, texts])
        name = f"{arms[arm].name}-seed{seed}-rate{rate:g}-{key[:8]}"
        return RunTask(
            name,
            with_sources(arms[arm], sources[arm]),
            folders[arm] / "index",
            shared / "tokenizer",
            shared / "runs" / name,
            size.fields,
            num_tokens,
            batch,
            rate,
            seed,
            held_out.texts,
        )

    tuning_tokens = max(batch * 10, int(tokens * TUNING_SHARE) // batch * batch)
    trials = [task(0, plan.first_seed, rate, tuning_tokens) for rate in RATES]
    engine.map(run, trials, "ablate: tuning the learning rate", unit="runs")
    tuned = RATES[int(np.argmin([np.load(trial.scores).sum() for trial in trials]))]
    if tuned == RATES[-1] or tuned == RATES[0]:
        notes.append(f"the best learning rate, {tuned:g}, is at the edge of those tried")
    rates = (tuned, tuned * LOW_RATE)
    places = [(arm, seed, rate) for rate in rates for seed in range(plan.seeds) for arm in range(len(arms))]
    tasks = {(arm, seed, rate): task(arm, plan.first_seed + seed, rate, tokens) for arm, seed, rate in places}
    engine.map(run, list(tasks.values()), "ablate: training", unit="runs")
    bits = {place: np.load(run_task.scores) for place, run_task in tasks.items()}
    rows, left_out = verdicts(arms, held_out, bits, rates, plan.seeds)
    num_runs = len(tasks) + len(RATES) * TUNING_SHARE
    flops = 6.0 * size.parameters * tokens * num_runs
    return AblationResult(
        list(arms),
        rows,
        size.fields,
        size.parameters,
        tokens,
        rates,
        plan.seeds,
        notes + left_out,
        {
            arm.name: [np.load(tasks[number, seed, tuned].curve) for seed in range(plan.seeds)]
            for number, arm in enumerate(arms)
        },
        baseline_bits(held_out, bits, tuned, plan.seeds),
        flops,
    )


def with_sources(arm: Arm, names: Sequence[str]) -> Any:
    """The arm's recipe with the sources that have training text."""
    kept = tuple(source for source in arm.recipe.sources if source.name in names)
    index = arm.recipe.index.model_copy(update={"languages": None})
    return arm.recipe.model_copy(update={"sources": kept, "index": index})


def tokens_of(index: Path) -> int:
    return sum(source.splits["train"].tokens for source in read_dataset(index).sources)


def choose_size(
    plan: Plan, num_arms: int, vocabulary: int, smallest: int, engine: Engine, folder: Path
) -> tuple[ModelSize, int]:
    """(the deepest model that sees enough tokens within the budget, the tokens of each run). Remembered, so that a
    command that was stopped goes on with the same."""
    path = folder / f"size-{fingerprint([asdict(plan) | {'folder': '', 'targets': []}, num_arms])[:12]}.json"
    if path.is_file():
        chosen = json.loads(path.read_bytes())
        return ModelSize(chosen["depth"], vocabulary, chosen["sequence_length"]), chosen["tokens"]
    num_runs = num_arms * plan.seeds * 2 + len(RATES) * TUNING_SHARE
    best: tuple[ModelSize, int] | None = None
    for depth in DEPTHS:
        size = ModelSize(depth, vocabulary, 256)
        if plan.flops is not None:
            possible = plan.flops / (6 * size.parameters * num_runs)
        else:
            workers = [
                (size.fields, vocabulary, batch_of(size), folder / "rate" / f"{depth}-{number}")
                for number in range(engine.workers)
            ]
            rate = min(engine.map(measured_rate, workers, "ablate: measuring this machine"))
            assert plan.seconds is not None
            possible = plan.seconds * (1 - SCORING_SHARE) * engine.workers * rate / num_runs
        possible = min(possible, MAX_EPOCHS * smallest)
        if best is not None and possible < TOKENS_PER_PARAMETER * size.parameters:
            break
        best = size, max(20, int(possible / batch_of(size))) * batch_of(size)
    assert best is not None
    write_atomic(
        path,
        canonical_json({"depth": best[0].depth, "sequence_length": best[0].sequence_length, "tokens": best[1]}),
    )
    return best


def repetition_notes(arms: Sequence[Arm], trainable: Sequence[int], tokens: int) -> list[str]:
    """How often each arm's text is read, here and in the recipe's own run: a proxy that repeats a source less often
    than the target run decides wrongly (arXiv 2606.07597)."""
    notes = []
    for arm, available in zip(arms, trainable, strict=True):
        here = tokens / available
        target = arm.recipe.train.tokens / available if arm.recipe.train is not None else None
        line = f"{arm.name}: {available:,} training tokens, read {here:.2f} times"
        if target is not None and not 0.5 <= target / here <= 2 and max(here, target) > 1:
            line += f"; the recipe's own run reads them {target:.2f} times, so repetition is not judged as it will be"
        notes.append(line)
    return notes


def verdicts(
    arms: Sequence[Arm],
    held_out: corpora.HeldOut,
    bits: dict[tuple[int, int, float], np.ndarray],
    rates: tuple[float, float],
    seeds: int,
) -> tuple[list[ArmComparison], list[str]]:
    """(a row for each arm and set, notes on sets that are too small). Corrected over all rows."""
    num_bytes = np.array([len(text.encode()) for text in held_out.texts], float)
    chosen = {name: places for name, places in held_out.sets.items() if len(places) >= corpora.MIN_DOCUMENTS}
    notes = [
        f"{name}: {len(places)} documents, too few to score by themselves"
        for name, places in held_out.sets.items()
        if name not in chosen
    ]
    if len(chosen) > 1:
        chosen = {"all held-out documents": tuple(range(len(held_out.texts))), **chosen}
    by_rate: list[list[Effect]] = []
    for rate in rates:
        of_rate: list[Effect] = []
        for places in chosen.values():
            scored = [
                ArmScores(
                    arm.name,
                    np.stack([bits[number, seed, rate][list(places)] for seed in range(seeds)]),
                    num_bytes[list(places)],
                )
                for number, arm in enumerate(arms)
            ]
            of_rate += effects(scored[0], scored[1:])
        by_rate.append(of_rate)
    decisions = decide(by_rate)
    names = [name for name in chosen for _ in arms[1:]]
    rows = [
        ArmComparison(tuned.arm, name, decision, p, tuned, low)
        for name, (decision, p), tuned, low in zip(names, decisions, *by_rate, strict=True)
    ]
    return rows, notes


def baseline_bits(
    held_out: corpora.HeldOut, bits: dict[tuple[int, int, float], np.ndarray], rate: float, seeds: int
) -> dict[str, float]:
    """Set -> bits per byte of the baseline at the tuned rate, over its seeds."""
    num_bytes = np.array([len(text.encode()) for text in held_out.texts], float)
    mean = np.mean([bits[0, seed, rate] for seed in range(seeds)], axis=0)
    sets = {"all held-out documents": tuple(range(len(held_out.texts))), **held_out.sets}
    return {
        name: float(mean[list(places)].sum() / num_bytes[list(places)].sum()) for name, places in sets.items() if places
    }

"""Which mixture of sources to train on: small runs over many mixtures, a law for each validation set, a proposal.

    curate once -> held-out documents of every source and target texts -> one tokenizer and index
    -> tune the rate on the natural mixture -> a run for each mixture -> laws -> the best mixture under caps and floors

All runs share documents, initial weights and order by seed (pipelines/ablate/paired_samples.py). Runs that stand in the
work folder are not trained again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.evaluation.results.mixtures import Proposal, draw_mixtures, propose
from gristmill.foundation.errors import InputError
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.ablate import corpora
from gristmill.pipelines.ablate.arms import Arm, mixed_sources
from gristmill.pipelines.ablate.budget import Budget, choose_size
from gristmill.pipelines.ablate.experiment import Material, Plan, Tasks, prepared, tune
from gristmill.pipelines.ablate.runs import run
from gristmill.pipelines.recipes.config import Recipe
from gristmill.tokenizers.tokenizer import load_tokenizer

RUNS_PER_SOURCE = 5


@dataclass(frozen=True)
class MixPlan:
    """runs: mixtures; None: RUNS_PER_SOURCE for each source. seconds or flops: the budget of all. target_tokens: of the
    run that the mixture is for. max_epochs: how often it may read a source. floors: the least weight of sources."""

    folder: Path
    runs: int | None
    seconds: float | None
    flops: float | None
    target_tokens: int
    max_epochs: float
    floors: dict[str, float]
    targets: tuple[Path, ...] = ()
    documents: int = 200


@dataclass(frozen=True)
class MixResult:
    """names: of the sources. natural: their shares of the tokens. caps: the largest weights that max_epochs allows.
    sets: of held-out texts. mixtures, losses: of the runs."""

    names: list[str]
    natural: np.ndarray
    caps: np.ndarray
    sets: list[str]
    mixtures: np.ndarray
    losses: np.ndarray
    proposal: Proposal


def mix(recipe: Recipe, curated: Path, plan: MixPlan, engine: Engine) -> MixResult:
    """Mixes whole sources, also of a recipe with index.mix. Raises InputError or RecipeError before training for what
    cannot be mixed."""
    recipe = recipe.model_copy(update={"index": recipe.index.model_copy(update={"mix": None})})
    names = mixed_sources(recipe, plan.floors)
    groups = {f"source {name}": list(corpora.read_split(curated, "test", [name])) for name in names}
    groups |= {f"target {path.name}": corpora.target_texts(path) for path in plan.targets}
    held_out = corpora.drawn_groups(groups, plan.documents)
    material = prepared([Arm("sources", recipe)], [curated], plan.folder, held_out, engine)
    tokens = material.tokens(0)
    names = [name for name in names if name in tokens]
    sizes = np.array([tokens[name] for name in names], float)
    natural, caps = sizes / sizes.sum(), np.minimum(1.0, plan.max_epochs * sizes / plan.target_tokens)
    check_caps(names, caps, plan)
    num_runs = plan.runs or RUNS_PER_SOURCE * len(names)
    mixtures = draw_mixtures(natural, num_runs, recipe.seed)
    losses, sets = swarm(material, mixtures, names, plan, engine)
    lowest = np.array([plan.floors.get(name, 0.0) for name in names])
    proposal = propose(mixtures, losses, lowest, caps, recipe.seed)
    return MixResult(names, natural, caps, sets, mixtures, losses, proposal)


def check_caps(names: Sequence[str], caps: np.ndarray, plan: MixPlan) -> None:
    """Raises InputError if the text does not suffice for the run or a floor, and says which sources have how much."""
    if caps.sum() < 1:
        parts = ", ".join(f"{name} at most {cap:.1%}" for name, cap in zip(names, caps, strict=True))
        raise InputError(
            f"{plan.target_tokens:,} tokens at most {plan.max_epochs:g} times each: {parts}, {caps.sum():.1%} in all; "
            "raise --max-epochs, lower --tokens, or add text"
        )
    for name, least in plan.floors.items():
        cap = dict(zip(names, caps.tolist(), strict=True)).get(name, 0.0)
        if least > cap:
            raise InputError(
                f"--floor {name}={least:g}: the text of {name} suffices for a weight of {cap:.3g} "
                f"({plan.target_tokens:,} tokens at most {plan.max_epochs:g} times each); lower the floor, or raise "
                "--max-epochs"
            )


def swarm(
    material: Material, mixtures: np.ndarray, names: Sequence[str], plan: MixPlan, engine: Engine
) -> tuple[np.ndarray, list[str]]:
    """(float64[runs, sets]: bits per byte of each run, names of the sets)."""
    recipe = material.arms[0].recipe
    dataset = read_dataset(material.folders[0] / "index")
    count = len(mixtures)
    arms = [
        Arm(f"mixture{number}", with_weights(recipe, dict(zip(names, weights.tolist(), strict=True))))
        for number, weights in enumerate(mixtures)
    ]
    swarm_material = replace(
        material, arms=arms, folders=material.folders * count, sources=[[s.name for s in dataset.sources]] * count
    )
    budget = Budget(plan.seconds, plan.flops, seeds=1)
    smallest = sum(material.tokens(0).values())
    vocabulary = load_tokenizer(material.tokenizer).vocab_size
    size, tokens = choose_size(budget, -(-count // 2), vocabulary, smallest, engine, material.shared)
    engine.reporter.say(
        f"mix: {count} mixtures: models of {size.parameters / 1e6:.2f}M parameters, {tokens / 1e6:.2f}M tokens each"
    )
    tasks = Tasks(swarm_material, Plan(plan.folder, seeds=1), size, tokens)
    rate, _ = tune(tasks, engine)
    runs = [tasks.of_arm(number, 0, rate) for number in range(count)]
    engine.map(run, runs, "mix: training", unit="runs")
    num_bytes = material.held_out.texts.num_bytes
    sets = {
        name: list(places) for name, places in material.held_out.sets.items() if len(places) >= corpora.MIN_DOCUMENTS
    }
    losses = [
        [np.load(task.scores)[places].sum() / num_bytes[places].sum() for places in sets.values()] for task in runs
    ]
    return np.array(losses), list(sets)


def with_weights(recipe: Recipe, weights: dict[str, float]) -> Recipe:
    """The recipe with these weights of its sources, those of 0 left out of training; without the run it describes."""
    sources = tuple(
        source.model_copy(update={"weight": weights[source.name]})
        for source in recipe.sources
        if source.name in weights
    )
    return recipe.model_copy(update={"sources": sources, "train": None})

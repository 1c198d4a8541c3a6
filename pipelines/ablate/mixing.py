"""Which mixture of sources, or of their cells, to train on: small runs over many mixtures, a law for each validation
set, a proposal.

    curate once -> held-out documents of every source and target texts -> one tokenizer and index
    -> tune the rate on the natural mixture -> a run for each mixture -> laws -> the best mixture under caps and floors
    -> an ablation of the proposal against the natural, the uniform and a tempered mixture

All runs share documents, initial weights and order by seed (pipelines/ablate/paired_samples.py). Runs that stand in the
work folder are not trained again; where a source was added since, they are runs in which it has the weight 0."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.indexed.config import PhaseConfig
from gristmill.data_pipeline.indexed.mix import cell_of
from gristmill.evaluation.results.ablation import Proposal, draw_mixtures, propose
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.ablate import corpora
from gristmill.pipelines.ablate.corpora import Arm, mixed_sources
from gristmill.pipelines.ablate.experiment import AblationResult, Material, Plan, Tasks, decided, prepared, tune
from gristmill.pipelines.ablate.runs import SCORES_NAME, Budget, ProxySize, RescoreTask, choose_size, run, score_again
from gristmill.pipelines.recipes.config import Recipe
from gristmill.tokenizers.tokenizer import load_tokenizer

RUNS_PER_SOURCE = 5  # of a source, or of a cell of index.mix
SWARM_NAME = "swarm.json"
TEMPERED = 0.3  # exponent of the shares in the tempered mixture (mT5: Xue et al. 2021, arXiv 2010.11934, section 3.2)
LEAST_WEIGHT = 1e-4  # in a recipe, where 0 would say that the source is not wanted


@dataclass(frozen=True)
class MixPlan:
    """runs: mixtures; None: RUNS_PER_SOURCE for each source. seconds or flops: the budget of all. target_tokens: of the
    run that the mixture is for. max_epochs: how often it may read a source. floors: the least weight of sources.
    targets: texts that the model should be good at. documents: held out of each source, at most."""

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
    """names: of the sources, or of their cells. natural: their shares of the tokens. caps: the largest weights that
    max_epochs allows. sets: of held-out texts. mixtures, losses: of the runs. material: what they read."""

    names: list[str]
    natural: np.ndarray
    caps: np.ndarray
    sets: list[str]
    mixtures: np.ndarray
    losses: np.ndarray
    proposal: Proposal
    material: Material


def mix(recipe: Recipe, curated: Path, plan: MixPlan, engine: Engine) -> MixResult:
    """Raises InputError or RecipeError before training for what cannot be mixed."""
    swarm_data = gathered(recipe, curated, plan, engine)
    material, names = swarm_data.material, swarm_data.names
    tokens = material.tokens(0)
    sizes = np.array([tokens[name] for name in names], float)
    natural, caps = sizes / sizes.sum(), np.minimum(1.0, plan.max_epochs * sizes / plan.target_tokens)
    check_caps(names, caps, plan)
    mixtures, losses, sets = swarm(swarm_data, natural, plan, engine)
    lowest = np.array([plan.floors.get(name, 0.0) for name in names])
    proposal = propose(mixtures, losses, lowest, caps, recipe.seed)
    return MixResult(names, natural, caps, sets, mixtures, losses, proposal, material)


@dataclass(frozen=True)
class SwarmData:
    """names: of what is mixed. former: the swarm in the work folder, None if there is none or its data differ."""

    names: list[str]
    material: Material
    former: "FormerSwarm | None"


@dataclass(frozen=True)
class FormerSwarm:
    """Runs of an earlier command. names: of what they mixed. data: name of a source -> fingerprint of its documents'
    settings. folders, weights: of each run."""

    names: list[str]
    data: dict[str, str]
    tokenizer: Path
    size: ProxySize
    tokens: int
    rate: float
    folders: list[Path]
    weights: list[list[float]]

    def mixtures(self, names: Sequence[str]) -> np.ndarray:
        """float64[runs, names]: what a run had none of has the weight 0."""
        mixtures = np.zeros((len(self.weights), len(names)))
        mixtures[:, [names.index(name) for name in self.names]] = np.array(self.weights).reshape(-1, len(self.names))
        return mixtures


def gathered(recipe: Recipe, curated: Path, plan: MixPlan, engine: Engine) -> SwarmData:
    """Held-out texts, training text and index, with the tokenizer of the former swarm if its sources are still here."""
    names = mixed_sources(recipe, plan.floors)
    groups = {f"source {name}": list(corpora.read_split(curated, "test", [name])) for name in names}
    groups |= {f"target {path.name}": corpora.target_texts(path) for path in plan.targets}
    held_out = corpora.drawn_groups(groups, plan.documents)
    data = data_of(recipe, plan)
    former = former_swarm(plan.folder)
    if former is not None and not former.data.items() <= data.items():
        changed = ", ".join(sorted(name for name in former.data if former.data[name] != data.get(name)))
        engine.reporter.info(f"mix: the runs in {plan.folder / SWARM_NAME} are not reused: changed since: {changed}")
        former = None
    tokenizer = None if former is None else former.tokenizer
    material = prepared([Arm("sources", recipe)], [curated], plan.folder, held_out, engine, tokenizer)
    tokens = material.tokens(0)
    names = [name for name in material.sources[0] if tokens.get(name)]
    if former is not None and (gone := sorted(set(former.names) - set(names))):
        engine.reporter.info(f"mix: the runs in {plan.folder / SWARM_NAME} are not reused: no text left of {gone[0]}")
        former = None
    if others := sorted(plan.floors.keys() - set(names)):
        raise InputError(f"--floor {others[0]}: no training text has this name; there are {', '.join(names)}")
    return SwarmData(names, material, former)


def data_of(recipe: Recipe, plan: MixPlan) -> dict[str, str]:
    """Source -> fingerprint of all in the recipe that decides its documents and their cells; and of the budget, which
    decides the models."""
    common = [recipe.seed, recipe.curate.model_dump(mode="json")]
    common += [] if recipe.index.mix is None else [recipe.index.mix.cells()]
    budget = {"--budget": fingerprint([plan.seconds, plan.flops])}
    return budget | {
        source.name: fingerprint([*common, source.model_dump(mode="json", exclude={"weight"})])
        for source in recipe.sources
        if source.held_out is None
    }


def former_swarm(folder: Path) -> FormerSwarm | None:
    """Raises InputError if the file is damaged."""
    path = folder / SWARM_NAME
    if not path.is_file():
        return None
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        stored["size"] = ProxySize(**stored["size"])
        stored["tokenizer"] = folder / stored["tokenizer"]
        stored["folders"] = [folder / name for name in stored["folders"]]
        for inside in (stored["tokenizer"], *stored["folders"]):
            if not inside.resolve().is_relative_to(folder.resolve()) or not inside.is_dir():
                raise ValueError(f"{inside} is no folder of a run here")
        return FormerSwarm(**stored)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); remove it, and train anew") from error


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
    data: SwarmData, natural: np.ndarray, plan: MixPlan, engine: Engine
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(float64[runs, names]: the mixtures; float64[runs, sets]: bits per byte of each run; names of the sets).

    The runs of a former swarm come first, scored on the present texts; new ones have its size, length and rate."""
    names, material, former = data.names, data.material, data.former
    recipe = material.arms[0].recipe
    needed = plan.runs or RUNS_PER_SOURCE * len(names)
    reused = [] if former is None else former.folders
    added = len(set(names) - set(former.names)) if former is not None else 0
    count = max(needed - len(reused), RUNS_PER_SOURCE * added, 0)
    known = 2 if former is not None and not added else 0  # the natural and the uniform mixture come first
    mixtures = draw_mixtures(natural, known + count, recipe.seed + len(reused))[known:].reshape(count, len(names))
    named = {f"mixture{len(reused) + number}": weights for number, weights in enumerate(mixtures)}
    if former is None:
        size, tokens = size_of(material, count, plan, engine)
    else:
        size, tokens = former.size, former.tokens
        mixtures = np.concatenate([former.mixtures(names), mixtures])
    engine.reporter.info(
        f"mix: {len(mixtures)} mixtures, {len(reused)} of them trained before: models of {size.parameters / 1e6:.2f}M "
        f"parameters, {tokens / 1e6:.2f}M tokens each"
    )
    tasks = Tasks(with_mixtures(material, named, names), Plan(plan.folder, seeds=1), size, tokens)
    rate = former.rate if former is not None else tune(tasks, engine)[0]
    runs = [tasks.of_arm(number, 0, rate) for number in range(count)]
    engine.map(run, runs, "mix: training", unit="runs")
    scores = scored_again(material, reused, engine) + [task.scores for task in runs]
    folders = [*reused, *(task.folder for task in runs)]
    write_swarm(plan, data, tasks, rate, dict(zip(folders, mixtures, strict=True)))
    return mixtures, *losses_by_set(material, scores)


def scored_again(material: Material, folders: Sequence[Path], engine: Engine) -> list[Path]:
    """The file with the bits of the material's held-out texts for each run, which others scored if its data did."""
    tasks = [
        RescoreTask(
            folder,
            material.tokenizer,
            material.held_out.texts,
            folder / SCORES_NAME
            if folder.is_relative_to(material.shared)
            else material.shared / "scores" / f"{folder.parent.parent.name}-{folder.name}.npy",
        )
        for folder in folders
    ]
    engine.map(score_again, tasks, "mix: scoring former runs", unit="runs")
    return [task.path for task in tasks]


def size_of(material: Material, count: int, plan: MixPlan, engine: Engine) -> tuple[ProxySize, int]:
    """The model of each of `count` runs and its tokens, within the budget."""
    budget = Budget(plan.seconds, plan.flops, seeds=1)
    vocabulary = load_tokenizer(material.tokenizer).vocab_size
    return choose_size(budget, -(-count // 2), vocabulary, sum(material.tokens(0).values()), engine, material.shared)


def with_mixtures(material: Material, mixtures: dict[str, np.ndarray], names: Sequence[str]) -> Material:
    """The material with an arm for each mixture of the same documents. mixtures: name of the arm -> weights."""
    recipe, count = material.arms[0].recipe, len(mixtures)
    arms = [
        Arm(
            name,
            with_weights(recipe, dict(zip(names, weights.tolist(), strict=True))),
            ", ".join(f"{part} {weight:.3f}" for part, weight in zip(names, weights, strict=True)),
        )
        for name, weights in mixtures.items()
    ]
    return replace(material, arms=arms, folders=material.folders * count, sources=material.sources * count)


def losses_by_set(material: Material, scores: Sequence[Path]) -> tuple[np.ndarray, list[str]]:
    """(float64[runs, sets]: bits per byte, names of the sets that are large enough). scores: a file for each run."""
    num_bytes = material.held_out.texts.num_bytes
    sets = {
        name: list(places) for name, places in material.held_out.sets.items() if len(places) >= corpora.MIN_DOCUMENTS
    }
    losses = [[np.load(path)[places].sum() / num_bytes[places].sum() for places in sets.values()] for path in scores]
    return np.array(losses), list(sets)


def write_swarm(plan: MixPlan, data: SwarmData, tasks: Tasks, rate: float, mixtures: dict[Path, np.ndarray]) -> None:
    """Writes swarm.json, by which a later command reuses the runs; see FormerSwarm. mixtures: by folder of a run."""
    content = {
        "names": data.names,
        "data": data_of(data.material.arms[0].recipe, plan),
        "tokenizer": str(data.material.tokenizer.relative_to(plan.folder)),
        "size": asdict(tasks.size),
        "tokens": tasks.tokens,
        "rate": rate,
        "folders": [str(path.relative_to(plan.folder)) for path in mixtures],
        "weights": [weights.tolist() for weights in mixtures.values()],
    }
    write_atomic(plan.folder / SWARM_NAME, canonical_json(content) + b"\n")


def confirm(result: MixResult, plan: Plan, engine: Engine) -> AblationResult:
    """An ablation of the proposal, the uniform and the tempered mixture against the natural one by the mean over the
    held-out sets, as the proposal was chosen. It trains anew: with other models, several seeds and two learning
    rates."""
    tempered = result.natural**TEMPERED
    mixtures = {
        "natural": result.natural,
        "proposed": result.proposal.weights,
        "uniform": np.full(len(result.names), 1 / len(result.names)),
        "tempered": tempered / tempered.sum(),
    }
    held_out = result.material.held_out.as_one(f"mean of {len(result.sets)} sets")
    material = with_mixtures(result.material, mixtures, result.names)
    return decided(replace(material, held_out=held_out), plan, engine)


def with_weights(recipe: Recipe, weights: dict[str, float]) -> Recipe:
    """The recipe with these weights of its sources or cells from the first token on, without the run it describes."""
    drawn = {name: weight for name, weight in weights.items() if weight > 0}
    index = recipe.index.model_copy(update={"phases": (PhaseConfig(from_tokens=0, weights=drawn),), "mix": None})
    return recipe.model_copy(update={"index": index, "train": None})


def mixed_fields(result: MixResult) -> tuple[dict[str, float], dict[str, float]]:
    """(weights of the sources, factors of cells for index.mix.repeats; none without cells): what the proposal is in a
    recipe."""
    sources: dict[str, float] = {}
    repeats: dict[str, float] = {}
    tokens = result.material.tokens(0)
    for name, weight in zip(result.names, result.proposal.weights.tolist(), strict=True):
        cell = cell_of(name)
        sources[cell.source] = sources.get(cell.source, 0.0) + weight
        repeats[name] = max(LEAST_WEIGHT, round(weight / tokens[name] * sum(tokens.values()), 4))
    weights = {name: max(LEAST_WEIGHT, round(weight, 4)) for name, weight in sources.items()}
    return weights, {} if result.material.arms[0].recipe.index.mix is None else repeats

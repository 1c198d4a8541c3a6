"""An ablation from end to end: curate the arms, share what is equal, train, score, decide.

    curate each arm -> one held-out set, taken out of every arm -> one tokenizer -> an index for each arm
    -> tune the learning rate on the baseline -> arms x seeds x two rates -> effects and verdicts

Every step writes files under the work folder and is skipped where they stand, so the same command goes on after a
stop."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.mix import cell_of, mix_repeats
from gristmill.evaluation.results.ablation import MIN_SEEDS
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.fingerprint import canonical_json, fingerprint
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.ablate import corpora
from gristmill.pipelines.ablate.compare_arms import (
    ArmComparison,
    Bits,
    DifferingDocument,
    baseline_bits,
    compare_arms,
    differing_documents,
)
from gristmill.pipelines.ablate.corpora import Arm, missing_sources
from gristmill.pipelines.ablate.paired_samples import KEYS_FOLDER, DocumentDraw
from gristmill.pipelines.ablate.runs import (
    COOLDOWN_SHARE,
    LOW_RATE,
    RATES,
    TUNING_SHARE,
    WARMUP_SHARE,
    Budget,
    ProxySize,
    RunTask,
    choose_size,
    run,
)
from gristmill.tokenizers.tokenizer import MODEL_NAME, load_tokenizer

DECAYING = {"shape": "linear", "warmup_share": WARMUP_SHARE, "final_ratio": 0.0}
NOT_DECAYING = {"shape": "constant", "warmup_share": WARMUP_SHARE}
TRUNK = -1  # the number of the arm under which the runs that all arms go on from are kept


@dataclass(frozen=True)
class Plan:
    """seeds: models of each arm and rate, counted from first_seed. seconds or flops: the budget of all runs. documents:
    held out of each arm, at most. targets: files of texts that the user wants to be good at. questions: task -> pairs
    of context and right answer. cooldown: the arms differ in the last COOLDOWN_SHARE of a run alone.
    targets_alone: the arms' own held-out documents are not scored."""

    folder: Path
    seeds: int = 5
    first_seed: int = 0
    seconds: float | None = 1800.0
    flops: float | None = None
    documents: int = 400
    targets: tuple[Path, ...] = ()
    questions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    cooldown: bool = False
    targets_alone: bool = False

    @property
    def budget(self) -> Budget:
        return Budget(self.seconds, self.flops, self.seeds, self.cooldown)


@dataclass(frozen=True)
class AblationResult:
    """rates: the tuned learning rate and a tenth of it. notes: what a reader of the verdicts must know. flops: of all
    runs together, 6 N D each; cpu_seconds: with scoring. bits: of every held-out text under every model."""

    arms: list[Arm]
    rows: list[ArmComparison]
    size: ProxySize
    tokens: int
    rates: tuple[float, float]
    plan: Plan
    notes: list[str]
    curves: dict[str, list[np.ndarray]]
    baseline_bits: dict[str, float]
    documents: list[DifferingDocument]
    flops: float
    cpu_seconds: float
    held_out: corpora.HeldOut
    bits: Bits


@dataclass(frozen=True)
class Material:
    """Data of the runs of an experiment. folders: of the arms' documents, keys and index. sources: of each arm, those
    with training text. shared: the folder of all that belongs to these arms and held-out texts."""

    arms: list[Arm]
    shared: Path
    folders: list[Path]
    sources: list[list[str]]
    held_out: corpora.HeldOut

    @property
    def tokenizer(self) -> Path:
        return self.shared / "tokenizer"

    def tokens(self, arm: int) -> dict[str, int]:
        """Source -> training tokens."""
        dataset = read_dataset(self.folders[arm] / "index")
        return {source.name: source.splits["train"].tokens for source in dataset.sources}

    def repetitions(self, arm: int) -> dict[str, float]:
        """Source -> how often the recipe's own run reads it; those that it reads more than once."""
        recipe, tokens = self.arms[arm].recipe, self.tokens(arm)
        if recipe.train is None:
            return {}
        if recipe.index.mix is not None:
            cells = {cell_of(name): count for name, count in tokens.items()}
            table = mix_repeats(cells, recipe.source_weights, recipe.index.mix, recipe.train.tokens)
            return {row.cell.name: row.times for row in table if row.times > 1}
        given = {
            name: weight for name, weight in recipe.source_weights.items() if weight is not None and name in tokens
        }
        # sources without weights are drawn by their size
        weights = given if len(given) == len(tokens) else {name: float(size) for name, size in tokens.items()}
        total = sum(weights.values())
        repetitions = {
            name: recipe.train.tokens * weights[name] / total / tokens[name] for name in tokens if tokens[name]
        }
        return {name: times for name, times in repetitions.items() if times > 1}


def experiment(arms: Sequence[Arm], curated: Sequence[Path], plan: Plan, engine: Engine) -> AblationResult:
    """curated: the corpus folder of each arm. Raises InputError or RecipeError before training for what cannot be
    compared."""
    check_seeds(plan.seeds)
    for note in missing_sources(arms):
        engine.reporter.info(f"ablate: {note}")
    return decided(gather(arms, curated, plan, engine), plan, engine)


def check_seeds(seeds: int) -> None:
    if seeds < MIN_SEEDS:
        raise RecipeError(f"--seeds {seeds}: at least {MIN_SEEDS} are needed to know how much seeds matter")


def decided(material: Material, plan: Plan, engine: Engine) -> AblationResult:
    """Trains the arms of the material, scores and decides."""
    arms = material.arms
    vocabulary = load_tokenizer(material.tokenizer).vocab_size
    trainable = [sum(material.tokens(arm).values()) for arm in range(len(arms))]
    size, tokens = choose_size(plan.budget, len(arms), vocabulary, min(trainable), engine, material.shared)
    engine.reporter.info(
        f"ablate: {len(arms)} arms x {plan.seeds} seeds x 2 learning rates: models of {size.parameters / 1e6:.2f}M "
        f"parameters, {tokens / 1e6:.2f}M tokens each"
    )
    tasks = Tasks(material, plan, size, tokens)
    tuned, notes = tune(tasks, engine)
    rates = (tuned, tuned * LOW_RATE)
    if plan.cooldown:
        trunks = [tasks.trunk(seed, rate) for rate in rates for seed in range(plan.seeds)]
        engine.map(run, trunks, "ablate: training what the arms share", unit="runs")
    runs = {
        (arm, seed, rate): tasks.of_arm(arm, seed, rate)
        for rate in rates
        for seed in range(plan.seeds)
        for arm in range(len(arms))
    }
    engine.map(run, list(runs.values()), "ablate: training", unit="runs")
    bits = {place: np.load(task.scores) for place, task in runs.items()}
    names = [arm.name for arm in arms]
    rows, left_out = compare_arms(names, material.held_out, bits, rates, plan.seeds)
    return AblationResult(
        arms=list(arms),
        rows=rows,
        size=size,
        tokens=tokens,
        rates=rates,
        plan=plan,
        notes=[*missing_sources(arms), *repetition_notes(material, trainable, tokens), *notes, *left_out],
        curves={
            arm.name: [np.load(runs[number, seed, tuned].curve) for seed in range(plan.seeds)]
            for number, arm in enumerate(arms)
        },
        baseline_bits=baseline_bits(material.held_out, bits, tuned, plan.seeds),
        documents=differing_documents(names, material.held_out, bits, tuned, plan.seeds),
        flops=6.0 * size.parameters * tokens * plan.budget.num_runs(len(arms)),
        cpu_seconds=sum(task.seconds for task in tasks.made),
        held_out=material.held_out,
        bits=bits,
    )


def gather(arms: Sequence[Arm], curated: Sequence[Path], plan: Plan, engine: Engine) -> Material:
    """Held-out texts of the arms, and what their runs read."""
    held_out = corpora.hold_out(arms, curated, plan.targets, plan.documents, plan.targets_alone)
    held_out = held_out.with_tasks(plan.questions)
    return prepared(arms, curated, plan.folder, held_out, engine)


def prepared(
    arms: Sequence[Arm],
    curated: Sequence[Path],
    folder: Path,
    held_out: corpora.HeldOut,
    engine: Engine,
    tokenizer: Path | None = None,
) -> Material:
    """Each arm's training text without copies of held-out texts, one tokenizer (`tokenizer`, else a new one) and the
    arms' indexes."""
    identity = fingerprint(
        [
            [list(held_out.texts.texts), list(held_out.texts.contexts)],
            [arm.recipe.model_dump(mode="json", include={"sources", "curate", "seed"}) for arm in arms],
            *[[arm.name, mix.cells()] for arm in arms if (mix := arm.recipe.index.mix) is not None],
        ]
    )
    shared = shared_folder(folder, identity, tokenizer)
    sources: list[list[str]] = []
    for arm, corpus in zip(arms, curated, strict=True):
        names = [source.name for source in arm.recipe.sources if source.held_out is None]
        mix = arm.recipe.index.mix
        copies = corpora.write_without_copies(corpus, names, held_out, shared / arm.name, mix)
        engine.reporter.info(f"ablate: {arm.name}: {copies} copies of held-out documents taken out of training")
        sources.append(corpora.sources_with_text(shared / arm.name, names))
        if not sources[-1]:
            raise InputError(f"{arm.name}: no training text is left; its recipe keeps nothing")
    folders = [shared / arm.name for arm in arms]
    seed = arms[0].recipe.seed
    if tokenizer is not None and tokenizer != shared / "tokenizer":
        shutil.copytree(tokenizer, shared / "tokenizer", dirs_exist_ok=True)
    corpora.train_tokenizer(folders, sources, seed, shared / "tokenizer", engine)
    for arm_folder, names in zip(folders, sources, strict=True):
        corpora.write_index(arm_folder, names, shared / "tokenizer", seed, engine)
    return Material(list(arms), shared, folders, sources, held_out)


def shared_folder(folder: Path, identity: str, tokenizer: Path | None) -> Path:
    """A folder for the identity, in which no other tokenizer stands than the one that is given."""
    shared = folder / f"shared-{identity[:12]}"
    there = shared / "tokenizer" / MODEL_NAME
    if tokenizer is None or not there.is_file():
        return shared
    given = (tokenizer / MODEL_NAME).read_bytes()
    if there.read_bytes() == given:
        return shared
    return folder / f"shared-{fingerprint([identity, hashlib.sha256(given).hexdigest()])[:12]}"


class Tasks:
    """The runs of an experiment. Under one seed all arms begin with the same weights and draw documents in the same
    order; the seeds draw documents of their own as far as there are enough. made: every task so far."""

    def __init__(self, material: Material, plan: Plan, size: ProxySize, tokens: int):
        self.material, self.plan, self.size, self.tokens = material, plan, size, tokens
        self.made: list[RunTask] = []
        self._texts_digest = hashlib.sha256(
            canonical_json([list(material.held_out.texts.texts), list(material.held_out.texts.contexts)])
        ).hexdigest()
        trunk_steps = round(tokens * (1 - COOLDOWN_SHARE) / size.batch_tokens)
        self._trunk_tokens = trunk_steps * size.batch_tokens

    def trial(self, rate: float) -> RunTask:
        """A short run on the baseline."""
        batch = self.size.batch_tokens
        tokens = max(batch * 10, int(self.tokens * TUNING_SHARE) // batch * batch)
        return self._task(0, self._draw(0, 0, tokens), rate, DECAYING)

    def trunk(self, seed: int, rate: float) -> RunTask:
        """The part of a run that all arms share, on the baseline's documents."""
        draw = self._draw(0, seed, self._trunk_tokens)
        return self._task(TRUNK, draw, rate, NOT_DECAYING)

    def of_arm(self, arm: int, seed: int, rate: float) -> RunTask:
        if not self.plan.cooldown:
            return self._task(arm, self._draw(arm, seed, self.tokens), rate, DECAYING)
        trunk = self.trunk(seed, rate)
        draw = self._draw(arm, seed, self.tokens - self._trunk_tokens)
        behind = draw.place + (1 - COOLDOWN_SHARE) * draw.share
        return self._task(arm, replace(draw, place=behind), rate, DECAYING, trunk.folder)

    def _draw(self, arm: int, seed: int, tokens: int) -> DocumentDraw:
        return DocumentDraw(
            self.plan.first_seed + seed,
            seed / self.plan.seeds,
            1 / self.plan.seeds,
            tokens,
            self.material.repetitions(arm),
        )

    def _task(
        self, arm: int, draw: DocumentDraw, rate: float, schedule: dict[str, Any], init_from: Path | None = None
    ) -> RunTask:
        number, name = max(arm, 0), "shared" if arm == TRUNK else self.material.arms[arm].name
        recipe, folder = self.material.arms[number].recipe, self.material.folders[number]
        key = fingerprint(
            [
                name,
                recipe.source_weights,
                self.size.fields,
                self.size.batch_tokens,
                asdict(draw),
                rate,
                schedule,
                None if init_from is None else init_from.name,
                self._texts_digest,
                *([] if recipe.index.mix is None else [recipe.index.mix.model_dump(mode="json")]),
                *(phase.model_dump(mode="json") for phase in recipe.index.phases),
            ]
        )
        name = f"{name}-seed{draw.seed}-rate{rate:g}-{key[:8]}"
        task = RunTask(
            name,
            with_sources(self.material.arms[number], self.material.sources[number]),
            folder / "index",
            folder / KEYS_FOLDER,
            self.material.tokenizer,
            self.material.shared / "runs" / name,
            self.size.fields,
            self.size.batch_tokens,
            rate,
            schedule,
            draw,
            init_from,
            None if arm == TRUNK else self.material.held_out.texts,
        )
        if task not in self.made:
            self.made.append(task)
        return task


def tune(tasks: Tasks, engine: Engine) -> tuple[float, list[str]]:
    """(the best of RATES on the baseline, a note where it is the lowest)."""
    trials = [tasks.trial(rate) for rate in RATES]
    engine.map(run, trials, "ablate: tuning the learning rate", unit="runs")
    documents = list(tasks.material.held_out.documents)
    tuned = RATES[int(np.argmin([np.load(trial.scores)[documents].sum() for trial in trials]))]
    if tuned == RATES[0]:
        return tuned, [f"the best learning rate, {tuned:g}, is the lowest of those tried"]
    return tuned, []


def with_sources(arm: Arm, names: Sequence[str]) -> Any:
    """The arm's recipe with the sources that have training text."""
    with_text = {cell_of(name).source for name in names}
    kept = tuple(source for source in arm.recipe.sources if source.name in with_text)
    index = arm.recipe.index.model_copy(update={"languages": None})
    return arm.recipe.model_copy(update={"sources": kept, "index": index})


def repetition_notes(material: Material, trainable: Sequence[int], tokens: int) -> list[str]:
    """How often each arm's text is read here, and which sources are subsampled so that they repeat as often as in the
    recipe's own run (a proxy that repeats a source less often decides wrongly: arXiv 2606.07597)."""
    notes = []
    for number, (arm, available) in enumerate(zip(material.arms, trainable, strict=True)):
        line = f"{arm.name}: {available:,} training tokens, a run reads {tokens / available:.2f} times as many"
        repetitions = material.repetitions(number)
        for name, times in sorted(repetitions.items()):
            line += f"; source {name}: so few documents that each is read {times:.2f} times, as in the recipe's own run"
        if arm.recipe.train is not None and not repetitions and tokens > available:
            line += "; the recipe's own run reads each once at most, so repetition is not judged as it will be"
        notes.append(line)
    return notes

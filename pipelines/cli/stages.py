"""The commands that run, plan and check the stages of a recipe."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import is_address
from gristmill.foundation.manifest import LOG_FOLDER, MANIFEST_NAME, read_manifest
from gristmill.foundation.progress import Reporter, print_block
from gristmill.foundation.runtime.tasks.local import LocalEngine
from gristmill.foundation.startup import DeferredModule, torchrun_variable
from gristmill.pipelines.cli.checkpoint import EvaluatedModel, TaskOptions, evaluate_checkpoint
from gristmill.pipelines.cli.options import (
    EngineOptions,
    RecipeArgument,
    SetOption,
    StageOptions,
    UpdateLockOption,
    WorkdirOption,
    make_runner,
    run_stage,
    selected_stages,
    with_option_groups,
    workdir_of,
)
from gristmill.pipelines.provenance.verify import manifest_folder, plan_folder, verify_address
from gristmill.pipelines.provenance.verify import reproduce as reproduce_stage
from gristmill.pipelines.provenance.verify import verify as verify_folder
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe, validate
from gristmill.pipelines.recipes.schema import recipe_schema
from gristmill.pipelines.stages.index import estimated_mix, indexed_mix
from gristmill.pipelines.stages.preflight import check_workdir, estimated_tokens, is_complete, preflight, raise_issues
from gristmill.pipelines.stages.runner import Runner
from gristmill.pipelines.stages.stage_list import STAGES, stages_of, with_report
from gristmill.pipelines.workdir.raw_files import lock_raw_files
from gristmill.pipelines.workdir.remote import RemoteWork, fetched
from gristmill.training.config.layers import MAX_PROCESSES
from gristmill.training.planner.noise_scale import batch_advice

rich_table = DeferredModule("rich.table")  # for `plan` alone


@with_option_groups
def run(
    recipe: RecipeArgument,
    stage: StageOptions,
    to: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    update_lock: UpdateLockOption = False,
) -> None:
    """Run all stages that are not complete, in order."""
    loaded = load_recipe(recipe, stage.set_ or [])
    stages, skip_reason = selected_stages(loaded, to)
    runner = make_runner(loaded, stages, stage, update_lock)
    if skip_reason:
        runner.reporter.info(skip_reason)
    runner.run()
    done = [stage.name for stage in stages]
    if "evaluate" in done and runner.rank == 0:
        table = runner.workdir / "evaluate" / "table.md"
        print(table.read_text("utf-8"))
    if "report" in done and runner.rank == 0:
        _print_report(runner.workdir / "report")


@with_option_groups
def tokenizer(recipe: RecipeArgument, stage: StageOptions, update_lock: UpdateLockOption = False) -> None:
    """Run only the stage tokenizer; its input stages must be complete."""
    run_stage("tokenizer", recipe, stage, update_lock)


@with_option_groups
def index(recipe: RecipeArgument, stage: StageOptions, update_lock: UpdateLockOption = False) -> None:
    """Run only the stage index; its input stages must be complete."""
    run_stage("index", recipe, stage, update_lock)


@with_option_groups
def curate(
    recipe: RecipeArgument,
    stage: StageOptions,
    update_lock: UpdateLockOption = False,
    add: Annotated[
        bool, typer.Option("--add", help="Accept new raw files; only what they touch is computed again.")
    ] = False,
) -> None:
    """Run only the stage curate: raw files to a corpus."""
    run_stage("curate", recipe, stage, update_lock or ("added" if add else False))


@with_option_groups
def report(recipe: RecipeArgument, stage: StageOptions, update_lock: UpdateLockOption = False) -> None:
    """Write the report on the stages that are complete: curation alone, training, or all of them."""
    loaded = load_recipe(recipe, stage.set_ or [])
    folder = workdir_of(loaded, stage.workdir)
    check_workdir(folder)
    if RemoteWork.of_mirror(folder) is not None:
        fetched(folder)
    stages = [candidate for candidate in stages_of(loaded) if candidate.name != "report"]
    complete = [
        number for number, candidate in enumerate(stages) if (folder / candidate.name / MANIFEST_NAME).is_file()
    ]
    if not complete:
        raise InputError(f"{folder}: no stage is complete; `gristmill run {recipe}` runs them and writes the report")
    runner = make_runner(loaded, with_report(stages[: complete[-1] + 1]), stage, update_lock, "report")
    runner.run(only="report")
    _print_report(runner.folder(runner.stages[-1]))


def _print_report(folder: Path) -> None:
    """The page that is the same in every run, and the one with time and cost if there was training."""
    print(f"report: {folder / 'report.html'}")
    timed = folder / LOG_FOLDER / "report.html"
    if timed.is_file():
        print(f"with time and cost: {timed}")


@with_option_groups
def train(
    recipe: RecipeArgument,
    stage: StageOptions,
    profile: Annotated[
        str, typer.Option(metavar="STEPS", help="Write Chrome traces of these steps to train/logs: 10,11")
    ] = "",
) -> None:
    """Run only the stage train; its input stages must be complete."""
    steps = [f"train.monitoring.profile_steps=[{profile}]"] if profile else []
    run_stage("train", recipe, replace(stage, set_=[*(stage.set_ or []), *steps]))


@with_option_groups
def evaluate(
    stage: StageOptions,
    model: EvaluatedModel,
    tasks: TaskOptions,
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="Run its stage evaluate.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Results (default: work/evaluate).")] = None,
) -> None:
    """Run only the stage evaluate of a recipe, or evaluate a checkpoint without a recipe."""
    if (recipe is None) == (model.checkpoint is None):
        raise RecipeError("give a RECIPE, or --checkpoint DIR with --tasks a,b")
    if recipe is not None:
        run_stage("evaluate", recipe, stage)
        return
    evaluate_checkpoint(model, tasks, output)


def plan(recipe: RecipeArgument, workdir: WorkdirOption = None, set_: SetOption = None) -> None:
    """Show which stages would run or be skipped, and why. Writes nothing."""
    loaded = load_recipe(recipe, set_ or [])
    stages, skip_reason = selected_stages(loaded, None)
    reporter = Reporter.to_terminal()
    table = rich_table.Table("stage", "action", "reason", "fingerprint")
    with plan_folder(workdir_of(loaded, workdir)) as folder:
        lock = lock_raw_files(loaded, folder, LocalEngine(1, reporter), write=False)
        for planned in Runner(loaded, folder, stages, lock, reporter).plan():
            table.add_row(planned.stage.name, planned.action, "\n".join(planned.reasons), planned.fingerprint[:12])
        advice = _batch_advice(folder / "train" / "metrics.jsonl", loaded)
    print_block(table)
    if loaded.index.mix is not None:
        print_mix(loaded, workdir_of(loaded, workdir))
    if advice is not None:
        print(f"train, by the run in this folder: {advice}")
    if skip_reason:
        print(skip_reason)


def print_mix(recipe: Recipe, workdir: Path) -> None:
    """The cells of index.mix, how many tokens they have and how often the run reads them."""
    index = next(stage for stage in STAGES if stage.name == "index")
    if is_complete(index, recipe, workdir):
        table = indexed_mix(recipe, workdir / "index")
    elif all((tokens := estimated_tokens(recipe)).values()):
        table = estimated_mix(recipe, tokens)
    else:
        print("mix: the size of the sources is not known before the stage index")
        return
    print(f"mix, {'as indexed' if table.is_exact else 'estimated from the raw files, before curation'}:")
    for row in table.rows:
        print(f"  {row.line}")


def _batch_advice(metrics: Path, recipe: Recipe) -> str | None:
    """The recipe's batch beside the noise scale that the run of the folder measured."""
    if recipe.train is None or not metrics.is_file():
        return None
    try:
        lines = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
        return batch_advice(lines, recipe.train.batch_tokens)
    except (ValueError, TypeError) as error:
        return f"{metrics}: no metrics of a run ({error}); `gristmill verify` tells what else is damaged"


def check(
    recipe: RecipeArgument,
    workdir: WorkdirOption = None,
    set_: SetOption = None,
    to: Annotated[str | None, typer.Option(help="The last stage to check.")] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_PROCESSES, help="World size under torchrun (default: the layout's)."),
    ] = None,
) -> None:
    """Report all errors in a recipe that can be found before any work. Writes nothing; `run` checks the same."""
    loaded = load_recipe(recipe, set_ or [])
    stages, skip_reason = selected_stages(loaded, to)
    layout_size = 1
    if loaded.train is not None and not (loaded.train.layout.auto or loaded.train.layout.starts_processes):
        layout_size = loaded.train.layout.world_size
    world_size = processes or torchrun_variable("WORLD_SIZE", 0) or layout_size
    check_workdir(workdir_of(loaded, workdir), stages)
    findings = preflight(loaded, stages, world_size)
    for finding in findings:
        if finding.error is None:
            print(f"warning: {finding.text}")
    raise_issues(findings)
    print(f"recipe {loaded.name}: no errors found; checked {', '.join(stage.name for stage in stages)}")
    if world_size > 1 and "train" in [stage.name for stage in stages]:
        print(f"train needs {world_size} processes: torchrun --nproc-per-node N, with {world_size} over all nodes")
    if skip_reason:
        print(skip_reason)


# The commands that compare a work folder with its manifests: `verify` and `reproduce`.


def verify(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="A stage's folder or a work folder, or the address of one.")
    ],
) -> None:
    """Compare files, fingerprints and links with the manifests. Exit code 1 if any differ."""
    verification = verify_address(folder) if is_address(folder) else verify_folder(Path(folder))
    for line in verification.lines:
        print(line)
    if verification.wrong:
        raise InputError("\n".join(verification.wrong))


@with_option_groups
def reproduce(
    manifest: Annotated[
        str, typer.Argument(metavar="MANIFEST", help="A stage's manifest.json or its folder, or the address of one.")
    ],
    engine: EngineOptions,
    workdir: Annotated[
        Path | None, typer.Option(help="Where to rebuild it (default: work/reproduce-FINGERPRINT).")
    ] = None,
) -> None:
    """Rebuild a stage from its manifest and report whether every byte is identical."""
    with manifest_folder(manifest) as folder:
        _reproduce(folder, engine, workdir)


def _reproduce(folder: Path, engine: EngineOptions, workdir: Path | None) -> None:
    original = read_manifest(folder)
    stages = stages_of(validate(original.origin["recipe"], str(folder / MANIFEST_NAME)))
    target = workdir or Path("work") / f"reproduce-{original.fingerprint[:12]}"
    result = reproduce_stage(folder, target, stages, engine.open(Reporter.to_terminal(), target))
    for line in result.libraries:
        print(f"library {line}")
    if result.differences:
        raise InputError("differs:\n" + "\n".join(result.differences))
    print(f"identical: {result.files} files")


# The command `schema`.


def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    print(json.dumps(recipe_schema(), indent=2))

"""The command line. Thin: every command reads its arguments, calls one function and prints what it returns."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from gristmill.foundation.disk_errors import disk_trouble
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.progress import Reporter
from gristmill.pipelines.commands.checkpoint import compare, data_folder, evaluate_checkpoint, export, generate, import_
from gristmill.pipelines.commands.corpus import signatures_app, similar_command, why
from gristmill.pipelines.commands.data import data_app, tokenizer_compare
from gristmill.pipelines.commands.layout import calibrate, layout
from gristmill.pipelines.commands.profiles import profiles_app
from gristmill.pipelines.commands.thresholds import decide, explore
from gristmill.pipelines.config import Recipe
from gristmill.pipelines.console import print_block, print_error
from gristmill.pipelines.kernel_cache import damaged_kernels
from gristmill.pipelines.preflight import check_workdir, preflight, raise_all, require_ready
from gristmill.pipelines.raw_files import pin
from gristmill.pipelines.recipe_file import load_recipe
from gristmill.pipelines.reproduce import reproduce as reproduce_stage
from gristmill.pipelines.runner import Runner
from gristmill.pipelines.schema import recipe_schema
from gristmill.pipelines.stage import Stage
from gristmill.pipelines.stage_list import STAGES
from gristmill.pipelines.stage_selection import runnable_stages, stages_up_to
from gristmill.pipelines.verify import verify as verify_folder
from gristmill.training.config import MAX_PROCESSES

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Raw text to an evaluated model.",
)

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the bare name of one of ours.")
]


def _folder_name(text: str) -> Path:
    if not text.strip():
        raise RecipeError("--workdir is empty; name a folder, or leave it out for work/NAME")
    return Path(text).expanduser()


WorkdirOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", parser=_folder_name, help="The stages' folders (default: work/NAME)."),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a field: train.layout.tensor=2")]
WorkersOption = Annotated[int, typer.Option(min=1, max=1024, help="Processes; the bytes do not depend on it.")]
UpdateLockOption = Annotated[bool, typer.Option("--update-lock", help="Accept raw files that changed.")]


INTERRUPTED = "interrupted; what is finished is kept, and the same command goes on from there"


class StageGroup(TyperGroup):
    """Commands beside that of a stage: `tokenizer compare ...`, and `tokenizer RECIPE` for everything else."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = args[:1] == ["--help"] or (args and args[0] in self.commands)
        return super().parse_args(ctx, args if known else [STAGE_COMMAND, *args])


STAGE_COMMAND = "stage"
tokenizer_app = typer.Typer(cls=StageGroup, help="Run the stage tokenizer alone, or compare tokenizers.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit codes: 0 done, 1 the work failed, 2 the call or the recipe is wrong. A user's mistake shows no traceback."""
    try:
        app(args=arguments)
    except RecipeError as error:
        _leave(error, 2)
    except InputError as error:
        _leave(error, 1)
    except OSError as error:
        if (said := disk_trouble(error)) is None:
            raise
        _leave(said, 1)
    except MemoryError:
        _leave("memory ran out; what is finished is kept: run the same command with fewer --workers", 1)
    except Exception as error:
        if (damage := damaged_kernels(error)) is None:
            raise
        _leave(damage, 1)
    except SystemExit as error:
        if (interrupt := _interrupt_behind(error)) is None:
            raise
        _leave(str(interrupt) or INTERRUPTED, 130)


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """typer makes SystemExit of Ctrl-C and says nothing; training's KeyboardInterrupt says what it saved."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _leave(error: object, code: int) -> None:
    print_error(error)
    sys.exit(code)


def _runner(
    recipe: Recipe,
    stages: Sequence[Stage],
    workdir: Path | None,
    workers: int = 1,
    update_lock: bool = False,
    only: str | None = None,
) -> Runner:
    """What runs the stages, or `only` one of them. Raises RecipeError or InputError for all that can be known to be
    wrong before work starts."""
    folder = _folder(recipe, workdir)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    reporter = Reporter.to_terminal() if rank == 0 else Reporter.silent()
    if rank == 0:
        check_workdir(folder)
        require_ready(recipe, [one for one in stages if only in (None, one.name)], folder, world_size, reporter)
    lock = pin(recipe, folder, reporter, workers, update=update_lock, write=rank == 0)
    return Runner(recipe, folder, stages, lock, reporter, workers, rank)


def _folder(recipe: Recipe, workdir: Path | None) -> Path:
    return workdir or Path("work") / recipe.name


def _run_stage(
    name: str,
    reference: str,
    workdir: Path | None,
    overrides: list[str] | None,
    workers: int,
    update_lock: bool = False,
) -> None:
    recipe = load_recipe(reference, overrides or [])
    _runner(recipe, stages_up_to(recipe, STAGES, name), workdir, workers, update_lock, name).run(only=name)


def _wanted(recipe: Recipe, to: str | None) -> tuple[Sequence[Stage], str]:
    return runnable_stages(recipe, STAGES) if to is None else (stages_up_to(recipe, STAGES, to), "")


@app.command()
def run(
    recipe: RecipeArgument,
    workdir: WorkdirOption = None,
    set_: SetOption = None,
    to: Annotated[str | None, typer.Option(help="Stop after this stage.")] = None,
    workers: WorkersOption = 2,
    update_lock: UpdateLockOption = False,
) -> None:
    """Run every stage that is not whole, in order."""
    loaded = load_recipe(recipe, set_ or [])
    stages, left_out = _wanted(loaded, to)
    runner = _runner(loaded, stages, workdir, workers, update_lock)
    if left_out:
        runner.reporter.say(left_out)
    runner.run()
    done = [stage.name for stage in stages]
    if "evaluate" in done and runner.rank == 0:
        table = runner.workdir / "evaluate" / "table.md"
        print(table.read_text("utf-8"))
    if "report" in done and runner.rank == 0:
        print(f"report: {runner.workdir / 'report' / 'report.html'}")


def _stage_command(name: str, group: typer.Typer, command_name: str) -> None:
    def command(
        recipe: RecipeArgument,
        workdir: WorkdirOption = None,
        set_: SetOption = None,
        workers: WorkersOption = 2,
        update_lock: UpdateLockOption = False,
    ) -> None:
        _run_stage(name, recipe, workdir, set_, workers, update_lock)

    command.__doc__ = f"Run the stage {name} alone; its inputs must be whole."
    group.command(command_name)(command)


for _name in ("curate", "index", "report"):
    _stage_command(_name, app, _name)
_stage_command("tokenizer", tokenizer_app, STAGE_COMMAND)
tokenizer_app.command("compare")(tokenizer_compare)


@app.command()
def train(
    recipe: RecipeArgument,
    workdir: WorkdirOption = None,
    set_: SetOption = None,
    workers: WorkersOption = 2,
    profile: Annotated[
        str, typer.Option(metavar="STEPS", help="Chrome traces of these steps, into train/logs: 10,11")
    ] = "",
) -> None:
    """Run the stage train alone; its inputs must be whole."""
    steps = [f"train.watch.profile_steps=[{profile}]"] if profile else []
    _run_stage("train", recipe, workdir, [*(set_ or []), *steps], workers)


@app.command()
def evaluate(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="The stage evaluate of a recipe.")] = None,
    workdir: WorkdirOption = None,
    set_: SetOption = None,
    workers: WorkersOption = 2,
    checkpoint: Annotated[Path | None, typer.Option(metavar="DIR", help="A checkpoint alone, no recipe.")] = None,
    tasks: Annotated[str, typer.Option(help="Names or YAML files of lm-eval, joined by commas.")] = "",
    shots: Annotated[int | None, typer.Option(min=0, help="Worked examples before each question.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many documents of each task.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Results (default: work/evaluate).")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the tasks' files lie.")] = None,
    corpus: Annotated[Path | None, typer.Option(metavar="DIR", help="A work folder, for the held-out tasks.")] = None,
    every: Annotated[int | None, typer.Option(min=1, help="Every n-th step's checkpoint of a run: a curve.")] = None,
    precision: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    weights: Annotated[str, typer.Option(help="as_trained or int8, whose cost is then shown.")] = "as_trained",
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a pass (default: by device).")] = None,
    tensor: Annotated[int, typer.Option(min=1, help="Under torchrun: ranks that cut one copy's layers.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Under torchrun: stages of one copy.")] = 1,
    download: Annotated[bool, typer.Option("--download", help="lm-eval's own tasks may read from the hub.")] = False,
    include_path: Annotated[Path | None, typer.Option(metavar="DIR", help="A folder of task files (YAML).")] = None,
) -> None:
    """Run the stage evaluate of a recipe, or score a checkpoint alone."""
    if (recipe is None) == (checkpoint is None):
        raise RecipeError("give a RECIPE, or --checkpoint DIR with --tasks a,b")
    if recipe is not None:
        _run_stage("evaluate", recipe, workdir, set_, workers)
        return
    names = [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise RecipeError("--tasks wants names joined by single commas, such as --tasks piqa,wic")
    assert checkpoint is not None
    files = data_folder(data)
    settings = {
        "tasks": names,
        "shots": shots,
        "limit": limit,
        "data": None if files is None else str(files),
        "precision": precision,
        "weights": weights,
        "batch_tokens": batch_tokens,
    }
    parts = (tensor, pipeline)
    evaluate_checkpoint(checkpoint, settings, output, tokenizer, corpus, every, parts, download, include_path)


def stage_script(name: str) -> None:
    """What `python -m gristmill.pipelines.stages.NAME RECIPE` runs."""
    main([name, *sys.argv[1:]])


@app.command()
def plan(recipe: RecipeArgument, workdir: WorkdirOption = None, set_: SetOption = None) -> None:
    """What would run, what is skipped, and why. Writes nothing."""
    loaded = load_recipe(recipe, set_ or [])
    stages, left_out = runnable_stages(loaded, STAGES)
    folder, reporter = _folder(loaded, workdir), Reporter.to_terminal()
    lock = pin(loaded, folder, reporter, write=False)
    table = Table("stage", "what", "why", "fingerprint")
    for planned in Runner(loaded, folder, stages, lock, reporter).plan():
        table.add_row(planned.stage.name, planned.action, "\n".join(planned.reasons), planned.fingerprint[:12])
    print_block(table)
    if left_out:
        print(left_out)


@app.command()
def check(
    recipe: RecipeArgument,
    workdir: WorkdirOption = None,
    set_: SetOption = None,
    to: Annotated[str | None, typer.Option(help="The last stage that is to run.")] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_PROCESSES, help="Under torchrun (default: what the layout takes)."),
    ] = None,
) -> None:
    """Find what is wrong with a recipe before any work, all of it at once. Writes nothing; `run` does the same."""
    loaded = load_recipe(recipe, set_ or [])
    stages, left_out = _wanted(loaded, to)
    planned = 1 if loaded.train is None or loaded.train.layout.auto else loaded.train.layout.world_size
    count = processes or int(os.environ.get("WORLD_SIZE", "0")) or planned
    check_workdir(_folder(loaded, workdir))
    findings = preflight(loaded, stages, count)
    for finding in findings:
        if finding.error is None:
            print(f"warning: {finding.text}")
    raise_all(findings)
    print(f"recipe {loaded.name}: nothing wrong is known of {', '.join(stage.name for stage in stages)}")
    if count > 1 and "train" in [stage.name for stage in stages]:
        print(f"train takes {count} processes: torchrun --nproc-per-node N, with {count} over all nodes")
    if left_out:
        print(left_out)


@app.command()
def verify(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A stage's folder, or a work folder.")]) -> None:
    """Compare every file, fingerprint and link with the manifests. Exit code 1 names each that differs."""
    found = verify_folder(folder)
    for line in found.lines:
        print(line)
    if found.wrong:
        raise InputError("\n".join(found.wrong))


@app.command()
def reproduce(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST")],
    workdir: Annotated[
        Path | None, typer.Option(help="Where to build it again (default: work/reproduce-FINGERPRINT).")
    ] = None,
    workers: WorkersOption = 2,
) -> None:
    """Build a stage again from its manifest; say whether every byte is the same."""
    folder = manifest.parent if manifest.name == MANIFEST_NAME else manifest
    target = workdir or Path("work") / f"reproduce-{read_manifest(folder).fingerprint[:12]}"
    verdict = reproduce_stage(manifest, target, STAGES, workers, Reporter.to_terminal())
    for line in verdict.libraries:
        print(f"library {line}")
    if verdict.differences:
        raise InputError("differs:\n" + "\n".join(verdict.differences))
    print(f"identical: {verdict.files} files")


for _command in (why, decide, explore, generate, export, compare, layout, calibrate):
    app.command()(_command)
app.command("import")(import_)

app.add_typer(data_app, name="data")
app.add_typer(signatures_app, name="signatures")
app.add_typer(profiles_app, name="profiles")
app.command("similar")(similar_command)
app.add_typer(tokenizer_app, name="tokenizer")


@app.command()
def schema() -> None:
    """The recipe's JSON schema, for editors."""
    print(json.dumps(recipe_schema(), indent=2))


if __name__ == "__main__":
    main()

"""`gristmill ablate`: which data makes the better model, and how sure that is."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.cli.checkpoint import data_folder
from gristmill.pipelines.cli.options import EngineOptions, SetOption, StageOptions, make_runner, with_option_groups
from gristmill.pipelines.stages.stage_list import stages_of, stages_up_to

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class AblateOptions(EngineOptions):
    """How large the experiment is, and where."""

    vary: Annotated[
        list[str] | None, typer.Option("--vary", help="FIELD=VALUE,VALUE: an arm for each value; none switches off.")
    ] = None
    seeds: Annotated[int, typer.Option(min=3, max=64, help="Models of each arm and learning rate.")] = 5
    budget: Annotated[str, typer.Option(help="Of all runs together: 30m, 2h, or FLOPs such as 1e16.")] = "30m"
    target: Annotated[
        list[Path] | None, typer.Option(help="Texts the models should be good at: .jsonl with `text`, or plain text.")
    ] = None
    task: Annotated[list[str] | None, typer.Option(help="Tasks whose right answers are scored, such as arc_easy.")] = (
        None
    )
    questions: Annotated[int, typer.Option(min=30, help="Questions of each task, at most.")] = 200
    data: Annotated[Path | None, typer.Option(help="Folder of the tasks' files (default: GRISTMILL_SHARED_DATA).")] = (
        None
    )
    documents: Annotated[int, typer.Option(min=30, help="Held-out documents of each arm, at most.")] = 400
    targets_alone: Annotated[
        bool, typer.Option("--targets-alone", help="Score the targets, not what each arm holds out: fewer comparisons.")
    ] = False
    cooldown: Annotated[
        bool, typer.Option("--cooldown", help="One run to 80 %; the arms differ in the decay phase alone.")
    ] = False
    workdir: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: work/ablate-NAME.")] = None
    set_: SetOption = None


@with_option_groups
def ablate(
    recipes: Annotated[list[str], typer.Argument(metavar="RECIPE...", help="The baseline first; or one, with --vary.")],
    options: AblateOptions,
) -> None:
    """Train small models on each recipe's data and say which data is better, worse, or not to tell apart."""
    from gristmill.pipelines.ablate.arms import arms_of

    seconds, flops = parse_budget(options.budget)
    arms = arms_of(recipes, options.vary or [], options.set_ or [])
    folder = options.workdir or Path("work") / f"ablate-{arms[0].recipe.name}"
    questions = task_questions(options)
    check_targets(options.target or [])
    if options.targets_alone and not options.target:
        raise RecipeError("--targets-alone: no --target is named; name texts that the models should be good at")
    curated: list[Path] = []
    done: dict[str, Path] = {}
    for arm in arms:
        workdir = folder / "arms" / arm.name
        stage_options = StageOptions(options.workers, options.engine, options.address, workdir=workdir)
        runner = make_runner(arm.recipe, stages_up_to(arm.recipe, stages_of(arm.recipe), "curate"), stage_options)
        identity = runner.plan()[0].fingerprint
        if identity not in done:
            runner.run(only="curate")
            done[identity] = workdir / "curate"
        curated.append(done[identity])
    from gristmill.pipelines.ablate.experiment import Plan, experiment  # torch takes seconds to load
    from gristmill.pipelines.ablate.report import terminal_table, write_report

    plan = Plan(
        folder,
        options.seeds,
        seconds=seconds,
        flops=flops,
        documents=options.documents,
        targets=tuple(options.target or ()),
        questions=questions,
        cooldown=options.cooldown,
        targets_alone=options.targets_alone,
    )
    reporter = StageOptions().reporter()
    engine = options.open(reporter, folder)
    try:
        outcome = experiment(arms, curated, plan, engine)
    finally:
        engine.close()
    print(terminal_table(outcome))
    print(f"{write_report(outcome, folder)}")


def check_targets(paths: list[Path]) -> None:
    """Raises InputError for a file of texts that cannot be read, before anything is curated."""
    if paths:
        from gristmill.pipelines.ablate.corpora import target_texts  # torch takes seconds to load

        for path in paths:
            target_texts(path)


def task_questions(options: AblateOptions) -> dict[str, list[tuple[str, str]]]:
    """Task -> (context, right answer); read before anything is curated, so that a missing file is known first."""
    if not options.task:
        return {}
    from gristmill.evaluation.tasks.harness import right_answers  # lm-eval takes seconds to load
    from gristmill.evaluation.tasks.task_index import TaskSources

    return right_answers(options.task, options.questions, TaskSources(data_folder(options.data)))


def parse_budget(text: str) -> tuple[float | None, float | None]:
    """(seconds, FLOPs), one of them None. "30m" -> (1800, None); "1e16" -> (None, 1e16)."""
    match = re.fullmatch(r"([0-9.]+)([smh])", text)
    try:
        if match:
            return float(match[1]) * UNITS[match[2]], None
        flops = float(text)
    except ValueError:
        raise RecipeError(f"--budget {text}: write a time such as 30m or 2h, or FLOPs such as 1e16") from None
    if not 1e9 <= flops < float("inf"):
        raise RecipeError(f"--budget {text}: {flops:g} FLOPs train nothing; write a time such as 30m, or 1e15 and more")
    return None, flops

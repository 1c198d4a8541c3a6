"""The stages in execution order."""

from collections.abc import Sequence
from dataclasses import replace

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.config import Recipe, missing_text, plural_pronoun
from gristmill.pipelines.stages.curate import STAGE as CURATE
from gristmill.pipelines.stages.evaluate import STAGE as EVALUATE
from gristmill.pipelines.stages.index import STAGE as INDEX
from gristmill.pipelines.stages.report import STAGE as REPORT
from gristmill.pipelines.stages.stage import Stage
from gristmill.pipelines.stages.tokenizer import STAGE as TOKENIZER
from gristmill.pipelines.stages.train import STAGE as TRAIN

STAGES: tuple[Stage, ...] = (CURATE, TOKENIZER, INDEX, TRAIN, EVALUATE, REPORT)
CORPUS_STAGES = ("curate", "index")


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """All stages; without those of the corpus where the recipe has no sources."""
    if recipe.sources:
        return STAGES
    return tuple(
        replace(stage, inputs=tuple(name for name in stage.inputs if name not in CORPUS_STAGES))
        for stage in STAGES
        if stage.name not in CORPUS_STAGES
    )


# Selects the stages a command runs, by its options and by the sections the recipe has.


def stages_up_to(recipe: Recipe, stages: Sequence[Stage], last: str) -> tuple[Stage, ...]:
    """The stages up to and including the named one.

    Raises RecipeError for an unknown stage, and if the recipe lacks a required section of one of the stages."""
    names = [stage.name for stage in stages]
    if last not in names:
        raise RecipeError(f"--to {last}: unknown stage; the stages are {', '.join(names)}")
    selected = tuple(stages[: names.index(last) + 1])
    for stage in selected:
        missing = recipe.missing_sections(stage.sections)
        if missing:
            before = names[names.index(stage.name) - 1]
            raise RecipeError(
                f"recipe {recipe.name}: {missing_text(missing)}, which the stage {stage.name} reads; write "
                f"{plural_pronoun(missing)} as in the recipe demo, or stop earlier: gristmill run RECIPE --to {before}"
            )
    return selected


def runnable_stages(recipe: Recipe, stages: Sequence[Stage]) -> tuple[tuple[Stage, ...], str]:
    """(stages to run, "" or the reason why the others are skipped).

    Without the sections `model` and `train` the run ends with the last stage whose own section is in the recipe:
    curate, or tokenizer if there is a section `tokenizer`; then the report on these. Raises RecipeError if only one of
    the two is missing."""
    missing = recipe.missing_sections(("model", "train"))
    if len(missing) < 2:
        return stages_up_to(recipe, stages, stages[-1].name), ""
    written = [
        stage for stage in stages if stage.name in recipe.model_fields_set and not _lacks_sections(recipe, stage)
    ]
    last = max((stages.index(stage) for stage in written), default=0)
    left_out = ", ".join(stage.name for stage in stages[last + 1 :] if stage.name != REPORT.name)
    return with_report(stages[: last + 1]), (
        f"recipe {recipe.name}: {missing_text(missing)}, so the last stage is {stages[last].name}; not run: {left_out}"
    )


def with_report(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages and the report on them alone, which reads no section of the recipe."""
    return (*stages, replace(REPORT, inputs=tuple(stage.name for stage in stages), sections=()))


def _lacks_sections(recipe: Recipe, stage: Stage) -> bool:
    return bool(recipe.missing_sections(stage.sections))

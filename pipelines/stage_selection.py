"""Selects the stages a command runs, by its options and by the sections the recipe has."""

from collections.abc import Sequence

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.config import Recipe, missing_text, pronoun
from gristmill.pipelines.stage import Stage


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
                f"{pronoun(missing)} as in the recipe demo, or stop earlier: gristmill run RECIPE --to {before}"
            )
    return selected


def runnable_stages(recipe: Recipe, stages: Sequence[Stage]) -> tuple[tuple[Stage, ...], str]:
    """(stages to run, "" or the reason why the others are skipped).

    Without the sections `model` and `train` the run ends with the last stage whose own section is in the recipe:
    curate, or tokenizer if there is a section `tokenizer`. Raises RecipeError if only one of the two is missing."""
    missing = recipe.missing_sections(("model", "train"))
    if len(missing) < 2:
        return stages_up_to(recipe, stages, stages[-1].name), ""
    written = [
        stage for stage in stages if stage.name in recipe.model_fields_set and not _lacks_sections(recipe, stage)
    ]
    last = max((stages.index(stage) for stage in written), default=0)
    left_out = ", ".join(stage.name for stage in stages[last + 1 :])
    return tuple(stages[: last + 1]), (
        f"recipe {recipe.name}: {missing_text(missing)}, so the last stage is {stages[last].name}; not run: {left_out}"
    )


def _lacks_sections(recipe: Recipe, stage: Stage) -> bool:
    return bool(recipe.missing_sections(stage.sections))

"""Which stages a command runs: those that were asked for, and whose sections the recipe has."""

from collections.abc import Sequence

from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.config import Recipe, missing_text, them
from gristmill.pipelines.stage import Stage


def stages_up_to(recipe: Recipe, stages: Sequence[Stage], last: str) -> tuple[Stage, ...]:
    """The stages in their order up to the one named.

    Raises RecipeError for a name that is no stage, and for a section without a default that one of them reads and the
    recipe does not have."""
    names = [stage.name for stage in stages]
    if last not in names:
        raise RecipeError(f"--to {last}: no such stage; the stages are {', '.join(names)}")
    wanted = tuple(stages[: names.index(last) + 1])
    for stage in wanted:
        missing = recipe.missing_sections(stage.sections)
        if missing:
            before = names[names.index(stage.name) - 1]
            raise RecipeError(
                f"recipe {recipe.name}: {missing_text(missing)}, which the stage {stage.name} reads; write "
                f"{them(missing)} as in the recipe demo, or stop before: gristmill run RECIPE --to {before}"
            )
    return wanted


def runnable_stages(recipe: Recipe, stages: Sequence[Stage]) -> tuple[tuple[Stage, ...], str]:
    """All stages and "", or those that a recipe without `model` and `train` asks for, and why the others are left out.

    Such a recipe ends with the last stage whose own section is written: name, sources and curate end after curate, a
    `tokenizer` section goes on to the tokenizer. A recipe with one of the two sections alone is refused."""
    missing = recipe.missing_sections(("model", "train"))
    if len(missing) < 2:
        return stages_up_to(recipe, stages, stages[-1].name), ""
    written = [stage for stage in stages if stage.name in recipe.model_fields_set and not _misses(recipe, stage)]
    last = max((stages.index(stage) for stage in written), default=0)
    left_out = ", ".join(stage.name for stage in stages[last + 1 :])
    return tuple(stages[: last + 1]), (
        f"recipe {recipe.name}: {missing_text(missing)}, so the stages end with {stages[last].name}; "
        f"not run: {left_out}"
    )


def _misses(recipe: Recipe, stage: Stage) -> bool:
    return bool(recipe.missing_sections(stage.sections))

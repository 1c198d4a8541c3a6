"""The arms of an ablation: recipes side by side, or one recipe and variations of its fields."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gristmill.foundation.config import read_yaml
from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe

MIN_MIXED_SOURCES = 2


@dataclass(frozen=True)
class Arm:
    """name: of its folder and in the report. changes: what differs from the recipe, "" where nothing does."""

    name: str
    recipe: Recipe
    changes: str = ""


def arms_of(references: Sequence[str], variations: Sequence[str], overrides: Sequence[str] = ()) -> list[Arm]:
    """The baseline and then the others: a recipe each, or one recipe and an arm for each value of each variation.

    variations: FIELD=VALUE,VALUE; none switches off a field, or the section that cannot do without it. Raises
    RecipeError if fewer than two arms are left, or if arms hold out documents in different ways."""
    recipes = [load_recipe(reference, overrides) for reference in references]
    arms = [Arm(f"arm{number}" if number else "baseline", recipe) for number, recipe in enumerate(recipes)]
    if variations and len(references) != 1:
        raise RecipeError(f"--vary changes one recipe, and {len(references)} are given; leave out the others")
    for variation in variations:
        field, values = parse_variation(variation)
        for value in values:
            recipe, change = _varied(references[0], overrides, field, value)
            if recipe != arms[0].recipe:
                arms.append(Arm(f"arm{len(arms)}", recipe, change))
    if len(arms) < 2:
        raise RecipeError("nothing to compare; give two recipes, or one and --vary FIELD=VALUE,VALUE with other values")
    for arm in arms[1:]:
        check_comparable(arms[0], arm)
    return arms


def parse_variation(text: str) -> tuple[str, list[Any]]:
    """ "curate.near_dedup.threshold=0.7,none" -> ("curate.near_dedup.threshold", [0.7, None])."""
    field, equals, values = text.partition("=")
    if not field or not equals or not values:
        raise RecipeError(f"--vary {text}: write FIELD=VALUE,VALUE, such as curate.near_dedup.threshold=0.7,0.8,none")
    parsed = read_yaml(f"[{values}]", f"--vary {text}", name_lines=False).value
    return field, [None if value == "none" else value for value in parsed]


def _varied(reference: str, overrides: Sequence[str], field: str, value: Any) -> tuple[Recipe, str]:
    def load(path: str) -> tuple[Recipe, str]:
        value_text = "none" if value is None else json.dumps(value)
        return load_recipe(reference, [*overrides, f"{path}={json.dumps(value)}"]), f"{path}: {value_text}"

    try:
        return load(field)
    except RecipeError:
        parent, dot, _ = field.rpartition(".")
        if value is not None or not dot:
            raise
        return load(parent)


def check_comparable(baseline: Arm, arm: Arm) -> None:
    """Raises RecipeError if the arms' models could not be scored on the same held-out documents."""
    for what, of in HELD_OUT_BY.items():
        first, second = of(baseline.recipe), of(arm.recipe)
        if first != second:
            raise RecipeError(
                f"{arm.name} ({arm.recipe.name}) and the baseline cannot be compared: {what} is {second} and {first}; "
                "give both the same"
            )
    objectives = {of.train.objective if of.train is not None else "causal" for of in (baseline.recipe, arm.recipe)}
    if objectives != {"causal"}:
        raise RecipeError(
            f"ablations compare bits per byte of causal models, and an arm trains {', '.join(sorted(objectives))}"
        )


HELD_OUT_BY: Mapping[str, Any] = {
    "seed": lambda recipe: recipe.seed,
    "curate.splits": lambda recipe: recipe.curate.splits.model_dump(),
}


def missing_sources(arms: Sequence[Arm]) -> list[str]:
    """A line for each source that one arm has and another lacks: a difference one should know of."""
    names = [{source.name for source in arm.recipe.sources} for arm in arms]
    everywhere, anywhere = set.intersection(*names), set.union(*names)
    return [
        f"source {name} is in {', '.join(arm.name for arm, own in zip(arms, names, strict=True) if name in own)} alone"
        for name in sorted(anywhere - everywhere)
    ]


def mixed_sources(recipe: Recipe, floors: Mapping[str, float]) -> list[str]:
    """The sources of a mixture. Raises RecipeError if they are too few and not cut into cells, if phases set their
    weights, or if a floor names none of them or all floors together leave nothing to choose."""
    names = [source.name for source in recipe.sources if source.held_out is None]
    if recipe.index.phases:
        raise RecipeError("index.phases sets the weights of the sources; leave it out of a recipe to mix")
    if len(names) < MIN_MIXED_SOURCES and recipe.index.mix is None:
        raise RecipeError(f"{len(names)} source to train on; a mixture needs at least {MIN_MIXED_SOURCES}")
    for name in sorted(name for name in floors if name.partition(".")[0] not in names):
        raise RecipeError(f"--floor {name}: no source has this name; the sources are {', '.join(names)}")
    if sum(floors.values()) > 1 + 1e-9:
        raise RecipeError(f"--floor: the least weights are {sum(floors.values()):g} together; lower them to 1 at most")
    return names

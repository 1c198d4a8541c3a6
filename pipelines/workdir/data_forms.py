"""Opens a split of the indexed data in the form that an objective asks for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.indexed.config import IndexConfig, PhaseConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, read_dataset
from gristmill.data_pipeline.indexed.language_shares import RunLength, resolved_weights
from gristmill.data_pipeline.indexed.mix import mix_weights
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.recipes.config import Recipe

# For runs of the stages train and evaluate.
indexed = DeferredModule("gristmill.data_pipeline.indexed.samples")
pairs = DeferredModule("gristmill.data_pipeline.indexed.sentence_pairs")


def sample_format(objective: str) -> str:
    """`data` of the objective's class: windows, sentence_pairs or own."""
    if objective == "causal":
        return "windows"
    from gristmill.training.objectives.load_objective import (
        load_objective,  # imports torch, which the report does not need
    )

    return load_objective(objective).data


def sampling(recipe: Recipe, dataset: Dataset) -> IndexConfig:
    """recipe.index; where it names no phases, with one: the weights of the recipe's sources, or of the cells of its
    mix, from the first token on.

    Raises RecipeError if languages have floors or caps that cannot hold, or a mix has too little text."""
    if recipe.index.phases:
        return recipe.index
    length = recipe.model.sequence_length if recipe.model is not None else 1
    run = RunLength(recipe.train.tokens if recipe.train is not None else None, length)
    if recipe.index.mix is not None:
        weights = mix_weights(dataset, recipe.source_weights, recipe.index.mix, run)
    else:
        weights = resolved_weights(dataset, recipe.source_weights, recipe.index.languages, run)
    drawn = {name: weight for name, weight in weights.items() if weight > 0}
    if not drawn:
        return recipe.index
    return recipe.index.model_copy(update={"phases": (PhaseConfig(from_tokens=0, weights=drawn),), "mix": None})


def open_format(
    form: str, index: Path, split: str, recipe: Recipe, info: Callable[[str], None] = lambda message: None
) -> Any:
    """form: `windows` or `sentence_pairs`, as in an objective's `data`. Samples to train on are drawn in the order of
    train.seed; those of other splits are the same for every run on the corpus."""
    length = recipe.training().model.sequence_length
    seed = recipe.train_seed if split == "train" else recipe.seed
    config = sampling(recipe, read_dataset(index))
    if form == "sentence_pairs":
        from gristmill.training.objectives.masked import SPECIAL_TOKENS  # as above

        return pairs.open_pairs(index, split, length - SPECIAL_TOKENS, seed, config, info)
    return indexed.open_samples(index, split, length, seed, config, info)

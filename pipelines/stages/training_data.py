"""Opens a split of the indexed data in the form that the recipe's objective asks for, and makes the objective."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.indexed.config import IndexConfig, PhaseConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, read_dataset
from gristmill.data_pipeline.indexed.language_shares import RunLength, resolved_weights
from gristmill.data_pipeline.indexed.mix import mix_weights
from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.stage import StageContext

# For runs of the stages train and evaluate.
indexed = DeferredModule("gristmill.data_pipeline.indexed.samples")
pairs = DeferredModule("gristmill.data_pipeline.indexed.sentence_pairs")
loading = DeferredModule("gristmill.tokenizers.tokenizer")


@dataclass(frozen=True)
class PieceCodec:
    """The tokenizer's pieces by id, and a text's token ids; empty for the causal objective, which does without."""

    pieces: tuple[str, ...] = ()
    encode: Any = None


def form_of(objective: str) -> str:
    """`data` of the objective's class: windows, sentence_pairs or own."""
    if objective == "causal":
        return "windows"
    from gristmill.training.objectives.load import load_objective  # imports torch, which the report does not need

    return load_objective(objective).data


def open_split(context: StageContext, split: str) -> Any:
    """Raises InputError or, where a split has nothing, its subclass TooFewTokens."""
    from gristmill.training.objectives.objective import NoCorpus  # imports torch, which other stages do not need

    objective = context.recipe.training().train.objective
    form = form_of(objective)
    if form == "own":
        return NoCorpus(vocabulary(context)[0])
    if not context.recipe.sources:
        raise RecipeError(needs_sources(objective, form))
    return open_form(form, context.inputs["index"], split, context.recipe, context.reporter.say)


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


def open_form(
    form: str, index: Path, split: str, recipe: Recipe, say: Callable[[str], None] = lambda message: None
) -> Any:
    """form: `windows` or `sentence_pairs`, as in an objective's `data`. Samples to train on are drawn in the order of
    train.seed; those of other splits are the same for every run on the corpus."""
    length = recipe.training().model.sequence_length
    seed = recipe.train_seed if split == "train" else recipe.seed
    config = sampling(recipe, read_dataset(index))
    if form == "sentence_pairs":
        from gristmill.training.objectives.masked import SPECIAL_TOKENS  # as above

        return pairs.open_pairs(index, split, length - SPECIAL_TOKENS, seed, config, say)
    return indexed.open_samples(index, split, length, seed, config, say)


def open_held_out(context: StageContext, split: str) -> Any | None:
    """As `open_split`; None, with a message, where the split has nothing."""
    try:
        return open_split(context, split)
    except indexed.TooFewTokens as error:
        context.reporter.say(f"train: no {split} loss: {error}")
        return None


def vocabulary(context: StageContext) -> tuple[int, int]:
    """(tokens of the vocabulary, the end-of-document token)."""
    if "index" in context.inputs:
        dataset = read_dataset(context.inputs["index"])
        return dataset.vocab_size, dataset.end_of_document
    codec = loading.load_tokenizer(context.inputs["tokenizer"])
    return codec.vocab_size, codec.end_of_document


def needs_sources(objective: str, data: str) -> str:
    return (
        f"train.objective: {objective} draws {data.replace('_', ' ')} from a corpus, and the recipe has no sources; "
        'name one, or set data = "own" in the class if it makes its own samples'
    )


def words(context: StageContext) -> PieceCodec:
    if context.recipe.training().train.objective == "causal":
        return PieceCodec()
    codec = loading.load_tokenizer(context.inputs["tokenizer"])
    return PieceCodec(codec.pieces, codec.encode)


def objective_on_test_split(context: StageContext) -> Any:
    """The recipe's objective on the test split."""
    from gristmill.training.objectives.load import make_objective  # as above
    from gristmill.training.objectives.objective import ObjectiveInputs

    recipe, known = context.recipe, words(context)
    model, train = recipe.training()
    vocab_size, end_of_document = vocabulary(context)
    inputs = ObjectiveInputs(
        open_split(context, "test"),
        model,
        vocab_size,
        end_of_document,
        recipe.seed,
        mask_documents=recipe.index.mask_documents,
        split="test",
        pieces=known.pieces,
        encode=known.encode,
    )
    return make_objective(train.objective, train.objective_options, inputs)

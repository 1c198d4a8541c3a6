"""Opens a split of the indexed data in the form that the recipe's objective asks for, and makes the objective."""

from dataclasses import dataclass
from typing import Any

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.foundation.deferred_module import DeferredModule
from gristmill.pipelines.stage import StageContext

# For runs of the stages train and evaluate.
indexed = DeferredModule("gristmill.data_pipeline.indexed.samples")
pairs = DeferredModule("gristmill.data_pipeline.indexed.sentence_pairs")
loading = DeferredModule("gristmill.tokenizers.tokenizer")


@dataclass(frozen=True)
class Words:
    """The tokenizer's pieces by id, and a text's token ids; empty for the causal objective, which does without."""

    pieces: tuple[str, ...] = ()
    encode: Any = None


def open_split(context: StageContext, split: str) -> Any:
    """Raises InputError or, where a split has nothing, its subclass TooFewTokens."""
    from gristmill.training.objectives.load import load_objective  # imports torch, which other stages do not need
    from gristmill.training.objectives.masked import SPECIAL_TOKENS

    recipe, folder, say = context.recipe, context.inputs["index"], context.reporter.say
    model, train = recipe.training()
    if load_objective(train.objective).data == "sentence_pairs":
        max_tokens = model.sequence_length - SPECIAL_TOKENS
        return pairs.open_pairs(folder, split, max_tokens, recipe.seed, recipe.index, say)
    return indexed.open_samples(folder, split, model.sequence_length, recipe.seed, recipe.index, say)


def open_held_out(context: StageContext, split: str) -> Any | None:
    """As `open_split`; None, with a message, where the split has nothing."""
    try:
        return open_split(context, split)
    except indexed.TooFewTokens as error:
        context.reporter.say(f"train: no {split} loss: {error}")
        return None


def words(context: StageContext) -> Words:
    if context.recipe.training().train.objective == "causal":
        return Words()
    codec = loading.load_tokenizer(context.inputs["tokenizer"])
    return Words(codec.pieces, codec.encode)


def objective_on_test_split(context: StageContext) -> Any:
    """The recipe's objective on the test split."""
    from gristmill.training.objectives.load import make_objective  # as above
    from gristmill.training.objectives.objective import ObjectiveInputs

    recipe, known = context.recipe, words(context)
    model, train = recipe.training()
    dataset = read_dataset(context.inputs["index"])
    inputs = ObjectiveInputs(
        open_split(context, "test"),
        model,
        dataset.vocab_size,
        dataset.end_of_document,
        recipe.seed,
        mask_documents=recipe.index.mask_documents,
        split="test",
        pieces=known.pieces,
        encode=known.encode,
    )
    return make_objective(train.objective, train.objective_options, inputs)

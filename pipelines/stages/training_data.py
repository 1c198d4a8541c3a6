"""The data, vocabulary and objective of the stages train and evaluate."""

from dataclasses import dataclass
from typing import Any

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.stages.stage import StageContext
from gristmill.pipelines.workdir.data_forms import open_format, sample_format

# For runs of the stages train and evaluate.
indexed = DeferredModule("gristmill.data_pipeline.indexed.samples")
loading = DeferredModule("gristmill.tokenizers.tokenizer")


@dataclass(frozen=True)
class VocabularyInfo:
    """The tokenizer's pieces by id, and a text's token ids; empty for the causal objective, which does without."""

    pieces: tuple[str, ...] = ()
    encode: Any = None


def open_split(context: StageContext, split: str) -> Any:
    """Raises InputError or, where a split has nothing, its subclass TooFewTokens."""
    from gristmill.training.objectives.objective import NoCorpus  # imports torch, which other stages do not need

    objective = context.recipe.training().train.objective
    form = sample_format(objective)
    if form == "own":
        return NoCorpus(vocabulary(context)[0])
    if not context.recipe.sources:
        raise RecipeError(needs_sources(objective, form))
    return open_format(form, context.inputs["index"], split, context.recipe, context.reporter.info)


def open_held_out(context: StageContext, split: str) -> Any | None:
    """As `open_split`; None, with a message, where the split has nothing."""
    try:
        return open_split(context, split)
    except indexed.TooFewTokens as error:
        context.reporter.info(f"train: no {split} loss: {error}")
        return None


def vocabulary(context: StageContext) -> tuple[int, int]:
    """(tokens of the vocabulary, the end-of-document token)."""
    if "index" in context.inputs:
        dataset = read_dataset(context.inputs["index"])
        return dataset.vocab_size, dataset.end_of_document
    tokenizer = loading.load_tokenizer(context.inputs["tokenizer"])
    return tokenizer.vocab_size, tokenizer.end_of_document


def needs_sources(objective: str, data: str) -> str:
    return (
        f"train.objective: {objective} draws {data.replace('_', ' ')} from a corpus, and the recipe has no sources; "
        'name one, or set data = "own" in the class if it makes its own samples'
    )


def words(context: StageContext) -> VocabularyInfo:
    if context.recipe.training().train.objective == "causal":
        return VocabularyInfo()
    tokenizer = loading.load_tokenizer(context.inputs["tokenizer"])
    return VocabularyInfo(tokenizer.pieces, tokenizer.encode)


def objective_on_test_split(context: StageContext) -> Any:
    """The recipe's objective on the test split."""
    from gristmill.training.objectives.load_objective import make_objective  # as above
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

"""The stage `index`: documents to tokens, one shuffled .bin and .idx per source and split."""

from typing import Any

from gristmill.data_pipeline.corpus.counts import sources_without_documents
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.indexed.config import epochs_by_source, repeat_warnings
from gristmill.data_pipeline.indexed.dataset import Dataset
from gristmill.data_pipeline.indexed.language_shares import held_out_notes, tokens_by_language
from gristmill.foundation.deferred_module import DeferredModule
from gristmill.foundation.errors import RecipeError
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.stage import Stage, StageContext, run_as_script
from gristmill.pipelines.workdir.data_forms import sampling

# The command imports every stage; this part is imported by a run of this one.
indexing = DeferredModule("gristmill.tokenizers.index_corpus")


def config(recipe: Recipe) -> dict[str, Any]:
    """Config of the stage: `sentences`, `languages.min_tokens`, `rehydrate` and the cells of `mix` of section `index`;
    the rest, and the weights of the sources, decide how samples are drawn, not what the indexed files hold."""
    decides: dict[str, Any] = {"seed": recipe.seed, "sources": [source.name for source in recipe.sources]}
    if recipe.index.languages is not None:
        decides["languages"] = recipe.index.languages.min_tokens
    if recipe.index.mix is not None:
        decides["mix"] = recipe.index.mix.cells()
    if recipe.index.rehydrate:
        decides["rehydrate"] = [list(pair) for pair in sorted(recipe.index.rehydrate.items())]
    return decides | ({"sentences": True} if recipe.index.sentences else {})


def run(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    empty = sources_without_documents(context.inputs["curate"], recipe.training_weights)
    request = indexing.IndexRequest(
        corpus=context.inputs["curate"],
        tokenizer=context.inputs["tokenizer"],
        sources=tuple(source.name for source in recipe.sources),
        seed=recipe.seed,
        folder=context.folder,
        sentences=recipe.index.sentences,
        min_language_tokens=None if recipe.index.languages is None else recipe.index.languages.min_tokens,
        mix=recipe.index.mix,
        rehydrate=recipe.index.rehydrate,
        held_out=frozenset(source.name for source in recipe.sources if source.held_out is not None) | empty,
    )
    dataset, tokenizer = indexing.index_corpus(request, context.engine)
    for line in [*_repeat_notes(recipe, dataset), *held_out_notes(tokens_by_language(dataset))]:
        context.reporter.say(f"index: {line}")
    return {
        "vocab_size": dataset.vocab_size,
        "end_of_document": dataset.end_of_document,
        "encoder": tokenizer.encoder,
        "tokens": {split: {source.name: source.splits[split].tokens for source in dataset.sources} for split in SPLITS},
    }


def _repeat_notes(recipe: Recipe, dataset: Dataset) -> list[str]:
    """recipe_repeat_warnings, or why the mix does not allow the run: the indexed files serve a run that it allows."""
    try:
        return recipe_repeat_warnings(recipe, dataset)
    except RecipeError as error:
        if recipe.index.mix is None:
            raise
        return [f"warning: {error}"]


def recipe_repeat_warnings(recipe: Recipe, dataset: Dataset) -> list[str]:
    """One line per source that the recipe's training would read over 4 times; none for a recipe without `train`."""
    if recipe.train is None:
        return []
    tokens = {source.name: source.splits["train"].tokens for source in dataset.sources}
    tokens = {name: count for name, count in tokens.items() if count or recipe.index.mix is None}
    phases = sampling(recipe, dataset).phases
    epochs = epochs_by_source(tokens, dict.fromkeys(tokens, 0.0), recipe.train.tokens, phases)
    return repeat_warnings(epochs, tokens, recipe.train.tokens)


STAGE: Stage = Stage(
    name="index",
    code_version=4,
    inputs=("curate", "tokenizer"),
    config=config,
    run=run,
    sections=("index",),
    libraries=("sentencepiece", "tokenizers", "kitoken", "tiktoken", "gigatoken", "numpy"),
)

if __name__ == "__main__":
    run_as_script("index")

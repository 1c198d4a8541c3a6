"""The stage `index`: documents to tokens, one shuffled .bin and .idx per source and split."""

from typing import Any

from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.indexed.dataset import Dataset
from gristmill.data_pipeline.indexed.epochs import epochs_by_source, repeat_warnings
from gristmill.foundation.deferred_module import DeferredModule
from gristmill.pipelines.config import Recipe
from gristmill.pipelines.stage import Stage, StageContext

# The command imports every stage; this part is imported by a run of this one.
indexing = DeferredModule("gristmill.tokenizers.index_corpus")


def config(recipe: Recipe) -> dict[str, Any]:
    """Of the recipe's section `index` only `sentences`: the rest decides how samples are drawn, not what the indexed
    files hold."""
    decides = {"seed": recipe.seed, "sources": [[source.name, source.weight] for source in recipe.sources]}
    return decides | ({"sentences": True} if recipe.index.sentences else {})


def run(context: StageContext) -> dict[str, Any]:
    recipe = context.recipe
    request = indexing.IndexRequest(
        corpus=context.inputs["curate"],
        tokenizer=context.inputs["tokenizer"],
        weights={source.name: source.weight for source in recipe.sources},
        seed=recipe.seed,
        folder=context.folder,
        sentences=recipe.index.sentences,
    )
    dataset, tokenizer = indexing.index_corpus(request, context.engine)
    for line in recipe_repeat_warnings(recipe, dataset):
        context.reporter.say(f"index: {line}")
    return {
        "vocab_size": dataset.vocab_size,
        "end_of_document": dataset.end_of_document,
        "encoder": tokenizer.encoder,
        "tokens": {split: {source.name: source.splits[split].tokens for source in dataset.sources} for split in SPLITS},
    }


def recipe_repeat_warnings(recipe: Recipe, dataset: Dataset) -> list[str]:
    """One line per source that the recipe's training would read over 4 times; none for a recipe without `train`."""
    if recipe.train is None:
        return []
    tokens = {source.name: source.splits["train"].tokens for source in dataset.sources}
    weights = {source.name: source.weight for source in dataset.sources}
    epochs = epochs_by_source(tokens, weights, recipe.train.tokens, recipe.index.phases)
    return repeat_warnings(epochs, tokens, recipe.train.tokens)


STAGE: Stage = Stage(
    name="index",
    code_version=2,
    inputs=("curate", "tokenizer"),
    config=config,
    run=run,
    sections=("index",),
    libraries=("sentencepiece", "tokenizers", "kitoken", "tiktoken", "numpy"),
)

if __name__ == "__main__":
    from gristmill.pipelines.cli import stage_script

    stage_script("index")

"""The stage `index`: documents to tokens, one shuffled .bin and .idx per source and split; and the
table of its mix."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.counts import sources_without_documents
from gristmill.data_pipeline.corpus.document_history import Event
from gristmill.data_pipeline.corpus.splits import SPLITS
from gristmill.data_pipeline.indexed.config import MixConfig
from gristmill.data_pipeline.indexed.dataset import Dataset, read_dataset
from gristmill.data_pipeline.indexed.draws import epochs_by_source, repeat_warnings
from gristmill.data_pipeline.indexed.language_shares import RunLength, held_out_notes, tokens_by_language
from gristmill.data_pipeline.indexed.mix import CELLS_FOLDER, Cell, CellRepeats, cells_of, mix_repeats
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import validate
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
        context.reporter.info(f"index: {line}")
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
    by_tasks=True,
)

if __name__ == "__main__":
    run_as_script("index")


# The table of index.mix in a recipe: tokens and repeats of each cell, and the cell of one document.


@dataclass(frozen=True)
class MixTable:
    """rows: of the cells. is_exact: counted in the index, not estimated from the sizes of raw files."""

    rows: tuple[CellRepeats, ...]
    is_exact: bool


def run_length(recipe: Recipe) -> RunLength:
    length = recipe.model.sequence_length if recipe.model is not None else 1
    return RunLength(recipe.train.tokens if recipe.train is not None else None, length)


def indexed_mix(recipe: Recipe, index: Path) -> MixTable:
    """The table of the indexed files. Raises RecipeError where a cap does not allow the run."""
    assert recipe.index.mix is not None
    run = run_length(recipe)
    cells = cells_of(read_dataset(index), run)
    return MixTable(tuple(mix_repeats(cells, recipe.source_weights, recipe.index.mix, run.train_tokens)), True)


def estimated_mix(recipe: Recipe, tokens: Mapping[str, int]) -> MixTable:
    """tokens: of each source, about. Buckets have equally many; topics and copies are not known yet. Raises RecipeError
    where a cap does not allow the run."""
    mix = recipe.index.mix
    assert mix is not None
    cells: dict[Cell, int] = {}
    for source, count in tokens.items():
        if mix.sources and source not in mix.sources:
            cells[Cell(source)] = count
        else:
            cells |= {Cell(source, bucket): count // mix.buckets for bucket in range(mix.buckets)}
    rows = mix_repeats(cells, recipe.source_weights, mix, run_length(recipe).train_tokens)
    return MixTable(tuple(rows), False)


def check_sources(mix: MixConfig, recipe: Recipe) -> None:
    """Raises RecipeError for a source that the recipe lacks."""
    for name in mix.sources:
        if name not in recipe.training_weights:
            raise RecipeError(
                f"index.mix.sources names {name!r}; sources to train on are {', '.join(recipe.training_weights)}"
            )


def mix_events(doc_id: str, workdir: Path) -> list[Event]:
    """The cell of a document and how often the run reads it; none where the work folder has no index with cells."""
    for path in sorted((workdir / "index" / CELLS_FOLDER).glob("*.parquet")):
        rows = pq.read_table(path, filters=pc.field("doc_id") == doc_id).to_pylist()
        if rows:
            return [_event(rows[0], workdir)]
    return []


def _event(row: dict, workdir: Path) -> Event:
    stage = "train" if (workdir / "train" / MANIFEST_NAME).is_file() else "index"
    recipe = validate(read_manifest(workdir / stage).origin["recipe"], str(workdir / stage / MANIFEST_NAME))
    assert recipe.index.mix is not None
    score = "no" if row["score"] is None else f"{row['score']:.6g}"
    lines = [f"{recipe.index.mix.score}: {score}, above {row['rank']:.1%} of its source's tokens in its language"]
    cells = [cell for cell in indexed_mix(recipe, workdir / "index").rows if cell.cell.name == row["cell"]]
    tokens = run_length(recipe).train_tokens
    lines += [f"{cell.line}{'' if tokens is None else f' in the run of {tokens:,} tokens'}" for cell in cells]
    return Event("mix", f"cell {row['cell']}", tuple(lines))

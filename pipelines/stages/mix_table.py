"""The table of index.mix in a recipe: tokens and repeats of each cell, and the cell of one document."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.document_history import Event
from gristmill.data_pipeline.indexed.config import MixConfig
from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.language_shares import RunLength
from gristmill.data_pipeline.indexed.mix import CELLS_FOLDER, Cell, CellRepeats, cells_of, mix_repeats
from gristmill.foundation.errors import RecipeError
from gristmill.foundation.manifest import MANIFEST_NAME, read_manifest
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import validate


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

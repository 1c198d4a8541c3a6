"""Order of documents in the .bin of a source: a keyed permutation of rows of the corpus, of which index.languages and
index.mix take those of a language or a cell, and index.rehydrate takes some several times."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.indexed.documents import document_ranges, read, read_repeats
from gristmill.data_pipeline.indexed.language_shares import OTHER, cell_name, language_tag
from gristmill.data_pipeline.indexed.mix import CELLS_FOLDER
from gristmill.data_pipeline.indexed.permutation import Permutation, key_of
from gristmill.pipelines.recipes.config import Recipe


@dataclass(frozen=True)
class DocumentOrder:
    """order: of the documents in the .bin. rows: int64[documents], ascending, the row of the corpus that each was taken
    from before the shuffle; None where every row was taken once. source: of the corpus."""

    source: str
    order: Permutation
    rows: np.ndarray | None = field(default=None)

    def row(self, document: int) -> int:
        """The row of the source's train split that document number `document` of the .bin is."""
        place = self.order(document)
        return place if self.rows is None else int(self.rows[place])

    def documents(self, row: int) -> list[int]:
        """The documents of the .bin that this row became; none if it is not in this file."""
        if self.rows is None:
            return [self.order.inverse(row)]
        first, last = (int(np.searchsorted(self.rows, row, side=side)) for side in ("left", "right"))
        return sorted(self.order.inverse(place) for place in range(first, last))


def document_orders(recipe: Recipe, workdir: Path, sizes: Mapping[str, int]) -> dict[str, DocumentOrder]:
    """The order of each indexed file of the train split. sizes: documents of each, by its name in the index; with
    index.languages and index.mix the names are SOURCE.LANGUAGE and SOURCE.CELL; a column of all documents is
    read."""
    orders = {}
    chosen: dict[str, dict[str, np.ndarray]] = {}
    settings = recipe.index
    is_plain = settings.languages is None and settings.mix is None and not settings.rehydrate
    for name, size in ((name, size) for name, size in sizes.items() if size):
        source = name.partition(".")[0]
        if not is_plain and source not in chosen:
            chosen[source] = _chosen_rows(recipe, workdir, source, sizes)
        rows = None if is_plain else chosen[source].get(name, np.empty(0, np.int64))
        key = key_of(recipe.seed, "documents", name, "train")
        orders[name] = DocumentOrder(source, Permutation(size, key), rows)
    return orders


def _chosen_rows(recipe: Recipe, workdir: Path, source: str, names: Collection[str]) -> dict[str, np.ndarray]:
    """Name of an indexed file of the source -> the rows that it holds, as often as it holds them."""
    corpus, cells = workdir / "curate", workdir / "index" / CELLS_FOLDER / f"{source}.parquet"
    ranges = document_ranges(corpus, "train", source)
    tables = [read(documents, "doc_id", "language") for documents in ranges]
    table = pa.concat_tables(tables) if tables else pa.table({"doc_id": [], "language": []})
    times = np.ones(len(table), np.int64)
    if recipe.index.rehydrate and len(table):
        times = read_repeats(corpus, recipe.index.rehydrate).of(table["doc_id"])
    rows = np.repeat(np.arange(len(table), dtype=np.int64), times)
    if recipe.index.mix is not None and cells.is_file():
        encoded = _encoded(pq.read_table(cells, columns=["cell"])["cell"])
        files = encoded.dictionary.to_pylist()
    elif recipe.index.languages is not None:
        encoded = _encoded(table["language"])
        files = [_file_of(source, value, names) for value in encoded.dictionary.to_pylist()]
    else:
        return {source: rows}
    of_row = encoded.indices.to_numpy(zero_copy_only=False)[rows]
    return {
        name: rows[np.isin(of_row, [code for code, file in enumerate(files) if file == name])] for name in set(files)
    }


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    return pc.cast(column, pa.string()).combine_chunks().dictionary_encode(null_encoding="encode")


def _file_of(source: str, language: str | None, names: Collection[str]) -> str:
    """The indexed file of a document's language: its own, or `other` where it is too small for one."""
    name = cell_name(source, language_tag(language))
    return name if name in names else cell_name(source, OTHER)

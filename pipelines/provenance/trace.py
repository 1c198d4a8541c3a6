"""From a training step to the documents it read, and from a document to the steps that read it, without any log.

Sample k is a pure function of the index, the recipe and train.seed (data_pipeline/indexed/samples.py), and each mapping
on the way has an inverse: step -> samples (the tokens in metrics.jsonl) -> source, epoch and window -> documents of the
.bin -> rows of the corpus, by the keyed permutation in which they were written."""

import mmap
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.id_index import IdIndex, read_row
from gristmill.data_pipeline.corpus.splits import document_ranges, document_shards, read, read_repeats
from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.data_pipeline.indexed.language_shares import OTHER, cell_name, language_tag
from gristmill.data_pipeline.indexed.mix import CELLS_FOLDER
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.manifest import CACHE_FOLDER, MANIFEST_NAME, read_manifest
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.workdir.data_forms import open_format, sample_format
from gristmill.training.config.train import LEFT_OUT

# Steps of a run in metrics.jsonl, found by bisection of the file: a run of 10^6 steps is not read whole.


Step = dict[str, Any]


class StepLog:
    """The lines of metrics.jsonl, whose steps and tokens ascend. Raises InputError if there is no such file, or no step
    in it; an unfinished last line is left out."""

    def __init__(self, folder: Path):
        path = folder / "metrics.jsonl"
        if not path.is_file() or not path.stat().st_size:
            raise InputError(f"{path}: no such file; name a run that has trained at least a step")
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._size = self._content.rfind(b"\n") + 1
        if not self._size:
            raise InputError(f"{path}: no complete line; name a run that has trained at least a step")
        self.first, self.last = self._line(0)[0], self._line(self._start(self._size - 1))[0]

    def first_with(self, is_reached: Callable[[Step], bool]) -> Step | None:
        """The first step for which this holds, as it does for all later ones; None if it does for none."""
        start = self._offset_of_first(is_reached)
        return None if start is None else self._line(start)[0]

    def between(self, first: int, last: int) -> Iterator[Step]:
        """The steps of these numbers that the run has made, ascending."""
        start = self._offset_of_first(lambda step: step["step"] >= first)
        while start is not None and start < self._size:
            step, start = self._line(start)
            if step["step"] > last:
                return
            yield step

    def _offset_of_first(self, is_reached: Callable[[Step], bool]) -> int | None:
        """Where the line of the first such step begins."""
        low, high, reached = 0, self._size, None
        while low < high:
            start = self._start((low + high) // 2)
            step, end = self._line(start)
            if is_reached(step):
                high, reached = start, start
            else:
                low = end
        return reached

    def at(self, number: int) -> Step | None:
        """The step of this number; None if the run has not made it."""
        step = self.first_with(lambda step: step["step"] >= number)
        return step if step is not None and step["step"] == number else None

    def _start(self, offset: int) -> int:
        """Where the line begins that holds this byte."""
        return self._content.rfind(b"\n", 0, offset) + 1

    def _line(self, start: int) -> tuple[Step, int]:
        """(the line that begins here, where the next begins)."""
        end = self._content.find(b"\n", start) + 1
        return orjson.loads(self._content[start:end]), end

    def close(self) -> None:
        self._content.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def samples_of_steps(log: StepLog, first: int, last: int, sequence_length: int) -> Sequence[int]:
    """The samples that steps first to last read, without those of replicas that were lost. Raises InputError for steps
    that the run has not made."""
    begin, end = log.at(first), log.at(last)
    if begin is None or end is None or last < first:
        raise InputError(f"steps {first} to {last}: the run has made steps {log.first['step']} to {log.last['step']}")
    before = log.at(first - 1)
    samples = range((before["tokens"] if before else 0) // sequence_length, end["tokens"] // sequence_length)
    left_out = {k for step in log.between(first, last) for bounds in step.get(LEFT_OUT, ()) for k in range(*bounds)}
    return [k for k in samples if k not in left_out] if left_out else samples


def was_left_out(log: StepLog, sample: int, step: int) -> bool:
    """Whether the replica that would have read the sample in this step, which is its own, was lost."""
    line = log.at(step)
    return line is not None and any(sample in range(*bounds) for bounds in line.get(LEFT_OUT, ()))


def step_of(log: StepLog, sample: int, sequence_length: int) -> int | None:
    """The step of the sample, which read it unless it `was_left_out`; None if the run has not made it yet."""
    step = log.first_with(lambda step: step["tokens"] > sample * sequence_length)
    return None if step is None else step["step"]


# Order of documents in the .bin of a source: a keyed permutation of rows of the corpus, of which index.languages and
# index.mix take those of a language or a cell, and index.rehydrate takes some several times.


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
        times = read_repeats(corpus, recipe.index.rehydrate).counts_of(table["doc_id"])
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


MEDIAN_STEPS = 10  # on either side of a step, for what is a spike
MIN_STEPS = 3  # before it
TRACED_FORMS = ("windows", "sentence_pairs")
ID_DIGITS = 32


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens start to stop of a document, as sample k of an epoch of its source reads them. source: of the index; row:
    of the corpus, in the train split of the source."""

    sample: int
    source: str
    epoch: int
    doc_id: str
    start: int
    stop: int
    row: int = -1


class Tracer:
    """Traces documents and steps of a recipe's run in a work folder. Raises RecipeError for objectives that it cannot
    follow, InputError where the corpus or the index is missing."""

    def __init__(self, recipe: Recipe, workdir: Path):
        model, self.train = recipe.training()
        form = sample_format(self.train.objective)
        if form not in TRACED_FORMS:
            raise RecipeError(
                f"train.objective: {self.train.objective} makes samples of its own, whose documents cannot be traced; "
                "objectives on windows and on sentence pairs can"
            )
        for stage in ("curate", "index"):
            if not (workdir / stage / MANIFEST_NAME).is_file():
                raise InputError(f"{workdir / stage}: not complete; run `gristmill run` with this recipe first")
        self.workdir, self.recipe, self.sequence_length = workdir, recipe, model.sequence_length
        self.samples = open_format(form, workdir / "index", "train", recipe)
        self._shards = lru_cache(maxsize=None)(self._shards_of)

    @property
    def num_samples(self) -> int:
        """Number of samples of the whole run, as planned."""
        return -(-self.train.tokens // self.sequence_length)

    @cached_property
    def orders(self) -> dict[str, DocumentOrder]:
        """By indexed source, the rows of the corpus behind its documents."""
        sizes = {
            source.name: source.splits["train"].documents for source in read_dataset(self.workdir / "index").sources
        }
        return document_orders(self.recipe, self.workdir, sizes)

    def documents_of(self, samples: Sequence[int]) -> list[DocumentSpan]:
        """Document spans that these samples read, in their order."""
        pieces = [(k, *self.samples.pieces_of(k)) for k in samples]
        rows = [
            (self.orders[source].source, self.orders[source].row(piece.document))
            for _, source, _, of_sample in pieces
            for piece in of_sample
        ]
        ids = self._doc_ids(rows)
        return [
            DocumentSpan(k, source, epoch, ids[row], piece.start, piece.stop, row[1])
            for (k, source, epoch, piece), row in zip(
                ((k, source, epoch, piece) for k, source, epoch, of_sample in pieces for piece in of_sample),
                rows,
                strict=True,
            )
        ]

    def samples_of(self, doc_id: str) -> list[tuple[str, int, int]]:
        """(source, sample, epoch) of each sample of the planned run that reads the document, ascending.

        Raises InputError if no document of the train split has this id."""
        source, row = self._find(doc_id)
        occurrences = [
            (name, k, epoch)
            for name, order in self.orders.items()
            if order.source == source and name in self.samples.sources
            for document in order.documents(row)
            for k, epoch in self.samples.samples_with(name, document, self.num_samples)
        ]
        return sorted(occurrences, key=lambda occurrence: occurrence[1:])

    def first_sample(self, source: str, row: int) -> int | None:
        """The first sample of the planned run that reads the document in this row of the train split; None if none."""
        numbers = [
            k
            for name, order in self.orders.items()
            if order.source == source and name in self.samples.sources
            for document in order.documents(row)
            for k, _ in self.samples.samples_with(name, document, self.num_samples)
        ]
        return min(numbers, default=None)

    def text_of(self, span: DocumentSpan) -> str:
        return self.record_of(span)["text"]

    def record_of(self, span: DocumentSpan) -> dict[str, str]:
        """text and url of the span's document."""
        shard, inside = self._place(self.orders[span.source].source, span.row)
        with pq.ParquetFile(shard) as file:
            return read_row(file, inside, ["text", "url"])

    def _shards_of(self, source: str) -> tuple[list[Path], list[int]]:
        """(shards of the source, the row behind each)."""
        shards = document_shards(self.workdir / "curate", "train", source)
        counts = _shard_rows(self.workdir, source, shards)
        return shards, list(accumulate(counts))

    def _place(self, source: str, row: int) -> tuple[Path, int]:
        """(shard, row in it) of a row of the source."""
        shards, ends = self._shards(source)
        place = bisect_right(ends, row)
        if place == len(shards):
            raise InputError(f"{self.workdir / 'curate'}: fewer documents of {source} than the index; index it again")
        return shards[place], row - (ends[place - 1] if place else 0)

    def _doc_ids(self, rows: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """(source, row) -> the id of its document. Each shard is opened once, and of it the row groups are read that
        hold one of the rows."""
        by_shard: dict[Path, list[tuple[int, tuple[str, int]]]] = {}
        for row in set(rows):
            shard, inside = self._place(*row)
            by_shard.setdefault(shard, []).append((inside, row))
        ids: dict[tuple[str, int], str] = {}
        for shard, places in by_shard.items():
            doc_ids = _doc_ids_of(shard, sorted(inside for inside, _ in places))
            ids |= {row: doc_ids[inside] for inside, row in places}
        return ids

    def _find(self, doc_id: str) -> tuple[str, int]:
        """(source of the corpus, row of its train split)."""
        index = IdIndex.of_folder(self.workdir / "curate")
        is_id = len(doc_id) == ID_DIGITS and set(doc_id) <= set("0123456789abcdef")
        for place in index.places(doc_id) if index is not None and is_id else ():
            folder, _, name = place.table.rpartition("/")
            if folder == "documents/train" and not place.is_duplicate:
                return self._row_in_source(name, place.row)
        raise InputError(
            f"no document {doc_id!r} in the train split of {self.workdir / 'curate'}; `gristmill why {doc_id}` "
            "says what became of it"
        )

    def _row_in_source(self, shard: str, row: int) -> tuple[str, int]:
        """(source, row among all its shards) of a row of the shard documents/train/SHARD.parquet."""
        name = shard.removesuffix(".parquet")
        source = name.rpartition("-")[0]
        shards, ends = self._shards(source)
        place = [path.stem for path in shards].index(name)
        return source, (ends[place - 1] if place else 0) + row


def _shard_rows(workdir: Path, source: str, shards: Sequence[Path]) -> list[int]:
    """Documents of each shard. A corpus of 10^9 has thousands, so they are kept in the cache of the work folder."""
    path = workdir / CACHE_FOLDER / "trace" / f"{source}-{read_manifest(workdir / 'curate').fingerprint}.json"
    if path.is_file():
        rows = orjson.loads(path.read_bytes())
        if len(rows) == len(shards):
            return rows
    rows = [pq.read_metadata(shard).num_rows for shard in shards]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, orjson.dumps(rows))
    return rows


def _doc_ids_of(shard: Path, rows: Sequence[int]) -> dict[int, str]:
    """Row -> id; rows ascend."""
    ids: dict[int, str] = {}
    with pq.ParquetFile(shard) as file:
        metadata = file.metadata  # read anew each time that it is asked for
        ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        groups = [bisect_right(ends, row) for row in rows]
        for group in sorted(set(groups)):
            first = ends[group - 1] if group else 0
            column = file.read_row_group(group, columns=["doc_id"], use_threads=False).column("doc_id")
            ids |= {
                row: column[row - first].as_py() for row, of_row in zip(rows, groups, strict=True) if of_row == group
            }
    return ids


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Raises InputError if there is none; an unfinished last line is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise InputError(f"{path}: no such file; name a run that has trained at least a step")
    steps = []
    for line in path.read_bytes().splitlines():
        try:
            steps.append(orjson.loads(line))
        except ValueError:
            break
    return [step for step in steps if "step" in step and "tokens" in step]


def spikes(steps: Sequence[dict[str, Any]], field: str, count: int) -> list[tuple[int, float]]:
    """(step, value over the running median) of the worst `count` steps by this field, the worst first.

    The median is the larger of those of the MEDIAN_STEPS steps before and behind, so that the fall at a run's start is
    no spike; the first MIN_STEPS steps have none before them. Values 9 7 5 4 3 3 8 3 3
    -> step 7: 8 over the 4.5 before it."""
    values = [(step["step"], step[field]) for step in steps if step.get(field) is not None]
    ratios = []
    for place in range(MIN_STEPS, len(values)):
        step, value = values[place]
        sides = values[max(0, place - MEDIAN_STEPS) : place], values[place + 1 : place + 1 + MEDIAN_STEPS]
        median = max(statistics.median(other for _, other in side) for side in sides if side)
        ratios.append((step, value / median if median else 1.0))
    return sorted(ratios, key=lambda ratio: (-ratio[1], ratio[0]))[:count]


def in_common(spans: Sequence[Sequence[DocumentSpan]]) -> list[tuple[str, int]]:
    """(doc_id, in how many of the lists it is) of documents in more than one, the most frequent first."""
    counts = Counter(doc_id for span_list in spans for doc_id in {span.doc_id for span in span_list})
    return [(doc_id, count) for doc_id, count in counts.most_common() if count > 1]

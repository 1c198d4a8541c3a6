"""Where documents went: outcome, shards, ranges of the index, the tokenizer's sample, checkpoints."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.counts import sources_without_documents
from gristmill.data_pipeline.corpus.id_index import DUPLICATE, IDS_FOLDER, IdIndex
from gristmill.data_pipeline.indexed.dataset import source_prefix
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.data_pipeline.indexed.format import IndexedReader
from gristmill.data_pipeline.ledger.document_file import RowRange, packed_ids, read_rows
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.provenance.trace import StepLog, Tracer, step_of
from gristmill.pipelines.recipes.config import Recipe
from gristmill.tokenizers.training_sample import training_documents

CHECKPOINTS = "checkpoints"
LEDGER_COLUMNS = ["doc_id", "outcome", "split", "step", "pieces"]
TRAIN = "train"


@dataclass(frozen=True)
class IndexRange:
    """Tokens first to last - 1 of the .bin of a source and split."""

    source: str
    split: str
    first: int
    last: int


@dataclass(frozen=True)
class Training:
    """Steps of a model that read the documents. first_step: the first step that read one, None if none has. clean: the
    newest checkpoint before it, None if there is none. seen: checkpoints from it on. note: why nothing is known."""

    steps: int = 0
    first_step: int | None = None
    clean: int | None = None
    seen: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class DocumentPlaces:
    """Places of the documents. outcomes: (outcome, split or step) -> documents. shards: file of the corpus -> rows.
    sharing: documents that had a span removed because one of these keeps it. in_sample: documents of the tokenizer's
    sample; None if it was not trained here."""

    outcomes: Mapping[tuple[str, str], int]
    shards: Mapping[str, int]
    sharing: int
    ranges: tuple[IndexRange, ...] = ()
    in_sample: int | None = None
    training: Training = field(default_factory=Training)


def find_places(doc_ids: frozenset[str], recipe: Recipe, workdir: Path, engine: Engine) -> DocumentPlaces:
    """Places in what the stages of the work folder have written. Raises InputError without a corpus."""
    corpus = workdir / "curate"
    index = open_index(corpus)
    outcomes, written = _in_ledger(doc_ids, corpus, index)
    rows = {corpus / table: of_table for table, of_table in _rows_of(written, index, "documents/").items()}
    shards = {path.relative_to(corpus).as_posix(): len(of_shard) for path, of_shard in rows.items()}
    return DocumentPlaces(
        outcomes,
        shards,
        _num_sharing(doc_ids, corpus),
        tuple(_index_ranges(rows, recipe, workdir)),
        _in_sample(written, recipe, workdir, engine),
        _training(rows, recipe, workdir),
    )


def open_index(corpus: Path) -> IdIndex:
    """The index of ids. Raises InputError without a corpus."""
    index = IdIndex.of_folder(corpus) if (corpus / MANIFEST_NAME).is_file() else None
    if index is None:
        raise InputError(f"{corpus}: not complete; run `gristmill curate` first")
    return index


def _rows_of(doc_ids: frozenset[str], index: IdIndex, folder: str) -> dict[str, np.ndarray]:
    """Table below this folder of the corpus -> rows of these documents."""
    records = index.records_of(packed_ids(pa.array(sorted(doc_ids), pa.string()), Path(IDS_FOLDER)))
    by_table = index.rows_by_table(records[(records["table"] & DUPLICATE) == 0])
    return {table: rows for table, rows in sorted(by_table.items()) if table.startswith(folder)}


def _in_ledger(
    doc_ids: frozenset[str], corpus: Path, index: IdIndex
) -> tuple[dict[tuple[str, str], int], frozenset[str]]:
    """(counts by outcome and split or step, ids under which kept ones stand in the corpus)."""
    outcomes: Counter[tuple[str, str]] = Counter()
    written: set[str] = set()
    for name, rows in _rows_of(doc_ids, index, "ledger/").items():
        for row in read_rows(RowRange.of_rows(corpus / name, rows), LEDGER_COLUMNS).to_pylist():
            if row["doc_id"] in doc_ids:  # not the whole document of a piece
                outcomes[row["outcome"], row["split"] or row["step"] or ""] += 1
                if row["outcome"] == "kept":
                    written.update(row["pieces"] or [row["doc_id"]])
    return dict(outcomes), frozenset(written)


def _num_sharing(doc_ids: frozenset[str], corpus: Path) -> int:
    """Other documents of the ledger that had a span removed which one of these keeps."""
    sharing: set[str] = set()
    wanted = pa.array(sorted(doc_ids), pa.string())
    for path in sorted((corpus / "ledger").glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            spans = file.read(["removed_spans.list.element.kept_in"]).column(0).combine_chunks()
            kept_in = pc.struct_field(spans.flatten(), "kept_in")
            if kept_in.null_count < len(kept_in):
                is_wanted = pc.fill_null(pc.is_in(kept_in, wanted), False)
                rows = pc.list_parent_indices(spans).filter(is_wanted)
                sharing.update(file.read(["doc_id"]).column(0).take(rows).to_pylist())
    return len(sharing.difference(doc_ids))


def _index_ranges(rows: Mapping[Path, np.ndarray], recipe: Recipe, workdir: Path) -> Iterator[IndexRange]:
    """Ranges of tokens of the documents in these rows of shards."""
    index = workdir / "index"
    settings = recipe.index
    has_other_order = settings.languages is not None or settings.mix is not None or bool(settings.rehydrate)
    if not (index / MANIFEST_NAME).is_file() or has_other_order:
        return
    for (split, source), places in sorted(_rows_of_sources(rows, workdir / "curate").items()):
        prefix = source_prefix(index, split, source)
        if not prefix.with_suffix(".idx").is_file():
            continue
        reader = IndexedReader(prefix)
        order = Permutation(len(reader), key_of(recipe.seed, "documents", source, split))
        documents = np.array(sorted(order.inverse(place) for place in places.tolist()), np.int64)
        for first, last in zip(*(bounds.tolist() for bounds in reader.token_ranges(documents)), strict=True):
            yield IndexRange(source, split, first, last)


def _rows_of_sources(rows: Mapping[Path, np.ndarray], corpus: Path) -> dict[tuple[str, str], np.ndarray]:
    """(split, source) -> rows counted over all its shards."""
    counted: dict[tuple[str, str], list[np.ndarray]] = {}
    starts: Counter[tuple[str, str]] = Counter()
    for path in sorted((corpus / "documents").glob("*/*.parquet")):
        key = path.parent.name, path.stem.rpartition("-")[0]
        if path in rows:
            counted.setdefault(key, []).append(starts[key] + rows[path])
        starts[key] += pq.read_metadata(path).num_rows
    return {key: np.concatenate(parts) for key, parts in counted.items()}


def _in_sample(doc_ids: Collection[str], recipe: Recipe, workdir: Path, engine: Engine) -> int | None:
    """How many of the documents the tokenizer was trained on; None if none was trained."""
    if not (workdir / "tokenizer" / MANIFEST_NAME).is_file() or recipe.tokenizer.pretrained is not None:
        return None
    corpus = workdir / "curate"
    empty = sources_without_documents(corpus, recipe.training_weights)
    sources = [name for name in recipe.training_weights if name not in empty]
    return len(training_documents(corpus, sources, recipe.tokenizer, recipe.seed, engine) & set(doc_ids))


def _training(rows: Mapping[Path, np.ndarray], recipe: Recipe, workdir: Path) -> Training:
    folder = workdir / TRAIN
    if not (folder / MANIFEST_NAME).is_file():
        return Training(note="no finished model in the work folder")
    log = StepLog(folder)
    last = log.last["step"]
    saved = checkpoint_steps(folder)
    try:
        first = _first_step(rows, recipe, workdir, log)
    except RecipeError as error:
        return Training(
            last, None, None, tuple(saved), f"not traced ({error}); every checkpoint counts as one that saw them"
        )
    if first is None:
        return Training(last, None, saved[-1] if saved else None)
    clean = max((step for step in saved if step < first), default=None)
    return Training(last, first, clean, tuple(step for step in saved if step >= first))


def _first_step(rows: Mapping[Path, np.ndarray], recipe: Recipe, workdir: Path, log: StepLog) -> int | None:
    """First step that read a document in these rows. Raises RecipeError if samples cannot be traced."""
    tracer = Tracer(recipe, workdir)
    samples = []
    for (split, source), places in _rows_of_sources(rows, workdir / "curate").items():
        if split == TRAIN:
            samples += [
                sample for place in places.tolist() if (sample := tracer.first_sample(source, place)) is not None
            ]
    return None if not samples else step_of(log, min(samples), tracer.sequence_length)


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints of a run, ascending."""
    names = [path.parent.name for path in (folder / CHECKPOINTS).glob(f"step-*/{MANIFEST_NAME}")]
    return sorted(int(name.removeprefix("step-")) for name in names)

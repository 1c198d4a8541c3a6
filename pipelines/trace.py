"""From a training step to the documents it read, and from a document to the steps that read it, without any log.

Sample k is a pure function of the index, the recipe and train.seed (data_pipeline/indexed/samples.py), and each mapping
on the way has an inverse: step -> samples (the tokens in metrics.jsonl) -> source, epoch and window -> documents of the
.bin -> rows of the corpus, by the keyed permutation in which they were written."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.indexed.dataset import read_dataset
from gristmill.data_pipeline.indexed.documents import DocumentRange, document_ranges, read
from gristmill.data_pipeline.indexed.permutation import Permutation, key_of
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.manifest import MANIFEST_NAME
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.training_data import form_of, open_form

MEDIAN_STEPS = 21  # around a step, for what is a spike


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens start to stop of a document, as sample k of an epoch of its source reads them."""

    sample: int
    source: str
    epoch: int
    doc_id: str
    start: int
    stop: int


class Tracer:
    """Traces documents and steps of a recipe's run in a work folder. Raises RecipeError for objectives and indexes that
    it cannot follow, InputError where the corpus or the index is missing."""

    def __init__(self, recipe: Recipe, workdir: Path):
        model, self.train = recipe.training()
        if form_of(self.train.objective) != "windows":
            raise RecipeError(
                f"train.objective: {self.train.objective} makes samples of its own, whose documents cannot be traced; "
                "causal and span objectives on windows can"
            )
        if recipe.index.languages is not None or recipe.index.mix is not None or recipe.index.rehydrate:
            raise RecipeError(
                "index.languages, index.mix and index.rehydrate write documents in another order: not traced"
            )
        for stage in ("curate", "index"):
            if not (workdir / stage / MANIFEST_NAME).is_file():
                raise InputError(f"{workdir / stage}: not complete; run `gristmill run` with this recipe first")
        self.workdir, self.seed, self.sequence_length = workdir, recipe.seed, model.sequence_length
        self.samples = open_form("windows", workdir / "index", "train", recipe)
        self._ranges: dict[str, list[DocumentRange]] = {}
        self._ids_of = lru_cache(maxsize=64)(_ids_of)
        self._sizes = {
            source.name: source.splits["train"].documents for source in read_dataset(workdir / "index").sources
        }

    @property
    def num_samples(self) -> int:
        """Number of samples of the whole run, as planned."""
        return -(-self.train.tokens // self.sequence_length)

    def documents_of(self, samples: range) -> list[DocumentSpan]:
        """Document spans that these samples read, in their order."""
        spans = []
        for k in samples:
            source, epoch, pieces = self.samples.pieces_of(k)
            rows = [self._row(source, piece.document) for piece in pieces]
            ids = self._doc_ids(source, rows)
            spans += [
                DocumentSpan(k, source, epoch, doc_id, piece.start, piece.stop)
                for doc_id, piece in zip(ids, pieces, strict=True)
            ]
        return spans

    def samples_of(self, doc_id: str) -> list[tuple[str, int, int]]:
        """(source, sample, epoch) of each sample of the planned run that reads the document, ascending.

        Raises InputError if no document of the train split has this id."""
        occurrences = []
        for source in self.samples.sources:
            row = self._find(source, doc_id)
            if row is not None:
                place = self._order(source).inverse(row)
                occurrences += [
                    (source, k, epoch) for k, epoch in self.samples.samples_with(source, place, self.num_samples)
                ]
                break
        else:
            raise InputError(
                f"no document {doc_id!r} in the train split of {self.workdir / 'curate'}; `gristmill why {doc_id}` "
                "says what became of it"
            )
        return occurrences

    def first_sample(self, source: str, row: int) -> int | None:
        """The first sample of the planned run that reads the document in this row of the train split; None if none."""
        place = self._order(source).inverse(row)
        return min((k for k, _ in self.samples.samples_with(source, place, self.num_samples)), default=None)

    def text_of(self, span: DocumentSpan) -> str:
        row = self._find(span.source, span.doc_id)
        assert row is not None
        documents, inside = self._range_of(span.source, row)
        return read(documents, "text")["text"][inside].as_py()

    def _order(self, source: str) -> Permutation:
        return Permutation(self._sizes[source], key_of(self.seed, "documents", source, "train"))

    def _row(self, source: str, document: int) -> int:
        """The row of the corpus of a document of the .bin."""
        return self._order(source)(document)

    def _ranges_of(self, source: str) -> list[DocumentRange]:
        if source not in self._ranges:
            self._ranges[source] = document_ranges(self.workdir / "curate", "train", source)
        return self._ranges[source]

    def _range_of(self, source: str, row: int) -> tuple[DocumentRange, int]:
        for documents in self._ranges_of(source):
            if row < documents.documents:
                return documents, row
            row -= documents.documents
        raise InputError(f"{self.workdir / 'curate'}: fewer documents of {source} than the index has; index it again")

    def _doc_ids(self, source: str, rows: Sequence[int]) -> list[str]:
        ids = []
        for row in rows:
            documents, inside = self._range_of(source, row)
            ids.append(self._ids_of(documents)[inside])
        return ids

    def _find(self, source: str, doc_id: str) -> int | None:
        first = 0
        for documents in self._ranges_of(source):
            ids = self._ids_of(documents)
            if doc_id in ids:
                return first + ids.index(doc_id)
            first += documents.documents
        return None


def _ids_of(documents: DocumentRange) -> list[str]:
    return read(documents, "doc_id")["doc_id"].to_pylist()


# Steps of a run, from its metrics.


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Raises InputError if there is none; an unfinished last line is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise InputError(f"{path}: no such file; name a run that has trained at least a step")
    steps = []
    for line in path.read_text("utf-8").splitlines():
        try:
            steps.append(json.loads(line))
        except ValueError:
            break
    return [step for step in steps if "step" in step and "tokens" in step]


def samples_of_steps(steps: Sequence[dict[str, Any]], first: int, last: int, sequence_length: int) -> range:
    """The samples that steps first to last read. Raises InputError for steps that the run has not made."""
    tokens = {step["step"]: step["tokens"] for step in steps}
    if first not in tokens or last not in tokens or last < first:
        raise InputError(f"steps {first} to {last}: the run has made steps {min(tokens)} to {max(tokens)}")
    before = tokens.get(first - 1, 0)
    return range(before // sequence_length, tokens[last] // sequence_length)


def step_of(steps: Sequence[dict[str, Any]], sample: int, sequence_length: int) -> int | None:
    """The step that read the sample; None if it has not been read yet."""
    return next((step["step"] for step in steps if step["tokens"] > sample * sequence_length), None)


def spikes(steps: Sequence[dict[str, Any]], field: str, count: int) -> list[tuple[int, float]]:
    """(step, value over the running median) of the worst `count` steps by this field, the worst first."""
    values = [(step["step"], step[field]) for step in steps if step.get(field) is not None]
    ratios = []
    for place, (step, value) in enumerate(values):
        around = [other for _, other in values[max(0, place - MEDIAN_STEPS // 2) : place + MEDIAN_STEPS // 2 + 1]]
        median = statistics.median(around)
        ratios.append((step, value / median if median else 1.0))
    return sorted(ratios, key=lambda ratio: (-ratio[1], ratio[0]))[:count]


def in_common(spans: Sequence[Sequence[DocumentSpan]]) -> list[tuple[str, int]]:
    """(doc_id, in how many of the lists it is) of documents in more than one, the most frequent first."""
    counts = Counter(doc_id for span_list in spans for doc_id in {span.doc_id for span in span_list})
    return [(doc_id, count) for doc_id, count in counts.most_common() if count > 1]

"""The index stage: documents to tokens, one .bin and .idx a source and split, document order shuffled once."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.indexed.dataset import (
    SPLITS,
    Dataset,
    FimIds,
    IndexedSource,
    SplitCounts,
    source_prefix,
    write_dataset,
)
from gristmill.data_pipeline.indexed.documents import document_ranges
from gristmill.data_pipeline.indexed.epochs import blend_weights, epochs_by_source, repeat_warnings
from gristmill.data_pipeline.indexed.format import bin_path, dtype_for
from gristmill.data_pipeline.indexed.merge import merge
from gristmill.data_pipeline.indexed.permutation import key_of
from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.engine.local import LocalEngine
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import file_digest, write_atomic
from gristmill.pipelines.config import Recipe
from gristmill.pipelines.stage import Stage, StageContext
from gristmill.tokenizers.encode import EncodeTask, encode_part, note_path, tasks_of
from gristmill.tokenizers.tokenizer import Tokenizer, load_bulk_tokenizer

PARTS = "parts"  # of a half-done stage: small files in the corpus's order, removed when all are merged
# Starting a process costs 1.5 s of imports; below twice that the work is done in this one. Text per second and core.
WORTH_SHARING_SECONDS = 3.0
ENCODED_BYTES_SECOND = 12e6
GATHERED_BYTES_SECOND = 200e6


@dataclass(frozen=True)
class MergeTask:
    """parts: prefixes in their order. prefix: where the source goes. key: of its shuffle."""

    parts: tuple[Path, ...]
    prefix: Path
    note: Path
    key: int


def config(recipe: Recipe) -> dict[str, Any]:
    """The index section is not here: it says how samples are drawn from the files, not what is in them."""
    return {"seed": recipe.seed, "sources": [[source.name, source.weight] for source in recipe.sources]}


def run(context: StageContext) -> dict[str, Any]:
    tokenizer = load_bulk_tokenizer(context.inputs["tokenizer"])
    context.reporter.say(f"index: encoding with {tokenizer.encoder}")
    encodes, merges = _tasks(context, tokenizer)
    todo = [task for task in encodes if not task.merged.is_file()]
    text_bytes = sum(task.encode.bytes for task in encodes)
    _engine(context, text_bytes / ENCODED_BYTES_SECOND).map(
        encode_part, [task.encode for task in todo], "index: encoding", [task.encode.bytes for task in todo], "B"
    )
    _engine(context, text_bytes / GATHERED_BYTES_SECOND).map(_merge, merges, "index: shuffling", unit="files")
    dataset = _describe(context, tokenizer)
    write_dataset(context.folder, dataset)
    shutil.rmtree(context.folder / PARTS, ignore_errors=True)
    for line in repeats(context.recipe, dataset):
        context.reporter.say(f"index: {line}")
    return _facts(dataset, tokenizer)


def _engine(context: StageContext, seconds: float) -> LocalEngine:
    """All workers, or this process alone where sharing the work would take longer than doing it."""
    return LocalEngine(context.workers if seconds >= WORTH_SHARING_SECONDS else 1, context.reporter)


@dataclass(frozen=True)
class _Work:
    """An encoding task, and the note that says its documents have been merged already."""

    encode: EncodeTask
    merged: Path


def _tasks(context: StageContext, tokenizer: Tokenizer) -> tuple[list[_Work], list[MergeTask]]:
    """Raises InputError if a source has no documents in the train split."""
    encodes: list[_Work] = []
    merges: list[MergeTask] = []
    for split in SPLITS:
        for source in context.recipe.sources:
            found = document_ranges(context.inputs["curate"], split, source.name)
            if not found and split == "train":
                raise InputError(
                    f"{context.inputs['curate']}: source {source.name!r} has no documents in the train split; "
                    "look at what curate removed, or drop the source"
                )
            if not found:
                continue
            parts = context.folder / PARTS / split / source.name
            tasks = tasks_of(found, parts, context.inputs["tokenizer"], tokenizer.encoder)
            merged = note_path(parts)
            encodes += [_Work(task, merged) for task in tasks]
            prefixes = tuple(task.prefix for task in tasks)
            key = key_of(context.recipe.seed, "documents", source.name, split)
            merges.append(MergeTask(prefixes, source_prefix(context.folder, split, source.name), merged, key))
    return encodes, merges


def _merge(task: MergeTask) -> None:
    """The source's .bin and .idx in their shuffled order, then the note with its counts; skipped if the note stands."""
    if task.note.is_file():
        return
    merge(task.parts, task.prefix, task.key)
    reader = IndexedReader(task.prefix)
    counts = SplitCounts(
        documents=len(reader),
        tokens=reader.num_tokens,
        bytes=sum(json.loads(note_path(part).read_bytes())["bytes"] for part in task.parts),
        sha256=file_digest(bin_path(task.prefix)),
    )
    write_atomic(task.note, canonical_json(counts.model_dump(mode="json")))


def _describe(context: StageContext, tokenizer: Tokenizer) -> Dataset:
    fim = tokenizer.fim_ids()
    tokens = {source.name: _counts(context.folder, "train", source.name).tokens for source in context.recipe.sources}
    weights = blend_weights({source.name: source.weight for source in context.recipe.sources}, tokens)
    return Dataset(
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtype=str(dtype_for(tokenizer.vocab_size)),
        fim=None if fim is None else FimIds(prefix=fim[0], middle=fim[1], suffix=fim[2]),
        sources=tuple(
            IndexedSource(
                name=source.name,
                weight=weights[source.name],
                tokenizer=tokenizer.fingerprint,
                splits={split: _counts(context.folder, split, source.name) for split in SPLITS},
            )
            for source in context.recipe.sources
        ),
    )


def repeats(recipe: Recipe, dataset: Dataset) -> list[str]:
    """A line for each source that the recipe's training would see more than 4 times; none where it trains nothing."""
    if recipe.train is None:
        return []
    tokens = {source.name: source.splits["train"].tokens for source in dataset.sources}
    weights = {source.name: source.weight for source in dataset.sources}
    epochs = epochs_by_source(tokens, weights, recipe.train.tokens, recipe.index.phases)
    return repeat_warnings(epochs, tokens, recipe.train.tokens)


def _counts(folder: Path, split: str, source: str) -> SplitCounts:
    note = note_path(folder / PARTS / split / source)
    if not note.is_file():
        return SplitCounts(documents=0, tokens=0, bytes=0, sha256="")
    return SplitCounts.model_validate_json(note.read_bytes())


def _facts(dataset: Dataset, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": dataset.vocab_size,
        "end_of_document": dataset.end_of_document,
        "encoder": tokenizer.encoder,
        "tokens": {split: {source.name: source.splits[split].tokens for source in dataset.sources} for split in SPLITS},
    }


STAGE: Stage = Stage(
    name="index",
    code_version=1,
    inputs=("curate", "tokenizer"),
    config=config,
    run=run,
    sections=("index",),
    libraries=("sentencepiece", "tokenizers", "kitoken", "tiktoken", "numpy"),
)

if __name__ == "__main__":
    from gristmill.pipelines.cli import stage_script

    stage_script("index")

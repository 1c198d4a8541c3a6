"""dataset.json: what a folder of indexed sources holds, and how a trainer must read it."""

import json
from pathlib import Path

from pydantic import Field

from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic

DATASET_NAME = "dataset.json"


class SplitCounts(Config):
    """sha256 is that of the .bin; tokens count the end-of-document tokens, bytes the text before encoding."""

    documents: int
    tokens: int
    bytes: int
    sha256: str


class IndexedSource(Config):
    name: str
    weight: float
    tokenizer: str = Field(description="fingerprint of the tokenizer the ids belong to")
    splits: dict[str, SplitCounts]


class FimIds(Config):
    prefix: int
    middle: int
    suffix: int


class Dataset(Config):
    vocab_size: int
    end_of_document: int
    dtype: str
    fim: FimIds | None
    sources: tuple[IndexedSource, ...]


def write_dataset(folder: Path, dataset: Dataset) -> None:
    write_atomic(folder / DATASET_NAME, canonical_json(dataset.model_dump(mode="json")) + b"\n")


def read_dataset(folder: Path) -> Dataset:
    """Raises InputError if the folder has no dataset.json, or its sources do not belong together."""
    path = folder / DATASET_NAME
    if not path.is_file():
        raise InputError(f"{path}: no such file; this is no folder of indexed data: run `gristmill index` first")
    try:
        dataset = Dataset.model_validate(json.loads(path.read_bytes()))
    except ValueError as error:
        raise InputError(f"{path}: not a dataset description ({error}); run `gristmill index` again") from error
    by_tokenizer = {source.tokenizer: source.name for source in dataset.sources}
    if len(by_tokenizer) > 1:
        raise InputError(
            f"{path}: sources {sorted(by_tokenizer.values())} were made with different tokenizers; "
            "their ids mean different text: index them again with one tokenizer"
        )
    for source in dataset.sources:
        if not 0 <= source.weight < float("inf"):
            raise InputError(
                f"{path}: source {source.name!r} has weight {source.weight}; a weight is a finite number, 0 or more: "
                "set the source's weight and run `gristmill index` again"
            )
    return dataset


def source_prefix(folder: Path, split: str, name: str) -> Path:
    """Where a source's .bin and .idx stand: FOLDER/train/books."""
    return folder / split / name

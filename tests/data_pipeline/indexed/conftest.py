"""Small indexed folders written by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from gristmill.data_pipeline.indexed.dataset import (
    Dataset,
    FimIds,
    IndexedSource,
    SplitCounts,
    source_prefix,
    write_dataset,
)
from tests.support.indexed_files import write_documents

END = 1
VOCABULARY = 1000


@pytest.fixture
def make_dataset(tmp_path) -> Callable[..., Path]:
    """make({"books": (0.7, [[5, 6], [7]])}) writes the documents, each with END behind it, and returns the folder."""

    def make(sources: dict[str, tuple[float, Sequence[Sequence[int]]]], split: str = "train", **changes) -> Path:
        described = []
        for name, (weight, documents) in sources.items():
            ended = [[*document, END] for document in documents]
            if ended:
                write_documents(source_prefix(tmp_path, split, name), ended, np.uint16, VOCABULARY)
            tokens = sum(map(len, ended))
            counts = SplitCounts(documents=len(ended), tokens=tokens, bytes=tokens, sha256="")
            tokenizer = changes.get("tokenizers", {}).get(name, "t")
            described.append(IndexedSource(name=name, weight=weight, tokenizer=tokenizer, splits={split: counts}))
        fim = FimIds(prefix=2, middle=3, suffix=4) if changes.get("fim") else None
        sources_ = tuple(described)
        write_dataset(
            tmp_path,
            Dataset(vocab_size=VOCABULARY, end_of_document=END, dtype="uint16", fim=fim, sources=sources_),
        )
        return tmp_path

    return make


@pytest.fixture
def random_documents() -> Callable[[int, int, int], list[list[int]]]:
    """(seed, count, longest) -> documents of random ids from 10 on."""

    def draw(seed: int, count: int, longest: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(10, VOCABULARY, rng.integers(1, longest)).tolist() for _ in range(count)]

    return draw

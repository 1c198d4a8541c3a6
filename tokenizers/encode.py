"""Documents become token ids: a task takes some slices of a corpus and writes them as one small indexed file."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.documents import SLICE_BYTES, DocumentRange, read
from gristmill.data_pipeline.indexed.format import dtype_for, idx_path
from gristmill.data_pipeline.indexed.writer import IndexedWriter, indexed_writer
from gristmill.foundation.canonical_json import canonical_json
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.tokenizers.tokenizer import Tokenizer, load_bulk_tokenizer

# Documents given to the encoder in one call.
BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class EncodeTask:
    """prefix: the part's .bin and .idx; beside them PREFIX.json keeps the bytes of text, written last."""

    tokenizer: Path
    encoder: str
    slices: tuple[DocumentRange, ...]
    prefix: Path

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.slices)


def tasks_of(slices: Sequence[DocumentRange], prefix: Path, tokenizer: Path, encoder: str) -> list[EncodeTask]:
    """Neighbouring slices put together to about SLICE_BYTES; parts PREFIX-00000, PREFIX-00001 ... in their order."""
    runs: list[list[DocumentRange]] = []
    for part in slices:
        if not runs or sum(held.bytes for held in runs[-1]) + part.bytes > SLICE_BYTES:
            runs.append([])
        runs[-1].append(part)
    return [
        EncodeTask(tokenizer, encoder, tuple(run), prefix.with_name(f"{prefix.name}-{number:05d}"))
        for number, run in enumerate(runs)
    ]


def encode_part(task: EncodeTask) -> None:
    """Writes the task's part, unless it stands there whole. Raises InputError naming a document that has no text."""
    note = note_path(task.prefix)
    if note.is_file() and idx_path(task.prefix).is_file():
        return
    tokenizer = _loaded(task.tokenizer, task.encoder)
    text_bytes = 0
    with indexed_writer(task.prefix, dtype_for(tokenizer.vocab_size), tokenizer.vocab_size) as writer:
        for part in task.slices:
            texts = read(part, "text")["text"].to_pylist()
            _check_texts(part, texts)
            for start in range(0, len(texts), BATCH_DOCUMENTS):
                text_bytes += _encode_batch(tokenizer, texts[start : start + BATCH_DOCUMENTS], writer)
    write_atomic(note, canonical_json({"bytes": text_bytes}))


def note_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def _encode_batch(tokenizer: Tokenizer, texts: list[str], writer: IndexedWriter) -> int:
    """Adds the texts, each with an end-of-document token, and returns their bytes."""
    ids, lengths = tokenizer.encode_flat(texts)
    writer.add_many(np.insert(ids, np.cumsum(lengths), tokenizer.end_of_document), lengths + 1)
    return sum(len(text.encode()) for text in texts)


def _check_texts(part: DocumentRange, texts: list[str | None]) -> None:
    if None in texts:
        row = part.first + texts.index(None)
        raise InputError(
            f"{part.path}: row group {part.row_group}, row {row} has no text; run `gristmill curate` again"
        )


@lru_cache(maxsize=2)
def _loaded(folder: Path, encoder: str) -> Tokenizer:
    """A worker process encodes many parts with the one tokenizer it was handed; reading it again would cost as much."""
    return load_bulk_tokenizer(folder, encoder)

"""Encodes documents: a task reads document ranges of a corpus and writes their token ids as one small indexed file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.data_pipeline.indexed.documents import SLICE_BYTES, DocumentRange, read
from gristmill.data_pipeline.indexed.format import IndexedWriter, dtype_for, idx_path, indexed_writer
from gristmill.data_pipeline.ledger.document_file import utf8_of
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.foundation.fingerprint import canonical_json
from gristmill.foundation.runtime.tasks.task_files import fetch_folder
from gristmill.tokenizers.tokenizer import Tokenizer, load_bulk_tokenizer

# Text given to the encoder in one call, about; a longer document is one call.
BATCH_BYTES = 1_000_000
DESCRIBED = ["doc_id", "language"]  # columns of documents


@dataclass(frozen=True)
class EncodeTask:
    """prefix: of the output .bin and .idx; PREFIX.json, written last, holds the number of text bytes. sentences: every
    sentence is a sequence of its own. described: PREFIX.parquet holds the id, language and bytes of
    each document. differing: the code points that the encoder does not encode itself."""

    tokenizer: Path
    encoder: str
    ranges: tuple[DocumentRange, ...]
    prefix: Path
    sentences: bool = False
    described: bool = False
    differing: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> int:
        return sum(documents.bytes for documents in self.ranges)


def encode_tasks(ranges: Sequence[DocumentRange], common: EncodeTask) -> list[EncodeTask]:
    """Groups consecutive ranges up to about SLICE_BYTES per task; outputs are PREFIX-00000, PREFIX-00001 ...

    common: what all tasks share, with the PREFIX and no ranges."""
    groups: list[list[DocumentRange]] = []
    for documents in ranges:
        if not groups or sum(earlier.bytes for earlier in groups[-1]) + documents.bytes > SLICE_BYTES:
            groups.append([])
        groups[-1].append(documents)
    name = common.prefix.name
    return [
        replace(common, ranges=tuple(group), prefix=common.prefix.with_name(f"{name}-{number:05d}"))
        for number, group in enumerate(groups)
    ]


def encode_documents(task: EncodeTask) -> None:
    """Writes the task's indexed file unless it is complete. Raises InputError naming a document that has no text."""
    note = note_path(task.prefix)
    if note.is_file() and idx_path(task.prefix).is_file():
        return
    tokenizer = _loaded_once(fetch_folder(task.tokenizer), task.encoder, task.differing)
    text_bytes = 0
    described: list[pa.Table] = []
    with indexed_writer(task.prefix, dtype_for(tokenizer.vocab_size), tokenizer.vocab_size) as writer:
        for documents in task.ranges:
            table = read(documents, "text", *(DESCRIBED if task.described else ()))
            texts = table["text"].combine_chunks()
            _check_texts(documents, texts)
            buffer, offsets = utf8_of(texts)
            if task.described:
                described.append(table.select(DESCRIBED).append_column("bytes", pa.array(np.diff(offsets))))
            if task.sentences:
                _encode_sentences(tokenizer, texts.to_pylist(), writer)
            else:
                _encode_texts(tokenizer, buffer, offsets, writer)
            text_bytes += int(offsets[-1] - offsets[0])
    if described:
        with atomic_path(documents_path(task.prefix)) as temporary:
            pq.write_table(pa.concat_tables(described), temporary)
    write_atomic(note, canonical_json({"bytes": text_bytes}))


def note_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def documents_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".parquet")


def _encode_texts(tokenizer: Tokenizer, buffer: np.ndarray, offsets: np.ndarray, writer: IndexedWriter) -> None:
    """Appends the texts, each followed by an end-of-document token. Text i is the UTF-8 buffer[offsets[i] : offsets[i +
    1]], uint8 and int64[texts + 1]."""
    first = 0
    while first < len(offsets) - 1:
        start = int(offsets[first])
        last = max(first + 1, int(np.searchsorted(offsets, start + BATCH_BYTES, side="right")) - 1)
        ends = offsets[first + 1 : last + 1] - start
        writer.add_many(*tokenizer.encode_documents(buffer[start : start + int(ends[-1])], ends))
        first = last


def _encode_sentences(tokenizer: Tokenizer, texts: Sequence[str], writer: IndexedWriter) -> None:
    """Appends the texts with a sequence for each sentence; the last one ends with the end-of-document token."""
    for text in texts:
        ids, lengths = tokenizer.encode_flat(split_sentences(text))
        lengths[-1] += 1
        lengths = lengths[lengths > 0]  # a sentence may have no token, such as one of characters that are dropped
        writer.add_many(np.append(ids, tokenizer.end_of_document), lengths, np.array([len(lengths)]))


def _check_texts(documents: DocumentRange, texts: pa.Array) -> None:
    if texts.null_count:
        row = documents.first + texts.is_null().index(True).as_py()
        raise InputError(
            f"{documents.path}: row group {documents.row_group}, row {row} has no text; run `gristmill curate` again"
        )


def _loaded_once(folder: Path, encoder: str, differing: tuple[tuple[int, int], ...] = ()) -> Tokenizer:
    """The tokenizer, loaded once per process while its files stay the same: loading takes as long as one task."""
    states = sorted((path.name, path.stat()) for path in folder.iterdir())
    files = tuple((name, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states)
    return _loaded(folder.absolute(), encoder, differing, files)


@lru_cache(maxsize=2)
def _loaded(
    folder: Path, encoder: str, differing: tuple[tuple[int, int], ...], files: tuple[tuple[str | int, ...], ...]
) -> Tokenizer:
    """files: the state of the folder's files, so that a tokenizer trained again under its old path is loaded again."""
    return load_bulk_tokenizer(folder, encoder, differing)


# Splits a text into sentences, by rules for any language: for indexed data in which a sequence is a sentence.
#
# A sentence ends at . ! ? or an ellipsis (with closing quotes and brackets) before white space, unless a lower-case
# letter follows or the dot ends an abbreviation or an initial; at 。！？ and their like anywhere; and at a blank line.

_ABBREVIATIONS = (
    "Mr Mrs Ms Dr Prof Sr Jr St Mt vs cf e.g i.e etc al Fig Figs No Nos Vol Inc Ltd Co Corp Jan Feb Mar Apr "
)
_ABBREVIATIONS += "Jun Jul Aug Sep Sept Oct Nov Dec approx resp ca"
_ENDS_IN_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:" + "|".join(map(re.escape, _ABBREVIATIONS.split())) + r"|[^\W\d_])\.$"
)
# Linear in the text: a run of dots or of white space is entered at its first character only, and never twice.
_BREAK = re.compile(
    r"""(?<![.!?…؟।])(?P<dot>[.!?…؟।]++["'”’»)\]]*+)\s++(?=(?P<next>["'“‘«(\[]*\S))"""  # an end, space, what follows
    r"|(?P<wide>[。！？｡]+[」』”’）]*)\s*"
    r"|\n\s*\n\s*"
)


def split_sentences(text: str) -> list[str]:
    """The sentences without the white space around them, in order; [text] where there is none to split.

    "Dr. No came. He left!" -> ["Dr. No came.", "He left!"]."""
    sentences, start = [], 0
    for match in _BREAK.finditer(text):
        if match["dot"] is not None and not _ends_here(text, start, match):
            continue
        end = match.end("dot") if match["dot"] else match.end("wide") if match["wide"] else match.start()
        sentences.append(text[start:end].strip())
        start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence] or [text]


def _ends_here(text: str, start: int, match: re.Match[str]) -> bool:
    if match["next"][-1].islower():
        return False
    return not (
        match["dot"] == "." and _ENDS_IN_ABBREVIATION.search(text, max(start, match.end("dot") - 12), match.end("dot"))
    )

"""Which encoded documents go into a file, and how often: by language, and by the number of their duplicates.

Read from the tables that the encoding tasks write beside their chunks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.indexed.language_shares import language_tag
from gristmill.data_pipeline.indexed.reader import IndexedReader
from gristmill.data_pipeline.indexed.rehydration import Repeats
from gristmill.foundation.task_files import fetch
from gristmill.tokenizers.encode import documents_path


def language_tokens(chunks: Sequence[Path]) -> dict[str, int]:
    """Language -> tokens of its documents, sorted by language."""
    found: dict[str, int] = {}
    for chunk in chunks:
        languages = _languages(chunk)
        starts, ends = _token_ranges(chunk)
        for language, tokens in zip(languages.to_pylist(), (ends - starts).tolist(), strict=True):
            found[language] = found.get(language, 0) + tokens
    return dict(sorted(found.items()))


def documents_of(
    chunks: Sequence[Path], languages: frozenset[str] | None, repeats: Repeats | None
) -> tuple[np.ndarray, int]:
    """(int64: numbers of the documents in these languages, counted over all chunks, each as often as it is repeated;
    the bytes of their texts). languages: None takes all; repeats: None takes each document once."""
    wanted = None if languages is None else pa.array(sorted(languages), pa.string())
    numbers, first, text_bytes = [np.empty(0, np.int64)], 0, 0
    for chunk in chunks:
        table = pq.read_table(fetch(documents_path(chunk)), columns=["doc_id", "bytes"])
        times = np.ones(len(table), np.int64) if repeats is None else repeats.of(table["doc_id"])
        if wanted is not None:
            times *= np.asarray(pc.is_in(_languages(chunk), value_set=wanted))
        numbers.append(first + np.repeat(np.arange(len(table)), times))
        text_bytes += int((table["bytes"].to_numpy() * times).sum())
        first += len(table)
    return np.concatenate(numbers), text_bytes


def _languages(chunk: Path) -> pa.Array:
    """The tag of each document; each distinct value is checked once."""
    column = pq.read_table(fetch(documents_path(chunk)), columns=["language"])["language"].combine_chunks()
    encoded = column.cast(pa.string()).dictionary_encode(null_encoding="encode")
    tags = pa.array([language_tag(value) for value in encoded.dictionary.to_pylist()], pa.string())
    return tags.take(encoded.indices)


def _token_ranges(chunk: Path) -> tuple[np.ndarray, np.ndarray]:
    reader = IndexedReader(chunk)
    return reader.token_ranges(np.arange(len(reader)))

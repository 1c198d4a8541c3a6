"""Indexed files (.bin and .idx) made of lists of tokens."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from gristmill.data_pipeline.indexed.format import indexed_writer


def write_documents(
    prefix: Path, documents: Iterable[Sequence[int] | np.ndarray], dtype: np.dtype, vocab_size: int | None = None
) -> None:
    """Both files from an iterable of documents. [[5, 6], [7]] as uint16 -> .bin 05 00 06 00 07 00."""
    with indexed_writer(prefix, dtype, vocab_size) as writer:
        for document in documents:
            writer.add(document)
